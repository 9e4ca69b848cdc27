"""Several futures as one, as in torch, but done at the first failure, whatever kind of future failed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from .future import RpcFuture
from .torch_private import NativeFuture


def collect_all(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """A future that is done when all of these are, or when the first one fails.

    torch's function waits for the others if the failure was set from Python, as the failures of our calls are.
    """
    collected: RpcFuture[list[Future[Any]]] = RpcFuture()
    # The futures themselves report failures that are never looked at.
    collected.is_watched = True
    futures = list(futures)
    lock = threading.Lock()
    left = len(futures)
    if not left:
        collected.set_result(futures)
        return collected

    def one_done(done: Any) -> None:
        nonlocal left
        error: BaseException | None = None
        try:
            NativeFuture.value(done)
        except BaseException as raised:  # noqa: BLE001  # raised where the result is waited for
            error = raised
        with lock:
            if left <= 0:
                return
            left = 0 if error is not None else left - 1
            if left:
                return
        if error is None:
            collected.set_result(futures)
        else:
            collected.set_exception(error)

    for future in futures:
        # Not RpcFuture's method, which would count it as a user's callback.
        NativeFuture.add_done_callback(future, one_done)
    return collected


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """All results, in order. Blocks; raises the first failure at once."""
    for future in futures:
        if not future.done():
            return [each.wait() for each in collect_all(futures).wait()]
    return [each.wait() for each in futures]
