"""The random generators of a process: torch's, the current device's, Python's and NumPy's; and a session's local values.

Their state is read several times in each step, so that must be cheap: Python's and NumPy's are read as bytes from where the
generators keep them, and what has not changed is reused.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch

from rallypoint.elastic import torch_private

from .local_values import LocalValues


# The layout of Python's and NumPy's Mersenne Twister: 624 words of key, and a position in the key.
_WORDS = 624
_KEY = 4 * _WORDS


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of all generators, and whatever else changes on one rank alone.

    Args:
        torch_state: of the CPU's generator.
        device_state: of the current accelerator's, if it is in use.
        python: key and position (native words) of ``random``'s generator.
        python_gauss: the number that its ``gauss`` will return next, if it holds one.
        numpy: kind, key, position, has_gauss and gauss of ``numpy.random``'s generator, if NumPy is in use.
        local: the values of ``session.local``.
    """

    torch_state: bytes
    device_state: bytes | None
    python: bytes
    python_gauss: float | None
    numpy: tuple[str, bytes, int, int, float] | None
    local: bytes = b""

    @classmethod
    def now(cls) -> RandomState:
        """The current state; the same object as before, if nothing has changed."""
        global _last  # noqa: PLW0603  one process has one set of generators
        device = None
        if torch_private.cuda_is_in_use():
            device = _bytes(torch.cuda.get_rng_state())
        python, gauss = _python_now()
        numpy = _numpy.now()
        cpu = _bytes(torch.get_rng_state())
        local = b"" if _local is None else _local.pack()
        last = _last
        if (
            last is not None
            and last.numpy is numpy
            and last.torch_state == cpu
            and last.python == python
            and last.python_gauss == gauss
            and last.device_state == device
            and last.local == local
        ):
            return last
        _last = cls(cpu, device, python, gauss, numpy, local)
        return _last

    def equals(self, other: RandomState) -> bool:
        """Whether both are the same."""
        return self is other or self == other

    def restore(self) -> None:
        """Make it the current state."""
        torch.set_rng_state(_tensor(self.torch_state))
        if self.device_state is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(self.device_state))
        words = struct.unpack(f"={_WORDS + 1}I", self.python)
        random.setstate((random.Random.VERSION, words, self.python_gauss))
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            import numpy as np

            kind, key, place, has_gauss, gauss = self.numpy
            numpy.set_state((kind, np.frombuffer(key, dtype=np.uint32), place, has_gauss, gauss))
            _numpy.forget()
        if _local is not None:
            _local.restore(self.local)

    def pack(self) -> tuple[dict[str, Any], list[bytes]]:
        """As JSON, and the bytes that go with it."""
        head: dict[str, Any] = {"python": self.python_gauss}
        parts = [self.torch_state, self.python]
        if self.device_state is not None:
            head["device"] = True
            parts.append(self.device_state)
        if self.numpy is not None:
            kind, key, place, has_gauss, gauss = self.numpy
            head["numpy"] = [kind, place, has_gauss, gauss]
            parts.append(key)
        if self.local:
            head["local"] = True
            parts.append(self.local)
        return head, parts

    @classmethod
    def unpack(cls, head: dict[str, Any], parts: list[bytes]) -> RandomState:
        """From what :meth:`pack` returned."""
        left = list(parts)
        torch_state, python = left.pop(0), left.pop(0)
        device = left.pop(0) if head.get("device") else None
        numpy = None
        if "numpy" in head:
            kind, place, has_gauss, gauss = head["numpy"]
            numpy = str(kind), left.pop(0), int(place), int(has_gauss), float(gauss)
        local = left.pop(0) if head.get("local") else b""
        return cls(torch_state, device, python, head["python"], numpy, local)


_last: RandomState | None = None
_local: LocalValues | None = None


def keep_local(values: LocalValues | None) -> None:
    """From now on, the state includes these values of the running session. None: the session has ended."""
    global _local  # noqa: PLW0603  one process has one session at a time
    _local = values


# -- Python's ---------------------------------------------------------------------------------------------


def _python_now() -> tuple[bytes, float | None]:
    """Key and position, and the held gauss."""
    at = _python_at
    if at is not None:
        raw = ctypes.string_at(at, _KEY + 4)
        return raw[4:] + raw[:4], torch_private.python_gauss()
    return _python_asked()


def _python_asked() -> tuple[bytes, float | None]:
    _, words, gauss = random.getstate()
    return struct.pack(f"={_WORDS + 1}I", *words), gauss


def _find_python() -> int | None:
    """Where Python's generator keeps its position and key; None if that is not where CPython keeps them."""
    at = torch_private.python_generator()
    if at is None:
        return None
    raw = ctypes.string_at(at, _KEY + 4)
    is_there = (raw[4:] + raw[:4], torch_private.python_gauss()) == _python_asked()
    return at if is_there else None


_python_at = _find_python()


# -- NumPy's ----------------------------------------------------------------------------------------------


class _NumPy:
    """NumPy's legacy generator. Asking it is slow, so it is asked only when its memory has changed."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._at = 0
        self._raw = b""
        self._held = False  # it has held a gauss since its memory last changed
        self._state: tuple[str, bytes, int, int, float] | None = None

    def now(self) -> tuple[str, bytes, int, int, float] | None:
        """The same object as before, if it has not changed; None if NumPy is not loaded."""
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        generator = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
        if generator is None or type(generator).__name__ != "MT19937":
            return self._ask(numpy)
        if generator is not self._generator:
            self._generator, self._at = generator, generator.ctypes.state_address
            self._state = None
        raw = ctypes.string_at(self._at, _KEY + 4)
        # A held gauss can be used up or set again without a change in that memory.
        if self._state is None or raw != self._raw or self._held:
            self._held = raw == self._raw and self._held
            self._raw, self._state = raw, self._ask(numpy)
            self._held = self._held or bool(self._state[3])
        return self._state

    def forget(self) -> None:
        """Its state was set: ask it again."""
        self._state = None

    def _ask(self, numpy: Any) -> tuple[str, bytes, int, int, float]:
        kind, key, place, has_gauss, gauss = numpy.get_state()
        state = str(kind), key.tobytes(), int(place), int(has_gauss), float(gauss)
        return self._state if state == self._state and self._state is not None else state


_numpy = _NumPy()


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
