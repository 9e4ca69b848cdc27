"""The installed torchrun with `--rdzv-backend rallypoint`: what its own rendezvous does not survive.

Workers run all-reduces over Gloo until the test says stop, and note who they are when they start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousTimeoutError,
    api,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers

import supervisors
from ports import free_port
from rallypoint import errors
from rallypoint.rendezvous import torchrun
from rallypoint.rendezvous.torchrun import create_handler
from servers.etcd_server import EtcdCluster, require_etcd


pytestmark = pytest.mark.integration

# The longest wait for one thing; most come within 3 s on an idle machine.
PATIENCE = 180.0
# Seconds a silent node is believed alive; killed processes are noticed sooner, by their sockets.
CONF = "lease=4,last_call_timeout=0.2,join_timeout=40"

IMPORTS = (*supervisors.TORCH[:2], "torch.distributed.run")
# Runs torchrun. Its workers are forks too, of a child that torchrun has from its beginning, before it has threads.
AGENT = f"""\
import os, socket, sys
sys.path.append({str(Path(supervisors.__file__).parent)!r})
line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    import supervisor_zygote
    line.close()
    sys.argv[1:] = [str(theirs.detach()), *{IMPORTS!r}, ""]
    supervisor_zygote.main()
theirs.close()
os.environ["TEST_AGENT"] = str(os.getpid())
import supervisors
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
zygote = object.__new__(supervisors.Zygote)
zygote._line = line
supervisors._zygote = lambda *_, **__: zygote
subprocess_handler.Popen = lambda args, **more: supervisors.Popen(args, **more)
from torch.distributed.run import main
main()
"""

WORKER = """\
import os, sys, time

out, node = sys.argv[1], os.environ["TEST_NODE"]
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
line = f"{node} {rank} {dist.get_world_size()} {attempt} {os.environ['MASTER_PORT']}\\n"
with open(os.path.join(out, "started"), "ab", buffering=0) as file:
    file.write(line.encode())
fails = os.environ.get("TEST_FAIL") == f"{node} {os.environ['LOCAL_RANK']} {attempt}"
for step in range(4000):
    if not os.path.exists(f"/proc/{os.environ['TEST_AGENT']}"):
        os._exit(7)
    if fails and step == 3:
        os._exit(9)
    flags = torch.tensor([1, int(os.path.exists(os.path.join(out, "stop")))])
    dist.all_reduce(flags)
    assert flags[0] == dist.get_world_size()
    if flags[1]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
