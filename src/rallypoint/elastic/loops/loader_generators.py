"""Random generators that loaders have for themselves: ``DataLoader(…, generator=…)``, and those of its samplers. And what takes
their place in the loaders of frameworks: how often one was iterated, which is the epoch for its sampler.

They go on from epoch to epoch, so a process that begins in the midst of the training must find them as they were. Only the
script has them, and it shows them where a loop over batches begins. So a process tells which loops they were seen in, and another
one takes them up at the same places. A script may also make new ones for each epoch; those begin as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rallypoint.elastic import torch_private

from .loaders import loaders_in


@dataclass(frozen=True, slots=True)
class Seen:
    """A generator, as its process tells of it.

    Args:
        first: a digest of its state where it was first seen.
        uses: numbers of loops within an epoch, and the generator's place among those of the loop's loader.
        stays: whether it was there in a later epoch, too; None: there was none yet.
        state: where the last of these loops ended; empty before that.
    """

    first: str
    uses: tuple[tuple[int, int], ...]
    stays: bool | None = None
    state: bytes = b""


_COUNTED = b"count "


class _Generator:
    """A random generator."""

    def __init__(self, it: torch.Generator) -> None:
        self._it = it
        self.key = id(it), ""

    def state(self) -> bytes:
        return self._it.get_state().numpy().tobytes()

    def restore(self, state: bytes) -> None:
        self._it.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Count:
    """A loader's attribute that counts."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name
        self.key = id(loader), name

    def state(self) -> bytes:
        return _COUNTED + str(getattr(self._loader, self._name)).encode()

    def restore(self, state: bytes) -> None:
        setattr(self._loader, self._name, int(state.removeprefix(_COUNTED)))


Own = _Generator | _Count


def generators_of(given: Any) -> list[Own]:
    """The own generators of a loader, or of those within an object that gives their batches; not the one that all share."""
    owners: list[Any] = []
    counts: list[Own] = []
    for loader in loaders_in(given):
        values = getattr(loader, "__dict__", {})
        counts += [
            _Count(loader, name)
            for name in torch_private.LOADER_COUNTS
            if type(values.get(name)) is int
        ]
        batches = getattr(loader, "batch_sampler", None)
        own = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        owners += own
    found: list[torch.Generator] = []
    for each in owners:
        it = getattr(each, "generator", None)
        if not isinstance(it, torch.Generator) or it is torch.default_generator:
            continue
        if not any(it is other for other in found):
            found.append(it)
    # In this order: some samplers have no generator before they are iterated.
    return [*counts, *map(_Generator, found)]


def states_of(generators: Iterable[Own]) -> tuple[bytes, ...]:
    """Their states."""
    return tuple(each.state() for each in generators)


def restore(generators: Sequence[Own], states: Sequence[bytes]) -> None:
    """Set their states, of those of each kind if there are as many as that."""
    for kind in (_Count, _Generator):
        some = [each for each in generators if isinstance(each, kind)]
        theirs = [each for each in states if each.startswith(_COUNTED) is (kind is _Count)]
        if len(some) == len(theirs):
            for each, state in zip(some, theirs, strict=True):
                each.restore(state)


class LoaderGenerators:
    """Those that this process has seen, beside what is told of them.

    What is told (a tuple of :class:`Seen`) is part of the place in the data, so it comes from outside, and goes back.
    """

    def __init__(self) -> None:
        self._mine: dict[int, Own] = {}  # by their place in what is told

    def meet(self, told: tuple[Seen, ...], loop: int, loader: Any) -> tuple[Seen, ...]:
        """A loop begins, or is left out: take up what another process has told, and tell what is new.

        Args:
            told: so far.
            loop: its number within the epoch.
            loader: whose batches it has.
        """
        all_seen = list(told)
        for number, generator in enumerate(generators_of(loader)):
            use = (loop, number)
            of_use = next((at for at, each in enumerate(all_seen) if use in each.uses), None)
            mine = next((at for at, it in self._mine.items() if it.key == generator.key), None)
            if mine is not None:
                each = all_seen[mine]
                if mine == of_use:
                    all_seen[mine] = replace(each, stays=True)
                else:
                    self._forget(all_seen, of_use, use)
                    all_seen[mine] = replace(each, uses=(*each.uses, use))
                continue
            (now,) = states_of([generator])
            if of_use is not None and of_use not in self._mine:
                each = all_seen[of_use]
                if each.stays or (each.stays is None and each.first == _digest(now)):
                    self._mine[of_use] = generator
                    if each.state:
                        restore([generator], [each.state])
                    continue
            self._forget(all_seen, of_use, use)
            stays = None if of_use is None else False
            self._mine[len(all_seen)] = generator
            all_seen.append(Seen(_digest(now), (use,), stays))
        return self._without_unused(all_seen)

    def leave(self, told: tuple[Seen, ...], loader: Any) -> tuple[Seen, ...]:
        """A loop has ended."""
        all_seen = list(told)
        for generator in generators_of(loader):
            for at, each in self._mine.items():
                if each.key == generator.key and at < len(all_seen):
                    (state,) = states_of([generator])
                    all_seen[at] = replace(all_seen[at], state=state)
        return tuple(all_seen)

    @staticmethod
    def _forget(all_seen: list[Seen], at: int | None, use: tuple[int, int]) -> None:
        """Another generator is in that place now."""
        if at is not None:
            each = all_seen[at]
            all_seen[at] = replace(each, uses=tuple(other for other in each.uses if other != use))

    def _without_unused(self, all_seen: list[Seen]) -> tuple[Seen, ...]:
        kept = [at for at, each in enumerate(all_seen) if each.uses]
        self._mine = {new: self._mine[old] for new, old in enumerate(kept) if old in self._mine}
        return tuple(all_seen[at] for at in kept)


def _digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()
