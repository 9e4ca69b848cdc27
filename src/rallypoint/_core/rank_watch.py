"""In a warm spare: whether the script asks for its rank before a session, and where.

A spare runs the script up to the session as one of the ranks. If nothing asks which one, it can take over any
other. Torch asks, too, but keeps no rank in what a session with replicated state holds.
"""

from __future__ import annotations

import inspect
import os
from types import FrameType
from typing import Any, cast

from . import env as environment


# Set by the supervisor for a spare.
SPARE = "RALLY_SPARE"
# Variables that tell ranks apart.
_OF_A_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK"})
# Modules that only pass an answer on.
_PASSING = ("os", "collections.abc")
_C10D = "torch.distributed.distributed_c10d"
# Modules that ask, and keep nothing that matters afterwards.
_HARMLESS = (
    *(_C10D, "torch.distributed.rendezvous", "torch.distributed.c10d_logger"),
    *("torch.distributed.logging_handlers", "torch.nn.parallel.distributed", "logging"),
    "torch.utils.data.distributed",
    *("rallypoint.elastic", "rallypoint._core", "rallypoint.launch"),
)
_SAMPLER = "torch.utils.data.distributed"

_is_watching = False
_asked = ""
_samplers: list[Any] = []


def begin() -> None:
    """From now on, notice whether this process asks for its rank. Call it once."""
    global _is_watching  # noqa: PLW0603  one process is one worker
    _is_watching = True
    variables: Any = environment.process_environment()
    kind: Any = type(variables)

    def read(self: Any, name: str) -> str:
        if name in _OF_A_RANK:
            note()
        return cast("str", kind.__getitem__(self, name))

    # A class of its own, so that os.environ stays the same object for those who hold it.
    variables.__class__ = type("Environ", (kind,), {"__getitem__": read})


def bind(why: str) -> None:
    """Note that what the script has made belongs to one rank."""
    global _asked  # noqa: PLW0603  one process is one worker
    if _is_watching and not _asked:
        _asked = why


def note() -> None:
    """Note that the caller's caller is being told the rank."""
    if not _is_watching or _asked:
        return
    frame: FrameType | None = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    if frame is None:
        return
    module = str(frame.f_globals.get("__name__", ""))
    if module == _SAMPLER and frame.f_code.co_name == "__init__" and "self" in frame.f_locals:
        _samplers.append(frame.f_locals["self"])
    if not _is_harmless(module):
        bind(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} asks for the rank")


def why_bound() -> str:
    """Why this process can only be the rank that it has run as; empty if it can be any."""
    return _asked


def end(before: int, rank: int) -> None:
    """Stop watching: the process has taken over a rank. Distributed samplers that it has made become that rank's.

    Args:
        before: the rank that it ran the set-up as.
        rank: the rank that it is now.
    """
    global _is_watching  # noqa: PLW0603  one process is one worker
    _is_watching = False
    for sampler in _samplers:
        if sampler.rank == before:
            sampler.rank = rank
    _samplers.clear()


def _passes_on(frame: FrameType) -> bool:
    module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    return module in _PASSING or (module == _C10D and function.startswith("get_"))


def _is_harmless(module: str) -> bool:
    # Torch's private packages (its compiler, its log) ask for the sake of messages and file names.
    return module.startswith("torch._") or any(
        module == each or module.startswith(f"{each}.") for each in _HARMLESS
    )
