"""What programs call: a context, and its gradients."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from rallypoint.errors import RpcError
from rallypoint.rpc.current_agent import current_agent, required_agent
from rallypoint.rpc.current_context import CURRENT

from .context import Context


class context:  # noqa: N801  # torch's name
    """A block whose calls record gradients: ``with context() as context_id:``.

    Tensors that require a gradient connect the workers' graphs when they pass between workers in the block's calls, or in
    calls that these make. When the block ends, everything that was recorded is released on all workers.

    Returns:
        The context's id, for :func:`backward` and :func:`get_gradients` on any worker of the context.

    Raises:
        RpcError: this process is not in a group, or this code already runs in a context.
    """

    def __init__(self) -> None:
        self._context: Context | None = None

    def __enter__(self) -> int:
        agent = required_agent()
        current = CURRENT.get()
        # A task that a coroutine has started keeps the coroutine's context, even once that is over.
        if current is not None and not current.is_over:
            # torch's words.
            raise RpcError("Already have an autograd context id for this thread")
        made: Context = agent.contexts.begin()
        self._token = CURRENT.set(made)
        self._agent = agent
        self._context = made
        return made.id

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        made, self._context = self._context, None
        if made is not None:
            CURRENT.reset(self._token)
            self._agent.contexts.end(made)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The gradients that backward passes of a context have computed on this worker.

    Args:
        context_id: from :func:`context`.

    Returns:
        The gradients, by leaf. Leaves that no root depends on are missing. Valid only within the context.

    Raises:
        RpcError: this worker does not know the context, or it has ended.
    """
    agent = current_agent()
    if agent is None:
        agent = required_agent()
    found: Context = agent.contexts.get(context_id)
    return dict(found.gradients)
