"""The buffers of modules, wherever they are: a forward pass may change one in place, or assign another tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rallypoint.elastic import torch_private
from rallypoint.elastic.communication.setup_record import bytes_of
from rallypoint.errors import ElasticError


# Modules' buffers are kept in each step if all of them are at most this many bytes.
MAX_BUFFERS = 32 * 1024
# Bytes of a buffer's digest, by which two ranks compare theirs.
DIGEST = 8
# Where a buffer is: the dict of its module, its name there, and the tensor or None.
Place = tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]


class Buffers:
    """The buffers of a session's modules.

    Args:
        parts: all modules, in the same order on all ranks.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = list(parts)
        self._held = torch_private.buffers_of(self._parts)
        self._are_large = False

    def _places(self) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        self._held = torch_private.buffers_of(self._parts)
        return [(held, name) for held in self._held for name in held]

    def now(self) -> list[torch.Tensor]:
        """Each buffer once, except those without elements."""
        found = {
            id(each): each
            for held in self._held
            for each in held.values()
            if each is not None and each.numel()
        }
        return list(found.values())

    def placed(self) -> list[Place]:
        """Which buffer is where, for :meth:`put_back`."""
        return [(held, name, held[name]) for held, name in self._places()]

    def put_back(self, placed: Sequence[Place]) -> None:
        """Put the same tensors back into the same places, whatever they hold by now. Buffers registered later are dropped."""
        known = {(id(held), name) for held, name, _ in placed}
        for held, name in self._places():
            if (id(held), name) not in known:
                del held[name]
        for held, name, before in placed:
            held[name] = before

    # -- one step -----------------------------------------------------------------------------------

    def copied(self, data: bytes = b"") -> list[Any]:
        """Which buffer is where, and copies, for :meth:`restore`.

        Args:
            data: what :meth:`as_bytes` has just returned, which is a copy of all buffers; empty: there is none.
        """
        places, buffers = self.placed(), self.now()
        # Cloning a hundred small tensors takes a third of a millisecond. A module may have got its first buffer since.
        is_whole = data and len(data) == sum([each.nbytes for each in buffers])
        if is_whole and all(type(each) is torch.Tensor for each in buffers):
            return [places, buffers, data]
        return [places, buffers, [each.detach().clone() for each in buffers]]

    @torch.no_grad()
    def restore(self, saved: Sequence[Any]) -> None:
        """Go back to a copy."""
        places, buffers, copies = saved
        for held, name, before in places:
            held[name] = before
        if isinstance(copies, bytes):
            copies = [
                torch.frombuffer(bytearray(part), dtype=torch.uint8)
                .view(each.dtype)
                .view(each.shape)
                for each, part in zip(buffers, _parts(copies, buffers), strict=True)
            ]
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)

    # -- as bytes -----------------------------------------------------------------------------------

    def as_bytes(self) -> bytes:
        """All buffers, if they are small, else nothing."""
        if self._are_large:  # called before each collective
            return b""
        buffers = self.now()
        self._are_large = sum([each.nbytes for each in buffers]) > MAX_BUFFERS
        if self._are_large:
            return b""
        if self.are_on_gpu(buffers):
            # Only one copy to the host: each copy waits for the GPU.
            parts = [each.detach().contiguous().view(-1).view(torch.uint8) for each in buffers]
            return bytes_of(torch.cat(parts))
        return b"".join([bytes_of(each) for each in buffers])

    def are_on_gpu(self, buffers: Sequence[torch.Tensor] | None = None) -> bool:
        """Whether there are any, and all on one device that is not the host."""
        devices = {each.device for each in (self.now() if buffers is None else buffers)}
        return len(devices) == 1 and next(iter(devices)).type != "cpu"

    @torch.no_grad()
    def fill(self, data: bytes, left_out: Sequence[bool] = ()) -> None:
        """Fill the buffers from :meth:`as_bytes`, except those ``left_out``. Does nothing if the total size differs."""
        buffers = self.now()
        if len(data) != sum(each.nbytes for each in buffers):
            return
        left_out = left_out or [False] * len(buffers)
        for buffer, part, stays in zip(buffers, self._parted(data), left_out, strict=True):
            if not stays:
                given = torch.frombuffer(bytearray(part), dtype=buffer.dtype)
                buffer.copy_(given.view(buffer.shape))

    def digests(self, data: bytes) -> bytes:
        """For each buffer in what :meth:`as_bytes` returned, a digest of :data:`DIGEST` bytes."""
        return b"".join(
            hashlib.blake2b(part, digest_size=DIGEST).digest() for part in self._parted(data)
        )

    def _parted(self, data: bytes) -> Iterator[bytes]:
        return _parts(data, self.now() if data else ())

    # -- from one rank to another -----------------------------------------------------------------

    def told(self) -> list[Any]:
        """For each place, the number of the buffer there, its shape and type; None if there is none."""
        numbers: dict[int, int] = {}
        found: list[Any] = []
        for held, name in self._places():
            each = held[name]
            number = numbers.setdefault(id(each), len(numbers))
            found.append(None if each is None else [number, *_shape(each)])
        return found

    def take(self, told: Sequence[Any]) -> None:
        """Take buffers like another rank's, ready to be filled: those here that do not fit are replaced.

        Args:
            told: from :meth:`told`.
        Raises:
            ElasticError: the modules here have another number of buffers.
        """
        places = self._places()
        if len(places) != len(told):
            raise ElasticError(
                f"the modules of this rank have {len(places)} buffers, those of the other ranks {len(told)}: register the same"
                " buffers on all ranks, before the session"
            )
        made: dict[int, torch.Tensor] = {}
        used: set[int] = set()
        for (held, name), one in zip(places, told, strict=True):
            own = held[name]
            if one is None:
                held[name] = None
                continue
            number, *shape = one
            if number not in made:
                fits = own is not None and _shape(own) == shape and id(own) not in used
                made[number] = own if own is not None and fits else self._new(own, shape)
                used.add(id(made[number]))
            held[name] = made[number]

    def _new(self, own: torch.Tensor | None, shape: Sequence[Any]) -> torch.Tensor:
        near: Any = own if own is not None else next(iter(self._near()), None)
        device = "cpu" if near is None else near.device
        return torch.empty(shape[0], dtype=getattr(torch, shape[1]), device=device)

    def _near(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from part.parameters()


def _parts(data: bytes, buffers: Sequence[torch.Tensor]) -> Iterator[bytes]:
    at = 0
    for each in buffers:
        yield data[at : at + each.nbytes]
        at += each.nbytes


def _shape(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
