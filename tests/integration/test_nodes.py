"""Several nodes: real supervisors, side by side on this machine and in network namespaces of their own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from supervisors import Popen


pytestmark = pytest.mark.integration

# Seconds that anything may take on a machine that is busy with something else; otherwise nobody waits that long.
PATIENCE = 180.0

PROBE = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(x)
names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
         " MASTER_ADDR TORCHELASTIC_RUN_ID RALLY_GENERATION").split()
line = json.dumps({**{n: os.environ[n] for n in names}, "sum": x.item()}) + "\\n"
os.write(1, line.encode())  # one write: workers share the file
wanted = dict(item.split("=") for item in sys.argv[1:])
if wanted.get("rank") == os.environ["RANK"] and int(os.environ["RALLY_GENERATION"]) < int(wanted["until"]):
    raise ValueError("a bad batch")
while "rank" in wanted and int(os.environ["RALLY_GENERATION"]) < int(wanted["until"]):
    dist.all_reduce(x)
"""
LOOP = """
import pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path(sys.argv[1], f"started-{dist.get_rank()}").touch()
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""


class Node:
    """One `rally run`, with its output in files (a full pipe must not stop it).

    Args:
        prefix: words to start it through. It is an interpreter of its own then, unless they are Python's.
        net: the name of the network namespace to run in.
        host: its host name there.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        words: Sequence[str],
        env: dict[str, str],
        prefix: Sequence[str],
        net: str,
        host: str,
    ) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self.process: Any
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [*prefix, sys.executable, "-m", "rallypoint", "run", *words]
            place = {"net": f"/run/netns/{net}", "host": host} if net else {}
            # In a session of its own, so that Ctrl-C at pytest does not reach it.
            self.process = Popen(
                command,
                stdout=out,
                stderr=err,
                env=env,
                cwd=folder,
                start_new_session=True,
                **place,
            )

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout)

    def wait_said(self, text: str, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.says():
            assert self.process.poll() is None, f"it has ended, and said:\n{self.says()}"
            assert time.monotonic() < deadline, f"it did not say {text!r}:\n{self.says()}"
            time.sleep(0.02)

    def records(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.out.read_text().splitlines() if line[0] == "{"]

    def says(self) -> str:
        return self.err.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "tmp").mkdir()
    nodes: list[Node] = []

    def run(
        name: str,
        *words: str,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        net: str = "",
        host: str = "",
    ) -> Node:
        full = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), **(env or {})}
        nodes.append(Node(tmp_path, name, words, full, prefix, net, host or socket.gethostname()))
        return nodes[-1]

    yield run
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait(PATIENCE)


def two_nodes(start, *flags: str, rest: Sequence[str] = ("probe.py",)) -> tuple[Node, Node]:
    port = str(free_port())
    return tuple(
        start(
            f"node{rank}",
            *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", port, *flags, *rest),
        )
        for rank in range(2)
    )


def test_ranks_run_through_the_nodes_and_all_meet(start) -> None:
    nodes = two_nodes(start, "--rdzv-id", "together")
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    records = [r for node in nodes for r in sorted(node.records(), key=lambda r: r["RANK"])]
    assert [r["RANK"] for r in records] == ["0", "1", "2", "3"]
    assert [r["LOCAL_RANK"] for r in records] == ["0", "1", "0", "1"]
    assert [r["GROUP_RANK"] for r in records] == ["0", "0", "1", "1"]
    assert {r["WORLD_SIZE"] for r in records} == {"4"}
    assert {r["GROUP_WORLD_SIZE"] for r in records} == {"2"}
    assert {r["TORCHELASTIC_RUN_ID"] for r in records} == {"together"}
    assert {r["sum"] for r in records} == {6.0}


def test_nodes_may_have_different_numbers_of_workers_and_come_late(start) -> None:
    port = str(free_port())
    common = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    late = start("node1", *common, "--node-rank", "1", "--nproc-per-node", "1", "probe.py")
    late.wait_said(f"waiting for the rendezvous at 127.0.0.1:{port}")
    first = start("node0", *common, "--node-rank", "0", "--nproc-per-node", "2", "probe.py")
    assert [first.wait(), late.wait()] == [0, 0], first.says() + late.says()
    assert [r["RANK"] for r in late.records()] == ["2"]
    assert {r["WORLD_SIZE"] for r in (*first.records(), *late.records())} == {"3"}
    assert f"waiting for the rendezvous at 127.0.0.1:{port}" in late.says()


