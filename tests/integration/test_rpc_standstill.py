"""A peer that stands still is late, and not lost; one whose host is cut off is."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import rpc_workers
from pace import pace
from rallypoint import rpc
from rpc_workers import Workers, eventually


pytestmark = [pytest.mark.integration]

# More than the kernel keeps for both ends of a connection.
MANY = 8_000_000
HEARTBEAT = 1.0
# Seconds: whatever used to end a connection would have done so by then.
STILL = 3.5


def total(x: torch.Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def give(count: int) -> torch.Tensor:
    return torch.ones(count)


def join(**options) -> None:
    rpc_workers.join_dynamic(heartbeat=HEARTBEAT, **options)


def names() -> list[str]:
    return sorted(each.name for each in rpc.members()[1])


def give_when_told(count: int) -> torch.Tensor:
    told = rpc_workers.held["told"] = threading.Event()
    told.wait(60)
    return give(count)


def is_stuck() -> bool:
    """Whether something waits for the other end to read it."""
    connections = rpc.api._get_current_rpc_agent().connections
    ends = [*connections.all_outgoing(), *connections.all_incoming()]
    return any(each.line.is_full for each in ends)


def begin(func, *args) -> None:
    # On another thread, as the sender waits for a peer that does not read.
    pool = rpc_workers.held["pool"] = ThreadPoolExecutor(1)
    rpc_workers.held["call"] = pool.submit(rpc.rpc_sync, "w1", func, args, timeout=60)


def finish():
    rpc_workers.held.pop("pool").shutdown()
    return rpc_workers.held.pop("call").result()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_callee_that_stands_still_amid_a_large_tensor_is_not_lost(tls):
    with Workers(2) as workers:
        workers.run(functools.partial(join, transports=("tcp",), tls=tls or None))
        workers.on(0, lambda: rpc.wait_for("w1", 10) and rpc.rpc_sync("w1", total, (give(1),)))
        workers.signal(1, signal.SIGSTOP)
        workers.on(0, lambda: begin(total, torch.ones(MANY)))
        eventually(lambda: workers.on(0, is_stuck))
        time.sleep(STILL)
        assert workers.on(0, names) == ["w0", "w1"]
        workers.signal(1, signal.SIGCONT)
        assert workers.on(0, finish, limit=60) == MANY
        workers.run(rpc_workers.leave)


def test_a_caller_that_stands_still_amid_a_large_answer_is_not_lost():
    with Workers(2) as workers:
        workers.run(functools.partial(join, transports=("tcp",)))
        workers.on(0, lambda: rpc.wait_for("w1", 10) and rpc.rpc_sync("w1", total, (give(1),)))

        workers.on(0, functools.partial(begin, give_when_told, MANY))
        eventually(lambda: workers.on(1, lambda: "told" in rpc_workers.held))
        workers.signal(0, signal.SIGSTOP)
        workers.on(1, lambda: rpc_workers.held["told"].set())
        eventually(lambda: workers.on(1, is_stuck))
        time.sleep(STILL)
        assert workers.on(1, names) == ["w0", "w1"]
        workers.signal(0, signal.SIGCONT)
        assert workers.on(0, lambda: total(finish()), limit=60) == MANY
        workers.run(rpc_workers.leave)


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_one_that_stands_still_while_its_connection_breaks_stays_a_member(transport):
    with Workers(2) as workers:
        workers.run(functools.partial(join, transports=(transport,)))
        workers.on(0, lambda: rpc.wait_for("w1", 10) and rpc.rpc_sync("w1", total, (give(1),)))
        workers.signal(1, signal.SIGSTOP)

        def break_and_call():
            (outgoing,) = rpc.api._get_current_rpc_agent().connections.all_outgoing()
            outgoing.fail("as if the line had broken")
            time.sleep(STILL)
            assert names() == ["w0", "w1"]
            with pytest.raises(rpc.RpcTimeout):
                rpc.rpc_sync("w1", total, (give(2),), timeout=0.5)

        workers.on(0, break_and_call)
        workers.signal(1, signal.SIGCONT)
        assert workers.on(0, lambda: rpc.rpc_sync("w1", total, (give(2),), timeout=60)) == 2
        workers.run(rpc_workers.leave)


def test_one_that_was_expelled_and_lives_is_told_and_comes_back():
    with Workers(2) as workers:
        workers.run(join)

        def expel():
            rpc.wait_for("w1", 10)
            group = rpc.api._get_current_rpc_agent().group
            group.report_lost(group.find("w1"), "it was cut off")
            return names()

        def is_told():
            try:
                rpc.rpc_sync("w0", total, (give(1),))
            except rpc.Expelled as error:
                return str(error)
            except rpc.PeerLost:
                return ""
            return ""

        def come_back():
            assert names() == ["w0"]
            group = rpc.api._get_current_rpc_agent().group
            group.report_lost(group.find("w0"), "it is silent")  # nobody listens to one that is out
            join()
            return rpc.rpc_sync("w0", total, (give(3),))

        assert workers.on(0, expel) == ["w0"]
        assert "removed this worker, 'w1', as lost (it was cut off); call init_rpc" in eventually(
            lambda: workers.on(1, is_told), 20
        )
        assert workers.on(1, come_back) == 3
        assert workers.on(0, lambda: rpc.rpc_sync("w1", total, (give(4),))) == 4
        assert workers.on(0, names) == ["w0", "w1"]
        workers.run(rpc_workers.leave)


HOST = """
import concurrent.futures, os, signal, sys, time
import torch, torch.distributed as dist
from rallypoint import rpc

