"""How long a new peer takes to join while strangers hold thousands of connections and open hundreds per second; prints JSON.

    python bench/strangers.py --quick
    python bench/strangers.py --output bench/results/strangers.json

Needs root and iproute2. Each scenario has one worker that is called, one that keeps calling it, and new peers that join one
after another, make a first call, and leave. The strangers connect over TCP from another network namespace, or as another
user on the same host, over TCP and over the worker's Unix socket.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from hosts import Network, address, available
from jobs import Progress, machine, publish, spread

from rallypoint import rpc
from rallypoint.rpc.current_agent import current_agent


SECRET = "known to the members alone"
PORT, CALLEE_PORT = 29719, 29720
NOBODY = 65534
HELD, ARRIVING = 5000, 500
PEERS, SECONDS = 30, 10.0


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# -- the members -----------------------------------------------------------------------------------


def be_called(host: str, ways: list[str]) -> None:
    """Rank 0, which serves the store."""
    options = rpc.NativeRpcBackendOptions(
        init_method=f"tcp://{host}:{PORT}", secret=SECRET, port=CALLEE_PORT, transports=ways
    )
    rpc.init_rpc("callee", rank=0, rpc_backend_options=options)
    agent = current_agent()
    assert agent is not None
    addresses = {each.kind: each.address for each in agent.acceptor.listeners}
    say(uds=addresses.get("uds"))
    for line in sys.stdin:
        if line.strip() == "end":
            break
        used = resource.getrusage(resource.RUSAGE_SELF)
        say(strangers=len(agent.acceptor.strangers), cpu=used.ru_utime + used.ru_stime)
    rpc.shutdown(graceful=False)


def call(host: str, ways: list[str]) -> None:
    """Keeps calling. Reports how long the calls have taken since it was last asked."""
    options = rpc.NativeRpcBackendOptions(
        init_method=f"tcp://{host}:{PORT}", secret=SECRET, transports=ways
    )
    rpc.init_rpc("caller", rank=1, rpc_backend_options=options)
    rpc.rpc_sync("callee", max, (1, 2))
    say(ready=True)
    took: list[float] = []
    while True:
        began = time.perf_counter()
        rpc.rpc_sync("callee", max, (1, 2))
        took.append(time.perf_counter() - began)
        time.sleep(0.001)
        if select.select([sys.stdin], [], [], 0)[0]:
            if sys.stdin.readline().strip() == "end":
                break
            took.sort()
            say(
                calls=len(took),
                median_us=round(1e6 * took[len(took) // 2], 1),
                p99_us=round(1e6 * took[len(took) * 99 // 100], 1),
                max_us=round(1e6 * took[-1], 1),
            )
            took.clear()
    rpc.shutdown(graceful=False)


def come(host: str, ways: list[str]) -> None:
    """New peers: forks of one process that has imported torch."""
    for line in sys.stdin:
        number = int(line)
        if number < 0:
            break
        pid = os.fork()
        if pid == 0:
            began = time.perf_counter()
            options = rpc.NativeRpcBackendOptions(
                init_method=f"tcp://{host}:{PORT}", secret=SECRET, transports=ways
            )
            try:
                rpc.init_rpc(f"peer{number}", rank=2 + number, rpc_backend_options=options)
                met = time.perf_counter()
                rpc.rpc_sync("callee", max, (1, 2), timeout=20)
            except Exception as error:
                say(failed=f"{type(error).__name__}: {error}")
            else:
                done = time.perf_counter()
                say(join_s=done - began, first_call_s=done - met)
            rpc.shutdown(graceful=False)
            os._exit(0)
        os.waitpid(pid, 0)


# -- the strangers ---------------------------------------------------------------------------------


def crowd(where: str, held: int, a_second: int, uid: int) -> None:
    """Hold the newest ``held`` connections, and open ``a_second`` per second, forever."""
    target: Any = json.loads(where)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    if uid:
        os.setuid(uid)
    is_unix = isinstance(target, str)
    open_ones: deque[socket.socket] = deque()
    opened = refused = 0
    began, asked = 0.0, time.monotonic()
    while True:
        # At first as many as are held; from then on so many per second.
        due = held - opened
        if began:
            due += int((time.monotonic() - began) * a_second)
        elif due <= 0:
            began = time.monotonic()
        for _ in range(min(due, 500)):
            sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
            try:
                if is_unix:
                    sock.setblocking(False)
                    sock.connect("\0" + target)
                else:
                    sock.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        sock.connect(tuple(target))
            except OSError:
                refused += 1
                sock.close()
            else:
                open_ones.append(sock)
            opened += 1
            if len(open_ones) > held:
                open_ones.popleft().close()
        time.sleep(0.002)
        if time.monotonic() > asked + 1:
            asked = time.monotonic()
            say(opened=opened, holds=len(open_ones), refused=refused)


# -- the bench -------------------------------------------------------------------------------------


class Process:
    """A process that answers lines with JSON."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        self._process.kill()

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def scenario(
    network: Network, *, strangers: str, ways: list[str], peers: int, held: int, a_second: int
) -> dict[str, Any]:
    """One worker under siege.

    Args:
        strangers: ``another host``, ``this host over tcp`` or ``this host over uds``.
    """
    host = address(0)
    here = strangers != "another host"

    def start(index: int, role: str, *args: str) -> Process:
        # Not `ip netns exec`: processes with separate file systems do not count as on one host.
        net = ["nsenter", f"--net=/run/netns/{network.hosts[index]}"]
        made = Process([*net, sys.executable, __file__, "--role", role, *args])
        stack.callback(made.end)
        return made

    with contextlib.ExitStack() as stack:
        callee = start(0, "be_called", host, json.dumps(ways))
        uds = callee.read()["uds"]
        away = 0 if here else 1
        caller = start(away, "call", host, json.dumps(ways))
        caller.read()
        visitors = start(away, "come", host, json.dumps(ways))
        quiet = [visitors.ask(str(number)) for number in range(peers)]
        caller.ask("more")
        before = callee.ask("more")
        time.sleep(SECONDS / 2)
        idle = caller.ask("more")
        idle["callee_cpu"] = round((callee.ask("more")["cpu"] - before["cpu"]) / (SECONDS / 2), 3)
        target: Any = uds if strangers.endswith("uds") else [host, CALLEE_PORT]
        who = [json.dumps(target), str(held), str(a_second), str(NOBODY if here else 0)]
        siege = start(0 if here else 2, "crowd", *who)
        while (crowd := siege.read())["opened"] < held:
            pass
        caller.ask("more")
        before = callee.ask("more")
        began = time.monotonic()
        found = [visitors.ask(str(peers + number)) for number in range(peers)]
        joins_took = time.monotonic() - began
        time.sleep(max(0.0, SECONDS - joins_took))
        busy = caller.ask("more")
        after = callee.ask("more")
        took = time.monotonic() - began
        busy["callee_cpu"] = round((after["cpu"] - before["cpu"]) / took, 3)
        siege.kill()
    return {
        "strangers": strangers,
        "held_by_strangers": crowd["holds"],
        "held_by_the_worker": after["strangers"],
        "join_s": {"quiet": told(quiet, "join_s"), "besieged": told(found, "join_s")},
        "first_call_s": {
            "quiet": told(quiet, "first_call_s"),
            "besieged": told(found, "first_call_s"),
        },
        "failed": [each["failed"] for each in found if "failed" in each],
        "calls": {"quiet": idle, "besieged": busy},
    }


def told(found: list[dict[str, Any]], key: str) -> dict[str, float]:
    return spread([each[key] for each in found if key in each], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="5 peers for each scenario")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    match args.role:
        case "be_called" | "call" | "come":
            globals()[args.role](args.rest[0], json.loads(args.rest[1]))
            return
        case "crowd":
            crowd(args.rest[0], *map(int, args.rest[1:]))
            return
    if not available():
        sys.exit("this needs root and iproute2")
    progress = Progress(3)
    peers = 5 if args.quick else PEERS
    found = []
    for strangers, ways in (
        ("another host", ["tcp"]),
        ("this host over tcp", ["tcp"]),
        ("this host over uds", ["uds"]),
    ):
        progress.step(strangers)
        with Network(3) as network:
            each = scenario(
                network, strangers=strangers, ways=ways, peers=peers, held=HELD, a_second=ARRIVING
            )
        found.append(each)
    publish(
        {
            "benchmark": "strangers",
            "quick": args.quick,
            "machine": machine(),
            "held": HELD,
            "arriving_a_second": ARRIVING,
            "scenarios": found,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
