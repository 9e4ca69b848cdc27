"""Random generators that belong to loaders: ``DataLoader(…, generator=…)``, and those of its samplers. Also what the loaders of
frameworks have instead: a count of how often the loader was iterated, which is the epoch for its sampler.

They carry on from epoch to epoch, so a process that starts partway through the training must find them as they were. Only the
script has them, and the session sees them where a loop over batches begins. So a process records in which loops it saw them, and
another one restores them at the same places. A script may also create new ones for each epoch; those are used as they are.
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
    """A generator, as its process describes it to others.

    Args:
        first: a digest of its state where it was first seen.
        uses: loops by their number within an epoch, each with the generator's place among those of the loop's loader.
        stays: whether it was there in a later epoch, too; None: there was no later epoch yet.
        state: its state where the last of these loops ended; empty before that.
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
    """A loader's own generators, or those of the loaders within an object; without torch's default one, which all share."""
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
    # Counts come first: some samplers have no generator before they are iterated.
    return [*counts, *map(_Generator, found)]


def states_of(generators: Iterable[Own]) -> tuple[bytes, ...]:
    """Their states."""
    return tuple(each.state() for each in generators)


def restore(generators: Sequence[Own], states: Sequence[bytes]) -> None:
    """Set the states of each kind of generator, if there are as many states as generators of that kind."""
    for kind in (_Count, _Generator):
        some = [each for each in generators if isinstance(each, kind)]
        theirs = [each for each in states if each.startswith(_COUNTED) is (kind is _Count)]
        if len(some) == len(theirs):
            for each, state in zip(some, theirs, strict=True):
                each.restore(state)


class LoaderGenerators:
    """The generators that this process has seen, to go with their descriptions.

    The descriptions (a tuple of :class:`Seen`) are part of the place in the data, so they are passed in and returned.
    """

    def __init__(self) -> None:
        self._mine: dict[int, Own] = {}  # by their place among the descriptions

    def meet(self, told: tuple[Seen, ...], loop: int, loader: Any) -> tuple[Seen, ...]:
        """A loop begins, or is skipped: restore what another process has described, and describe what is new.

        Args:
            told: the descriptions so far.
            loop: its number within the epoch.
            loader: the one whose batches it iterates over.
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
        """Another generator has taken that place."""
        if at is not None:
            each = all_seen[at]
            all_seen[at] = replace(each, uses=tuple(other for other in each.uses if other != use))

    def _without_unused(self, all_seen: list[Seen]) -> tuple[Seen, ...]:
        kept = [at for at, each in enumerate(all_seen) if each.uses]
        self._mine = {new: self._mine[old] for new, old in enumerate(kept) if old in self._mine}
        return tuple(all_seen[at] for at in kept)


def _digest(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=8).hexdigest()
