"""Random kills and broken connections while members train through each other; prints JSON.

    python bench/soak_autograd.py --faults 40
    python bench/soak_autograd.py --faults 2000 --seed 7 --output bench/results/soak_autograd.json

The members of a dynamic group all do the same, again and again: open a context, call a chain of other members (some calls
take no part in the result), run the backward pass, compare the gradient with the known one, and sometimes step an
optimizer over parameters of several members. Meanwhile members are killed and replaced, connections are broken, and
members are stopped for a while, which delays all their messages, at random instants: in forward passes, backward passes
and steps.

Every 25 faults the members pause. Then no context, backward pass, gradient or sent tensor may be left on any of
them. The exit code is 1 if something was left, a gradient was wrong, an error unexpected, or a step took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from jobs import Progress, machine, publish

from rallypoint import rpc
from rallypoint.rpc import autograd
from rallypoint.rpc.autograd.context import Context
from rallypoint.rpc.autograd.local_pass import LocalPass
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.optim import DistributedOptimizer


MEMBERS = 5
TIMEOUT = 20.0
# A step has several calls, and the loss of a peer is noticed within seconds.
LATE = 2 * TIMEOUT
PATIENCE = 30.0
BETWEEN_PAUSES = 25
# Seconds, fewer than members need to notice the loss of another one.
STOPPED = 0.05, 1.0


# -- a member ---------------------------------------------------------------------------------------

weight = torch.nn.Parameter(torch.ones(4))


class Slow(torch.autograd.Function):
    """Slows backward passes down, so that faults hit them as well."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        _.seconds = seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


def hop(x: torch.Tensor, rest: list[str], seconds: float) -> torch.Tensor:
    y: torch.Tensor = Slow.apply(x * 2 * weight.sum() / 4, seconds)  # type: ignore[no-untyped-call]
    if rest:
        y = rpc.rpc_sync(rest[0], hop, (y, rest[1:], seconds))
    return y + x * 0


def my_weight() -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(weight)


