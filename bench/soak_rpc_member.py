"""One process of the RPC soak (soak_rpc.py): calls random peers in a loop and checks every answer.

A member sends JSON objects to the driver, one per line: ``hello`` when it has joined, ``problem`` when something is wrong,
``quiet`` and ``census`` when asked, ``bye`` before it exits. The driver judges; a member only measures.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import json
import logging
import os
import random
import signal
import socket
import sys
import termios
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from soak_rpc_calls import (
    CALLERS,
    COROUTINES,
    LARGE_SECONDS,
    LEDGER,
    Caller,
    let_go,
    send_large,
    stacks,
)

from rallypoint import rpc
from rallypoint.rpc import api
from rallypoint.rpc.agent.agent import Agent
from rallypoint.rpc.agent.peer_monitor import PeerMonitor
from rallypoint.rpc.agent.serving import Request
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.connections.unused_memory import UnusedMemory
from rallypoint.rpc.threads.poller import Poller
from rallypoint.wire.memory import MemoryListener
from rallypoint.wire.shm import SMALLEST, Mapped, Pool


# -- faults from within --------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)


def reset(agent: Any, chance: random.Random) -> str:
    """Break one of this member's connections."""
    lines = [
        each.line
        for each in (*list(agent.connections.outgoing.values()), *list(agent.connections.incoming))
    ]
    if not lines:
        return "no connection"
    sock = chance.choice(lines)._sock
    # A sealing socket wraps the real one.
    sock = getattr(sock, "_sock", sock)
    with suppress(OSError):
        if sock.family != socket.AF_UNIX and chance.random() < 0.7:
            # Connecting to nowhere aborts a TCP connection: the other end gets an RST.
            nowhere = bytes(16)
            _libc.connect(sock.fileno(), nowhere, len(nowhere))
            return "RST"
        how = chance.choice((socket.SHUT_RDWR, socket.SHUT_RDWR, socket.SHUT_RD, socket.SHUT_WR))
        sock.shutdown(how)
        return ("SHUT_RD", "SHUT_WR", "SHUT_RDWR")[how]
    return "closed already"


_MESSAGES = (Kind.CALL, Kind.REMOTE, Kind.FETCH, Kind.STREAM)
_CONTROL = (Kind.FORK_REQUEST, Kind.CHILD_ACCEPT, Kind.USER_DELETE)


def disturb(agent: Any, how: str, chance: random.Random) -> None:
    """Delay, lose or refuse messages until :func:`undisturb`."""
    match how:
        case "delay":
            kinds = chance.sample((*_MESSAGES, *_CONTROL), 3)
            agent.caller._delay = {kind: chance.uniform(0.01, 0.4) for kind in kinds}
        case "drop":
            # Not messages about references, which are sent again only after a minute.
            agent.caller._drop = {chance.choice(_MESSAGES)}
        case "refuse":
            agent.caller._fail = set(chance.sample(_CONTROL, 2))


def undisturb(agent: Any) -> None:
    agent.caller._delay, agent.caller._drop, agent.caller._fail = {}, set(), set()


# -- children ------------------------------------------------------------------------------------------

_HOLDERS_SECONDS = 3.0
# Seconds within which a child must have exited.
_CHILD_SECONDS = 40


