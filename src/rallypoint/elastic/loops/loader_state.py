"""The state of a loader that can resume without fetching the earlier batches again: torchdata's ``StatefulDataLoader``."""

from __future__ import annotations

import io
import logging
from typing import Any

import torch


_log = logging.getLogger(__name__)


def packed(loader: Any) -> bytes:
    """The place of a loader, as bytes; empty if it keeps none, or one that could not be read back."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return b""
    data = io.BytesIO()
    torch.save(loader.state_dict(), data)
    try:
        restored(data.getvalue())
    except Exception as error:  # noqa: BLE001  the unpickler raises several kinds
        _log.debug("the state of the loader is not kept: %s", error)
        return b""
    return data.getvalue()


def restored(data: bytes) -> Any:
    """What :func:`packed` has packed, for ``load_state_dict``."""
    return torch.load(io.BytesIO(data), weights_only=True)
