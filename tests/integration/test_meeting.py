"""How nodes first meet, and what they are told when they cannot: real supervisors on this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic import PATIENCE, Cluster, Node, wait_until
from pace import pace
from ports import free_port
from rallypoint.rendezvous.backends.door import greet
from rallypoint.rendezvous.backends.greeting import Door
from servers.etcd_server import EtcdCluster, require_etcd
from supervisors import Popen


pytestmark = pytest.mark.integration

# Says which node it is on, and needs no torch.
SCRIPT = """
import os, pathlib
folder = pathlib.Path(os.environ["ELASTIC_FOLDER"])
names = ("RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "RALLY_GENERATION")
(folder / f"ran-{os.environ['ELASTIC_NODE']}").write_text(" ".join(os.environ[n] for n in names))
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "script.py").write_text(SCRIPT)
    made = Cluster(tmp_path)
    yield made
    made.close()


def start(cluster: Cluster, name: str, *words: str, **more: Any) -> Node:
    if more and more.get("prefix", ("",))[0] != sys.executable:
        # Not a fork, so its fork server would have to import torch, which the script does without.
        words = ("--start-method", "exec", *words)
    return cluster.start(name, *words, script=("script.py",), **more)


def first(code: str) -> tuple[str, ...]:
    """Words that run code before a command, in the same process: a fork of one that has all imports."""
    follows = "import runpy, sys\ndel sys.argv[1:4]  # python -m rallypoint\n"
    follows += "runpy.run_module('rallypoint', run_name='__main__', alter_sys=True)\n"
    return (sys.executable, "-c", code + follows)


def ran(cluster: Cluster, name: str) -> list[str]:
    """RANK, GROUP_RANK, WORLD_SIZE, MASTER_ADDR and generation of a node's worker."""
    return (cluster.folder / f"ran-{name}").read_text().split()


def stop(*nodes: Node) -> None:
    for node in nodes:
        if node.alive:
            node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait()


# -- the same line everywhere ---------------------------------------------------------------------


def test_the_same_line_on_every_node_meets_and_assigns_ranks(cluster: Cluster) -> None:
    line = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}")
    nodes = [start(cluster, f"n{i}", *line) for i in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], cluster
    assert sorted(ran(cluster, node.name)[0] for node in nodes) == ["0", "1"]
    assert {ran(cluster, node.name)[2] for node in nodes} == {"2"}
    assert "this is node 0" not in str(cluster)


# -- nodes that do not go together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (("--rdzv-id", "a"), ("--rdzv-id", "b"), "another job uses this endpoint"),
        (("--secret-file", "one"), (), "give all nodes the same --secret-file"),
        pytest.param(
            ("--secret-file", "one"),
            ("--secret-file", "other"),
            "has another secret than this node",
            marks=pytest.mark.long,
        ),
    ],
)
def test_nodes_of_two_minds_both_say_why_they_wait(cluster: Cluster, one, other, says) -> None:
    for name in ("one", "other"):
        (cluster.folder / name).write_text(f"{name}: a secret of some length")
        (cluster.folder / name).chmod(0o600)
    port = free_port()
    line = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}")
    first = start(cluster, "n0", *line, *one)
    wait_until(lambda: greet("localhost", port, 3.0).door is Door.SERVES, "the first serves")
    began = time.monotonic()
    nodes = [first, start(cluster, "n1", *line, *other)]
    for node in nodes:
        assert node.wait_said(says) - began < 5 * pace(), "of which its start takes a part"
    stop(*nodes)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (("--nnodes", "2"), ("--nnodes", "3"), "the number of nodes is"),
        (("--nnodes", "2"), ("--nnodes", "2", "--node-rank", "1"), "was given a rank"),
    ],
)
def test_who_cannot_go_with_the_first_is_turned_away_and_the_first_is_told(
    cluster: Cluster, one, other, says
) -> None:
    where = ("--rdzv-endpoint", f"localhost:{free_port()}")
    first = start(cluster, "n0", *one, *where)
    second = start(cluster, "n1", *other, *where)
    ended = wait_until(
        lambda: next((each for each in (first, second) if not each.alive), None), "one ends"
    )
    assert ended.wait() == 2, cluster
    assert says in ended.says()
    (stays,) = {first, second} - {ended}
    stays.wait_said(says)
    stop(stays)


