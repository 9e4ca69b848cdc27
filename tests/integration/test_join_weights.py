"""A rank's weight reaches all of its gradients, whatever a model returns and whatever a loss does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rallypoint.errors import ConfigError, JoinError
from rallypoint.join import Join
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration

FEATURES = 4
# The samples of each step of each rank.
SIZES = [[3, 3], [3, 3, 3, 2]]

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(2)) as ranks:
        yield ranks


def batches_of(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(n, generator=generator, dtype=torch.float64),
        )
        for n in sizes
    ]


@dataclass
class Record:
    value: torch.Tensor


class Named(dict[str, torch.Tensor]):
    pass


class Model(nn.Module):
    """Returns its values in one of several forms.

    Args:
        form: ``tensor``, ``record``, ``named``, ``distribution``, or ``unit``: a tensor, from inputs of length one.
    """

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if self.form == "unit":
            x = x / x.norm(dim=1, keepdim=True)
        y = self.last(self.first(x).tanh()).sum(
            1
        )  # a view would not do: fully_shard refuses to see it changed
        if self.form == "record":
            return Record(y)
        if self.form == "named":
            return Named(value=y)
        if self.form == "distribution":
            return torch.distributions.Normal(y, 1.0)
        return y


def model_of(form: str = "tensor") -> Model:
    torch.manual_seed(5)
    return Model(form).double()


def value_in(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        output = output["value"]
    found = getattr(output, "value", getattr(output, "loc", output))
    assert isinstance(found, torch.Tensor)
    return found


def loss_of(model: Any, batch: Batch, how: str = "plain") -> torch.Tensor:
    x, y = batch
    if how == "forces":  # the gradient with respect to the inputs is part of the loss
        x = x.clone().requires_grad_()
        energy = model(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (energy - y).square().mean() + (force - x.detach()).square().mean()
    if how == "slopes":  # the gradient with respect to the parameters is part of the loss
        loss = (model(x) - y).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(each.square().sum() for each in slopes)
    if how == "pair":  # two forward passes, one backward pass
        return (model(x) - y).square().mean() + (model(-x) + y).square().mean()
    if how == "critic":  # so it is with a gradient penalty between them
        energy, away = loss_of(model, batch, "forces"), loss_of(model, (-x, y), "forces")
        return energy - 0.5 * away
    if how == "turns":  # each forward pass has its own backward pass, which exchanges gradients
        (model(x) - y).square().mean().backward()
        return (model(-x) + y).square().mean()
    found = value_in(model(x))
    if how == "in place":
        found /= 2.0
    return (found - y).square().mean()


def alone(
    every: list[list[Batch]], form: str = "tensor", how: str = "plain", accumulation: int = 1
) -> torch.Tensor:
    """One process: in each step the samples of all ranks."""
    model = model_of(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = max(map(len, every))
    for step in range(steps):
        here = [each[step] for each in every if step < len(each)]
        union = (torch.cat([x for x, _ in here]), torch.cat([y for _, y in here]))
        loss_of(model, union, how).backward()
        if (step + 1) % accumulation == 0 or step + 1 == steps:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def replay(data: list[Batch], form: str = "tensor", how: str = "plain") -> torch.Tensor:
    model = model_of(form)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([ddp, optimizer], weighting="samples") as join:
        for batch in join.batches(data):
            optimizer.zero_grad()
            loss_of(ddp, batch, how).backward()
            optimizer.step()
    return flat(model)


FORMS = [
    *[(form, "plain") for form in ("record", "named", "distribution")],
    *[("tensor", how) for how in ("forces", "in place")],
]


def test_whatever_a_model_returns_and_a_loss_does_with_it(pairs: Ranks) -> None:
    every = [batches_of(sizes, seed) for seed, sizes in enumerate(SIZES)]

    def case() -> list[torch.Tensor]:
        return [replay(every[dist.get_rank()], *each) for each in FORMS]

    for found in pairs.run(case):
        for each, kind in zip(found, FORMS, strict=True):
            torch.testing.assert_close(
                each, alone(every, *kind), rtol=1e-10, atol=1e-12, msg=lambda m, k=kind: f"{k}: {m}"
            )


@pytest.mark.parametrize("mode", ["classic", "planned", "hooks"])
def test_a_loss_with_gradients_in_it_runs_back_twice_and_exchanges_once(mode: str) -> None:
    every = [batches_of([3] * n, seed) for seed, n in enumerate((2, 4))]

    def case() -> torch.Tensor:
        data, model = every[dist.get_rank()], model_of()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = len(data) if mode == "planned" else None
        with Join([ddp, optimizer], weighting="ranks", steps=steps, replay=False) as join:
            for batch in join.batches(data) if mode == "hooks" else data:
                optimizer.zero_grad()
                loss_of(ddp, batch, "forces").backward()
                optimizer.step()
        return flat(model)

    # Ranks for this test alone: they used to wait for each other, or to exit.
    with contextlib.closing(Ranks(2, group_timeout=5)) as ranks:
        for found in ranks.run(case):
            torch.testing.assert_close(found, alone(every, how="forces"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "accumulation"), [("pair", 1), ("critic", 1), ("turns", 1), ("turns", 2)]
)
def test_several_passes_in_a_step_equal_one_process(how: str, accumulation: int) -> None:
    every = [batches_of([3] * n, seed) for seed, n in enumerate((1, 3))]

    def case() -> torch.Tensor:
        data, model = every[dist.get_rank()], model_of()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how_joined: Any = {"weighting": "samples", "replay": False, "accumulation": accumulation}
        with Join([ddp, optimizer], **how_joined) as join:
            for batch in join.batches(data):
                with contextlib.nullcontext() if join.syncs else ddp.no_sync():
                    loss_of(ddp, batch, how).backward()
                if join.syncs:
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model)

    wanted = alone(every, how=how, accumulation=accumulation)
    # Ranks for this test alone: if it fails, they wait for each other.
    with contextlib.closing(Ranks(2, group_timeout=5)) as ranks:
        for found in ranks.run(case):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_several_passes_that_a_rank_cannot_know_are_an_error() -> None:
    def case() -> str:
        data, ddp = [[], batches_of([3], 1)][dist.get_rank()], DistributedDataParallel(model_of())
        with pytest.raises(RuntimeError) as raised, Join([ddp], replay=False) as join:
            for batch in join.batches(data):
                loss_of(ddp, batch, "turns").backward()
        return str(raised.value)

    # The rank without inputs waits for the other one.
    with contextlib.closing(Ranks(2, group_timeout=2)) as ranks:
        assert "runs forward several times in a step" in ranks.run(case)[1]


def test_gradients_that_a_loss_contains_are_not_weighted_themselves(pairs: Ranks) -> None:
    every = [[], batches_of([3, 2], 1)]
    for found in pairs.run(lambda: replay(every[dist.get_rank()], how="slopes")):
        torch.testing.assert_close(found, alone(every, how="slopes"), rtol=1e-10, atol=1e-12)


def test_a_function_of_the_users_counts_samples_in_every_kind_of_loader(pairs: Ranks) -> None:
    """The loss is a mean over the rows that a mask leaves."""

    def rows(rank: int) -> list[torch.Tensor]:
        n = (4, 8)[rank]
        (x, y), *_ = batches_of([n], rank)
        return [x, y, torch.arange(n) % (3 - rank) == 0]

    def left(batch: Any) -> int:
        return int(batch[2].sum())

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square()[mask].mean()

    def case() -> dict[str, torch.Tensor]:
        loader = DataLoader(TensorDataset(*rows(dist.get_rank())), batch_size=2)
        found = {}
        for kind in ("loader", "list", "steps"):
            model = model_of()
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data: Any = loader if kind == "loader" else list(loader)
            steps = data if kind == "steps" else None
            with Join([ddp, optimizer], weighting="samples", samples=left, steps=steps) as join:
                for batch in data if kind == "steps" else join.batches(data):
                    optimizer.zero_grad()
                    loss(ddp, *batch).backward()
                    optimizer.step()
            found[kind] = flat(model)
        join = Join([ddp], weighting="samples", samples=left, steps=loader)
        with pytest.raises(ConfigError, match="does not know the number of samples"), join:
            pass
        return found

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [list(zip(*(each.split(2) for each in rows(rank)), strict=True)) for rank in (0, 1)]
    for step in range(4):
        here = [each[step] for each in parts if step < len(each)]
        optimizer.zero_grad()
        loss(model, *(torch.cat(each) for each in zip(*here, strict=True))).backward()
        optimizer.step()
    for found in pairs.run(case):
        for kind, each in found.items():
            torch.testing.assert_close(
                each, flat(model), rtol=1e-10, atol=1e-12, msg=lambda m, k=kind: f"{k}: {m}"
            )


def test_a_batch_of_weight_zero_may_be_infinite(pairs: Ranks) -> None:
    every = [batches_of(sizes, seed) for seed, sizes in enumerate(SIZES)]
    every[0][-1] = (torch.full_like(every[0][-1][0], torch.inf), every[0][-1][1])

    def case() -> int:
        model = model_of()
        ddp, count = DistributedDataParallel(model), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with Join([ddp, optimizer, scaler], weighting="samples") as join:
            for batch in join.batches(every[dist.get_rank()]):
                before = flat(model)
                optimizer.zero_grad()
                scaler.scale(loss_of(ddp, batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                count += not torch.equal(flat(model), before)
        return count

    assert pairs.run(case) == [3, 3], "all steps but the one in which the batch counts"


def sharded(data: list[Batch], form: str, how: str) -> torch.Tensor:
    from torch.distributed.fsdp import fully_shard

    model: Any = model_of(form)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], weighting="samples") as join:
        for batch in join.batches(data):
            optimizer.zero_grad()
            loss_of(model, batch, how).backward()
            optimizer.step()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def test_a_rank_without_batches_runs_a_batch_that_a_model_can_take(pairs: Ranks) -> None:
    every = [[], batches_of(SIZES[1], 1)]

    def case() -> list[torch.Tensor]:
        data = every[dist.get_rank()]
        return [replay(data, "unit"), sharded(data, "unit", "plain")]

    for found in pairs.run(case):
        for each in found:
            torch.testing.assert_close(each, alone(every, "unit"), rtol=1e-10, atol=1e-12)


def test_sharded_models_are_weighted_at_their_outputs(pairs: Ranks) -> None:
    every = [batches_of(sizes, seed) for seed, sizes in enumerate(SIZES)]
    kinds = [("record", "plain"), ("named", "plain"), ("tensor", "in place")]

    def case() -> list[torch.Tensor]:
        return [sharded(every[dist.get_rank()], *each) for each in kinds]

    for found in pairs.run(case):
        for each, kind in zip(found, kinds, strict=True):
            torch.testing.assert_close(
                each, alone(every, *kind), rtol=1e-10, atol=1e-12, msg=lambda m, k=kind: f"{k}: {m}"
            )


def test_an_output_that_cannot_be_weighted_is_an_error(pairs: Ranks) -> None:
    def case() -> None:
        with pytest.raises(JoinError, match="output holds Normal, in which Join cannot weight"):
            # Unequal sizes: both ranks have a factor, and so both raise.
            sharded(batches_of([2 + dist.get_rank()], 0), "distribution", "plain")

    pairs.run(case)


class Tasks(nn.Module):
    """A body with two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 1), nn.Linear(5, 1)])

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.body(x).tanh()).squeeze(1)  # type: ignore[no-any-return]


