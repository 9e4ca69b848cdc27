"""What a rank that only matched steps holds at the end, when the others changed gradients or skipped optimizer steps in them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from rallypoint.errors import JoinError
from rallypoint.join import Join
from rallypoint.join.state import digest
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration

FEATURES, OUTPUTS = 4, 2
# Steps of each rank in each epoch: every rank runs out first once, and once a rank has no inputs at all.
EPOCHS = [[0, 3, 2], [3, 1, 4], [3, 2, 1]]
ACCUMULATION = 2
# The step of the second epoch in which some rank's gradients are infinite.
OVERFLOW = 2

CLASSIC, PLANNED = "classic", "planned"
MODES = [CLASSIC, PLANNED, "replay", "hooks", "hooks in windows"]
LOOPS = [
    *("clip norm", "clip value", "scaler", "scaler and clip norm", "zero_grad first"),
    *("accumulate and clip norm", "plateau", "milestones", "one cycle", "adam", "every epoch"),
]
SHARDED = ["clip norm", "scaler", "scaler and clip norm", "adam", "one cycle"]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3)) as ranks:
        yield ranks


def batches_of(rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    found = [
        (
            torch.randn(3, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(OUTPUTS, generator=generator, dtype=torch.float64),
        )
        for _ in range(EPOCHS[epoch][rank])
    ]
    if epoch == 1 and rank == 2:
        found[OVERFLOW][0][0, 0] = float("inf")
    return found


def model_of() -> nn.Module:
    torch.default_generator.manual_seed(11)  # faster than torch's own function, which asks for CUDA
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Softplus(), nn.Linear(5, OUTPUTS)).double()


class Loop:
    """What follows a backward pass, in one process and on each rank alike."""

    def __init__(self, kind: str, model: nn.Module, zero: bool = False) -> None:
        self.kind, self.parameters, self.steps = kind, list(model.parameters()), 0
        options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
        cls: Any = torch.optim.SGD
        if kind in ("adam", "clip value"):
            cls, options = torch.optim.Adam, {"lr": 0.05}
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer: Any = ZeroRedundancyOptimizer(self.parameters, cls, **options)
        else:
            self.optimizer = cls(self.parameters, **options)
        self.scheduler: Any = None
        if kind == "plateau":
            self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        elif kind == "milestones":
            self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 9], gamma=0.3)
        elif kind == "one cycle":
            self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        elif kind == "every epoch":
            self.scheduler = lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = None
        if "scaler" in kind:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    @property
    def joinables(self) -> list[Any]:
        # The order does not matter.
        every = [self.scaler, self.scheduler, self.optimizer]
        return [each for each in every if each is not None]

    def begin(self) -> None:
        if self.kind == "zero_grad first":
            self.optimizer.zero_grad()

    def scaled(self, loss: torch.Tensor) -> Any:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self) -> None:
        if "clip norm" in self.kind or self.kind == "zero_grad first":
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, 0.1)
        if self.kind == "clip value":
            nn.utils.clip_grad_value_(self.parameters, 0.01)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.steps += 1
        if self.kind == "plateau":
            self.scheduler.step(1.0 + self.steps % 3)  # any measurement will do
        elif self.scheduler is not None and self.kind != "every epoch":
            self.scheduler.step()
        if self.kind != "zero_grad first":
            self.optimizer.zero_grad()

    def end_epoch(self) -> None:
        if self.kind == "every epoch":
            self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        """All that must be the same on all ranks."""
        optimizer = [
            None if not hasattr(self.optimizer, "state") else self.optimizer.state.get(p)
            for p in self.parameters
        ]
        if type(self.optimizer).__name__ == "ZeroRedundancyOptimizer":
            optimizer = []  # each rank has a part of its own
        groups = [{**group, "params": None} for group in self.optimizer.param_groups]
        others = [each for each in (self.scheduler, self.scaler) if each is not None]
        return [self.parameters, optimizer, groups, *(each.state_dict() for each in others)]


def flat(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def finite(kind: str) -> bool:
    return "scaler" not in kind


def data_of(kind: str, rank: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = batches_of(rank, epoch)
    if finite(kind):
        found = [(x.nan_to_num(posinf=1.0), y) for x, y in found]
    return found


def alone(kind: str, flush: bool) -> list[torch.Tensor]:
    """One process: its parameters after each epoch."""
    model = model_of()
    loop, found = Loop(kind, model), []
    accumulation = ACCUMULATION if "accumulate" in kind else 1
    for epoch, lengths in enumerate(EPOCHS):
        every = [data_of(kind, rank, epoch) for rank in range(3)]
        for step in range(max(lengths)):
            here = [each[step] for each in every if step < len(each)]
            loop.begin()
            loss: Any = sum(nn.functional.mse_loss(model(x), y.expand(3, -1)) for x, y in here)
            loop.scaled(loss / len(here) / accumulation).backward()
            if (step + 1) % accumulation == 0 or (flush and step + 1 == max(lengths)):
                loop.step()
        loop.end_epoch()
        found.append(flat(loop.parameters))
    return found


def train(mode: str, kind: str, zero: bool = False) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after each epoch, and digests that tell whether ranks hold the same state."""
    model = DistributedDataParallel(model_of())
    loop, found, digests = Loop(kind, model.module, zero), [], []
    accumulation = ACCUMULATION if "accumulate" in kind else 1
    for epoch in range(len(EPOCHS)):
        data = data_of(kind, dist.get_rank(), epoch)
        options: dict[str, Any] = {"weighting": "ranks", "accumulation": accumulation}
        if mode == PLANNED:
            options["steps"] = len(data)
        if "hooks" in mode:
            options["replay"] = False
        if "windows" in mode:
            options["lookahead"] = 2
        with Join([*loop.joinables, model], **options) as join:
            own = mode in (CLASSIC, PLANNED)
            for index, (x, y) in enumerate(data if own else join.batches(data)):
                syncs = (index + 1) % accumulation == 0 if own else join.syncs
                loop.begin()
                with contextlib.nullcontext() if syncs else model.no_sync():
                    loss = nn.functional.mse_loss(model(x), y.expand(3, -1))
                    loop.scaled(loss / accumulation).backward()
                if syncs:
                    loop.step()
        loop.steps = sum(map(max, EPOCHS[: epoch + 1]))  # what the next metrics depend on
        digests.append(digest(loop.state()))
        loop.end_epoch()
        found.append(flat(loop.parameters))
    return found, digests


