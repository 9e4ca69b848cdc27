"""Reports the steps of the transformers Trainer to `rally run`. Needs ``pip install transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from .reporting import report


__all__ = ["ProgressCallback"]

# What the Trainer logs about training. The rest are speeds and totals, which are shown anyway or mean nothing here.
_SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss")


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # transformers may be missing
    """Calls :func:`rallypoint.progress` after each step, with the newest losses, gradient norm and learning rate.

    ``Trainer(..., callbacks=[ProgressCallback()])``, on all ranks.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, Any] = {}

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The Trainer has logged something.

        Args:
            args, state, control, kwargs: as for every hook.
            logs: names and values.
        """
        found = logs or {}
        self._numbers.update({name: found[name] for name in _SHOWN if name in found})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is complete.

        Args:
            args, control, kwargs: as for every hook.
            state: has ``global_step`` and ``max_steps``.
        """
        report(state.global_step, state.max_steps, self._numbers)
