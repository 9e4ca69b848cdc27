"""The random generators of a process: torch's, the current device's, Python's and NumPy's."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch

from . import torch_private


_PYTHON = struct.Struct("!625I")


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The state of all generators.

    Args:
        torch_state: of the CPU's generator.
        device_state: of the current accelerator's, if it is in use.
        python: as ``random.getstate()`` returns it.
        numpy: as ``numpy.random.get_state()`` returns it, if NumPy is in use.
    """

    torch_state: torch.Tensor
    device_state: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> RandomState:
        """The present state."""
        numpy = sys.modules.get("numpy.random")
        device = torch.cuda.get_rng_state() if torch_private.cuda_is_in_use() else None
        return cls(
            torch.get_rng_state(),
            device,
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def equals(self, other: RandomState) -> bool:
        """Whether both are the same."""
        return (
            torch.equal(self.torch_state, other.torch_state)
            and self.python == other.python
            and _same(self.device_state, other.device_state)
            and _same_numpy(self.numpy, other.numpy)
        )

    def restore(self) -> None:
        """Make it the present one."""
        torch.set_rng_state(self.torch_state)
        if self.device_state is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.device_state)
        random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def pack(self) -> tuple[dict[str, Any], list[bytes]]:
        """As JSON, and bytes that go beside it."""
        version, words, gauss = self.python
        head: dict[str, Any] = {"python": [version, gauss]}
        parts = [_bytes(self.torch_state), _PYTHON.pack(*words)]
        if self.device_state is not None:
            head["device"] = True
            parts.append(_bytes(self.device_state))
        if self.numpy is not None:
            kind, keys, place, has_gauss, cached = self.numpy
            head["numpy"] = [kind, place, has_gauss, cached]
            parts.append(keys.tobytes())
        return head, parts

    @classmethod
    def unpack(cls, head: dict[str, Any], parts: list[bytes]) -> RandomState:
        """From what :meth:`pack` returned."""
        left = list(parts)
        torch_state = _tensor(left.pop(0))
        version, gauss = head["python"]
        python = version, _PYTHON.unpack(left.pop(0)), gauss
        device = _tensor(left.pop(0)) if head.get("device") else None
        numpy: tuple[Any, ...] | None = None
        if "numpy" in head:
            import numpy as np

            kind, place, has_gauss, cached = head["numpy"]
            numpy = kind, np.frombuffer(left.pop(0), dtype=np.uint32), place, has_gauss, cached
        return cls(torch_state, device, python, numpy)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _same_numpy(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    if one is None or other is None:
        return one is other
    # The keys change only once in 624 draws: their place tells first.
    return one[2:] == other[2:] and bool((one[1] == other[1]).all())


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
