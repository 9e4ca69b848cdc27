"""Handlers by the name of their backend: which options exist, and what the errors for wrong ones say."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousTimeout
from rallypoint.rendezvous import (
    Meeting,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    create,
    rendezvous_handler_registry,
)
from rallypoint.rendezvous.backends import etcd_store as etcd, tcpstore
from rallypoint.rendezvous.catalogue import parse_endpoint
from rallypoint.rendezvous.quorum import Settings


def made(backend: str, endpoint: str, nodes: tuple[int, int] = (1, 1), **options: Any) -> Any:
    params = RendezvousParameters(backend, endpoint, "job", *nodes, "127.0.0.1", **options)
    return rendezvous_handler_registry.create_handler(params)


def job(endpoint: str, run_id: str = "job") -> Meeting:
    return Meeting(endpoint=parse_endpoint(endpoint), run_id=run_id, lease=5)


def meet(handlers: list[RendezvousHandler]) -> list[RendezvousInfo]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda each: each.next_rendezvous(), handlers))


def end(handlers: list[RendezvousHandler]) -> None:
    for each in handlers:
        assert each.shutdown()


# -- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tcpstore", "c10d", "file", "memory", "static"])
def test_rounds_have_c10d_stores_that_are_new_each_time(backend: str, tmp_path: Path) -> None:
    endpoint = {"file": str(tmp_path / "meeting"), "memory": f"new-{tmp_path}"}
    one = made(backend, endpoint.get(backend, "localhost:0"))
    first = one.next_rendezvous()
    first.store.set("key", "old")
    assert first.store.get("key") == b"old"
    second = one.next_rendezvous()
    assert (first.generation, second.generation) == (0, 1)
    assert not second.store.check(["key"])
    assert (second.rank, second.world_size) == (0, 1)
    end([one])


def test_nodes_of_a_round_share_the_store_of_a_memory_endpoint_by_its_name() -> None:
    nodes = [made("memory", "shared", (2, 2)) for _ in range(2)]
    one, other = meet(nodes)
    one.store.set("key", "value")
    assert other.store.get("key") == b"value"
    end(nodes)
    # Nothing refers to it any more: the next job of that name finds nothing.
    del nodes, one, other
    gc.collect()
    again = made("memory", "shared")
    assert again.next_rendezvous().generation == 0
    end([again])


def test_static_nodes_have_the_ranks_they_were_given_round_after_round() -> None:
    pytest.importorskip("torch")  # else the test waits for a thread that fails without torch
    host = made("static", "localhost:0", (2, 2), node_rank=0)
    # Only the host knows which free port it got; the other node is told.
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.next_rendezvous)
        until = time.monotonic() + 20
        while not host._home.serves and time.monotonic() < until:
            time.sleep(0.01)
        port = host._home._current.port
        # torchrun's name for the option, with text as its value.
        other = made("static", f"localhost:{port}", (2, 2), rank="1")
        assert other.next_rendezvous().rank == 1
        assert first.result().rank == 0
    one, two = meet([host, other])
    assert (one.rank, two.rank, one.generation) == (0, 1, 1)
    assert host.num_nodes_waiting() == 0
    end([other, host])


def test_torchs_parameters_do_as_well_and_what_it_adds_is_ignored() -> None:
    params = SimpleNamespace(
        backend="memory",
        endpoint="memory://torch",
        run_id="job",
        min_nodes=1,
        max_nodes=1,
        local_addr=None,
        config={"timeout": 900, "read_timeout": "60", "lease": "2"},
    )
    one = create.handler_for(params, "memory")
    assert one.next_rendezvous().world_size == 1
    end([one])


def test_a_secret_keeps_strangers_out() -> None:
    options = {"join_timeout": 0.3, "last_call_timeout": 0.1}
    one = made("memory", "secret", (2, 2), secret="ours, and nobody else's", **options)
    stranger = made("memory", "secret", (2, 2), secret=b"theirs, and not ours", **options)
    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(each.next_rendezvous) for each in (one, stranger)]:
            with pytest.raises(RendezvousTimeout):
                outcome.result()
    end([one, stranger])


# -- options --------------------------------------------------------------------------------------


def test_without_options_times_are_torchelastics_and_the_lease_is_short() -> None:
    one = made("memory", "defaults", (1, 3))
    assert one._timing == create.Timing(join=600, lease=5)
    assert one._settings == Settings(min_nodes=1, max_nodes=3, last_call=30)


@pytest.mark.parametrize(
    ("options", "lease"),
    [
        ({"lease": "2.5"}, 2.5),
        ({"keep_alive_interval": "2", "keep_alive_max_attempt": "4"}, 8),
        ({"keep_alive_interval": 2}, 6),
        ({"keep_alive_max_attempt": 2}, 10),
        ({"lease": 1, "keep_alive_interval": 9}, 1),
    ],
)
def test_the_lease_has_two_spellings(options: dict[str, Any], lease: float) -> None:
    assert made("memory", "lease", **options)._timing.lease == lease


def test_every_option_arrives(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"a word of some length\n")
    file.chmod(0o600)
    given = {"join_timeout": "7", "last_call_timeout": "0", "label": "rack1"}
    one = made("memory", "all", secret_file=str(file), split_brain_guard="false", **given)
    assert one._timing.join == 7
    assert (one._settings.last_call, one._settings.by_label) == (0, True)
    assert one._standing.node.label == "rack1"
    assert not one._guard
    assert (
        one._connection._codec.prefix
        == made("memory", "all", secret="a word of some length")._connection._codec.prefix
    )


def test_one_node_needs_no_endpoint_several_do() -> None:
    assert create.handler_for(RendezvousParameters("tcpstore", "", "job", 1, 1)).lease == 5
    with pytest.raises(ConfigError, match="expected the place where the nodes meet"):
        made("tcpstore", "", (1, 2))


@pytest.mark.parametrize(
    ("backend", "options", "told"),
    [
        ("memory", {"join_timeout": "soon"}, "--rdzv-conf join_timeout 'soon'"),
        ("memory", {"last_call_timeout": "-1"}, "--rdzv-conf last_call_timeout '-1'"),
        ("memory", {"lease": "0"}, "--rdzv-conf lease '0'"),
        ("memory", {"keep_alive_interval": "x"}, "--rdzv-conf keep_alive_interval 'x'"),
        ("memory", {"read_timeout": "x"}, "--rdzv-conf read_timeout 'x'"),
        ("memory", {"is_host": "perhaps"}, "--rdzv-conf is_host 'perhaps'"),
        ("memory", {"split_brain_guard": "2"}, "--rdzv-conf split_brain_guard '2'"),
        ("memory", {"secret": ""}, "--rdzv-conf secret: the secret has 0 bytes"),
        ("memory", {"secret": 7}, "--rdzv-conf secret: expected"),
        ("memory", {"secret_file": "/nowhere"}, "cannot be read: No such file"),
        ("memory", {"secret": "a", "secret_file": "/nowhere"}, "give one"),
        ("static", {"node_rank": "2"}, "--node-rank 2: expected 0 to 0"),
        ("static", {"node_rank": "x"}, "--rdzv-conf node_rank 'x'"),
        ("etcd", {"ttl": "long"}, "--rdzv-conf ttl 'long'"),
        ("etcd", {"ttl": "0"}, "ttl 0: expected whole seconds"),
        ("etcd", {"ca_cert": "/nowhere"}, "ca_cert '/nowhere': no such file"),
        ("etcd", {"user": "me"}, "a user and its password go together"),
    ],
)
def test_a_wrong_option_is_named(backend: str, options: dict[str, Any], told: str) -> None:
    endpoint = {"memory": "wrong", "static": "localhost:0", "etcd": "localhost:2379"}[backend]
    with pytest.raises(ConfigError) as caught:
        made(backend, endpoint, **options)
    assert told in str(caught.value)


def test_static_nodes_do_not_come_and_go() -> None:
    with pytest.raises(ConfigError, match="fixed number of nodes"):
        made("static", "localhost:0", (1, 2))


@pytest.mark.parametrize(
    "endpoint", ["tcp://localhost:0?x=1", "file:///tmp/x?x=1", "memory://x?x=1"]
)
def test_options_in_a_url_are_known_or_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no option 'x'"):
        create.home_for(job(endpoint))
    with pytest.raises(ConfigError, match="did you mean prefix"):
        create.home_for(job("etcd://h?prefx=1"))


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a folder"):
        made("file", str(tmp_path / "file"))


# -- etcd: what the client is told ----------------------------------------------------------------


def etcd_settings(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, run_id: str = "job", **options: Any
) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    class Recorded:
        def __init__(self, **settings: Any) -> None:
            found.append(settings)

        def close(self) -> None:
            pass

    monkeypatch.setattr(etcd, "EtcdStore", Recorded)
    create.home_for(job(endpoint, run_id), options)
    return {name: value for name, value in found[0].items() if value is not None}


def test_etcd_by_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "etcds://user:p%40ss@a,[fd00::1]:7?ca=/ca&cert=/c&key=/k&prefix=mine&ttl=9"
    assert etcd_settings(monkeypatch, url) == {
        "endpoints": ["https://a:2379", "https://[fd00::1]:7"],
        "prefix": "mine/job",
        "ca_cert": "/ca",
        "cert": "/c",
        "key": "/k",
        "user": "user",
        "password": "p@ss",
        "ttl": 9,
    }


def test_etcd_by_options_under_torchs_names_which_win(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"protocol": "https", "ca_cert": "/ca", "ssl_cert": "/c", "ssl_cert_key": "/k"}
    options |= {"user": "me", "password": "word"}
    assert etcd_settings(monkeypatch, "etcd://you:pw@a?prefix=rdzv", "a/b", **options) == {
        "endpoints": ["https://a:2379"],
        "prefix": "rdzv/a%2Fb",
        "ca_cert": "/ca",
        "cert": "/c",
        "key": "/k",
        "user": "me",
        "password": "word",
        "ttl": 60,
    }


def test_a_password_in_the_options_is_not_shown() -> None:
    meeting = Meeting(
        endpoint=parse_endpoint("etcd://a"), run_id="j", lease=5, options={"password": "s3cret"}
    )
    assert "s3cret" not in repr(meeting)


def test_making_handlers_and_listing_backends_imports_no_torch() -> None:
    program = (
        "import sys, tempfile; from rallypoint.rendezvous import *;"
        "from rallypoint.rendezvous import create;"
        "make = rendezvous_handler_registry.create_handler;"
        "handler = make(RendezvousParameters('file', tempfile.mkdtemp(), 'job', 1, 1));"
        "make(RendezvousParameters('tcpstore', 'localhost:0', 'job', 1, 1));"
        "import rallypoint.rendezvous.torchrun;"
        "assert 'torch' not in sys.modules; assert 'requests' not in sys.modules;"
        "meeting = Meeting(endpoint=parse_endpoint('memory://x'), run_id='job', lease=5);"
        "home = create.home_for(meeting);"
        "from rallypoint.launch import cli; assert cli.main(['run', '--help']) == 0;"
        "assert not {'etcd3gw', 'requests'} & set(sys.modules);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_names_of_jobs_in_a_folder_may_be_long(tmp_path: Path) -> None:
    for run_id in ("x" * 249, "x" * 300, "x" * 299 + "y", "ü" * 200):
        meeting = replace(job(f"file://{tmp_path}", run_id), mark_end=True)
        home = create.home_for(meeting)
        home.connect(Deadline(60.0), threading.Event()).close()
        home.close()
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize("endpoint", ["tcp://localhost:29400", "file:///shared", "etcd://a:2379"])
def test_a_name_that_is_no_text_is_told(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-id '.*udcff': the job's name is not UTF-8"):
        job(endpoint, os.fsdecode(b"job-\xff"))


@pytest.mark.parametrize("lease", [200_000.0, 1e12])
def test_a_lease_may_be_longer_than_the_kernel_waits(lease: float) -> None:
    with socket.socket() as sock:
        tcpstore.break_on_silence(sock, lease)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == tcpstore.MAX_KEEPALIVE