def test_a_replayed_batch_uses_no_parameters(pairs: Ranks) -> None:
    # Both ranks start with task 1. Rank 0 has no more batches; all that follows is task 0.
    lengths = [1, 6]
    every = [
        [(*batch, int(step == 0)) for step, batch in enumerate(batches_of([3] * n, seed))]
        for seed, n in enumerate(lengths)
    ]

    def made() -> tuple[Tasks, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Tasks().double()
        # Momentum and weight decay would both move a parameter whose gradient is zero.
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def case() -> list[torch.Tensor]:
        found = []
        for views in (False, True):
            model, optimizer = made()
            ddp = DistributedDataParallel(
                model, find_unused_parameters=True, gradient_as_bucket_view=views
            )
            with Join([ddp, optimizer], weighting="samples") as join:
                for x, y, task in join.batches(every[dist.get_rank()]):
                    optimizer.zero_grad()
                    (ddp(x, task) - y).square().mean().backward()
                    optimizer.step()
            found.append(flat(model))
        return found

    model, optimizer = made()
    for step in range(max(lengths)):
        here = [each[step] for each in every if step < len(each)]
        optimizer.zero_grad()
        predicted = model(torch.cat([x for x, _, _ in here]), here[0][2])
        (predicted - torch.cat([y for _, y, _ in here])).square().mean().backward()
        optimizer.step()
    for found in pairs.run(case):
        for each in found:
            torch.testing.assert_close(each, flat(model), rtol=1e-10, atol=1e-12)


def test_a_use_without_an_exchange_counts_when_the_rank_has_run_out(pairs: Ranks) -> None:
    """Rank 0 runs backward in no_sync, throws the gradient away, and has no more inputs: DDP still reports that use."""
    every = [[(*batch, 1) for batch in batches_of([3] * n, seed)] for seed, n in enumerate([2, 4])]
    exchanged = (0, 3)

    def made() -> tuple[Tasks, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Tasks().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def case() -> list[torch.Tensor]:
        found = []
        for views in (False, True):
            model, optimizer = made()
            ddp = DistributedDataParallel(
                model, find_unused_parameters=True, gradient_as_bucket_view=views
            )
            with Join([ddp, optimizer], weighting="samples") as join:
                for step, (x, y, task) in enumerate(join.batches(every[dist.get_rank()])):
                    optimizer.zero_grad()
                    with contextlib.nullcontext() if step in exchanged else ddp.no_sync():
                        (ddp(x, task) - y).square().mean().backward()
                    if step in exchanged:
                        optimizer.step()
            found.append(flat(model))
        return found

    model, optimizer = made()
    for step in exchanged:
        here = [each[step] for each in every if step < len(each)]
        optimizer.zero_grad()
        predicted = model(torch.cat([x for x, _, _ in here]), here[0][2])
        (predicted - torch.cat([y for _, y, _ in here])).square().mean().backward()
        optimizer.step()
    for found in pairs.run(case):
        for each in found:
            torch.testing.assert_close(each, flat(model), rtol=1e-10, atol=1e-12)
