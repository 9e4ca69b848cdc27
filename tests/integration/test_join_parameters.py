"""Parameters whose gradients DDP handles specially: sparse and complex ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.join import Join
from rallypoint.testing import CaseFailed, Ranks


pytestmark = pytest.mark.integration

FEATURES, OUTPUTS, WORDS = 4, 2, 6
# Steps of each rank in each epoch; one rank has no inputs once.
EPOCHS = [[2, 4, 3], [2, 1, 2], [2, 1, 0]]
MODES = ["classic", "planned", "replay", "hooks"]
# When a loop clears its gradients, and whether it changes them before it steps: a rank that has run out cannot know.
LOOPS = ["clear last", "clear first", "zero first", "never clear", "halve"]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3)) as ranks:
        yield ranks


class Words(nn.Module):
    """A model with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, OUTPUTS, sparse=True)
        self.rest = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        word = (x[:, 0].abs() * 3).long().clamp(max=WORDS - 1)
        # The words come first: the other way round, torch's own DDP divides the rest's gradients by the number of ranks twice.
        found: torch.Tensor = self.words(word) + self.rest(x)
        return found


class Waves(nn.Module):
    """A model with complex parameters, of several shapes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(OUTPUTS, FEATURES, dtype=torch.complex64).t())
        self.second = nn.Parameter(torch.randn(OUTPUTS, dtype=torch.complex64))
        self.third = nn.Parameter(torch.randn(OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.first.dtype) @ self.first + self.second).abs() + self.third


KINDS: dict[str, type[nn.Module]] = {"sparse": Words, "complex": Waves}


def model_of(kind: str) -> nn.Module:
    torch.default_generator.manual_seed(11)  # faster than torch's own function, which asks for CUDA
    model = KINDS[kind]()
    for p in model.parameters():
        p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    return model


def batches_of(rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return [
        (
            torch.randn(3, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(3, OUTPUTS, generator=generator, dtype=torch.float64),
        )
        for _ in range(EPOCHS[epoch][rank])
    ]


def step(loop: str, model: Any, optimizer: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    if loop in ("clear first", "zero first"):
        optimizer.zero_grad(set_to_none=loop == "clear first")
    x, y = batch
    ((model(x) - y) ** 2).mean().backward()
    if loop == "halve":
        for p in model.parameters():
            p.grad.mul_(0.5)
    optimizer.step()
    if loop in ("clear last", "halve"):
        optimizer.zero_grad()


@functools.cache
def alone(kind: str, loop: str) -> list[torch.Tensor]:
    """One process, with the batches of all ranks in each step."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    for epoch, lengths in enumerate(EPOCHS):
        every = [batches_of(rank, epoch) for rank in range(3)]
        for i in range(max(lengths)):
            here = [each[i] for each in every if i < len(each)]
            x, y = (torch.cat(parts) for parts in zip(*here, strict=True))
            step(loop, model, optimizer, (x, y))
    return [p.detach() for p in model.parameters()]


def train(kind: str, loop: str, mode: str, options: dict[str, Any]) -> list[torch.Tensor]:
    model = model_of(kind)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    for epoch in range(len(EPOCHS)):
        batches = batches_of(dist.get_rank(), epoch)
        steps = [len(x) for x, _ in batches] if mode == "planned" else None
        replay = False if mode == "hooks" else None
        with Join([ddp, optimizer], steps=steps, weighting="ranks", replay=replay) as join:
            own = mode in ("classic", "planned")
            for batch in batches if own else join.batches(batches):
                step(loop, ddp, optimizer, batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_and_complex_gradients_equal_one_process(three: Ranks, kind: str, mode: str) -> None:
    forms: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}]
    cases = [(loop, options) for loop in LOOPS for options in forms]

    def case() -> list[list[torch.Tensor]]:
        return [train(kind, loop, mode, options) for loop, options in cases]

    for each in three.run(case):
        for (loop, _), found in zip(cases, each, strict=True):
            torch.testing.assert_close(found, alone(kind, loop), rtol=0, atol=1e-10)


def too_early(steps: int) -> str:
    ddp = DistributedDataParallel(model_of("sparse"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    mine = steps if dist.get_rank() else 4
    with Join([ddp, optimizer], steps=mine):
        for batch in batches_of(1, 0)[:mine]:
            step("clear last", ddp, optimizer, batch)
    return ""


@pytest.mark.parametrize("steps", [0, 1])
def test_sparse_gradients_that_a_rank_cannot_know_are_refused_on_every_rank(
    three: Ranks, steps: int
) -> None:
    for ok, found in three.outcomes(too_early, steps):
        assert not ok
        assert "DistributedDataParallel needs join.batches: it learns the form of its" in str(found)
    three.close()


def test_a_classic_block_says_what_a_rank_without_sparse_gradients_lacks(three: Ranks) -> None:
    def classic() -> None:
        ddp = DistributedDataParallel(model_of("sparse"))
        with Join([ddp]):
            for x, y in batches_of(1, 0)[: 2 * dist.get_rank()]:
                ((ddp(x) - y) ** 2).mean().backward()

    with pytest.raises(CaseFailed, match="learns the form of its sparse gradients from the rank's"):
        three.run(classic)
