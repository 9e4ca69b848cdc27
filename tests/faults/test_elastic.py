"""Elastic jobs under fire: supervisors on hosts of their own, and everything that can happen to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic import PORT, Cluster, Hosts, Node, make_hosts, wait_until
from ports import free_port
from rallypoint._core import process
from rallypoint.testing import FaultProxy
from servers.etcd_server import EtcdCluster, require_etcd


pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

LEASE = 2.0


@pytest.fixture(autouse=True)
def _pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take few steps: the tests wait for some of them, and otherwise for supervisors."""
    monkeypatch.setenv("ELASTIC_PAUSE", "0.1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from make_hosts(4)


@pytest.fixture
def cluster(tmp_path: Path, hosts: Hosts) -> Iterator[Cluster]:
    """A job on hosts of its own; nothing of it may be left once the test has ended it."""
    job = Cluster(tmp_path, hosts)
    try:
        yield job
        job.check_nothing_left()
    finally:
        hosts.join()
        job.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Cluster]:
    """A job with all its supervisors on this host."""
    job = Cluster(tmp_path)
    try:
        yield job
        job.check_nothing_left()
    finally:
        job.close()


def words(nnodes: str, *more: str, lease: float = LEASE, last_call: float = 1.0) -> tuple[str, ...]:
    conf = f"lease={lease:g},last_call_timeout={last_call:g},join_timeout=60"
    # Named because torchrun's default for a fixed number of nodes is fixed ranks.
    backend = ("--rdzv-backend", "c10d")
    return ("--nnodes", nnodes, *backend, "--rdzv-conf", conf, "--shutdown-timeout", "2", *more)


def start_hosts(
    cluster: Cluster,
    count: int,
    nnodes: str,
    *more: str,
    env: dict[str, str] | None = None,
    **timing,
) -> None:
    assert cluster.hosts is not None
    endpoint = f"{cluster.hosts.addr(0)}:{PORT}"
    for index in range(count):
        flags = words(nnodes, "--rdzv-endpoint", endpoint, *more, **timing)
        cluster.start(f"n{index}", *flags, host=index, env=env)


def add(cluster: Cluster, name: str, host: int, nnodes: str, *more: str):
    endpoint = f"{cluster.hosts.addr(0)}:{PORT}"
    return cluster.start(name, *words(nnodes, "--rdzv-endpoint", endpoint, *more), host=host)


def finish(cluster: Cluster, *names: str) -> None:
    """End the job in good order; every node named exits with 0."""
    cluster.order("finish")
    assert {name: cluster.node(name).wait() for name in names} == dict.fromkeys(names, 0), cluster
    cluster.check_history()


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.netns
def test_workers_and_supervisors_are_killed_one_after_another(cluster: Cluster) -> None:
    start_hosts(cluster, 4, "1:4", "--max-restarts", "3", "--nproc-per-node", "2")
    first = cluster.formed(8)
    assert first.restarts == 0
    cluster.goes_on(first)

    # A worker dies: all restart, once, and it is charged to the job's budget.
    victim = first.workers[5]
    at = time.monotonic()
    os.kill(victim["pid"], signal.SIGKILL)
    second = cluster.formed(8, after=first.generation)
    assert (second.generation, second.restarts) == (first.generation + 1, 1)
    assert second.names == first.names, "who stays keeps its rank"
    for node in cluster.nodes:
        line = "rank 5 was killed by SIGKILL; restarting all workers (attempt 2 of 4)"
        cluster.measure(f"worker killed, {node.name} restarts", node.wait_said(line) - at)
    cluster.measure("worker killed, next collective", second.at - at)
    cluster.goes_on(second)

    # A supervisor that does not serve the store dies: the others go on, and nothing is charged.
    victim_name = next(name for name in reversed(second.names) if name != "n0")
    at = cluster.node(victim_name).signal(signal.SIGKILL)
    third = cluster.formed(6, after=second.generation)
    assert (third.generation, third.restarts) == (second.generation + 1, 1)
    assert victim_name not in third.names
    cluster.measure("supervisor killed, next collective", third.at - at)
    cluster.goes_on(third)

    # The supervisor that serves the store dies.
    at = cluster.node("n0").signal(signal.SIGKILL)
    fourth = cluster.formed(4, after=third.generation)
    assert (fourth.generation, fourth.restarts) == (third.generation + 1, 1)
    assert "n0" not in fourth.names
    cluster.measure("store's host killed, next collective", fourth.at - at)
    cluster.goes_on(fourth)

    # A host comes back and finds the job where it has moved.
    add(cluster, "again", 0, "1:4", "--max-restarts", "3", "--nproc-per-node", "2")
    fifth = cluster.formed(6, after=fourth.generation)
    assert fifth.restarts == 1
    assert sorted(fifth.names) == sorted([*fourth.names, "again"])
    cluster.goes_on(fifth)
    finish(cluster, *fifth.names)


