"""What a rank that ran out keeps of the steps that it only matched, whatever the order of a loop's statements."""

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
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration

FEATURES, OUTPUTS = 4, 2
# Steps of each rank in each epoch: every rank runs out first once, and once a rank has no inputs at all.
EPOCHS = [[1, 4, 2], [2, 1, 3], [2, 1, 0]]

CLASSIC, PLANNED = "classic", "planned"
MODES = [PLANNED, "replay", "hooks", "windows", "hooks in windows"]
ORDERS = [
    *("clear last", "zero last", "clear first", "zero first", "clear between"),
    *("never clear", "every other step"),
]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3)) as ranks:
        yield ranks


def batches_of(rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return [
        (
            torch.randn(1 + (step + rank) % 3, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(OUTPUTS, generator=generator, dtype=torch.float64),
        )
        for step in range(EPOCHS[epoch][rank])
    ]


def models_of(number: int) -> list[nn.Module]:
    torch.default_generator.manual_seed(11)  # faster than torch's own function, which asks for CUDA
    return [
        nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()
        for _ in range(number)
    ]


def loss_of(models: list[Any], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return sum(((model(x) - y) ** 2).mean() for model in models)  # type: ignore[return-value]


class Clearing:
    """When a loop clears its gradients."""

    def __init__(self, order: str, optimizer: Any) -> None:
        self.order, self.optimizer = order, optimizer

    def begin(self, index: int) -> None:
        if self.order in ("clear first", "zero first"):
            self.optimizer.zero_grad(set_to_none=self.order == "clear first")

    def between(self) -> None:
        if self.order == "clear between":
            self.optimizer.zero_grad()

    def end(self, index: int) -> None:
        if self.order in ("clear last", "zero last"):
            self.optimizer.zero_grad(set_to_none=self.order == "clear last")
        if self.order == "every other step" and index % 2:
            self.optimizer.zero_grad()


def parameters_of(models: list[nn.Module]) -> list[nn.Parameter]:
    return [p for model in models for p in model.parameters()]


def stand(models: list[nn.Module], standing: bool) -> None:
    """Leave gradients there, as from before the block."""
    if standing:
        for p in parameters_of(models):
            p.grad = torch.full_like(p, 0.25)


Snapshot = tuple[torch.Tensor, list[torch.Tensor | None]]


def snapshot(models: list[nn.Module]) -> Snapshot:
    every = parameters_of(models)
    return (
        torch.cat([p.detach().flatten() for p in every]),
        [None if p.grad is None else p.grad.detach().clone() for p in every],
    )


@functools.cache
def alone(order: str, weighting: str, number: int, standing: bool) -> list[Snapshot]:
    """One process: what it has after each epoch."""
    models = models_of(number)
    optimizer = torch.optim.SGD(parameters_of(models), lr=0.03, momentum=0.5)
    clearing, found = Clearing(order, optimizer), []
    for epoch, lengths in enumerate(EPOCHS):
        stand(models, standing)
        every = [batches_of(rank, epoch) for rank in range(3)]
        for step in range(max(lengths)):
            here = [each[step] for each in every if step < len(each)]
            clearing.begin(step)
            samples = sum(len(x) for x, _ in here)
            weights = {
                "samples": [len(x) / samples for x, _ in here],
                "ranks": [1 / len(here)] * len(here),
                "initial": [1 / 3] * len(here),
            }[weighting]
            loss = sum(w * loss_of(models, each) for w, each in zip(weights, here, strict=True))
            clearing.between()
            loss.backward()
            optimizer.step()
            clearing.end(step)
        found.append(snapshot(models))
    return found


def train(
    mode: str,
    order: str,
    weighting: str,
    *,
    number: int = 1,
    standing: bool = False,
    zero: bool = False,
) -> list[Snapshot]:
    models = models_of(number)
    wrapped = [DistributedDataParallel(model) for model in models]
    options: dict[str, Any] = {"lr": 0.03, "momentum": 0.5}
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        sharded = ZeroRedundancyOptimizer(parameters_of(models), torch.optim.SGD, **options)
    optimizer: Any = sharded if zero else torch.optim.SGD(parameters_of(models), **options)
    clearing, found = Clearing(order, optimizer), []
    for epoch in range(len(EPOCHS)):
        stand(models, standing)
        data = batches_of(dist.get_rank(), epoch)
        arguments: dict[str, Any] = {"weighting": weighting}
        if mode == PLANNED:
            arguments["steps"] = [len(x) for x, _ in data]
        if "hooks" in mode:
            arguments["replay"] = False
        if "windows" in mode:
            arguments["lookahead"] = 2
        with Join([*wrapped, optimizer], **arguments) as join:
            loop: Any = data
            if mode not in (CLASSIC, PLANNED):
                loop = join.batches(iter(data) if "windows" in mode else data)
            for index, batch in enumerate(loop):
                clearing.begin(index)
                loss = loss_of(wrapped, batch)
                clearing.between()
                loss.backward()
                optimizer.step()
                clearing.end(index)
        found.append(snapshot(models))
    return found


def assert_same(found: list[list[Snapshot]], expected: list[Snapshot], what: str) -> None:
    for rank, epochs in enumerate(found):
        for epoch, ((mine, gradients), (theirs, wanted)) in enumerate(
            zip(epochs, expected, strict=True)
        ):
            where = f"{what}: rank {rank}, epoch {epoch}"
            assert [g is None for g in gradients] == [w is None for w in wanted], where
            torch.testing.assert_close(
                mine, theirs, rtol=1e-10, atol=1e-12, msg=lambda text, where=where: where + text
            )
            for g, w in zip(gradients, wanted, strict=True):
                if g is not None:
                    torch.testing.assert_close(
                        g, w, rtol=1e-10, atol=1e-12, msg=lambda text, where=where: where + text
                    )


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_statements_does_not_matter(three: Ranks, order: str) -> None:
    def case() -> dict[str, Any]:
        found = {mode: train(mode, order, "samples") for mode in MODES}
        for weighting in ("ranks", "initial"):
            found[f"{CLASSIC}, {weighting}"] = train(CLASSIC, order, weighting)
        return found

    results = three.run(case)
    for what in results[0]:
        weighting = what.partition(", ")[2] or "samples"
        expected = alone(order, weighting, 1, False)
        assert_same([each[what] for each in results], expected, what)


@pytest.mark.parametrize("order", ORDERS)
def test_so_it_is_with_two_models_a_sharded_optimizer_and_gradients_from_before(
    three: Ranks, order: str
) -> None:
    def case() -> dict[str, Any]:
        found: dict[str, Any] = {}
        # Each order and each mode gets both kinds of optimizer, so there is no need for every pair of them.
        for turn, mode in enumerate((PLANNED, "replay", "hooks in windows"), ORDERS.index(order)):
            zero = turn % 2 == 0
            found[f"{mode}, zero" if zero else mode] = train(
                mode, order, "samples", number=2, standing=True, zero=zero
            )
        found[CLASSIC] = train(CLASSIC, order, "initial", number=2, standing=True)
        found[f"{CLASSIC}, ranks"] = train(CLASSIC, order, "ranks", number=2, standing=True)
        found[f"{CLASSIC}, zero"] = train(
            CLASSIC, order, "initial", number=2, standing=True, zero=True
        )
        return found

    results = three.run(case)
    for what in results[0]:
        weighting = "initial" if CLASSIC in what else "samples"
        expected = alone(order, "ranks" if "ranks" in what else weighting, 2, True)
        assert_same([each[what] for each in results], expected, what)


class Sparing(nn.Module):
    """Has a layer that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, OUTPUTS), nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_gradients_of_parameters_that_no_rank_uses_stay_as_they_were(three: Ranks) -> None:
    def case() -> dict[str, list[bool]]:
        found = {}
        for mode in (CLASSIC, *MODES):
            model = Sparing().double()
            stand([model], True)
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            arguments: dict[str, Any] = {}
            if mode == PLANNED:
                arguments["steps"] = EPOCHS[0][dist.get_rank()]
            if "hooks" in mode:
                arguments["replay"] = False
            data = batches_of(dist.get_rank(), 0)
            with Join([ddp], **arguments) as join:
                own_loop = mode in (CLASSIC, PLANNED)
                for batch in data if own_loop else join.batches(data):
                    loss_of([ddp], batch).backward()
            found[mode] = [
                p.grad is not None and bool((p.grad == 0.25).all())
                for p in model.unused.parameters()
            ]
        return found

    for rank, found in enumerate(three.run(case)):
        assert all(all(each) for each in found.values()), f"rank {rank}: {found}"


def test_parameters_may_be_frozen_after_ddp_was_made(three: Ranks) -> None:
    # DDP still exchanges whether a rank used them.
    def freeze(model: Any, epoch: int) -> None:
        model[0].requires_grad_(epoch == 0)

    def case() -> list[torch.Tensor]:
        found = []
        for mode in (PLANNED, CLASSIC, "hooks", "replay"):
            (model,) = models_of(1)
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
            for epoch in range(2):
                freeze(model, epoch)
                data = batches_of(dist.get_rank(), epoch)
                steps = len(data) if mode == PLANNED else None
                joined = [ddp, optimizer]
                with Join(joined, weighting="ranks", steps=steps, replay=mode == "replay") as join:
                    for batch in join.batches(data) if mode in ("hooks", "replay") else data:
                        loss_of([ddp], batch).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            found.append(snapshot([model])[0])
        return found

    (model,) = models_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    for epoch, lengths in enumerate(EPOCHS[:2]):
        freeze(model, epoch)
        every = [batches_of(rank, epoch) for rank in range(3)]
        for step in range(max(lengths)):
            here = [each[step] for each in every if step < len(each)]
            (sum(loss_of([model], each) for each in here) / len(here)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for found in three.run(case):
        for each in found:
            torch.testing.assert_close(each, snapshot([model])[0], rtol=1e-10, atol=1e-12)


# Steps of each rank in each epoch: the rest of an accumulation falls into an epoch in which other ranks have no inputs.
LEFT = [
    [1, 1, 1],
    [0, 1, 0],
    [0, 0, 1],
    [3, 0, 2],
    [1, 1, 1],
    [2, 0, 0],
    [1, 1, 3],
    [0, 0, 0],
    [0, 1, 0],
]


def accumulate(weighting: str, every: int, rank: int | None) -> list[torch.Tensor]:
    """``every`` passes for each step of the optimizer, counted in each epoch; on all ranks, or in one process (None)."""
    (model,) = models_of(1)
    ddp: Any = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
    generator = torch.Generator().manual_seed(3)
    for lengths in LEFT:
        data = [
            [
                (
                    torch.randn(
                        1 + (i + r) % 3, FEATURES, generator=generator, dtype=torch.float64
                    ),
                    torch.randn(OUTPUTS, generator=generator, dtype=torch.float64),
                )
                for i in range(length)
            ]
            for r, length in enumerate(lengths)
        ]
        with contextlib.ExitStack() as stack:
            if rank is not None:
                sizes = [len(x) for x, _ in data[rank]]
                joined = [ddp, optimizer]
                stack.enter_context(
                    Join(joined, steps=sizes, weighting=weighting, accumulation=every)  # type: ignore[arg-type]
                )
            for i in range(max(lengths) if rank is None else lengths[rank]):
                here = [
                    each[i] for each in (data if rank is None else [data[rank]]) if i < len(each)
                ]
                weights = [1.0]
                if rank is None:
                    samples = sum(len(x) for x, _ in here)
                    equal = weighting == "ranks"
                    weights = [1 / len(here) if equal else len(x) / samples for x, _ in here]
                exchanges = (i + 1) % every == 0
                plain = exchanges or rank is None
                with contextlib.nullcontext() if plain else ddp.no_sync():
                    losses = [loss_of([ddp], each) for each in here]
                    total = sum(w * loss for w, loss in zip(weights, losses, strict=True))
                    (total / every).backward()  # type: ignore[union-attr]
                if exchanges:
                    optimizer.step()
                    optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("weighting", ["samples", "ranks"])
def test_what_is_left_of_an_accumulation_counts_in_an_epoch_in_which_a_rank_has_no_inputs(
    three: Ranks, weighting: str, every: int
) -> None:
    expected = accumulate(weighting, every, None)
    for found in three.run(lambda: accumulate(weighting, every, dist.get_rank())):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
