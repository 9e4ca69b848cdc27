"""Reports the steps of Lightning's Trainer to `rally run`. Needs ``pip install lightning`` or ``pytorch-lightning``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .reporting import report


if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    # Both may be installed, and each accepts only its own callbacks.
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "rallypoint.integrations.lightning needs Lightning: pip install lightning"
            ) from error


__all__ = ["ProgressCallback"]


class ProgressCallback(Callback):  # type: ignore[misc]  # Lightning may be missing
    """Calls :func:`rallypoint.progress` after each training batch, with the newest values passed to ``self.log``.

    ``Trainer(..., callbacks=[ProgressCallback()])``. A step is an optimizer step, as in ``trainer.global_step``.
    """

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is complete.

        Args:
            trainer: has ``global_step``, ``estimated_stepping_batches`` and ``callback_metrics``.
            pl_module, outputs, batch, batch_idx: as Lightning passes them to this hook.
        """
        # The metrics are tensors, which are read only when it is time to show them.
        report(trainer.global_step, trainer.estimated_stepping_batches, trainer.callback_metrics)