@pytest.mark.long
def test_c10d_endpoint_assigns_ranks(start) -> None:
    endpoint = f"localhost:{free_port()}"
    words = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "probe.py")
    nodes = [start(f"node{i}", *words) for i in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert sorted(r["RANK"] for node in nodes for r in node.records()) == ["0", "1"]


def test_a_failure_restarts_all_nodes_and_the_next_generation_works(start) -> None:
    nodes = two_nodes(start, "--max-restarts", "1", rest=("probe.py", "rank=3", "until=1"))
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    for node in nodes:
        assert [r["RALLY_GENERATION"] for r in node.records()].count("1") == 2
        assert "rank 3 raised ValueError: a bad batch; restarting all workers" in node.says()


def test_every_node_prints_the_one_root_cause_and_exits_with_its_code(start) -> None:
    nodes = two_nodes(start, "--log-dir", "logs", rest=("probe.py", "rank=1", "until=9"))
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert "the job failed: rank 1 raised ValueError" in node.says()
    reports = [
        json.loads(p.read_text()) for p in (nodes[0].out.parent / "logs").rglob("report.json")
    ]
    assert len(reports) == 2
    assert [report["root_cause"]["rank"] for report in reports] == [1, 1]
    assert sorted(victim["rank"] for victim in reports[0]["victims"]) == [0, 2, 3]


def wait_for(paths: Sequence[Path], timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not all there: {paths}"
        time.sleep(0.05)


def wait_for_one(nodes: Sequence[Node], timeout: float = PATIENCE) -> Node:
    """The first of these nodes to exit."""
    deadline = time.monotonic() + timeout
    while True:
        for node in nodes:
            if node.process.poll() is not None:
                return node
        assert time.monotonic() < deadline, [node.says() for node in nodes]
        time.sleep(0.05)


def looping_nodes(start, tmp_path: Path, *flags: str) -> tuple[Node, Node]:
    nodes = two_nodes(start, "--shutdown-timeout", "2", *flags, rest=("loop.py", str(tmp_path)))
    wait_for([tmp_path / f"started-{rank}" for rank in range(4)])
    return nodes


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_supervisor_ends_the_job_on_the_other_node_with_its_name(
    start, tmp_path: Path, victim: int
) -> None:
    nodes = looping_nodes(start, tmp_path, "--rdzv-conf", "lease=2")
    nodes[victim].process.send_signal(signal.SIGKILL)
    assert nodes[1 - victim].wait() == 1
    assert f"the job failed: node {victim} is lost" in nodes[1 - victim].says()


@pytest.mark.faults
def test_a_signal_to_one_node_stops_all_in_order(start, tmp_path: Path) -> None:
    nodes = looping_nodes(start, tmp_path, "--max-restarts", "3")
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [143, 143]
    assert "node 1 was told to stop" in nodes[0].says()


def test_an_unreachable_master_ends_at_the_timeout_and_says_what_is_waited_for(start) -> None:
    port = free_port()
    words = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--insecure")
    node = start(
        "n", *words, "--master-port", str(port), "--rdzv-conf", "join_timeout=4", "probe.py"
    )
    assert node.wait() == 1
    said = node.says().splitlines()
    assert len(said) == 2, said
    assert f"waiting for the rendezvous at 127.0.0.1:{port}" in said[0]
    assert "cannot reach the rendezvous" in said[1]


def test_missing_nodes_are_named_at_the_timeout(start) -> None:
    words = ("--nnodes", "3", "--node-rank", "0", "--master-addr", "127.0.0.1")
    port = str(free_port())
    node = start("n", *words, "--master-port", port, "--rdzv-conf", "join_timeout=2", "probe.py")
    assert node.wait() == 1
    assert "1 of 3 nodes arrived within 2 s" in node.says()
    assert "missing: node 1, 2" in node.says()
    assert "Traceback" not in node.says()


def test_two_nodes_with_the_same_rank_are_told(start) -> None:
    port = str(free_port())
    words = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", port)
    ranks = ("0", "1", "1")
    nodes = [start(f"n{i}", *words, "--node-rank", r, "probe.py") for i, r in enumerate(ranks)]
    told = wait_for_one(nodes[1:])
    assert told.process.returncode == 2, told.says()
    assert "has this rank in the job" in told.says()


# -- clusters -------------------------------------------------------------------------------------


def slurm(rank: int, port: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4217",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "MASTER_PORT": str(port),
        **more,
    }


@pytest.mark.long
def test_inside_slurm_nodes_find_each_other_and_say_so_in_one_line(start) -> None:
    port = free_port()
    # The first host of the list is this machine, as on a real cluster's node 0.
    nodes = [
        start(f"n{r}", "--nproc-per-node", "2", "probe.py", env=slurm(r, port)) for r in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert sorted(r["RANK"] for node in nodes for r in node.records()) == ["0", "1", "2", "3"]
    for rank, node in enumerate(nodes):
        found = [
            line for line in node.says().splitlines() if line.startswith("rally: Slurm job 4217")
        ]
        assert len(found) == 1 and f"node {rank} of 2" in found[0]


@pytest.mark.long
def test_under_mpirun_each_task_is_one_worker_with_its_local_rank(start) -> None:
    port = str(free_port())
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port}
    nodes = [
        start(
            f"n{rank}",
            "probe.py",
            env={
                **env,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            },
        )
        for rank in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    records = sorted((r for node in nodes for r in node.records()), key=lambda r: r["RANK"])
    assert [(r["RANK"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"]) for r in records] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {r["GROUP_RANK"] for r in records} == {"0"}


@pytest.mark.long
def test_variables_of_kubeflow_are_the_flags_defaults(start) -> None:
    port = str(free_port())
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    nodes = [
        start(f"n{r}", "probe.py", env={**env, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(r)})
        for r in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert sorted(r["RANK"] for node in nodes for r in node.records()) == ["0", "1"]


@pytest.mark.long
def test_a_master_pod_that_calls_itself_localhost_is_reached_by_its_name_elsewhere(start) -> None:
    port = str(free_port())
    env = {"WORLD_SIZE": "2", "MASTER_PORT": port}
    # As a PyTorchJob sets them; this host's own name stands for the master's service.
    addrs = ("localhost", socket.gethostname())
    nodes = [
        start(f"n{r}", "probe.py", env={**env, "MASTER_ADDR": addr, "RANK": str(r)})
        for r, addr in enumerate(addrs)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert [node.records()[0]["MASTER_ADDR"] for node in nodes] == list(addrs)


def test_a_rank_of_another_node_that_ended_early_is_named_on_all(start, tmp_path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() != 3:\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    nodes = two_nodes(start, rest=("leaves.py",))
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert "rank 3 ended while other ranks still needed it; 3 others failed" in node.says()


# -- hosts of their own ---------------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a veth pair: 10.77.0.1 and 10.77.0.2, no route to elsewhere."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    names = (f"rally-a-{os.getpid()}", f"rally-b-{os.getpid()}")
    links = (f"ra{os.getpid()}"[:15], f"rb{os.getpid()}"[:15])

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for index, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{index}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def host_words(rank: int) -> tuple[str, ...]:
    return (
        *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2"),
        *("--master-addr", "10.77.0.1", "--master-port", "29500"),
    )


@pytest.mark.netns
def test_two_hosts_train_together_over_their_own_network(start, two_hosts) -> None:
    nodes = [
        start(
            f"n{r}",
            *host_words(r),
            "probe.py",
            net=name,
            # Gloo binds to the address of the host's name unless told which interface to use.
            env={"GLOO_SOCKET_IFNAME": f"r{'ab'[r]}{os.getpid()}"[:15]},
        )
        for r, name in enumerate(two_hosts)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    records = [r for node in nodes for r in node.records()]
    assert {r["sum"] for r in records} == {6.0}
    assert {r["MASTER_ADDR"] for r in records} == {"10.77.0.1"}


@pytest.mark.netns
def test_the_main_node_of_a_batch_job_is_reached_though_it_is_not_told_its_address(
    start, two_hosts
) -> None:
    env = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
    address = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.77.0.1"}
    nodes = [
        start(
            f"n{rank}",
            "probe.py",
            net=name,
            env={
                **env,
                **more,
                "AWS_BATCH_JOB_NODE_INDEX": str(1 - rank),
                "GLOO_SOCKET_IFNAME": f"r{'ab'[rank]}{os.getpid()}"[:15],
            },
        )
        for rank, (name, more) in enumerate(zip(two_hosts, ({}, address), strict=True))
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert [node.records()[0]["RANK"] for node in nodes] == ["0", "1"]
    for rank, node in enumerate(nodes):
        found = [line for line in node.says().splitlines() if "AWS Batch" in line]
        assert len(found) == 1 and f"node {rank} of 2" in found[0]


# A process that has been forked with all imports gets a file of hosts of its own, and becomes the command that follows.
WITH_ITS_HOSTS = """
import ctypes, runpy, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 1 << 12, 1 << 14, 1 << 18
assert libc.unshare(CLONE_NEWNS) == 0, "unshare"
assert libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0, "private mounts"
hosts = sys.argv[1].encode()
assert libc.mount(hosts, b"/etc/hosts", None, ctypes.c_ulong(MS_BIND), None) == 0, "bind"
del sys.argv[1:5]  # and python -m rallypoint
runpy.run_module("rallypoint", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def two_debian_hosts(two_hosts, tmp_path: Path) -> list[dict[str, Any]]:
    """What starts a node on each of two hosts whose names resolve to 127.0.1.1, as Debian's installer sets them up."""
    found = []
    for index, net in enumerate(two_hosts):
        hosts = tmp_path / f"hosts-{index}"
        names = [f"10.77.0.{other + 1} host{other}" for other in (0, 1) if other != index]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host{index}", *names]
        hosts.write_text("\n".join(lines) + "\n")
        prefix = (sys.executable, "-c", WITH_ITS_HOSTS, str(hosts))
        found.append({"prefix": prefix, "net": net, "host": f"host{index}"})
    return found


@pytest.mark.netns
@pytest.mark.parametrize("endpoint", ["10.77.0.1", "host0"])
def test_hosts_whose_names_lead_to_the_loopback_train_together(
    start, two_debian_hosts, endpoint: str
) -> None:
    nodes = [
        start(
            f"n{r}",
            *("--nnodes", "2", "--rdzv-endpoint", endpoint, "--nproc-per-node", "2", "probe.py"),
            **place,
        )
        for r, place in enumerate(two_debian_hosts)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].says() + nodes[1].says()
    assert {r["sum"] for node in nodes for r in node.records()} == {6.0}
    for index, node in enumerate(nodes):
        (line,) = [each for each in node.says().splitlines() if "SOCKET_IFNAME" in each]
        assert f"the name host{index} resolves to 127.0.1.1" in line


@pytest.mark.netns
@pytest.mark.faults
def test_a_cut_cable_is_noticed_by_both_sides(start, two_hosts, tmp_path: Path) -> None:
    nodes = [
        start(
            f"n{r}",
            *host_words(r),
            *("--rdzv-conf", "lease=2", "--shutdown-timeout", "1"),
            *("loop.py", str(tmp_path)),
            net=name,
            env={"GLOO_SOCKET_IFNAME": f"r{'ab'[r]}{os.getpid()}"[:15]},
        )
        for r, name in enumerate(two_hosts)
    ]
    wait_for([tmp_path / f"started-{rank}" for rank in range(4)])
    link = f"ra{os.getpid()}"[:15]
    subprocess.run(["ip", "-n", two_hosts[0], "link", "set", link, "down"], check=True, timeout=240)
    assert nodes[0].wait() == 1
    assert "node 1 is lost" in nodes[0].says()
    assert nodes[1].wait(40) == 1
    assert "node 0 is lost" in nodes[1].says()


UNTIL_TOLD = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"{sys.argv[2]}-{os.environ['RANK']}").touch()
while not (folder / "end").exists():
    time.sleep(0.02)
"""


@pytest.mark.netns
@pytest.mark.faults
def test_a_spare_meets_the_newcomer_at_the_endpoint_after_all_members_are_lost(
    start, two_hosts, tmp_path: Path
) -> None:
    (tmp_path / "until_told.py").write_text(UNTIL_TOLD)

    def node(name: str, host: int) -> Node:
        return start(
            name,
            *("--nnodes", "2", "--nproc-per-node", "1", "--insecure"),
            *("--rdzv-endpoint", "10.77.0.1:29500", "--rdzv-conf", "lease=2"),
            *("until_told.py", str(tmp_path), "first" if name in "ab" else "second"),
            net=two_hosts[host],
        )

    members = [node("a", 0), node("b", 0)]
    wait_for([tmp_path / f"first-{rank}" for rank in range(2)])
    spare = node("c", 1)
    spare.wait_said("waiting as a spare")
    for member in members:
        member.process.kill()
    newcomer = node("d", 0)  # serves the store, at the port of the one that is lost
    wait_for([tmp_path / f"second-{rank}" for rank in range(2)])
    (tmp_path / "end").touch()
    assert [newcomer.wait(), spare.wait()] == [0, 0], newcomer.says() + spare.says()
