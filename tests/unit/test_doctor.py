"""What `rally doctor` considers a problem, and how it shows that."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pace import pace
from rallypoint.launch.doctor import finding_table, judgement, links, pairs, probe
from rallypoint.launch.doctor.facts import AllReduce, Gpu, Link, NodeFacts
from rallypoint.launch.doctor.judgement import GIB, MIB, Finding, Level, judge


WELL = NodeFacts(
    host="ada",
    python="3.11.7",
    torch="2.13.0",
    rallypoint="0.1.0",
    workers=4,
    open_files=None,
    processes=32768,
    processes_limit="kernel.pid_max",
    cpus=8,
    memory=64 * GIB,
    shm_total=32 * GIB,
    shm_free=32 * GIB,
    folders={"/tmp": 100 * GIB},
    name_address="10.0.0.1",
    gloo=("eth0", "10.0.0.1"),
    nccl=("eth0",),
)
BOB = replace(WELL, host="bob", name_address="10.0.0.2", gloo=("eth0", "10.0.0.2"))
FAST = Link(source=0, target=1, latency=0.0001, bandwidth=1.2e9, clock=0.001)


def worst(findings: list[Finding]) -> tuple[Level, str] | None:
    """The first of the findings that is not fine: its level and what it is about."""
    first = findings[0]
    return None if first.level is Level.FINE else (first.level, first.what)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"open_files": 1024}, (Level.REMARK, "open files")),
        ({"open_files": 256}, (Level.PROBLEM, "open files")),
        ({"cpu_seconds": 3600}, (Level.REMARK, "CPU time")),
        ({"file_size": 1 << 30}, (Level.REMARK, "file size")),
        ({"locked_memory": 64 << 10}, None),
        ({"locked_memory": 64 << 10, "infiniband": True}, (Level.PROBLEM, "locked memory")),
        ({"infiniband": True}, None),
        ({"loopback_problem": "Network is unreachable"}, (Level.PROBLEM, "loopback")),
        ({"folder_problem": "temporary files: Read-only file system"}, (Level.PROBLEM, "disk")),
        ({"processes": 100}, (Level.REMARK, "processes")),
        ({"too_many_workers": "no more than 2"}, (Level.PROBLEM, "processes")),
        ({"cpus": 2}, (Level.REMARK, "CPUs")),
        ({"quota": 2.5}, (Level.REMARK, "CPUs")),
        ({"quota": 6.0}, (Level.REMARK, "CPUs")),
        ({"quota": 8.0}, None),
        ({"memory": 512 * MIB}, (Level.PROBLEM, "memory")),
        ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, (Level.PROBLEM, "/dev/shm")),
        ({"shm_free": 512 * MIB}, (Level.REMARK, "/dev/shm")),
        ({"shm_free": 1 * MIB}, (Level.PROBLEM, "/dev/shm")),
        ({"shm_total": None, "shm_free": None}, (Level.PROBLEM, "/dev/shm")),
        ({"folders": {"/logs": 10 * MIB}}, (Level.PROBLEM, "disk")),
        ({"folders": {"/logs": 500 * MIB}}, (Level.REMARK, "disk")),
        ({"torch": ""}, (Level.PROBLEM, "torch")),
        ({"gpus": (Gpu(name="H200", driver="1"),)}, None),
        ({"gpus": (Gpu(name="H200", errors=2),)}, (Level.PROBLEM, "GPUs")),
        ({"gpus": (Gpu(name="H200", slowed="heat"),)}, (Level.REMARK, "GPUs")),
        ({"gpu_problem": "nvidia-smi has failed"}, (Level.PROBLEM, "GPUs")),
        # With one node, the loopback interface is as good as any.
        ({"gloo": ("lo", "127.0.1.1"), "name_address": "127.0.1.1"}, None),
        ({"name_address": ""}, None),
    ],
)
def test_one_node(change: dict[str, object], expected: tuple[Level, str] | None) -> None:
    findings = judge([replace(WELL, **change)])  # type: ignore[arg-type]
    assert worst(findings) == expected, findings
    assert judgement.is_healthy(findings) == (expected is None or expected[0] is Level.REMARK)


@pytest.mark.parametrize(
    ("bob", "link", "expected"),
    [
        (BOB, FAST, None),
        (replace(BOB, torch="2.12.0"), FAST, (Level.PROBLEM, "torch")),
        (replace(BOB, python="3.12.1"), FAST, (Level.PROBLEM, "Python")),
        (replace(BOB, rallypoint="0.2.0"), FAST, (Level.PROBLEM, "rallypoint")),
        (replace(BOB, gloo=("lo", "127.0.1.1")), FAST, (Level.PROBLEM, "Gloo's interface")),
        (replace(BOB, name_address="127.0.1.1"), FAST, (Level.REMARK, "host name")),
        (replace(BOB, gpus=(Gpu(name="H200"),)), FAST, (Level.REMARK, "GPUs")),
        (BOB, replace(FAST, bandwidth=2.5e6), (Level.PROBLEM, "bandwidth")),
        (BOB, replace(FAST, bandwidth=30e6), (Level.REMARK, "bandwidth")),
        (BOB, replace(FAST, latency=0.02), (Level.REMARK, "latency")),
        (BOB, replace(FAST, clock=-3.0), (Level.REMARK, "clock")),
        (BOB, Link(source=1, target=0, problem="timed out"), (Level.PROBLEM, "connection")),
    ],
)
def test_two_nodes(bob: NodeFacts, link: Link, expected: tuple[Level, str] | None) -> None:
    findings = judge([WELL, bob], [link], several=True)
    assert worst(findings) == expected, findings


def test_the_node_that_is_odd_is_named() -> None:
    old = replace(BOB, torch="2.12.0")
    (found,) = (each for each in judge([WELL, old, WELL], several=True) if each.what == "torch")
    assert found.found == "2.13.0, but node 1 (bob): 2.12.0"


def test_one_slow_pair_among_fast_ones_is_a_problem_even_if_it_is_not_slow() -> None:
    nodes = [WELL, BOB, replace(WELL, host="eve")]
    rates = {(0, 1): 1.2e9, (0, 2): 1.1e9, (1, 2): 0.12e9}
    ways = [replace(FAST, source=a, target=b, bandwidth=rate) for (a, b), rate in rates.items()]
    (slow,) = (each for each in judge(nodes, ways, several=True) if each.what == "bandwidth")
    assert (slow.level, slow.where) == (Level.PROBLEM, "node 1 (bob) to node 2 (eve)")
    assert slow.found == "120.0 MB/s, others 1.1 GB/s"


def test_nodes_that_could_not_meet_and_an_all_reduce_that_failed() -> None:
    first, *_ = judge([WELL], several=True, meeting="nothing listens at ada:29400")
    assert first == Finding(Level.PROBLEM, "", "meeting", "nothing listens at ada:29400")
    first, *_ = judge([WELL, BOB], [FAST], AllReduce(problem="timed out"), several=True)
    assert (first.level, first.what) == (Level.PROBLEM, "all-reduce")


def test_what_several_nodes_have_alike_is_one_row() -> None:
    many = [replace(WELL, host=f"h{index}", open_files=1024) for index in range(6)]
    rows = [each for each in judge(many, several=True) if each.what == "open files"]
    assert [each.where for each in rows] == ["all nodes"]
    rows = [each for each in judge([*many, WELL], several=True) if each.what == "open files"]
    assert rows[0].where == "node 0 (h0), node 1 (h1), node 2 (h2), node 3 (h3) and 2 more"


def test_the_table_begins_with_the_culprit() -> None:
    findings = judge([replace(WELL, shm_free=1 * MIB, open_files=1024)])
    lines = finding_table.text(findings).splitlines()
    assert lines[0] == "PROBLEM  /dev/shm          1.0 MiB free of 32 GiB"
    assert lines[1].lstrip().startswith("→ DataLoader workers")
    assert lines[2].startswith("remark   open files")
    assert finding_table.verdict(findings) == "1 problem, 1 remark"
    brief = finding_table.text(findings, briefly=True)
    assert "fine" not in brief
    assert finding_table.text(judge([WELL]), briefly=True) == ""


@pytest.mark.parametrize("count", range(9))
def test_every_two_nodes_meet_once(count: int) -> None:
    found = pairs.turns(count)
    met = [pair for turn in found for pair in turn]
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for turn in found:
        assert len({node for pair in turn for node in pair}) == 2 * len(turn)
    assert len(found) == (max(count - 1, 0) if count % 2 == 0 else count)


def test_facts_travel_as_json() -> None:
    told = replace(WELL, gpus=(Gpu(name="H200", errors=1),))
    assert NodeFacts.from_json(json.loads(json.dumps(told.to_json()))) == told
    own = probe.facts(2)
    assert NodeFacts.from_json(json.loads(json.dumps(own.to_json()))) == own
    assert own.host == socket.gethostname()


# -- connections --------------------------------------------------------------------------------------

TOKEN = b"t" * links.TOKEN_LENGTH


@pytest.fixture
def answerer() -> Iterator[links.Answerer]:
    running = links.Answerer("127.0.0.1", TOKEN)
    yield running
    running.close()
    for thread in threading.enumerate():
        if thread.name == "rally-doctor":
            thread.join(10)


def test_a_connection_is_measured(
    answerer: links.Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "BULK_BYTES", 8 << 20)
    found = links.measure(0, 1, "127.0.0.1", answerer.port, TOKEN)
    assert found.problem == ""
    assert found.latency is not None
    assert 0 < found.latency < pace()
    assert found.bandwidth is not None
    assert found.bandwidth > 1e6
    assert found.clock is not None
    assert abs(found.clock) < pace()


def test_strangers_learn_nothing(answerer: links.Answerer) -> None:
    found = links.measure(0, 1, "127.0.0.1", answerer.port, b"x" * links.TOKEN_LENGTH)
    assert found.problem


def test_a_closed_and_a_silent_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_PATIENCE", 0.2)
    monkeypatch.setattr(links, "PATIENCE", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        found = links.measure(0, 1, "127.0.0.1", port, TOKEN)
        assert found.problem == f"127.0.0.1:{port}: connection refused"
        closed.listen()
        found = links.measure(0, 1, "127.0.0.1", port, TOKEN)
        assert found.problem == f"127.0.0.1:{port}: timed out"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 64 * GIB),
        # cgroup version 2: a container that has read many files.
        (
            {
                "memory.max": "2147483648\n",
                "memory.current": "2140000000\n",
                "memory.stat": "anon 5\nfile 1900000000\ninactive_file 1500000000\nactive_file 400000000\n",
            },
            2147483648 - 240_000_000,
        ),
        ({"memory.max": "1000\n", "memory.current": "900\n"}, 100),
        ({"memory.max": "max\n", "memory.current": "900\n"}, 64 * GIB),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "900\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 100\n",
            },
            700,
        ),
    ],
)
def test_memory_that_only_caches_files_is_available(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int
) -> None:
    def read(path: Path, **_: str) -> str:
        if path == Path("/proc/meminfo"):
            return f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n"
        if path == Path("/proc/self/cgroup"):
            return "4:memory:/a/b\n0::/a/b\n"
        try:
            return files[str(path).removeprefix("/sys/fs/cgroup/").replace("a/b/", "")]
        except KeyError:
            raise FileNotFoundError(path) from None

    monkeypatch.setattr(Path, "read_text", read)
    assert probe._memory() == available


@pytest.mark.parametrize(("capabilities", "limit"), [("000001ffffffffff", None), ("0" * 16, 8192)])
def test_a_process_that_may_lock_memory_has_no_limit_of_it(
    capabilities: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def read_text(path: Path, **more: str) -> str:
        if str(path) == "/proc/self/status":
            return f"Name:\tx\nCapEff:\t{capabilities}\n"
        return read(path, **more)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(probe, "_hard", lambda which: 8192)
    assert probe.facts(1).locked_memory == limit


def test_folders_that_cannot_be_used_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(probe.tempfile, "gettempdir", none)
    exists = Path.exists

    def refuses(path: Path, **more: object) -> bool:
        if str(path) == "/root/logs":
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuses)
    found = probe.facts(1, "/root/logs")
    assert found.folder_problem.startswith("temporary files: No usable temporary directory")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "exists", refuses)
    assert probe.facts(1, "/root/logs").folder_problem == "/root/logs: Permission denied"