@pytest.mark.long
@pytest.mark.netns
def test_the_stores_host_and_another_die_in_the_same_instant_and_then_rank_0(
    cluster: Cluster,
) -> None:
    start_hosts(cluster, 4, "1:4")
    first = cluster.formed(4)
    cluster.goes_on(first)
    other = next(name for name in first.names if name != "n0")
    at = cluster.node("n0").signal(signal.SIGKILL)
    cluster.node(other).signal(signal.SIGKILL)
    second = cluster.formed(2, after=first.generation)
    assert (second.generation, second.restarts) == (first.generation + 1, 0)
    cluster.measure("store's host and another killed, next collective", second.at - at)
    cluster.goes_on(second)
    at = cluster.node(second.names[0]).signal(signal.SIGKILL)
    third = cluster.formed(1, after=second.generation)
    assert third.restarts == 0
    cluster.measure("rank 0 killed, next collective", third.at - at)
    cluster.goes_on(third)
    finish(cluster, *third.names)


@pytest.mark.netns
@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.long), "raises"])
def test_a_failure_that_is_not_restarted_is_reported_alike_on_every_node(
    cluster: Cluster, how: str
) -> None:
    logs = cluster.folder / "logs"
    start_hosts(cluster, 3, "2:3", "--max-restarts", "0", "--log-dir", str(logs))
    first = cluster.formed(3)
    cluster.goes_on(first)
    at = time.monotonic()
    if how == "killed":
        os.kill(first.of("n1")[0]["pid"], signal.SIGKILL)
        code, headline = 128 + signal.SIGKILL, "was killed by SIGKILL"
    else:
        cluster.order("fail-n1")
        code, headline = 1, "raised ValueError"
    assert [node.wait() for node in cluster.nodes] == [code] * 3, cluster
    cluster.measure(f"worker {how}, the job has ended everywhere", time.monotonic() - at)
    rank = first.of("n1")[0]["rank"]
    for node in cluster.nodes:
        assert f"the job failed: rank {rank} {headline}" in node.says()
    reports = [json.loads(path.read_text()) for path in logs.rglob("report.json")]
    assert len(reports) == 3
    roots = [report["root_cause"] for report in reports]
    assert roots[0] == roots[1] == roots[2], "rank, host, exception and all"
    assert (roots[0]["rank"], roots[0]["host"]) == (rank, "host-1")


@pytest.mark.netns
def test_workers_deaths_are_known_everywhere_at_once(cluster: Cluster) -> None:
    """Without collectives, only the supervisors can tell the other nodes' workers."""
    by_lease = 60.0  # nobody waits for that long
    env = {"ELASTIC_APART": "1"}
    start_hosts(cluster, 4, "4:4", "--max-restarts", "1", env=env, lease=by_lease)
    first = cluster.formed(4)
    at = time.monotonic()
    os.kill(first.workers[2]["pid"], signal.SIGKILL)
    second = cluster.formed(4, after=first.generation)
    assert second.restarts == 1
    known = {each["rank"]: each["at"] for each in cluster.notes("signal")}
    assert sorted(known) == [0, 1, 3]
    cluster.measure("worker killed, all other workers are told to stop", max(known.values()) - at)
    cluster.measure("from that to the next collective", second.at - max(known.values()))
    assert max(known.values()) - at < by_lease / 2
    victim = next(name for name in second.names if name != "n0")
    at = cluster.node(victim).signal(signal.SIGKILL)
    wait_until(lambda: len(cluster.notes("signal", since=at)) == 3, "the others stop")
    told = max(each["at"] for each in cluster.notes("signal", since=at))
    cluster.measure("supervisor killed, all other workers are told to stop", told - at)
    assert told - at < by_lease / 2
    cluster.nodes[0].signal(signal.SIGINT)
    codes = [node.wait() for node in cluster.nodes if not node.killed]
    assert codes == [130, 143, 143], cluster


@pytest.mark.netns
@pytest.mark.parametrize("who", ["n0", "n2"], ids=["host", "guest"])
def test_a_job_that_is_stopped_between_two_rounds_ends_everywhere(
    cluster: Cluster, who: str
) -> None:
    """All wait for a node that was killed. After Ctrl-C on one of them, the others need not wait until ``join_timeout``."""
    env = {"ELASTIC_APART": "1"}
    start_hosts(cluster, 4, "4:4", env=env)
    first = cluster.formed(4)
    cluster.node("n1").signal(signal.SIGKILL)
    workers = [each["pid"] for each in first.workers if each["node"] != "n1"]
    wait_until(lambda: not any(map(process.is_running, workers)), "all other workers have ended")
    at = cluster.node(who).signal(signal.SIGINT)
    ends = {node.name: node.wait() for node in cluster.nodes if not node.killed}
    cluster.measure(f"{who} stopped between two rounds, all have ended", time.monotonic() - at)
    assert ends == {"n0": 143, "n2": 143, "n3": 143} | {who: 130}, cluster
    for node in cluster.nodes:
        assert node.killed or node.name == who or "was told to stop" in node.says(), node