def fork(name: str, how: str, chance: random.Random, settings: dict[str, Any]) -> None:
    """Fork a child, whatever the other threads are doing, and check in a new thread that it exits well."""
    peers = [info.name for info in rpc.members()[1]]
    peer = chance.choice(peers)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(_CHILD_SECONDS)
            code = _be_child(f"{name}-child{os.getpid()}", how, peer, settings)
        except BaseException:
            with open(settings["crashes"], "a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(code)

    def see() -> None:
        _, status = os.waitpid(child, 0)
        if status:
            LEDGER.problem("child", operation=how, error=f"status {status}")

    threading.Thread(target=see, name="soak", daemon=True).start()


def _be_child(name: str, how: str, peer: str, settings: dict[str, Any]) -> int:
    """What is wrong, as an exit code."""
    if how == "exit":
        gc.collect()
        return 0
    with suppress(rpc.RpcError):
        rpc.rpc_sync(peer, max, (1, 2))
        return 3
    if how == "call":
        return 0
    LEDGER.become(name)
    _join(name, settings)
    with suppress(rpc.PeerLost, rpc.RpcTimeout):
        # The peer may be stopped, killed, or refuse on purpose. What counts is that no answer is wrong.
        x = torch.arange(100_000)
        if not torch.equal(rpc.rpc_sync(peer, torch.add, (x, 1)), x + 1):
            return 4
    rpc.shutdown(graceful=False)
    return 0


# -- what this process has: descriptors, threads, memory -----------------------------------------------


def is_expected(act: Any) -> bool:
    """Whether a timer may be pending while there are no calls."""
    is_of_memory = isinstance(getattr(act, "__self__", None), UnusedMemory)
    asks_again = f"{PeerMonitor._investigate.__qualname__}."
    return is_of_memory or getattr(act, "__qualname__", "").startswith(asks_again)


def descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            found[target.partition(":[")[0] if target.startswith("socket") else target] += 1
    # The descriptor used for the listing itself.
    for each in [each for each in found if each.startswith("/proc/")]:
        del found[each]
    return found


def threads() -> Counter[str]:
    """The threads by name, without numbers. Those that Python does not know count as ``native``."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        found[thread.name.rstrip("0123456789").rstrip("-")] += 1
    found["native"] = len(os.listdir("/proc/self/task")) - sum(found.values())
    return found


def mappings() -> int:
    """How many pieces of shared memory are mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:rallypoint")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def own_descriptors(agent: Any) -> Counter[str]:
    """The descriptors of a member without connections: the poller's, the listeners', two connections to the store."""
    found = Counter({"anon_inode:[eventpoll]": 1, "anon_inode:[eventfd]": 1, "socket": 2})
    for listener in agent.acceptor.listeners:
        found["anon_inode:[eventfd]" if listener.kind == "memory" else "socket"] += 1
    return found


def expected_now(agent: Any, base: Counter[str]) -> tuple[Counter[str], int, list[str]]:
    """What the present connections account for: descriptors, mappings; and what in them is not at rest."""
    fds, maps, unrest = Counter(base), 0, []
    connections = [*list(agent.connections.outgoing.values()), *list(agent.connections.incoming)]
    for each in connections:
        fds["socket"] += 1
        if each.sharing is not None:
            fds["socket"] += 1
            state = each.sharing.statistics()
            maps += 1 + state["shared_segments"]
            if each.sharing._mapped is not None:
                maps += 1 + state["mapped_segments"]
            held = each.sharing._mapped.statistics().leased if each.sharing._mapped else 0
            if held:
                unrest.append(f"{held} blocks of shared memory that have come are still held here")
            if state["shared_leased"]:
                peer = getattr(each, "info", None) or each.peer
                unrest.append(
                    f"{state['shared_leased']} blocks of shared memory are still lent to {peer}"
                    f" ({type(each).__name__})"
                )
    if agent.service.loop._loop is not None:
        fds["socket"] += 2
        fds["anon_inode:[eventpoll]"] += 1
    return fds, maps, unrest


def census(agent: Any, base: Counter[str], patience: float) -> dict[str, Any]:
    """What there is while there are no calls. Waits until all is at rest, and reports what is not in the end."""
    until = time.monotonic() + patience
    while True:
        gc.collect()
        fds, maps, unrest = expected_now(agent, base)
        refs = agent.rrefs.diagnostics()
        unrest += [f"{count} rrefs {what}" for what, count in refs.items() if count]
        for each in list(agent.connections.outgoing.values()):
            if each.calls:
                open_calls = [call.describe() for call in list(each.calls._calls.values())]
                unrest.append(f"calls to {each.info}: {open_calls[:5]}")
            if each.in_flight:
                unrest.append(f"{each.in_flight} bytes in flight to {each.info}")
            if each._waiting:
                unrest.append(f"{len(each._waiting)} wait for {each.info}")
        for each in list(agent.connections.incoming):
            if each.active:
                kinds = Counter(Kind(r.frame.kind).name for r in list(each.active.values()))
                unrest.append(f"requests of {each.peer}: {dict(kinds)}")
            if each.line.is_full:
                unrest.append(f"replies to {each.peer} are not sent")
        values = agent.rrefs._values
        if values:
            unrest.append(f"{len(values)} values")
        if agent.rrefs._waiting:
            unrest.append(f"{len(agent.rrefs._waiting)} wait for confirmations")
        if agent.acceptor.strangers:
            unrest.append(f"{len(agent.acceptor.strangers)} strangers")
        # Except the one that manages unused memory, and those that ask a stopped member again, perhaps after 30 s.
        timers = [each for each in agent.tasks.timers if not is_expected(each[2])]
        if timers:
            names = [getattr(each[2], "__qualname__", repr(each[2])) for each in timers[:5]]
            unrest.append(f"{len(timers)} timers: {names}")
        if agent.queue():
            unrest.append(f"{agent.queue()} jobs in line")
        if agent.service.loop.count():
            unrest.append(f"{agent.service.loop.count()} coroutines")
        found = descriptors()
        if found != fds:
            more, less = found - fds, fds - found
            unrest.append(f"descriptors: {dict(more)} too many, {dict(less)} too few")
        mapped = mappings()
        if mapped != maps:
            unrest.append(f"{mapped} pieces of shared memory are mapped instead of {maps}")
        if not unrest or time.monotonic() > until:
            break
        time.sleep(0.05)
    return {
        "unrest": unrest,
        "descriptors": sum(found.values()),
        "threads": dict(threads()),
        "mappings": mapped,
        "resident": resident(),
        "connections": len(agent.connections.outgoing) + len(agent.connections.incoming),
        "held": [*facts(agent), *holders()] if unrest else [],
    }


def facts(agent: Agent) -> list[str]:
    """The state of each connection, to find out what delays something."""
    return [
        f"to {out.peer} by {out.line.kind}: {_unread(out.line)} bytes unread, armed {out.is_armed},"
        f" read {out._role.locked()}, calls {len(out.calls)}, owed {sorted(out._owed)[:5]},"
        f" pages {_pages(out.sharing)}"
        for out in list(agent.connections.outgoing.values())
    ] + [
        f"from {come.peer} by {come.line.kind}: {_unread(come.line)} bytes unread, {come.line.left} unsent,"
        f" {len(come._held)} held back, active {list(come.active)[:5]}, pages {_pages(come.sharing)}"
        for come in list(agent.connections.incoming)
    ]


def _unread(line: Any) -> int:
    with suppress(OSError):
        return int.from_bytes(fcntl.ioctl(line.fileno(), termios.FIONREAD, bytes(4)), "little")
    return -1


def _pages(sharing: Any) -> str:
    if sharing is None:
        return "none"
    pool, mapped = sharing._pool, sharing._mapped
    lent = {
        each.number: (pool._page[each.number], each.capacity, each.file is not None)
        for each in list(pool._segments.values())
        if pool._page[each.number]
    }
    got = (
        {} if mapped is None else {n: mapped._page[n] for n in mapped._segments if mapped._page[n]}
    )
    return f"lent {lent}, got {got}, early {sharing._early}"


# -- a member's life -----------------------------------------------------------------------------------


class Complaints(logging.Handler):
    """Reports errors that the package logs as problems."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        LEDGER.problem("logged", error=text[-3000:])


def live(name: str, control: socket.socket, settings: dict[str, Any]) -> None:
    """Be a member until the driver says otherwise. Does not return."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Exceptions of functions are printed there.
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        faulthandler.enable(open(settings["crashes"], "a"))  # noqa: SIM115  # for the process's life
        # The driver asks a member that does not answer where it is.
        faulthandler.register(signal.SIGUSR1, open(settings["stacks"], "a"))  # noqa: SIM115  # the same
        LEDGER.name, LEDGER.control = name, control
        # Before there are threads: torch recreates its pool in a forked process, which two threads must not do at once.
        torch.set_num_threads(1)
        logging.getLogger("rallypoint").addHandler(Complaints(logging.ERROR))
        threading.excepthook = lambda args: LEDGER.problem(
            "thread", error="".join(traceback.format_exception(args.exc_value))[-3000:]
        )
        sys.unraisablehook = lambda args: LEDGER.problem(
            "unraisable", error=repr(args.exc_value)[:300], where=repr(args.object)[:300]
        )
        code = _live(name, control, settings)
    except BaseException:
        LEDGER.problem("member", error=traceback.format_exc()[-3000:])
    finally:
        os._exit(code)


def _live(name: str, control: socket.socket, settings: dict[str, Any]) -> int:
    chance = random.Random(settings["seed"])
    threading.Thread(target=LEDGER.watch, name="soak-watch", daemon=True).start()
    threading.Thread(target=LEDGER.witness, name="soak-witness", daemon=True).start()
    callers = [Caller(settings["seed"] * 16 + number) for number in range(CALLERS + 1)]
    working = [
        threading.Thread(target=each.run, args=(settings["pause"],), name="soak", daemon=True)
        for each in callers[:CALLERS]
    ]
    working.append(
        threading.Thread(
            target=callers[CALLERS].run_async,
            args=(2 * settings["pause"],),
            name="soak",
            daemon=True,
        )
    )
    for each in working:
        each.start()
    while LEDGER.parked < len(working):
        time.sleep(0.002)
    before = descriptors(), threads()
    _join(name, settings)
    agent = api._get_current_rpc_agent()
    base = before[0] + own_descriptors(agent)
    expelled = threading.Event()
    me = rpc.get_worker_info()

    def left(info: rpc.WorkerInfo, _: str) -> None:
        if info.id == me.id:
            expelled.set()
            LEDGER.expelled = True
            with suppress(OSError):
                control.shutdown(socket.SHUT_RD)

    rpc.on_leave(left)
    LEDGER.send(
        hello=name,
        id=me.id,
        incarnation=agent.incarnation,
        addresses=dict(agent.group.me.addresses),
        job=agent.roster.introduction()["job"],
        secret=agent._secret.hex(),
    )
    LEDGER.running.set()
    graceful = _obey(control, agent, base, chance, len(working), settings)
    if expelled.is_set():
        with suppress(OSError):
            LEDGER.send(expelled=True)
    # The end: nothing of the group may be left in this process.
    LEDGER.ending = True
    LEDGER.running.set()
    for each in working:
        each.join(10.0)
        if each.is_alive():
            LEDGER.problem("hang", operation="end", to="", stacks=stacks())
    let_go()
    rpc.shutdown(graceful=graceful, timeout=20.0)
    let_go()  # of what calls have left in the meantime
    del agent
    _check_end(before)
    LEDGER.send(bye=name, outcomes=LEDGER.outcomes, operations=LEDGER.operations)
    return 0


def _join(name: str, settings: dict[str, Any]) -> None:
    store = dist.TCPStore(
        "127.0.0.1",
        settings["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    options = rpc.FaultyRpcBackendOptions(
        messages_to_fail=[],
        rpc_timeout=3.0,
        transports=settings["transports"],
        bind="127.0.0.1",
        advertise="127.0.0.1",
        num_worker_threads=8,
        shared_memory_bytes=settings["shared_memory_bytes"],
    )
    rpc.init_rpc(
        name, rpc.BackendType["RALLYPOINT_FAULTY"], rpc_backend_options=options, store=store
    )


def _obey(
    control: socket.socket,
    agent: Any,
    base: Counter[str],
    chance: random.Random,
    working: int,
    settings: dict[str, Any],
) -> bool:
    """Do what the driver says until it says to end. Returns whether to end gracefully."""
    for line in control.makefile("r"):
        command = json.loads(line)
        match command["do"]:
            case "reset":
                LEDGER.send(done="reset", how=reset(agent, chance))
            case "disturb":
                disturb(agent, command["how"], chance)
            case "send_large":
                LEDGER.begin_large()
                args = (command["to"], chance.randrange(1 << 30))
                threading.Thread(target=send_large, args=args, name="soak", daemon=True).start()
            case "undisturb":
                undisturb(agent)
            case "fork":
                fork(LEDGER.name, command["how"], chance, settings)
            case "pause":
                undisturb(agent)
                LEDGER.running.clear()
                until = time.monotonic() + command["patience"]
                while LEDGER.parked < working and time.monotonic() < until:
                    time.sleep(0.005)
                # Large tensors were sent to a member that was stopped until just now.
                while LEDGER.large and time.monotonic() < until + LARGE_SECONDS:
                    time.sleep(0.005)
                if LEDGER.parked < working or LEDGER.large:
                    LEDGER.problem("hang", operation="pause", to="", stacks=stacks())
                let_go()
                LEDGER.send(quiet=True)
            case "census":
                let_go()
                LEDGER.send(
                    census=census(agent, base, command["patience"]),
                    outcomes=LEDGER.outcomes,
                    operations=LEDGER.operations,
                    coroutines=COROUTINES,
                )
            case "resume":
                LEDGER.running.set()
            case "end":
                return True
    return False


def _check_end(before: tuple[Counter[str], Counter[str]]) -> None:
    """Check that after the shutdown all is as it was before the group."""
    until = time.monotonic() + 5.0
    while True:
        gc.collect()
        left = []
        more = descriptors() - before[0]
        if more:
            left.append(f"descriptors: {dict(more)}")
        after = threads()
        del after["soak"]
        more = after - before[1]
        if more:
            left.append(f"threads: {dict(more)}")
        mapped = mappings()
        if mapped:
            left.append(f"{mapped} pieces of shared memory")
        if not left or time.monotonic() > until:
            break
        time.sleep(0.05)
    if left:
        LEDGER.problem(
            "leak",
            operation="shutdown",
            error="; ".join(left),
            stacks=stacks(),
            held=[*anonymous(), *holders()],
        )


def anonymous() -> list[str]:
    """The owners of the epolls and eventfds that are open here. Those without one among our objects are torch's."""
    owners: dict[int, str] = {}
    for each in gc.get_objects():
        if isinstance(each, Poller) and not each._closed:
            owners[each._wake] = owners[each._epoll.fileno()] = f"a poller, {each!r}"
        elif isinstance(each, MemoryListener):
            owners[each._event] = f"a listener, {each.address}"
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("anon_inode:"):
                found.append(f"{name} {target}: {owners.get(int(name), 'of nobody here')}")
    return found


def holders() -> list[str]:
    """What keeps shared memory mapped here: chains of types, from the memory up to where they end.

    Each step looks at every object, so only as many steps are made as the driver's patience allows.
    """
    until = time.monotonic() + _HOLDERS_SECONDS
    everything = gc.get_objects()
    found = []
    mapped = [
        each
        for each in everything
        if isinstance(each, (Mapped, Pool, Agent, Request))
        or (isinstance(each, torch.Tensor) and each.nbytes >= SMALLEST)
    ]
    skip = {id(everything), id(mapped)}
    for each in mapped[:40]:
        chain, seen, thing = [], set(skip), each
        for _ in range(12):
            if time.monotonic() > until:
                return found
            chain.append(_named(thing))
            seen.add(id(thing))
            above = [
                one
                for one in gc.get_referrers(thing)
                if id(one) not in seen and one is not sys._getframe()
            ]
            if not above:
                break
            thing = above[0]
            seen.add(id(above))
        found.append(f"{sys.getrefcount(each)}: " + " <- ".join(chain))
    return found


def _named(thing: Any) -> str:
    if isinstance(thing, dict):
        return f"dict{list(thing)[:6]}"[:200]
    if isinstance(thing, (FrameType, FunctionType, tuple, list)):
        return repr(thing)[:200]
    return type(thing).__name__
