"""Leaving the group: once no calls are in progress, or at once."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from rallypoint._core import forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, RpcError

from . import constants, gather
from .agent.agent import Agent
from .current_agent import current_agent, leave_group, required_agent, set_current_agent
from .current_call import SERVING
from .future import copy_of
from .gather import GatherTimeout, _all_gather
from .groups.dynamic_group import DynamicGroup
from .leaving import Part, Roles, part_of
from .threads.thread_pool import waiting
from .time_limits import is_negative, limit_of


logger = logging.getLogger(__name__)

# State under torch's name. Programs and torch's own tests set it.
_ignore_rref_leak = True
# Seconds that a graceful shutdown waits for answers that are still being sent.
_LAST_WORDS = 5.0
# Seconds that a closing agent waits for running functions: normally, and after Ctrl-C.
_CLOSING, _AT_ONCE = 5.0, 0.1


class Leaving:
    """The end of one membership.

    Attributes:
        closed: the agent is closed.
        ended: the leading call of ``shutdown`` is over.
        error: what that call raised. Set before ``ended``.
    """

    def __init__(self, leader: int | None) -> None:
        self.roles = Roles(leader)
        self.closed = threading.Event()
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.ended.set()


# Held briefly: to decide which thread ends the membership, and while an agent starts. A signal handler may take it again.
turn = threading.RLock()
# The departure in progress.
_leaving: Leaving | None = None


def _wait_all_workers(timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, Any]:
    """Wait until every worker has called ``shutdown``. Returns the call counts of each.

    Raises:
        DeadlineExceeded: some did not do so in time; the error names them.
    """
    agent = required_agent()
    try:
        return _all_gather(_work_of(agent) if isinstance(agent, Agent) else None, timeout=timeout)
    except RuntimeError as error:
        logger.error("Failed to respond to 'Shutdown Proceed' in time, got error %s", error)  # noqa: TRY400  # raised below
        raise


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Delete all references to values on other workers, and wait until their owners know."""
    agent = required_agent()
    if isinstance(agent, Agent):
        agent.rrefs.delete_all(timeout)


