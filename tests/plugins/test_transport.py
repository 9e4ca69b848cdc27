"""A third party's transport: calls work, with the same security as over ours."""

import ast
import importlib
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rallypoint.errors import ConfigError
from rpc_workers import Workers, eventually


pytestmark = pytest.mark.integration

CODE = Path(__file__).parent / "transport"
MARKER = b"a marker that nobody else may read"


def same(x: Any) -> Any:
    return x


def install(folder: str) -> None:
    """As pip would: the module and the entry point."""
    sys.path[:0] = [str(CODE), folder]
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("site-packages")
    about = folder / "folder_sockets-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-sockets\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[rallypoint.transports]\nfolder = folder_sockets:TRANSPORT\n"
        "broken = no_such_module:TRANSPORT\nother = folder_sockets:TRANSPORT\n"
    )
    return str(folder)


@pytest.fixture(params=[False, True], ids=["sealed", "tls"])
def pair(request: pytest.FixtureRequest, site_packages: str) -> Iterator[Workers]:
    tls = request.param
    with Workers(2) as workers:
        workers.run(install, site_packages)
        before = workers.run(rpc_workers.resources)
        workers.run(lambda: rpc_workers.join(transports=("folder",), tls=tls))
        yield workers
        workers.run(rpc_workers.leave)

        def is_all_back() -> bool:
            after = workers.run(rpc_workers.resources)
            return [each["fds"] for each in after] == [each["fds"] for each in before]

        # The relay is the test's own, and its threads take a moment to exit.
        eventually(is_all_back)


def own_address() -> str:
    addresses = rpc.api._get_current_rpc_agent().group.me.addresses
    (found,) = addresses.values()
    return str(found)


def test_calls_go_by_it_and_nobody_on_the_way_reads_or_changes_them(
    pair: Workers, request: pytest.FixtureRequest
) -> None:
    tls = request.node.callspec.params["pair"]

    def call() -> None:
        import folder_sockets

        assert rpc.rpc_sync("w1", same, (MARKER,)) == MARKER
        sent = torch.arange(1_000_000)
        assert torch.equal(rpc.rpc_sync("w1", same, (sent,)), sent)
        (peer,) = rpc.statistics()["peers"]
        assert peer["transport"] == ("folder+tls" if tls else "folder")
        found = b"".join(folder_sockets.passed)
        assert len(found) > sent.nbytes
        assert (MARKER in found) is not tls

    def change() -> None:
        import folder_sockets

        folder_sockets.change.append(MARKER)
        with pytest.raises(rpc.RpcError):
            rpc.rpc_sync("w1", same, (MARKER,))

    pair.on(0, call)
    if not tls:
        pair.on(0, change)
        assert pair.on(1, lambda: rpc.statistics()["changed_frames"]) == 1


def test_answers_may_arrive_after_the_news_that_their_sender_has_left(pair: Workers) -> None:
    def slow_down() -> None:
        import folder_sockets

        folder_sockets.lags.append(0.3)

    assert pair.on(1, lambda: rpc.rpc_sync("w0", same, (3,))) == 3
    pair.on(1, slow_down)
    # The leader of the shutdown, w0, leaves while its last answer to w1 is on the way.
    pair.run(rpc_workers.leave)
    pair.run(lambda: rpc_workers.join(transports=("folder",)))


def test_strangers_are_turned_away(pair: Workers) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(rpc_workers.LIMIT)
        stranger.connect(pair.on(1, own_address))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionError):  # or end of file, which raises nothing
            while stranger.recv(4096):
                pass
            raise ConnectionError
    assert pair.on(0, lambda: rpc.rpc_sync("w1", same, (3,))) == 3


def test_members_without_it_are_told_what_the_others_have(site_packages: str) -> None:
    def join() -> None:
        rpc_workers.join(transports=("folder",) if rpc_workers.rank else ("uds",))

    def call() -> None:
        with pytest.raises(rpc.PeerLost, match=r"it offers folder, and this worker may use uds"):
            rpc.rpc_sync("w1", same, (1,))

    with Workers(2) as workers:
        workers.run(install, site_packages)
        workers.run(join)
        workers.on(0, call)


def test_a_plug_in_that_cannot_be_used_says_why(
    site_packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site_packages)
    monkeypatch.syspath_prepend(str(CODE))
    for kind, why in {
        "broken": "no_such_module:TRANSPORT cannot be loaded: ModuleNotFoundError",
        "other": "expected a Transport of this kind",
        "pigeon": "expected some of memory, uds, tcp, broken, folder, other",
    }.items():
        with pytest.raises(ConfigError, match=rf"transports.*'{kind}'.*{re.escape(why)}"):
            rpc.NativeRpcBackendOptions(transports=[kind])


def test_kinds_are_unique_and_can_be_addresses() -> None:
    def made(kind: str, **options: Any) -> rpc.Transport:
        return rpc.Transport(
            kind=kind, reach=rpc.Reach.HOST, listen=print, connect=print, **options
        )

    for kind in ("", "tcp+tls", "Upper", "a b"):
        with pytest.raises(ValueError, match=r"kind is .*expected"):
            made(kind)
    with pytest.raises(ValueError, match="expected private=True"):
        made("fast", shares_memory=True)
    with pytest.raises(ConfigError, match="another transport has this kind"):
        rpc.register_transport(made("tcp"))


def test_a_transport_that_breaks_costs_the_call_and_nothing_else() -> None:
    class Broken:
        """Listens, but can neither connect nor accept."""

        def __init__(self, config: rpc.ListenConfig) -> None:
            self._sock = socket.create_server(("127.0.0.1", 0))
            self.address = self._sock.getsockname()
            self.fileno, self.close = self._sock.fileno, self._sock.close

        def accept(self) -> None:
            raise KeyError("accept")

        def source(self, sock: socket.socket) -> str:
            return ""

    def connect(*_: object) -> Any:
        raise ValueError("wings are wet")

    def join() -> None:
        way = rpc.Transport(kind="wet", reach=rpc.Reach.NETWORK, listen=Broken, connect=connect)
        rpc.register_transport(way)
        rpc_workers.join(transports=("wet", "tcp"))

    def call() -> None:
        address = rpc.api._get_current_rpc_agent().group.find("w1").addresses["wet"]
        with socket.create_connection(address):
            assert rpc.rpc_sync("w1", same, (1,)) == 1
        del rpc.api._get_current_rpc_agent().group.find("w2").addresses["tcp"]
        with pytest.raises(rpc.PeerLost, match=r"wet: its connect\(\) raised ValueError: wings"):
            rpc.rpc_sync("w2", same, (1,))
        assert rpc.rpc_sync("w1", same, (2,)) == 2

    with Workers(3) as workers:
        workers.run(join)
        workers.on(0, call)


def test_the_plug_in_needs_public_names_only() -> None:
    for node in ast.walk(ast.parse((CODE / "folder_sockets.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rallypoint"):
            assert node.module == "rallypoint.rpc"
            assert {each.name for each in node.names} <= set(rpc.__all__)