def test_a_node_that_leaves_on_its_way_to_the_next_round_is_not_waited_for(local: Cluster) -> None:
    """The others form the round with it, as it has arrived, and then notice that it is gone."""
    flags = words("3:3", "--rdzv-endpoint", f"localhost:{free_port()}", "--max-restarts", "3")
    nodes = [local.start(f"n{index}", *flags) for index in range(3)]
    first = local.formed(3)
    serves, comes, leaves = (
        nodes[0],
        *(local.node(each) for each in first.names if each != "n0"),
    )
    os.kill(comes.pid, signal.SIGSTOP)
    try:
        (worker,) = (each["pid"] for each in first.workers if each["node"] == "n0")
        os.kill(worker, signal.SIGKILL)
        here = "2 of 3 nodes are here"
        wait_until(lambda: serves.said(here) or leaves.said(here), "both wait for the third")
        leaves.signal(signal.SIGTERM)
        assert leaves.wait() == 143
    finally:
        os.kill(comes.pid, signal.SIGCONT)
    local.start("again", *flags)
    formed = local.formed(3, after=first.generation)
    assert sorted(formed.names) == sorted(["again", serves.name, comes.name])
    finish(local, *formed.names)


@pytest.mark.netns
def test_all_nodes_are_restarted_in_turn(cluster: Cluster, hosts: Hosts) -> None:
    """A rolling update: SIGTERM, then an immediate restart. The store moves each time, and its old places stay."""
    endpoint = ",".join(f"{hosts.addr(index)}:{PORT}" for index in range(3))
    flags = words("2:3", "--rdzv-endpoint", endpoint)
    saves = {"ELASTIC_SAVES": "1"}  # meanwhile the store of a node that leaves keeps serving
    nodes = [cluster.start(f"n{index}", *flags, host=index, env=saves) for index in range(3)]
    formed = cluster.formed(3)
    cluster.goes_on(formed)
    for index in (0, 1, 2, 0):
        at = nodes[index].signal(signal.SIGTERM)
        assert nodes[index].wait() == 143
        name = f"again{len(cluster.nodes)}"
        nodes[index] = cluster.start(name, *flags, host=index, env=saves)
        formed = cluster.formed(3, after=formed.generation)
        assert formed.restarts == 0
        cluster.goes_on(formed)
        cluster.measure(f"n{index} restarted, all train again", formed.at - at)
    for node in cluster.nodes:
        assert node.says().count("connecting there") <= 2, node
    finish(cluster, *formed.names)


@pytest.mark.netns
def test_the_store_stays_where_newcomers_look_for_it(cluster: Cluster, hosts: Hosts) -> None:
    """Rank 0 is a node on a host that the endpoint does not name. It serves only if no named host is left."""
    endpoint = ",".join(f"{hosts.addr(index)}:{PORT}" for index in (1, 2))
    flags = words("2:3", "--rdzv-endpoint", endpoint)
    first = cluster.start("n1", *flags, host=1)
    wait_until(lambda: hosts.listening(1), "the first host that is named serves")
    for index in (0, 2):
        cluster.start(f"n{index}", *flags, host=index)
    formed = cluster.formed(3)
    assert formed.names[0] == "n0"
    first.signal(signal.SIGKILL)
    formed = cluster.formed(2, after=formed.generation)
    assert cluster.node("n2").said("serving it here") is not None
    cluster.start("n3", *flags, host=3)
    formed = cluster.formed(3, after=formed.generation)
    finish(cluster, *formed.names)


# -- silence --------------------------------------------------------------------------------------


def stop(pids: list[int]) -> float:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return time.monotonic()