def check(results: list[Any], mode: str, kinds: list[str], what: str) -> None:
    for kind in kinds:
        expected = alone(kind, flush=mode != PLANNED)
        for epoch in range(len(EPOCHS)):
            where = f"{what}, {mode}, {kind}, epoch {epoch}, rank"
            assert len({each[kind][1][epoch] for each in results}) == 1, f"{where}s differ"
            for rank, each in enumerate(results):
                assert torch.allclose(
                    each[kind][0][epoch], expected[epoch], rtol=1e-10, atol=1e-12
                ), f"{where} {rank}"


@pytest.mark.parametrize("mode", MODES)
def test_clipping_scaling_and_schedules_equal_one_process(three: Ranks, mode: str) -> None:
    # torch's protocol drops what a rank had accumulated when it ran out.
    kinds = [kind for kind in LOOPS if mode != CLASSIC or "accumulate" not in kind]

    def case() -> dict[str, Any]:
        return {kind: train(mode, kind) for kind in kinds}

    check(three.run(case), mode, kinds, "plain")


@pytest.mark.parametrize("mode", MODES)
def test_so_it_is_with_a_sharded_optimizer(three: Ranks, mode: str) -> None:
    def case() -> dict[str, Any]:
        return {kind: train(mode, kind, zero=True) for kind in SHARDED}

    check(three.run(case), mode, SHARDED, "sharded")


def test_what_steps_and_is_not_listed_is_named_once(three: Ranks) -> None:
    def case(listed: bool, even: bool) -> list[str]:
        rank = dist.get_rank()
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("rallypoint.join")
        log.addHandler(handler)
        try:
            model = DistributedDataParallel(model_of())
            loop = Loop("scaler", model.module)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)  # it holds nothing
            for _ in range(2):
                data = data_of("", 2 if even else rank, 2)
                with Join([model, *loop.joinables] if listed else [model]):
                    for x, y in data:
                        loop.scaled(nn.functional.mse_loss(model(x), y.expand(3, -1))).backward()
                        plain.step()
                        loop.step()
        finally:
            log.removeHandler(handler)
        return said

    for said in three.run(case, False, False):
        assert [text.partition(" is not listed in Join")[0] for text in said] == [
            "SGD",
            "GradScaler",
        ]
        assert "Join([model, optimizer, scaler])" in said[1]
    assert three.run(case, False, True) == [[]] * 3
    assert three.run(case, True, False) == [[]] * 3


def test_an_optimizer_that_wants_a_closure_is_caught_up_at_the_end(three: Ranks) -> None:
    def case() -> list[int]:
        model, rank = DistributedDataParallel(model_of()), dist.get_rank()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        digests = []
        for epoch in range(2):
            with Join([model, optimizer]):
                for x, y in data_of("", rank, epoch):

                    def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                        optimizer.zero_grad()
                        loss = nn.functional.mse_loss(model(x), y.expand(3, -1))
                        loss.backward()
                        return loss

                    optimizer.step(closure)
            state = optimizer.state[next(model.parameters())]
            digests.append(digest([list(model.parameters()), dict(state)]))
        return digests

    found = three.run(case)
    assert found == [found[0]] * 3


def test_a_state_that_cannot_be_told_is_an_error_on_every_rank(three: Ranks) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["lock"] = lambda: None

    def case() -> str:
        model, rank = DistributedDataParallel(model_of()), dist.get_rank()
        optimizer = Odd(model.parameters(), lr=0.1)
        with pytest.raises(JoinError) as caught, Join([model, optimizer]):
            for x, _ in data_of("", rank, 2):
                model(x).sum().backward()
                optimizer.step()
        return str(caught.value)

    for text in three.run(case):
        assert text.startswith("rank 0 cannot send the state of Odd"), text
