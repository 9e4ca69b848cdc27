"""Leaving the group: once no calls are in progress, or at once."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import DeadlineExceeded, RpcError

from . import constants, gather
from .agent.agent import Agent
from .current_agent import leave_group, required_agent, set_current_agent
from .current_call import SERVING
from .gather import GatherTimeout, _all_gather
from .groups.dynamic_group import DynamicGroup
from .time_limits import limit_of


logger = logging.getLogger(__name__)

# State under torch's name, which programs and torch's own tests set.
_ignore_rref_leak = True
# Seconds that a graceful shutdown waits for answers that are still being sent.
_LAST_WORDS = 5.0
# Seconds that a closing agent waits for running functions: normally, and after Ctrl-C.
_CLOSING, _AT_ONCE = 5.0, 0.1


def _wait_all_workers(timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> dict[str, Any]:
    """Wait until every worker has called ``shutdown``. Returns the call counts of each.

    Raises:
        DeadlineExceeded: some did not in time; names them.
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
    """Leave the group. This worker has left, and its resources are released, even if this raises.

    Args:
        graceful: whether to wait first. In a static group this is collective: it blocks until all workers have called
            ``shutdown`` and no calls are in progress. In a dynamic group it blocks until this worker has no calls in
            progress.
        timeout: seconds to wait; 0: no limit; negative: the default timeout of calls.

    Raises:
        DeadlineExceeded: some workers did not call ``shutdown`` in time, which the error names, or calls were still in
            progress.
        PeerLost: another member of a static group is gone.
        RpcError: this process is not in a group; others still have references to values of this worker; or a function
            that serves a call called this.
    """
    agent = required_agent()
    if not isinstance(agent, Agent):
        try:
            agent.shutdown(graceful, timeout)
        finally:
            finalize()
        return
    if graceful and SERVING.get() is not None:
        raise RpcError(
            "shutdown() was called by a function that serves a call, and would wait for that call to end: signal the main"
            " thread (threading.Event) to call shutdown(), or use graceful=False"
        )
    limit = limit_of(agent.default_timeout if timeout < 0 else timeout)
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
            # Others may still wait for answers.
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
        finalize(patience)


def _quiesce(agent: Agent, deadline: Deadline, first: dict[str, Any] | None) -> None:
    """Wait until no call is in progress. Calls made by functions that still run are served.

    In a static group this is detected by two waves (Mattern): twice in a row, all workers are idle and no call was made
    or served in between.

    Args:
        first: the first wave, if it was made already.
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
        # Compared with the wave before, not sent with served: cancelled calls and those to lost workers are never served.
        if said == before:
            return
        before = said
        _wait_idle(agent, deadline)


def _work_of(agent: Agent) -> tuple[int, int, bool]:
    """The numbers of calls that it has made and served for the program, and whether it is idle."""
    return agent.made.value(), agent.done.value(), agent.is_idle()


def _wait_idle(agent: Agent, deadline: Deadline) -> None:
    if not agent.wait_idle(deadline):
        raise GatherTimeout(f"shutdown() timed out while calls were in progress: {agent.work()}")


def finalize(patience: float = _CLOSING) -> None:
    """End this process's membership, whatever the state of its agent."""
    agent = leave_group()
    try:
        if isinstance(agent, Agent):
            with contextlib.suppress(RpcError, DeadlineExceeded, OSError):
                if agent.group is not None:
                    agent.group.leave("it has shut down")
            agent.close(patience)
    finally:
        set_current_agent(None)
        gather.forget_all()