class Member:
    """What runs in a member's process. Its main thread executes commands, and another one trains."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._chance = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.longest = 0.0
        self._goes_on = threading.Event()
        self._is_idle = threading.Event()
        self.ended: str | None = None

    def train(self) -> None:
        while self.ended is None:
            if not self._goes_on.is_set():
                self._is_idle.set()
                self._goes_on.wait()
                self._is_idle.clear()
            began = time.monotonic()
            try:
                outcome = self._step()
            except rpc.Expelled:
                self.ended = "expelled"
                return
            except (rpc.PeerLost, rpc.RpcTimeout) as error:
                outcome = type(error).__name__
            except rpc.RpcError as error:
                # The owner of a context, or of a reference, is gone.
                outcome = "RpcError"
                expected = ("context", "destination", "no worker", "RRef", "given up", "optimizer")
                if not any(each in str(error) for each in expected):
                    self.problems.append(f"{self._name}: {error!r}")
            except BaseException as error:
                outcome = "unexpected"
                self.problems.append(f"{self._name}: {error!r}")
            took = time.monotonic() - began
            self.longest = max(self.longest, took)
            if took > LATE:
                self.problems.append(
                    f"{self._name}: a step took {took:.1f} s, and ended: {outcome}"
                )
            self.outcomes[outcome] += 1

    def _step(self) -> str:
        others = [each.name for each in rpc.members()[1] if each.name != self._name]
        if not others:
            time.sleep(0.02)
            return "alone"
        chain = [self._chance.choice(others) for _ in range(self._chance.randint(1, 4))]
        size = self._chance.choice([4, 4, 60_000])
        seconds = self._chance.choice([0.0, 0.0, 0.003, 0.03])
        x = torch.ones(size, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(chain[0], hop, (x, chain[1:], seconds), timeout=TIMEOUT).sum()
            if self._chance.random() < 0.3:
                rpc.rpc_sync(chain[0], hop, (x, [], 0.0), timeout=TIMEOUT)  # not in the result
            autograd.backward(context_id, [loss], timeout=TIMEOUT)
            found = autograd.get_gradients(context_id)[x]
            if not bool((found == float(2 ** len(chain))).all()):
                self.problems.append(f"{self._name}: the gradient over {chain} is {found[:3]}")
            if self._chance.random() < 0.3:
                references = [rpc.rpc_sync(each, my_weight, timeout=TIMEOUT) for each in set(chain)]
                # Nothing changes, so that all gradients stay known.
                optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.0)
                optimizer.step(context_id, timeout=TIMEOUT)
                return "stepped"
        return "passed"

    # -- commands -------------------------------------------------------------------------------------

    def go(self) -> None:
        self._goes_on.set()

    def pause(self) -> bool:
        self._goes_on.clear()
        return self._is_idle.wait(LATE + PATIENCE) or self.ended is not None

    def census(self) -> tuple[dict[str, int], dict[str, Any]]:
        """What is left, once all that was under way has ended; and what happened since the last time."""
        until = time.monotonic() + PATIENCE
        while any((left := self._left()).values()) and time.monotonic() < until:
            time.sleep(0.05)
        said = {
            "outcomes": dict(self.outcomes),
            "problems": list(self.problems),
            "longest": self.longest,
        }
        self.outcomes.clear()
        self.problems.clear()
        return left, said

    def _left(self) -> dict[str, int]:
        gc.collect()
        agent = current_agent()
        contexts, passes = (0, 0) if agent is None else agent.contexts.counts()
        objects = gc.get_objects()
        return {
            "contexts": contexts,
            "passes": passes,
            "context objects": sum(type(each) is Context for each in objects),
            "parts of passes": sum(type(each) is LocalPass for each in objects),
            "large tensors": sum(
                isinstance(each, torch.Tensor) and each.numel() > 1000 for each in objects
            ),
        }

    def break_a_connection(self) -> None:
        sockets = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                one = socket.socket(fileno=os.dup(int(name)))
                # The agent's sockets have an address; the pipe to the driver has none.
                if one.getpeername() or (one.family == socket.AF_UNIX and one.getsockname()):
                    sockets.append(one)
                else:
                    one.close()
        if sockets:
            with contextlib.suppress(OSError):
                self._chance.choice(sockets).shutdown(socket.SHUT_RDWR)
        for one in sockets:
            one.close()


def live(pipe: Connection, name: str, rank: int, seed: int, meeting: str) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    torch.set_num_threads(1)
    # Functions' errors are printed, and there are many.
    printed = os.open(_printed(meeting, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 2)
    faulthandler.enable()
    try:
        rpc.init_rpc(
            name,
            rank=rank,
            rpc_backend_options=rpc.NativeRpcBackendOptions(
                init_method=meeting, rpc_timeout=TIMEOUT
            ),
        )
    except Exception as error:
        pipe.send(("failed to join", repr(error)))
        os._exit(1)
    member = Member(name, seed)
    member.go()
    threading.Thread(target=member.train, daemon=True).start()
    pipe.send(("joined", name))
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send((what, "expelled" if member.ended else getattr(member, what)()))


# -- the driver -------------------------------------------------------------------------------------


def _printed(meeting: str, name: str) -> Path:
    """The file that a member prints to."""
    return Path(meeting.removeprefix("file://")).with_name(f"{name}.stderr")


class Process:
    def __init__(self, context: Any, name: str, rank: int, seed: int, meeting: str) -> None:
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=live, args=(theirs, name, rank, seed, meeting), daemon=True
        )
        self.process.start()
        theirs.close()
        self.has_joined = False

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.answer(LATE + 2 * PATIENCE)

    def answer(self, seconds: float) -> Any:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"{self.name} does not answer within {seconds:g} s")
        return self.pipe.recv()[1]

    def stop(self, seconds: float) -> None:
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Soak:
    def __init__(self, faults: int, seed: int, meeting: str) -> None:
        self._chance = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rallypoint.rpc"])
        self._faults = faults
        self._meeting = meeting
        self._count = 0
        self._members: list[Process] = []
        self.done: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.longest = 0.0
        self.pauses = 0

    def run(self, progress: Progress) -> None:
        try:
            for _ in range(MEMBERS):
                self._add()
            for number in range(self._faults):
                time.sleep(self._chance.uniform(0.02, 0.25))
                self._fault()
                if (number + 1) % BETWEEN_PAUSES == 0 or number + 1 == self._faults:
                    progress.step(f"a pause after {number + 1} faults")
                    self._pause()
        finally:
            for each in self._members:
                each.kill()

    def _add(self) -> None:
        self._count += 1
        # A rank that no living member has.
        made = Process(
            self._context,
            f"w{self._count}",
            self._count,
            self._chance.getrandbits(32),
            self._meeting,
        )
        self._members.append(made)
        try:
            said = made.answer(PATIENCE)
        except (TimeoutError, EOFError) as error:
            made.process.join(1.0)
            printed = _printed(self._meeting, made.name)
            tail = printed.read_text()[-600:] if printed.exists() else ""
            said = f"{error!r}, exit code {made.process.exitcode}: {tail}"
        if said != made.name:
            self.problems.append(f"{made.name} did not join: {said}")
            self._replace(made)

    def _replace(self, member: Process) -> None:
        member.kill()
        self._members.remove(member)
        self._add()

    def _fault(self) -> None:
        member = self._chance.choice(self._members)
        kind = self._chance.random()
        if kind < 0.75:
            self.done["kill"] += 1
            self._replace(member)
        elif kind < 0.85:
            self.done["stopped"] += 1
            member.stop(self._chance.uniform(*STOPPED))
        else:
            self.done["broken connection"] += 1
            if member.ask("break_a_connection") == "expelled":
                self._replace(member)

    def _pause(self) -> None:
        self.pauses += 1
        members = list(self._members)
        for what in ("pause", "census", "go"):
            for each in members:
                each.pipe.send(what)
            for each in list(members):
                try:
                    said = each.answer(LATE + 2 * PATIENCE)
                except (TimeoutError, EOFError) as error:
                    self.problems.append(f"{each.name}, asked for {what}: {error!r}")
                    said = "expelled"
                if said == "expelled":
                    self.done["expelled"] += 1
                    members.remove(each)
                    self._replace(each)
                elif what == "census":
                    self._note(each.name, *said)
                elif said is False:
                    self.problems.append(f"{each.name} does not pause")

    def _note(self, name: str, left: dict[str, int], said: dict[str, Any]) -> None:
        if any(left.values()):
            self.problems.append(f"{name} has left: {left}")
        self.outcomes.update(said["outcomes"])
        self.problems += said["problems"]
        self.longest = max(self.longest, said["longest"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-autograd-") as folder:
        soak = Soak(args.faults, args.seed, f"file://{folder}/meeting")
        with closing(Progress(-(-args.faults // BETWEEN_PAUSES))) as progress:
            soak.run(progress)
    result = {
        "benchmark": "soak_autograd",
        "machine": machine(),
        "seed": args.seed,
        "faults": dict(soak.done),
        "pauses": soak.pauses,
        "steps": dict(soak.outcomes),
        "longest_step_s": round(soak.longest, 2),
        "problems": soak.problems[:50],
        "num_problems": len(soak.problems),
        "took_s": round(time.monotonic() - began, 1),
    }
    publish(result, args.output)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