def shutdown(graceful: bool = True, timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. Even if this raises, the worker has left and its resources are released.

    If several threads call it at once, one call does the work. The others wait for it, each up to its own ``timeout``,
    and raise what it raises. A call with ``graceful=False`` cuts a waiting one short.

    Args:
        graceful: whether to wait first. In a static group this is collective: it blocks until all workers have called
            ``shutdown`` and no calls are in progress. In a dynamic group it blocks until this worker has no calls in
            progress.
        timeout: seconds to wait; 0: no limit; negative: the default timeout of calls.

    Raises:
        DeadlineExceeded: some workers did not call ``shutdown`` in time (the error names them), or calls were still in
            progress.
        PeerLost: another member of a static group is gone.
        RpcError: this process is not in a group; others still have references to values of this worker; a function that
            serves a call called this; or another thread left the group with ``graceful=False``.
    """
    global _leaving  # noqa: PLW0603  # of the one agent of the process
    forks.call_in_child(_abandon)
    serving = SERVING.get() is not None
    with turn:
        leaving = _leaving
        agent = required_agent() if leaving is None else current_agent()
        limit = _limit(agent, timeout)
        part = part_of(
            None if leaving is None else leaving.roles,
            threading.get_ident(),
            graceful=graceful,
            serving=serving,
        )
        if graceful and serving and isinstance(agent, Agent):
            raise RpcError(
                "shutdown() was called by a function that serves a call, and would wait for that call to end: signal the"
                " main thread (threading.Event) to call shutdown(), or use graceful=False"
            )
        if leaving is None:
            leaving = _leaving = Leaving(threading.get_ident())
    if part is Part.RETURN:
        return
    if part is Part.REFUSE:
        raise RpcError(
            "shutdown() was called by a signal handler that interrupted shutdown(), and would wait for itself: let the"
            " handler return, or use graceful=False"
        )
    if part is Part.FOLLOW:
        _follow(leaving, agent, limit)
        return
    if part is Part.CUT_SHORT:
        _end(agent, False, timeout, limit)
        return
    try:
        _end(agent, graceful, timeout, limit)
    except BaseException as error:
        if _leaving is leaving:
            # Ctrl-C before anything was done.
            finalize(_AT_ONCE, shut_down=True)
        leaving.end(error)
        raise
    leaving.end()


def _limit(agent: Any, timeout: float) -> float | None:
    """The time limit of a shutdown in seconds; None: no limit. Another backend interprets its argument itself."""
    if not isinstance(agent, Agent):
        return timeout if timeout > 0 else None
    return limit_of(agent.default_timeout if is_negative(timeout) else timeout)


def _follow(leaving: Leaving, agent: Any, limit: float | None) -> None:
    """Another thread is leaving the group: wait for it, and raise what it raises.

    Raises:
        DeadlineExceeded: it takes longer than this call's own limit. This call then ends the membership.
    """
    patience = _CLOSING
    try:
        with waiting():
            is_over = leaving.ended.wait(limit)
        if not is_over:
            doing = agent.work() if isinstance(agent, Agent) else ""
            raise GatherTimeout(
                f"shutdown() timed out after {limit:.2f} seconds, while it waited for the shutdown() of another thread"
                f"{doing and f': {doing}'}"
            )
    except BaseException as error:
        if not isinstance(error, Exception):
            # Ctrl-C
            patience = _AT_ONCE
        finalize(patience, shut_down=True)
        raise
    if leaving.error is None:
        return
    if not isinstance(leaving.error, Exception):
        raise RpcError(
            f"shutdown() was interrupted in another thread by {type(leaving.error).__name__}; this worker has left"
        )
    raise copy_of(leaving.error)


def _end(agent: Any, graceful: bool, timeout: float, limit: float | None) -> None:
    if not isinstance(agent, Agent):
        try:
            agent.shutdown(graceful, timeout)
        finally:
            finalize(shut_down=True)
        return
    deadline = Deadline(limit)
    patience = _CLOSING
    try:
        if graceful:
            first: dict[str, Any] | None = None
            if not isinstance(agent.group, DynamicGroup):
                first = _wait_all_workers(limit or 0)
            left = deadline.remaining()
            # Without an argument if there is no limit: programs and torch's tests replace this function.
            _delete_all_user_and_unforked_owner_rrefs(*(() if left is None else (left,)))
            _quiesce(agent, deadline, first)
            # Others may still be waiting for answers.
            agent.wait_idle(Deadline(_LAST_WORDS))
            if not _ignore_rref_leak:
                leaks = agent.rrefs.leaks()
                if leaks:
                    raise RpcError("Leaking RRefs: Leaking RRef: " + "; ".join(leaks))
    except BaseException as error:
        if not isinstance(error, Exception):
            # Ctrl-C
            patience = _AT_ONCE
        raise
    finally:
        finalize(patience, shut_down=True)


def _quiesce(agent: Agent, deadline: Deadline, first: dict[str, Any] | None) -> None:
    """Wait until no call is in progress. Calls made by functions that still run are served.

    In a static group this is detected by two waves (Mattern): twice in a row, all workers are idle and no call was made
    or served in between.

    Args:
        first: the first wave, if there already was one.
    """
    agent.contexts.tell_ended()
    _wait_idle(agent, deadline)
    if isinstance(agent.group, DynamicGroup):
        return
    names = sorted(each.name for each in agent.infos())
    if len(names) == 1:
        return
    before = first
    while True:
        left = deadline.remaining()
        said = _all_gather(_work_of(agent), names, 0 if left is None else max(left, 0.001))
        # Compare with the previous wave, not calls made with calls served: those cancelled or to lost workers are never served.
        if said == before:
            return
        before = said
        _wait_idle(agent, deadline)


def _work_of(agent: Agent) -> tuple[int, int, bool]:
    """How many calls the agent has made and served for the program, and whether it is idle."""
    return agent.made.value(), agent.done.value(), agent.is_idle()


def _wait_idle(agent: Agent, deadline: Deadline) -> None:
    if not agent.wait_idle(deadline):
        raise GatherTimeout(f"shutdown() timed out while calls were in progress: {agent.work()}")


def finalize(patience: float = _CLOSING, *, shut_down: bool = False) -> None:
    """End this process's membership, whatever the state of its agent.

    If another thread is already doing so, wait until it is done.

    Args:
        patience: seconds to wait for functions that are still running.
        shut_down: whether the user asked for it, which later errors mention.
    """
    global _leaving  # noqa: PLW0603  # of the one agent of the process
    me = threading.get_ident()
    with turn:
        agent, leaving = leave_group(shut_down=shut_down), _leaving
        if agent is not None:
            if leaving is None:
                leaving = _leaving = Leaving(None)
            leaving.roles.closer = me
    if agent is None:
        if leaving is not None and leaving.roles.closer != me and SERVING.get() is None:
            leaving.closed.wait()
        return
    assert leaving is not None
    try:
        if isinstance(agent, Agent):
            with contextlib.suppress(RpcError, DeadlineExceeded, OSError):
                if agent.group is not None:
                    agent.group.leave("it has shut down")
            agent.close(patience)
    finally:
        with turn:
            set_current_agent(None)
            gather.forget_all()
            _leaving = None
        leaving.closed.set()
        if leaving.roles.leader is None:
            leaving.end()


def _abandon() -> None:
    """In a forked child: a thread of the parent may have held the lock, and no departure is in progress."""
    global turn, _leaving  # noqa: PLW0603  # of this process
    turn = threading.RLock()
    _leaving = None