os._exit(0)
"""


class Started(NamedTuple):
    node: str
    rank: int
    world: int
    attempt: int
    port: int


@dataclass
class Agent:
    """One torchrun: it stands for a host."""

    popen: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lose(self) -> None:
        """Kill everything of this host at once: torchrun leaves workers behind when it is killed."""
        try:
            top = psutil.Process(self.popen.pid)
            tree = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        for each in tree:
            try:
                each.suspend()
            except psutil.NoSuchProcess:
                pass
        for each in tree:
            try:
                each.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        self.popen.wait()

    def ends(self, code: int = 0) -> str:
        try:
            got = self.popen.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun does not end:\n{self.text()[-4000:]}") from None
        assert got == code, f"exit code {got}:\n{self.text()[-4000:]}"
        return self.text()


@dataclass
class Job:
    folder: Path
    endpoint: str
    agents: list[Agent] = field(default_factory=list)

    def start(
        self, node: str, *flags: str, nnodes: str = "1", conf: str = CONF, fail: str = ""
    ) -> Agent:
        script = self.folder / "worker.py"
        script.write_text(WORKER)
        command = [
            *(sys.executable, "-c", AGENT),
            "--rdzv-backend",
            "rallypoint",
            "--rdzv-endpoint",
            self.endpoint,
        ]
        command += ["--rdzv-id", "job", "--rdzv-conf", conf, "--nnodes", nnodes, *flags]
        # Without torchrun's own "python -u", for which a fork would not do.
        command += ["--no-python", sys.executable, str(script), str(self.folder)]
        log = self.folder / f"{node}.log"
        env = {**os.environ, "TEST_NODE": node, "TEST_FAIL": fail, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            popen = supervisors.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
                imports=IMPORTS,
            )
        agent = Agent(popen, log)
        self.agents.append(agent)
        return agent

    def started(self) -> list[Started]:
        path = self.folder / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split() for line in lines]
        return [Started(node, *map(int, numbers)) for node, *numbers in found]

    def generations(self) -> dict[int, list[Started]]:
        """Complete ones, by the port of their store."""
        by_port: dict[int, list[Started]] = {}
        for each in self.started():
            by_port.setdefault(each.port, []).append(each)
        return {port: all_ for port, all_ in by_port.items() if len(all_) == all_[0].world}

    def wait_for(self, nodes: str, beside: int = 0) -> list[Started]:
        """A complete generation of exactly these nodes, one letter each, other than the one with the port ``beside``."""

        def there() -> list[Started]:
            for port, members in self.generations().items():
                if port != beside and sorted(each.node for each in members) == sorted(nodes):
                    return members
            return []

        self.until(there, f"no generation of {nodes}")
        members = there()
        assert sorted(each.rank for each in members) == list(range(len(members)))
        return members

    def until(self, done: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > end:
                logs = "\n".join(f"--- {a.log.name}\n{a.text()[-3000:]}" for a in self.agents)
                raise AssertionError(f"{what}; started: {self.started()}\n{logs}")
            time.sleep(0.05)

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def close(self) -> None:
        for agent in self.agents:
            agent.lose()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, f"127.0.0.1:{free_port()}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    require_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.stop()


# -- torchrun's own processes ---------------------------------------------------------------------


def test_one_node_needs_no_endpoint_and_restarts_its_workers(job: Job) -> None:
    job.endpoint = ""
    agent = job.start(
        "a", "--nproc-per-node", "2", "--max-restarts", "1", fail="a 1 0"
    )  # fmt: skip
    job.until(lambda: len(job.generations()) == 2, "no second generation")
    job.stop()
    agent.ends()
    first, second = job.generations().values()
    assert {each.attempt for each in first} == {0}
    assert {each.attempt for each in second} == {1}


def test_two_nodes_restart_when_a_worker_fails(job: Job) -> None:
    flags = ("--max-restarts", "1")
    agents = [job.start(node, *flags, nnodes="2", fail="b 0 0") for node in "ab"]
    first = job.wait_for("ab")
    second = job.wait_for("ab", beside=first[0].port)
    assert first[0].port != second[0].port
    # Whoever was a member keeps its rank.
    assert {(each.node, each.rank) for each in first} == {(e.node, e.rank) for e in second}
    job.stop()
    for agent in agents:
        agent.ends()


@pytest.mark.long
def test_a_third_node_comes_in_and_is_lost_again(job: Job) -> None:
    flags = ("--max-restarts", "1")
    agents = [job.start(node, *flags, nnodes="2:4") for node in "ab"]
    two = job.wait_for("ab")
    third = job.start("c", *flags, nnodes="2:4")
    three = job.wait_for("abc")
    assert {each.attempt for each in three} == {0}, "a restart was charged for"
    third.lose()
    job.wait_for("ab", beside=two[0].port)
    job.stop()
    for agent in agents:
        agent.ends()


def test_the_host_of_the_store_is_lost_and_the_others_go_on(job: Job) -> None:
    flags = ("--max-restarts", "1")
    conf = f"{CONF},last_call_timeout=20"
    first = job.start("a", *flags, nnodes="1:3", conf=f"{conf},is_host=true")
    others = [job.start(node, *flags, nnodes="1:3", conf=f"{conf},is_host=false") for node in "bc"]
    job.wait_for("abc")
    first.lose()
    job.wait_for("bc")
    job.stop()
    for agent in others:
        agent.ends()


def serves(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("scheme", ["etcd", pytest.param("file", marks=pytest.mark.long)])
def test_nodes_meet_elsewhere_and_survive_the_loss_of_one(
    job: Job, scheme: str, request: pytest.FixtureRequest
) -> None:
    if scheme == "etcd":
        cluster: EtcdCluster = request.getfixturevalue("etcd")
        job.endpoint = f"etcd://{','.join(cluster.endpoints)}"
    else:
        job.endpoint = f"file://{job.folder}/meeting"
    conf = f"{CONF},last_call_timeout=20"
    flags = ("--max-restarts", "1")
    agents = [job.start(node, *flags, nnodes="1:2", conf=conf) for node in "ab"]
    job.wait_for("ab")
    agents[0].lose()
    job.wait_for("b")
    job.stop()
    agents[1].ends()


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("no-such-host.invalid:29400", "cannot reach the rendezvous at no-such-host.invalid:29400"),
        ("tpc://127.0.0.1:29400", "did you mean tcp://?"),
    ],
)
def test_a_wrong_endpoint_is_told(job: Job, endpoint: str, told: str) -> None:
    job.endpoint = endpoint
    text = job.start("a", nnodes="2", conf="join_timeout=1").ends(1)
    assert told in text
    assert job.started() == []


# -- the handler, as torchrun's agent uses it -----------------------------------------------------


def handler(name: str, **options: object) -> api.RendezvousHandler:
    given = {"min_nodes": 1, "max_nodes": 2, "local_addr": "127.0.0.1", "join_timeout": 20}
    given |= {"lease": 1, "last_call_timeout": 10, "timeout": 900, **options}
    return create_handler(RendezvousParameters("rallypoint", f"memory://{name}", "job", **given))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[list[api.RendezvousHandler]]:
    """Two members of a round, by rank."""
    made = [handler(request.node.name) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        rounds = list(pool.map(lambda each: each.next_rendezvous(), made))
    by_rank = [each for _, each in sorted(zip(rounds, made, strict=True), key=lambda p: p[0].rank)]
    yield by_rank
    for each in reversed(by_rank):  # rank 0 stays until the others have left
        each.shutdown()


def waits(one: api.RendezvousHandler, seconds: float) -> bool:
    """Whether the agent is told to go into the next round within that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if one.num_nodes_waiting():
            return True
        time.sleep(0.05)
    return False