def total(x):
    return float(x.sum())

name, port = sys.argv[1], int(sys.argv[2])
store = dist.TCPStore("10.78.0.1", port, is_master=name == "a", wait_for_workers=False)
options = rpc.NativeRpcBackendOptions(heartbeat=1.0)
rpc.init_rpc(name, store=store, rpc_backend_options=options)
if name == "b":
    signal.pause()
rpc.wait_for("b", 60)
rpc.rpc_sync("b", total, (torch.ones(2),))
print("ready", flush=True)
assert input() == "stopped"
pool = concurrent.futures.ThreadPoolExecutor(1)
call = pool.submit(rpc.rpc_sync, "b", total, (torch.ones(8_000_000),), timeout=0)
(outgoing,) = rpc.api._get_current_rpc_agent().connections.all_outgoing()
while not outgoing.line.is_full:
    time.sleep(0.01)
time.sleep(3.5)
print(len(rpc.members()[1]), call.done(), flush=True)
assert input() == "cut"
try:
    call.result()
except rpc.PeerLost as error:
    print(error, flush=True)
rpc.shutdown()
"""


@pytest.mark.netns
@pytest.mark.faults
def test_a_host_that_is_cut_off_while_its_process_stands_still_is_lost(tmp_path: Path):
    """Its window is shut and its kernel answers; then the kernel no longer answers."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    (tmp_path / "host.py").write_text(HOST)
    spaces = [f"rally-still-{which}-{os.getpid()}" for which in "ab"]
    links = [f"rs{which}{os.getpid()}"[:15] for which in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)

    def start(index: int) -> subprocess.Popen[str]:
        command = ("ip", "netns", "exec", spaces[index], sys.executable, str(tmp_path / "host.py"))
        return subprocess.Popen(
            [*command, "ab"[index], "29600"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    processes: list[subprocess.Popen[str]] = []
    try:
        for space in spaces:
            ip("netns", "add", space)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (space, link) in enumerate(zip(spaces, links, strict=True), 1):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "addr", "add", f"10.78.0.{number}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")
        processes += [start(0), start(1)]
        a, b = processes

        def say(word: str) -> None:
            assert a.stdin is not None
            a.stdin.write(word + "\n")
            a.stdin.flush()

        assert a.stdout is not None
        assert a.stdout.readline() == "ready\n"
        stopped = time.monotonic()
        os.kill(b.pid, signal.SIGSTOP)
        say("stopped")
        assert a.stdout.readline() == "2 False\n"
        ip("-n", spaces[1], "link", "set", links[1], "down")
        began = time.monotonic()
        say("cut")
        assert "its host has not answered for 1 s" in a.stdout.readline()
        # The kernel probes a closed window again after as long as it has been closed.
        assert time.monotonic() - began < 15.0 * pace() + (began - stopped)
        assert a.wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=240)
