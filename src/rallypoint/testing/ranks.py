"""Long-lived ranks: processes in a Gloo group, started once for many cases."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import cloudpickle

from rallypoint._core import code_files, collector, scheduling


# Seconds allowed for one case, unless the caller says otherwise.
LIMIT = 60.0
# Seconds after which a collective gives up.
GROUP_TIMEOUT = 30.0
# What is imported in the process that ranks are forked from, if it does not run yet.
preloaded = [f"{__package__}.rank_imports"]

StartMethod = Literal["forkserver", "fork", "spawn"]


class CaseFailed(AssertionError):
    """A rank raised, died or did not finish in time. The message has the traceback of each such rank."""


def run_ranks(
    case: Callable[..., Any],
    world_size: int,
    *args: Any,
    limit: float = LIMIT,
    start_method: StartMethod = "forkserver",
) -> list[Any]:
    """Call ``case(*args)`` on ranks started for this call alone. Blocks until all have returned.

    Args:
        case: called in each process, in a Gloo group of ``world_size`` ranks. Any function, including lambdas.
        world_size: number of ranks.
        args: what it is called with.
        limit: seconds that it may take.
        start_method: as in :mod:`multiprocessing`.

    Returns:
        What it returned, by rank.

    Raises:
        CaseFailed: a rank raised, died, or did not finish within ``limit``.
    """
    ranks = Ranks(world_size, start_method=start_method)
    try:
        return ranks.run(case, *args, limit=limit)
    finally:
        ranks.close()


class Ranks:
    """``world_size`` processes in one Gloo group, started when the first case runs.

    A case that fails or hangs on any rank ends all processes; the next case gets new ones::

        ranks = Ranks(3)
        losses = ranks.run(train, steps)  # train(steps) on every rank
        ranks.close()

    Args:
        world_size: number of ranks.
        group_timeout: seconds after which a collective gives up.
        start_method: as in :mod:`multiprocessing`. ``"forkserver"`` imports torch once for all ranks.
    """

    def __init__(
        self,
        world_size: int,
        group_timeout: float = GROUP_TIMEOUT,
        start_method: StartMethod = "forkserver",
    ) -> None:
        self.world_size = world_size
        self._group_timeout = group_timeout
        self._context: Any = multiprocessing.get_context(
            start_method
        )  # Any: each kind of context has its own Process
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Pids by rank; empty while there are no processes.

        Returns:
            Process ids.
        """
        return [process.pid for process in self._processes]

    def run(self, case: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Call ``case(*args)`` on every rank. Blocks until all have returned.

        Args:
            case: any function, including lambdas.
            args: what it is called with.
            limit: seconds that it may take.

        Returns:
            What it returned, by rank.

        Raises:
            CaseFailed: a rank raised, died, or did not finish within ``limit``. All ranks are ended then.
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
        """Like :meth:`run`, but failures are returned as results.

        Args:
            case: any function, including lambdas.
            args: what it is called with.
            limit: seconds that it may take.

        Returns:
            By rank: true and what it returned, or false and the traceback. After any failure all ranks are ended.
        """
        if not self._pipes:
            self._start()
        # Test modules cannot be imported by name in the ranks.
        module = sys.modules[inspect.unwrap(getattr(case, "func", case)).__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            work = _by_value((case, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for pipe in self._pipes:
            pipe.send_bytes(work)
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + limit
        while len(found) < self.world_size:
            open_pipes = {p: i for i, p in enumerate(self._pipes) if i not in found}
            ready: list[Any] = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
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
        """End all ranks. The next case starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
            process.close()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        if self._context.get_start_method() == "forkserver":
            self._context.set_forkserver_preload(preloaded)
        # The ranks' FileStore removes this file.
        handle, meeting = tempfile.mkstemp(prefix="ranks-")
        os.close(handle)
        for rank in range(self.world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_rank,
                args=(theirs, rank, self.world_size, meeting, self._group_timeout),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _by_value(what: object) -> bytes:
    file = io.BytesIO()
    _ByValue(file).dump(what)
    return file.getvalue()


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table = code_files.keeping(cloudpickle.Pickler.dispatch_table)


def _rank(pipe: Connection, rank: int, world_size: int, meeting: str, timeout: float) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    collector.keep()  # whatever else is preloaded
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    with scheduling.batch_threads():
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
    with contextlib.suppress(EOFError, OSError):
        while True:
            work = pipe.recv_bytes()
            try:
                case, args = cloudpickle.loads(work)
                answer = (True, case(*args))
            except BaseException:  # noqa: BLE001  whatever a case raises is its result
                answer = (False, traceback.format_exc())
            pipe.send_bytes(cloudpickle.dumps(answer))