def test_torch_finds_the_entry_point_and_gets_the_backend_it_asked_for() -> None:
    _register_out_of_tree_handlers()
    params = RendezvousParameters("rallypoint", "", "job", 1, 1)
    made = rendezvous_handler_registry.create_handler(params)
    assert isinstance(made, api.RendezvousHandler)
    assert (made.get_backend(), made.get_run_id(), made.use_agent_store) == (
        "rallypoint", "job", True,
    )  # fmt: skip
    made.shutdown()


def test_every_round_has_new_stores_at_one_address_for_all() -> None:
    one = handler("stores", max_nodes=1)
    first = one.next_rendezvous()
    first.store.set("key", "old")
    second = one.next_rendezvous()
    assert not second.store.check(["key"])
    old, new = first.bootstrap_store_info, second.bootstrap_store_info
    assert old is not None and new is not None
    assert old.master_port != new.master_port
    assert serves(f"127.0.0.1:{new.master_port}") and not serves(f"127.0.0.1:{old.master_port}")
    one.shutdown()
    assert not serves(f"127.0.0.1:{new.master_port}")


def test_members_are_told_the_same_address(pair: list[api.RendezvousHandler]) -> None:
    with ThreadPoolExecutor(2) as pool:
        rounds = list(pool.map(lambda each: each.next_rendezvous(), pair))
    assert rounds[0].bootstrap_store_info == rounds[1].bootstrap_store_info
    assert [each.rank for each in rounds] == [0, 1]  # kept
    rounds[1].store.set("from", "1")
    assert rounds[0].store.get("from") == b"1"


def test_a_node_that_has_finished_disturbs_nobody(pair: list[api.RendezvousHandler]) -> None:
    pair[1].shutdown()
    assert not waits(pair[0], 2.5)


def test_the_node_that_serves_the_workers_stays_until_the_others_have_finished(
    pair: list[api.RendezvousHandler],
) -> None:
    leaving = threading.Thread(target=pair[0].shutdown)
    leaving.start()
    assert not waits(pair[1], 1.5)
    assert leaving.is_alive()
    pair[1].shutdown()
    leaving.join(5)
    assert not leaving.is_alive()


def test_a_job_that_failed_ends_everywhere(pair: list[api.RendezvousHandler]) -> None:
    try:
        raise ChildFailedError("worker.py", {1: ProcessFailure(0, 1, 1, "")})
    except ChildFailedError:
        pair[1].shutdown()
    assert waits(pair[0], 5)
    assert pair[0].is_closed()
    with pytest.raises(RendezvousClosedError, match=r"workers of node 1 .* failed for good"):
        pair[0].next_rendezvous()


def test_a_job_that_failed_does_not_bar_its_name_in_a_folder(tmp_path: Path) -> None:
    for _ in range(2):
        params = RendezvousParameters(
            "rallypoint", f"file://{tmp_path}", "job", 1, 1, local_addr="127.0.0.1", lease=60
        )
        made = create_handler(params)
        assert made.next_rendezvous().world_size == 1
        try:
            raise ChildFailedError("worker.py", {0: ProcessFailure(0, 1, 1, "")})
        except ChildFailedError:
            made.shutdown()
        assert list(tmp_path.iterdir()) == []


def test_a_node_that_ends_for_another_reason_is_lost_and_closes_nothing(
    pair: list[api.RendezvousHandler],
) -> None:
    try:
        raise RendezvousTimeoutError
    except RendezvousTimeoutError:
        pair[1].shutdown()
    assert waits(pair[0], 5)
    assert not pair[0].is_closed()
    assert pair[0].next_rendezvous().world_size == 1


def test_too_few_nodes_are_torchs_own_error_with_our_words() -> None:
    one = handler("few", min_nodes=2, join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes arrived"):
        one.next_rendezvous()
    one.shutdown()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.RendezvousTimeout(1, 2, ()), api.RendezvousTimeoutError),
        (errors.RendezvousConnectionError("x"), api.RendezvousConnectionError),
        (errors.RendezvousClosedError("x"), api.RendezvousClosedError),
        (errors.RendezvousStateError("x"), api.RendezvousStateError),
        (errors.RendezvousGracefulExitError("x"), api.RendezvousGracefulExitError),
        (errors.RendezvousError("x"), api.RendezvousError),
    ],
)
def test_whatever_torchrun_asks_it_gets_torchs_errors(
    monkeypatch: pytest.MonkeyPatch, ours: Exception, theirs: type[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise ours

    made = handler(f"errors-{type(ours).__name__}")
    try:
        for ask in ("next_round", "num_nodes_waiting"):
            monkeypatch.setattr(torchrun.Rounds, ask, fails)
        for ask in (made.next_rendezvous, made.num_nodes_waiting):
            with pytest.raises(theirs) as caught:
                ask()
            assert type(caught.value) is theirs and str(ours) in str(caught.value)
    finally:
        made.shutdown()
    monkeypatch.setattr(torchrun.Rounds, "__init__", fails)
    with pytest.raises(theirs):
        handler("errors-when-made")