# -- somebody else at the endpoint, or nobody yet -------------------------------------------------


def test_a_stranger_at_the_endpoint_is_named(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with sock.accept()[0] as line, suppress(OSError):
                        line.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                        line.recv(100)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        where = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{sock.getsockname()[1]}")
        guest = start(cluster, "n1", *where)
        host = start(cluster, "n0", *where, "--node-rank", "0")
        assert host.wait() == 2, host
        for node in (host, guest):
            node.wait_said("an SSH server (OpenSSH_9.6) answers there")
        stop(guest)
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_a_store_of_another_program_is_named(cluster: Cluster) -> None:
    serve = (
        "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True,"
        " wait_for_workers=False); print(s.port, flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", serve]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    # With the clusters' variables, it is a fork of the same process.
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with Popen(words, env=env, **options) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        node = start(cluster, "n0", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
        node.wait_said("is not served by a node of a job")
        stop(node)
        other.kill()


def test_a_store_that_is_still_starting_is_waited_for_beyond_the_time_to_join(
    cluster: Cluster,
) -> None:
    """The host's import of torch takes as long as the test likes; that counts against neither the guest nor the host."""
    seconds = 3 * pace()
    where = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}")
    host_words = ("--rdzv-conf", f"join_timeout={seconds}")
    host = start(cluster, "n0", *where, *host_words, env=slow_to_serve(cluster.folder))
    guest_words = ("--rdzv-conf", "join_timeout=1.5,is_host=false")
    # The guest starts only once the host has bound its port.
    wait_until(lambda: listening(where[-1]), "the host listens")
    guest = start(cluster, "n1", *where, *guest_words)
    guest.wait_said("is starting; waiting for it")
    with pytest.raises(subprocess.TimeoutExpired):
        guest.process.wait(1.1 * seconds)  # twice its time to join: the point of the test
    cluster.order("go")
    assert [host.wait(), guest.wait()] == [0, 0], cluster
    assert "cannot reach" not in str(cluster)


def slow_to_serve(folder: Path) -> dict[str, str]:
    """Variables: the process that serves a store waits for the file "go" before its `import torch`."""
    slow = folder / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch' and 'serve_job' in ' '.join(sys.orig_argv):\n"
        "            while not os.path.exists(os.environ['ELASTIC_FOLDER'] + '/go'):\n"
        "                time.sleep(0.05)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    return on_path(slow)


def on_path(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    }


def listening(endpoint: str) -> bool:
    """Whether somebody listens there. Asks the kernel, without knocking."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return any(row[1].endswith(port) and row[3] == "0A" for row in rows)


@pytest.mark.parametrize("given", [True, False])
def test_a_name_that_has_no_address_yet_is_looked_up_again(cluster: Cluster, given: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for a file of hosts of its own")
    hosts = cluster.folder / "hosts"
    before = Path("/etc/hosts").read_text()
    hosts.write_text(before)
    own_hosts = first(
        "import ctypes\n"
        "CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 1 << 12, 1 << 14, 1 << 18\n"
        "libc, flags = ctypes.CDLL(None), ctypes.c_ulong(MS_REC | MS_PRIVATE)\n"
        "assert libc.unshare(CLONE_NEWNS) == 0\n"
        "assert libc.mount(None, b'/', None, flags, None) == 0\n"
        f"hosts = {os.fsencode(hosts)!r}\n"
        "assert libc.mount(hosts, b'/etc/hosts', None, ctypes.c_ulong(MS_BIND), None) == 0\n"
    )
    port = free_port()
    where = ("--nnodes", "2", "--rdzv-endpoint", f"node0.train.test:{port}")
    ranks = [("--node-rank", str(i)) if given else () for i in range(2)]
    nodes = [start(cluster, f"n{i}", *where, *ranks[i], prefix=own_hosts) for i in range(2)]
    for node in nodes[given:]:
        node.wait_said("node0.train.test has no address yet")
    if given:
        nodes[0].wait_said("node0.train.test has no address yet; serving on all addresses")
    assert all(node.alive for node in nodes), cluster
    with hosts.open("a") as file:
        file.write("\n127.0.0.1 node0.train.test\n")
    assert [node.wait() for node in nodes] == [0, 0], cluster


def test_a_name_that_never_has_an_address_ends_at_the_time_to_join(cluster: Cluster) -> None:
    where = ("--nnodes", "2", "--rdzv-endpoint", f"node0.train.test:{free_port()}")
    began = time.monotonic()
    node = start(cluster, "n0", *where, "--rdzv-conf", "join_timeout=3")
    assert node.wait() == 1
    assert 3 <= time.monotonic() - began < 20 * pace()
    waiting, end = (line for _, line in node.lines if "node0.train.test" in line)
    assert "waiting for the rendezvous at node0.train.test" in waiting
    assert "node0.train.test has no address yet" in waiting
    assert "cannot reach the rendezvous at node0.train.test" in end
    assert "node0.train.test has no address" in end


# -- a third party's rendezvous -------------------------------------------------------------------

PLUG_IN = '''
"""A rendezvous as somebody else would write it: ranks by order of arrival at a store of its own."""

from rallypoint.rendezvous import RendezvousHandler, RendezvousInfo


class Handler(RendezvousHandler):
    def __init__(self, params):
        self._params = params
        self._round = 0

    def get_backend(self):
        return "meeting-room"

    def get_run_id(self):
        return self._params.run_id

    def next_rendezvous(self):
        import pathlib
        import torch.distributed as dist

        path = pathlib.Path(self._params.endpoint, f"{self.get_run_id()}-{self._round}")
        store = dist.FileStore(str(path), -1)
        self._round += 1
        size = self._params.max_nodes
        rank = store.add("arrived", 1) - 1
        store.set(f"node-{rank}", "here")
        store.wait([f"node-{each}" for each in range(size)])
        print(f"met in the {self._params.get('colour')} room", flush=True)
        return RendezvousInfo(dist.PrefixStore("round", store), rank, size)

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        return True


def create(params):
    return Handler(params)
'''

# Fails once, so that there is a second round.
TWICE = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if os.environ["RALLY_GENERATION"] == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("a bad batch")
    dist.all_reduce(x)
exec(open("script.py").read())
"""


def test_a_plug_in_s_rendezvous_works_under_rally_run(cluster: Cluster) -> None:
    site = cluster.folder / "site"
    info = site / "meeting_room-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "meeting_room.py").write_text(PLUG_IN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meeting-room\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rallypoint.rendezvous]\nmeeting-room = meeting_room:create\n"
    )
    (cluster.folder / "twice.py").write_text(TWICE)
    (cluster.folder / "room").mkdir()
    path = on_path(site)
    line = ("--nnodes", "2", "--max-restarts", "1", "--rdzv-backend", "meeting-room")
    line += ("--rdzv-endpoint", str(cluster.folder / "room"), "--rdzv-conf", "colour=blue")
    nodes = [cluster.start(f"n{i}", *line, env=path, script=("twice.py",)) for i in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], cluster
    found = sorted(ran(cluster, node.name) for node in nodes)
    assert [each[0] for each in found] == ["0", "1"]
    assert {each[4] for each in found} == {"1"}
    assert "rank 1 raised ValueError: a bad batch; restarting" in str(cluster)
    unknown = cluster.start("n2", "--rdzv-backend", "meeting-rom", env=path)
    assert unknown.wait() == 2
    assert "did you mean meeting-room?" in unknown.says()
    assert "tcpstore (also c10d, tcp)" in unknown.says()