def resume(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


@pytest.mark.netns
@pytest.mark.parametrize(
    ("victim", "whole"), [("n2", True), ("n2", False), ("n0", True)], ids=["tree", "alone", "host"]
)
@pytest.mark.long
def test_a_node_that_stands_still_is_lost_and_comes_back(
    cluster: Cluster, victim: str, whole: bool
) -> None:
    start_hosts(cluster, 3, "2:3")
    first = cluster.formed(3)
    cluster.goes_on(first)
    node = cluster.node(victim)
    pids = node.tree() if whole else [node.pid]
    at = stop(pids)
    try:
        second = cluster.formed(2, after=first.generation)
        assert victim not in second.names
        assert second.restarts == 0, "nobody failed"
        cluster.measure(f"{victim} stands still, next collective", second.at - at)
        cluster.goes_on(second)
    finally:
        resume(pids)
    third = cluster.formed(3, after=second.generation)
    assert third.restarts == 0
    cluster.goes_on(third)
    finish(cluster, *third.names)


@pytest.mark.long
@pytest.mark.netns
def test_whoever_is_cut_off_waits_and_comes_back(cluster: Cluster, hosts: Hosts) -> None:
    start_hosts(cluster, 4, "1:4")
    first = cluster.formed(4)
    cluster.goes_on(first)
    at = hosts.cut(3)
    second = cluster.formed(3, after=first.generation)
    assert sorted(second.names) == ["n0", "n1", "n2"]
    noticed = [node.said("is lost", since=at) for node in cluster.nodes[:3]]
    cluster.measure("silent host noticed", max(filter(None, noticed)) - at)
    cluster.measure("from there to the next collective", second.at - max(filter(None, noticed)))
    cluster.goes_on(second)
    hosts.mend(3)
    third = cluster.formed(4, after=second.generation)
    cluster.goes_on(third)

    # Two halves: only the one with the store may go on.
    at = hosts.part(2, 3)
    fourth = cluster.formed(2, after=third.generation)
    assert sorted(fourth.names) == ["n0", "n1"]

    def of_the_other_half() -> list[dict[str, object]]:
        return [e for e in cluster.notes("generation", since=at) if e["node"] in {"n2", "n3"}]

    # The other half gathers around a store of its own and waits; if it is wrong, it trains.
    waits = "the others may continue without this node"
    other_half = [cluster.node(name) for name in ("n2", "n3")]
    wait_until(
        lambda: of_the_other_half() or any(node.said(waits, since=at) for node in other_half),
        "the half without the store waits",
    )
    assert not of_the_other_half()
    hosts.join()
    fifth = cluster.formed(4, after=fourth.generation)
    assert fifth.restarts == 0
    cluster.goes_on(fifth)
    finish(cluster, *fifth.names)


@pytest.mark.long
@pytest.mark.netns
def test_the_stores_host_is_cut_off_and_comes_back(cluster: Cluster, hosts: Hosts) -> None:
    start_hosts(cluster, 3, "1:3")
    first = cluster.formed(3)
    cluster.goes_on(first)
    at = hosts.cut(0)
    second = cluster.formed(2, after=first.generation)
    assert sorted(second.names) == ["n1", "n2"]
    cluster.measure("store's host cut off, next collective", second.at - at)
    cluster.goes_on(second)
    time.sleep(2 * LEASE)
    assert not [e for e in cluster.notes("generation", since=at) if e["node"] == "n0"]
    hosts.mend(0)
    third = cluster.formed(3, after=second.generation)
    cluster.goes_on(third)
    finish(cluster, *third.names)


@pytest.mark.netns
@pytest.mark.long
def test_hosts_that_were_all_cut_off_from_all_meet_again(cluster: Cluster, hosts: Hosts) -> None:
    """A switch reboots: each host gathers around a store of its own, and nobody goes on."""
    start_hosts(cluster, 3, "2:3")
    first = cluster.formed(3)
    cluster.goes_on(first)
    at = time.monotonic()
    for index in range(3):
        hosts.cut(index)
    time.sleep(5 * LEASE)
    assert not list(cluster.notes("generation", since=at))
    for index in range(3):
        hosts.mend(index)
    second = cluster.formed(3, after=first.generation)
    cluster.goes_on(second)
    finish(cluster, *second.names)


# -- one host -------------------------------------------------------------------------------------


def start_local(local: Cluster, count: int, *flags: str) -> str:
    endpoint = f"127.0.0.1:{free_port()}"
    for index in range(count):
        local.start(f"n{index}", *flags, "--rdzv-endpoint", endpoint)
    return endpoint


def test_the_stores_host_follows_those_who_lost_it_for_a_while(local: Cluster) -> None:
    # It stands still and wakes up; neither it nor its own workers notice anything.
    flags = words("3:3", "--max-restarts", "3")
    endpoint = f"127.0.0.1:{free_port()}"
    for index in range(3):
        apart = {"ELASTIC_APART": "1"}
        local.start(f"n{index}", *flags, "--rdzv-endpoint", endpoint, env=apart)
    first = local.formed(3)
    server, store = next(
        (node, pid) for node in local.nodes if (pid := process_of_store(node, endpoint))
    )
    os.kill(store, signal.SIGSTOP)
    server.signal(signal.SIGSTOP)
    time.sleep(LEASE + 0.6)
    os.kill(store, signal.SIGCONT)
    at = server.signal(signal.SIGCONT)
    second = local.formed(3, after=first.generation)
    assert second.restarts == 0
    local.measure("the store's host woke up, all begin anew", second.at - at)
    finish(local, "n0", "n1", "n2")


@pytest.mark.long
def test_a_slow_line_is_no_death_and_a_stalled_one_is(local: Cluster) -> None:
    # The default lease must tolerate a third of a second in each direction.
    flags = words("2:3", lease=5.0, last_call=15.0)
    port = free_port()
    proxy = FaultProxy(("127.0.0.1", port))
    proxy.delay = 0.3
    try:
        for index in range(2):
            local.start(f"n{index}", *flags, "--rdzv-endpoint", f"127.0.0.1:{port}")
        local.start("n2", *flags, "--rdzv-endpoint", f"127.0.0.1:{proxy.port}")
        first = local.formed(3)
        time.sleep(6)  # more than a lease
        assert not [e for e in local.notes("generation") if e["generation"] > first.generation]
        assert "is lost" not in str(local)
        proxy.delay = 0.0
        proxy.stall()
        at = time.monotonic()
        second = local.formed(2, after=first.generation)
        assert "n2" not in second.names
        local.measure("line stalled, next collective (lease 5 s)", second.at - at)
        proxy.resume()
        third = local.formed(3, after=second.generation)
        assert third.restarts == 0
        finish(local, *third.names)
    finally:
        proxy.close()


CLOCK = """
import time
_time, _ns = time.time, time.time_ns
time.time = lambda: _time() + 3600
time.time_ns = lambda: _ns() + 3_600_000_000_000
"""


@pytest.mark.long
def test_clocks_that_differ_between_nodes_do_no_harm(local: Cluster) -> None:
    (local.folder / "ahead").mkdir()
    (local.folder / "ahead" / "sitecustomize.py").write_text(CLOCK)
    flags = (*words("2:3", "--max-restarts", "1"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    local.start("n0", *flags)
    # One node's wall clock is an hour ahead; another's host was booted a day earlier.
    local.start("n1", *flags, env={"PYTHONPATH": str(local.folder / "ahead")})
    namespace = ("unshare", "--time", "--monotonic", "86400", "--fork", "--kill-child")
    usable = subprocess.run(
        [*namespace, "true"], check=False, capture_output=True, timeout=20
    ).returncode
    local.start("n2", *flags, prefix=namespace if usable == 0 else ())
    first = local.formed(3)
    time.sleep(2 * LEASE)
    assert "is lost" not in str(local)
    os.kill(first.of("n1")[0]["pid"], signal.SIGKILL)
    second = local.formed(3, after=first.generation)
    assert second.restarts == 1
    local.node("n1").signal(signal.SIGKILL)
    third = local.formed(2, after=second.generation)
    assert (third.generation, third.restarts) == (second.generation + 1, 1)
    local.order("finish")
    assert [local.node(name).wait() for name in ("n0", "n2")] == [0, 0], local


# -- told to leave --------------------------------------------------------------------------------


@pytest.mark.netns
def test_a_node_that_is_told_to_leave_goes_and_the_others_go_on(cluster: Cluster) -> None:
    start_hosts(cluster, 4, "1:4")
    first = cluster.formed(4)
    cluster.goes_on(first)
    for victim in ("n2", "n0"):  # the second one serves the store
        at = cluster.node(victim).signal(signal.SIGTERM)
        second = cluster.formed(len(first.workers) - 1, after=first.generation)
        assert victim not in second.names
        # One restart, not two, and it is not charged.
        assert (second.generation, second.restarts) == (first.generation + 1, 0), cluster
        assert cluster.node(victim).wait() == 143
        cluster.measure(f"{victim} is gone after SIGTERM", time.monotonic() - at)
        cluster.measure(f"{victim} told to leave, next collective", second.at - at)
        cluster.goes_on(second)
        first = second
    cluster.node(first.names[-1]).signal(signal.SIGINT)
    assert [cluster.node(name).wait() for name in first.names] == [143, 130], cluster
    cluster.check_history()


def test_a_node_all_of_whose_processes_are_told_to_end_leaves_and_the_others_go_on(
    local: Cluster,
) -> None:
    """As a batch system requeues part of a job. The node's workers die of the signal before their supervisor has read it."""
    port = free_port()
    for name in ("n0", "n1", "n2"):
        local.start(name, *words("1:3", "--rdzv-endpoint", f"127.0.0.1:{port}"))
    first = local.formed(3)
    local.goes_on(first)
    for victim in ("n2", "n0"):  # the second one serves the store
        pids = local.node(victim).tree()
        # Children before their parents: a worker may have died before its supervisor is told.
        process.send(reversed(pids), signal.SIGTERM)
        second = local.formed(len(first.workers) - 1, after=first.generation)
        assert victim not in second.names
        assert (second.generation, second.restarts) == (first.generation + 1, 0), local
        assert local.node(victim).wait() == 143
        told = [each["generation"] for each in local.notes("signal") if each["node"] == victim]
        assert told.count(first.generation) == 1, "once"
        first = second
    local.order("finish")
    assert [local.node(name).wait() for name in first.names] == [0]


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_who_is_done_early_leaves_but_the_stores_host_stays_for_the_others(local: Cluster) -> None:
    flags = words("1:4", "--max-restarts", "1", last_call=3.0)
    endpoint = f"127.0.0.1:{free_port()}"
    for index in range(4):
        local.start(f"n{index}", *flags, "--rdzv-endpoint", endpoint, env={"ELASTIC_APART": "1"})
    first = local.formed(4)
    n0, n1, n2, n3 = (local.node(f"n{index}") for index in range(4))
    server = next(node for node in local.nodes if process_of_store(node, endpoint))
    others = [node for node in (n0, n1, n2, n3) if node is not server]

    at = local.order(f"finish-{others[0].name}")
    assert others[0].wait() == 0
    local.measure("done early, and has left", time.monotonic() - at)
    local.order(f"finish-{server.name}")
    wait_until(lambda: len(local.notes("finished")) == 2, "the store's host is done")
    time.sleep(LEASE)
    assert server.alive, "the others need its store"
    assert not [e for e in local.notes("generation") if e["generation"] > first.generation]

    at = local.order(f"fail-{others[1].name}")
    second = local.formed(2, after=first.generation)
    assert second.restarts == 1
    local.measure("restart without the store's host", second.at - at)
    time.sleep(2 * LEASE)
    assert server.alive
    local.order(f"finish-{others[1].name}")
    assert others[1].wait() == 0
    time.sleep(LEASE)
    assert server.alive
    local.order("finish")
    assert others[2].wait() == 0
    assert server.wait() == 0, local
    assert "is lost" not in str(local)


@pytest.mark.long
def test_the_stores_host_does_not_stay_for_the_dead(local: Cluster) -> None:
    flags = words("1:2", last_call=3.0)
    endpoint = f"127.0.0.1:{free_port()}"
    for index in range(2):
        local.start(f"n{index}", *flags, "--rdzv-endpoint", endpoint, env={"ELASTIC_APART": "1"})
    local.formed(2)
    server = next(node for node in local.nodes if process_of_store(node, endpoint))
    other = next(node for node in local.nodes if node is not server)
    local.order(f"finish-{server.name}")
    wait_until(lambda: local.notes("finished"), "the store's host is done")
    time.sleep(LEASE)
    assert server.alive
    other.signal(signal.SIGKILL)
    assert server.wait() == 0, local


def process_of_store(node: Node, endpoint: str) -> int | None:
    """The pid of the node's process that listens at the endpoint."""
    port = int(endpoint.rpartition(":")[2])
    for each in psutil.Process(node.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found = each.net_connections()
            if any(c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in found):
                return each.pid
    return None


def test_a_spare_steps_in_and_ends_with_the_job(local: Cluster) -> None:
    flags = words("2:2")
    endpoint = start_local(local, 2, *flags)
    first = local.formed(2)
    local.goes_on(first)
    spare = local.start("spare", *flags, "--rdzv-endpoint", endpoint)
    spare.wait_said("the job is running with 2 nodes; waiting as a spare until one is lost")
    assert not [e for e in local.notes("generation") if e["generation"] > first.generation]
    server = next(node for node in local.nodes if process_of_store(node, endpoint))
    victim = next(node for node in local.nodes[:2] if node is not server)
    at = victim.signal(signal.SIGKILL)
    second = local.formed(2, after=first.generation)
    assert second.restarts == 0
    assert second.names.index("spare") == first.names.index(victim.name), "the dead one's rank"
    local.measure("member killed, the spare trains", second.at - at)
    local.goes_on(second)
    extra = local.start("extra", *flags, "--rdzv-endpoint", endpoint)
    told = local.start("told", *flags, "--rdzv-endpoint", endpoint)
    for each in (extra, told):
        each.wait_said("waiting as a spare")
    at = told.signal(signal.SIGTERM)
    assert told.wait() == 143
    local.measure("a spare is gone after SIGTERM", time.monotonic() - at)
    finish(local, server.name, "spare")
    at = time.monotonic()
    assert extra.wait() == 0, local
    local.measure("the job has ended, the spare too", time.monotonic() - at)
    assert "the job has ended well: this node was not needed" in extra.says()


@pytest.mark.long
def test_a_spare_of_a_job_that_fails_fails_too(local: Cluster) -> None:
    flags = words("2:2")
    endpoint = start_local(local, 2, *flags)
    first = local.formed(2)
    local.goes_on(first)
    spare = local.start("spare", *flags, "--rdzv-endpoint", endpoint)
    spare.wait_said("waiting as a spare")
    local.order("fail-n1")
    assert [local.node(name).wait() for name in ("n0", "n1")] == [1, 1]
    assert spare.wait() == 1
    assert "the job has failed" in spare.says()


@pytest.mark.long
def test_too_few_wait_for_a_replacement_and_say_who_is_there(local: Cluster) -> None:
    conf = ("--rdzv-conf", f"lease={LEASE},last_call_timeout=1,join_timeout=60")
    flags = ("--nnodes", "2:2", "--rdzv-backend", "c10d", *conf, "--shutdown-timeout", "2")
    endpoint = start_local(local, 2, *flags)
    first = local.formed(2)
    local.goes_on(first)
    victim = local.node(first.names[1])
    if process_of_store(victim, endpoint):
        victim = local.node(first.names[0])
    survivor = next(node for node in local.nodes if node is not victim)
    victim.signal(signal.SIGKILL)
    time.sleep(1)
    assert survivor.alive
    local.start("new", *flags, "--rdzv-endpoint", endpoint)
    second = local.formed(2, after=first.generation)
    assert second.names.index("new") == first.names.index(victim.name)
    local.goes_on(second)
    at = local.node("new").signal(signal.SIGKILL)
    assert survivor.wait() == 1
    local.measure("no replacement: the end (join_timeout=60)", time.monotonic() - at)
    assert "1 of 2 nodes arrived within 60 s" in survivor.says()
    assert socket.gethostname() in survivor.says().splitlines()[-1]
    assert "Traceback" not in survivor.says().split("1 of 2 nodes")[1]


# -- other stores ---------------------------------------------------------------------------------


def kill_one_and_scale_up(local: Cluster, endpoint: str) -> None:
    backend = endpoint.partition(":")[0]
    flags = (*words("1:3", last_call=3.0), "--rdzv-endpoint", endpoint, "--rdzv-backend", backend)
    for index in range(3):
        local.start(f"n{index}", *flags)
    first = local.formed(3)
    local.goes_on(first)
    at = local.node(first.names[0]).signal(signal.SIGKILL)
    second = local.formed(2, after=first.generation)
    assert (second.generation, second.restarts) == (first.generation + 1, 0)
    local.measure("rank 0 killed, next collective", second.at - at)
    local.goes_on(second)
    local.start("new", *flags)
    third = local.formed(3, after=second.generation)
    assert third.restarts == 0
    local.goes_on(third)
    spare = local.start("spare", *flags)
    spare.wait_said("waiting as a spare")
    finish(local, *third.names)
    assert spare.wait() == 0, local


@pytest.mark.long
def test_nodes_that_meet_in_etcd(local: Cluster) -> None:
    require_etcd()
    (local.folder / "etcd").mkdir()
    etcd = EtcdCluster(local.folder / "etcd")
    try:
        kill_one_and_scale_up(local, f"etcd://{etcd.endpoints[0]}")
    finally:
        etcd.stop()


def test_nodes_that_meet_in_a_folder(local: Cluster) -> None:
    (local.folder / "shared").mkdir()
    kill_one_and_scale_up(local, f"file://{local.folder / 'shared'}")


def test_workers_that_die_of_anothers_admission_cost_nothing(local: Cluster) -> None:
    """One node stops its workers for the newcomer before the other has heard of it: no restart is used."""
    (local.folder / "shared").mkdir()
    endpoint = f"file://{local.folder / 'shared'}"
    flags = (*words("1:3", lease=6.0), "--rdzv-endpoint", endpoint, "--rdzv-backend", "file")
    for index in range(2):
        local.start(f"n{index}", *flags)
    first = local.formed(2)
    local.goes_on(first)
    late = local.node(first.names[1])
    late.signal(signal.SIGSTOP)
    try:
        local.start("new", *flags)
        local.node(first.names[0]).wait_said("a node wants to join")
        time.sleep(0.5)  # the late node's worker dies of it
    finally:
        late.signal(signal.SIGCONT)
    second = local.formed(3, after=first.generation)
    assert second.restarts == 0
    finish(local, *second.names)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("needs root to mount a small disk, and CI=true")
        pytest.skip("needs root to mount a small disk")
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20, capture_output=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))


@pytest.mark.long
def test_a_folder_on_a_disk_that_is_full_is_an_error_not_a_hang(
    local: Cluster, small_disk: Path
) -> None:
    conf = ("--rdzv-conf", f"lease={LEASE},last_call_timeout=3,join_timeout=10")
    flags = ("--nnodes", "2:3", *conf, "--shutdown-timeout", "2")
    endpoint = ("--rdzv-endpoint", f"file://{small_disk}", "--rdzv-backend", "file")
    for index in range(3):
        local.start(f"n{index}", *flags, *endpoint)
    first = local.formed(3)
    local.goes_on(first)
    fill(small_disk / "ballast")
    local.node(first.names[2]).signal(signal.SIGKILL)
    left = [local.node(name) for name in first.names[:2]]
    codes = [node.wait() for node in left]
    assert all(code not in {0, -signal.SIGKILL} for code in codes), local
    for node in left:
        assert "No space left on device" in node.says(), node


# -- secrets --------------------------------------------------------------------------------------


@pytest.mark.long
def test_who_does_not_know_the_secret_is_no_member_and_does_no_harm(local: Cluster) -> None:
    for name in ("good", "bad"):
        (local.folder / name).write_text(f"a {name} secret of some length")
        (local.folder / name).chmod(0o600)
    conf = ("--rdzv-conf", f"lease={LEASE},last_call_timeout=2,join_timeout=20")
    flags = ("--nnodes", "2:4", *conf, "--shutdown-timeout", "2")
    knows = ("--secret-file", str(local.folder / "good"))
    endpoint = start_local(local, 2, *flags, *knows)
    first = local.formed(2)
    wrong = local.start(
        "wrong", *flags, "--secret-file", str(local.folder / "bad"), "--rdzv-endpoint", endpoint
    )
    none = local.start("none", *flags, "--rdzv-endpoint", endpoint)
    for stranger in (wrong, none):
        assert stranger.wait() == 1, stranger
        assert "nodes arrived within 20 s" in stranger.says(), stranger
        assert "Traceback" not in stranger.says()
    assert not [e for e in local.notes("generation") if e["generation"] > first.generation]
    assert "is lost" not in local.node("n0").says() + local.node("n1").says()
    local.start("third", *flags, *knows, "--rdzv-endpoint", endpoint)
    second = local.formed(3, after=first.generation)
    assert second.restarts == 0
    finish(local, *second.names)


# -- the process of the job's store ---------------------------------------------------------------


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_fork_server_that_is_killed_costs_its_node_and_is_told_to_the_others(
    local: Cluster, elastic: bool
) -> None:
    """It is on the node with the job's store, whose process lives on until the others are told. Only fork servers have torch."""
    nodes = words("1:2") if elastic else ("--nnodes", "2", "--shutdown-timeout", "2")
    endpoint = f"127.0.0.1:{free_port()}"
    # Separate interpreters, so that what they have in memory is their own.
    python = ("env",)
    for index in range(2):
        rank = () if elastic else ("--node-rank", str(index))
        local.start(f"n{index}", *nodes, *rank, "--rdzv-endpoint", endpoint, prefix=python)
    first = local.formed(2)
    local.goes_on(first)
    for node in local.nodes:
        assert "libtorch" not in Path(f"/proc/{node.pid}/maps").read_text()
        (resident,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{node.pid}/status").read_text())
        assert int(resident) < 40_000, f"{node.name} takes {resident} kB"
    server, store = next(
        (node, pid) for node in local.nodes if (pid := process_of_store(node, endpoint))
    )
    other = next(node for node in local.nodes if node is not server)
    fork_server = psutil.Process(store).ppid()
    os.kill(fork_server, signal.SIGKILL)
    at = time.monotonic()
    assert server.wait() == 1
    why = f"its fork server (pid {fork_server}) was killed by SIGKILL"
    assert why in server.says()
    if elastic:
        second = local.formed(1, after=first.generation)
        assert second.restarts == 0
        local.measure("fork server killed, next collective", second.at - at)
        local.goes_on(second)
        finish(local, other.name)
    else:
        assert other.wait() != 0, local
    assert f"failed: {why}" in other.says()
    assert not process.is_running(store)


def test_a_node_whose_store_ends_with_it_waits_until_the_others_have_read_why(
    local: Cluster,
) -> None:
    """A follower that stood still for a moment would otherwise find the store gone, and take the node for lost."""
    endpoint = f"127.0.0.1:{free_port()}"
    for index in range(2):
        local.start(f"n{index}", *words("1:2"), "--rdzv-endpoint", endpoint)
    first = local.formed(2)
    local.goes_on(first)
    server, store = next(
        (node, pid) for node in local.nodes if (pid := process_of_store(node, endpoint))
    )
    other = next(node for node in local.nodes if node is not server)
    fork_server = psutil.Process(store).ppid()
    other.signal(signal.SIGSTOP)
    os.kill(fork_server, signal.SIGKILL)
    why = f"its fork server (pid {fork_server}) was killed by SIGKILL"
    time.sleep(1.5)  # there is no event to wait for: the node stays
    assert server.alive, local
    other.signal(signal.SIGCONT)
    assert server.wait() == 1
    assert why in server.says()
    second = local.formed(1, after=first.generation)
    local.goes_on(second)
    assert f"failed: {why}" in other.says()
    finish(local, other.name)


def test_the_stores_process_ends_with_a_killed_supervisor(local: Cluster) -> None:
    flags = words("1:2")
    endpoint = start_local(local, 2, *flags)
    first = local.formed(2)
    local.goes_on(first)
    server, store = next(
        (node, pid) for node in local.nodes if (pid := process_of_store(node, endpoint))
    )
    server.signal(signal.SIGKILL)
    wait_until(lambda: not process.is_running(store), "the store's process has ended")
    second = local.formed(1, after=first.generation)
    local.goes_on(second)
    finish(local, *second.names)


def test_a_job_goes_on_when_only_the_stores_process_is_killed(local: Cluster) -> None:
    flags = words("1:3")
    endpoint = start_local(local, 3, *flags)
    first = local.formed(3)
    local.goes_on(first)
    _, store = next(
        (node, pid) for node in local.nodes if (pid := process_of_store(node, endpoint))
    )
    os.kill(store, signal.SIGKILL)
    second = local.formed(3, after=first.generation)
    assert second.restarts == 0
    local.goes_on(second)
    finish(local, *second.names)
