"""Ranks that stay: processes with a Gloo group, started once for many cases.

    ranks = Ranks(3)
    losses = ranks.run(train, steps)  # train(steps) on every rank; the results in rank order
    ranks.close()

A case that fails or hangs on any rank ends them all; the next ``run`` starts new ones.
"""

import atexit
import contextlib
import inspect
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle


# Seconds for one case, unless it says otherwise.
LIMIT = 60.0
# Seconds after which a collective gives up.
GROUP_TIMEOUT = 30.0

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: imported when an optimizer first steps.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


class CaseFailed(AssertionError):
    """A rank raised; its traceback is in the text."""


class Ranks:
    """``world_size`` processes in one Gloo group.

    Args:
        world_size: how many.
        group_timeout: seconds after which a collective gives up.
    """

    def __init__(self, world_size: int, group_timeout: float = GROUP_TIMEOUT) -> None:
        self.world_size = world_size
        self._group_timeout = group_timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, case: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Call ``case(*args)`` on every rank; what it returned, in rank order.

        Raises:
            CaseFailed: a rank raised, died, or did not end in time. The ranks are ended then.
        """
        results = self.outcomes(case, *args, limit=limit)
        failures = [f"rank {i}: {each}" for i, (ok, each) in enumerate(results) if not ok]
        if failures:
            self.close()
            raise CaseFailed("\n".join(failures))
        return [each for _, each in results]

    def outcomes(
        self, case: Callable[..., Any], *args: Any, limit: float = LIMIT
    ) -> list[tuple[bool, Any]]:
        """As :meth:`run`, but whatever happens: for each rank whether it succeeded, and the result or the traceback."""
        if not self._pipes:
            self._start()
        # Test modules cannot be imported by name in the ranks.
        module = sys.modules[inspect.unwrap(getattr(case, "func", case)).__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            work = cloudpickle.dumps((case, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for pipe in self._pipes:
            pipe.send_bytes(work)
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + limit
        while len(found) < self.world_size:
            open_pipes = {p: i for i, p in enumerate(self._pipes) if i not in found}
            ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = open_pipes[pipe]
                try:
                    found[rank] = cloudpickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    found[rank] = (False, "its process has ended")
            if not ready:
                for rank in open_pipes.values():
                    found[rank] = (False, f"did not end within {limit:g} s")
        if not all(ok for ok, _ in found.values()):
            self.close()
        return [found[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
            process.close()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        meeting = tempfile.mktemp(prefix="ranks-")  # the ranks' FileStore makes and removes it
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank,
                args=(theirs, rank, self.world_size, meeting, self._group_timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _rank(pipe: Connection, rank: int, world_size: int, meeting: str, timeout: float) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    with contextlib.suppress(EOFError, OSError):
        while True:
            work = pipe.recv_bytes()
            try:
                case, args = cloudpickle.loads(work)
                answer = (True, case(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send_bytes(cloudpickle.dumps(answer))