def test_a_rendezvous_that_a_program_registers_works_under_rally_run(cluster: Cluster) -> None:
    site = cluster.folder / "site"
    site.mkdir()
    (site / "meeting_room.py").write_text(PLUG_IN)
    # No package and no entry point: code that runs before the command registers it.
    registers = first(
        "import meeting_room\n"
        "from rallypoint.rendezvous import rendezvous_handler_registry as registry\n"
        "registry.register('meeting-room', meeting_room.create)\n"
    )
    (cluster.folder / "room").mkdir()
    line = ("--nnodes", "2", "--rdzv-backend", "meeting-room", "--rdzv-conf", "colour=green")
    line += ("--rdzv-endpoint", str(cluster.folder / "room"))
    more = {"env": on_path(site), "prefix": registers}
    nodes = [start(cluster, f"n{i}", *line, **more) for i in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], cluster
    assert sorted(ran(cluster, node.name)[0] for node in nodes) == ["0", "1"]


# -- nodes that come too late ---------------------------------------------------------------------


def on_host(name: str) -> tuple[str, ...]:
    """Words that run a command with a host name of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root for host names of their own")
    return first(
        "import ctypes, socket\n"
        "CLONE_NEWUTS = 0x04000000\n"
        "assert ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0\n"
        f"socket.sethostname({name!r})\n"
    )


@pytest.fixture(params=["file", "etcd"])
def outlives_jobs(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """An endpoint whose store no node serves."""
    folder = cluster.folder / "shared"
    folder.mkdir()
    if request.param == "file":
        yield f"file://{folder}"
        return
    require_etcd()
    server = EtcdCluster(folder)
    try:
        yield f"etcd://{server.endpoints[0]}"
        # Nothing stays there for good: each key expires a minute after it was set.
        assert server.keys("rally/ended/job-7/")
        assert server.seconds_to_live("rally/ended/") == {60}
    finally:
        server.stop()


def test_who_comes_after_the_job_has_ended_well_is_told_once(
    cluster: Cluster, outlives_jobs: str
) -> None:
    line = ("--nnodes", "1:2", "--rdzv-endpoint", outlives_jobs, "--rdzv-id", "job-7")
    line += ("--rdzv-conf", "last_call_timeout=0.1")
    assert start(cluster, "n0", *line, prefix=on_host("first")).wait() == 0, cluster
    late = start(cluster, "late", *line, prefix=on_host("late"))
    assert late.wait() == 0
    assert "the job has ended well: this node was not needed" in late.says()
    assert not (cluster.folder / "ran-late").exists()
    # A node that knows that the job has ended can only have come for the next job of that name.
    again = start(cluster, "late-again", *line, prefix=on_host("late"))
    assert again.wait() == 0
    assert (cluster.folder / "ran-late-again").exists(), again
    # Nothing of the first job was left to wait for.
    assert "the job is running" not in again.says()


# In a node that has just connected: it goes on once the job has ended.
HELD = """
import pathlib, os, sys, time
if "run" in sys.orig_argv:
    from rallypoint.rendezvous.connection import Connection
    look = Connection.look

    def held(self, records, keys):
        Connection.look = look  # this once: with its first look, the node is counted
        found = look(self, records, keys)
        pathlib.Path(os.environ["ELASTIC_FOLDER"], "came").touch()
        while records.look(["closed"]) == [None]:
            time.sleep(0.02)
        time.sleep(0.3)
        return found

    Connection.look = held
"""


def test_who_is_still_connecting_when_the_job_ends_well_is_told_so(cluster: Cluster) -> None:
    """The node that serves the store waits for it for a moment."""
    site = cluster.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HELD)
    (cluster.folder / "script.py").write_text(
        f"import time\n{SCRIPT}\nwhile not (folder / 'finish').exists(): time.sleep(0.02)"
    )
    line = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    line += ("--rdzv-conf", "last_call_timeout=0.1,join_timeout=10")
    first = start(cluster, "n0", *line)
    wait_until((cluster.folder / "ran-n0").exists, "the job runs")
    # Started through another program, so that it is an interpreter of its own, which loads that code.
    late = start(cluster, "late", *line, env=on_path(site), prefix=("env",))
    wait_until((cluster.folder / "came").exists, "the late one has connected")
    cluster.order("finish")
    assert [first.wait(), late.wait()] == [0, 0], cluster
    assert "the job has ended well: this node was not needed" in late.says()
    assert not (cluster.folder / "ran-late").exists()
