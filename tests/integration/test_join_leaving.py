"""Loops that are left before their last step: on all ranks, on one alone, by an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint.errors import JoinError
from rallypoint.join import Join
from rallypoint.testing import Ranks


pytestmark = pytest.mark.integration

FEATURES = 4
PLANNED = "planned"
MODES = [PLANNED, "replay", "hooks", "windows", "hooks in windows"]
# Where in the body of its loop a rank leaves.
PLACES = ["begin", "behind forward", "end"]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3)) as ranks:
        yield ranks


def batches_of(rank: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2, FEATURES, generator=generator, dtype=torch.float64) for _ in range(steps)
    ]


def model_of() -> nn.Module:
    torch.default_generator.manual_seed(3)  # faster than torch's own function, which asks for CUDA
    layers = [nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).double()


def train(
    mode: str, lengths: list[int], leave: dict[int, int], place: str = "end", error: bool = False
) -> tuple[torch.Tensor, int, int, str]:
    """Parameters, steps of the optimizer and of the scheduler, and what was raised; then another epoch works."""
    rank = dist.get_rank()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count)
    data = batches_of(rank, lengths[rank])
    options: dict[str, Any] = {"weighting": "ranks"}
    if mode == PLANNED:
        options["steps"] = len(data)
    if "hooks" in mode:
        options["replay"] = False
    if "windows" in mode:
        options["lookahead"] = 3
    text = ""

    def leaves(here: str, index: int) -> bool:
        if here != place or leave.get(rank) != index + (here == "end"):
            return False
        if error:
            raise KeyError(f"of rank {rank}")
        return True

    try:
        with Join([model, optimizer, scheduler], **options) as join:
            loop: Any = data
            if mode != PLANNED:
                loop = join.batches(iter(data) if "windows" in mode else data)
            for index, batch in enumerate(loop):
                if leaves("begin", index):
                    break
                loss = model(batch).square().mean()
                if leaves("behind forward", index):
                    break
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if leaves("end", index):
                    break
    except (JoinError, KeyError) as caught:
        text = f"{type(caught).__name__} {caught}"
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return parameters, steps, scheduler.last_epoch, text


def alone(lengths: list[int], total: int) -> torch.Tensor:
    models = [model_of() for _ in lengths]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    every = [batches_of(rank, steps) for rank, steps in enumerate(lengths)]
    for step in range(total):
        here = [each[step] for each in every if step < len(each)]
        sum(models[0](batch).square().mean() / len(here) for batch in here).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in models[0].parameters()])


@pytest.mark.parametrize("mode", MODES)
def test_leaving_on_all_ranks_ends_the_loop_there(three: Ranks, mode: str) -> None:
    def case() -> list[Any]:
        return [
            train(mode, [8, 10, 9], dict.fromkeys(range(3), 3)),
            train(mode, [8, 10, 9], dict.fromkeys(range(3), 3), "begin"),
            train(mode, [8, 8, 8], dict.fromkeys(range(3), 1), "begin"),
            train(mode, [8, 10, 9], dict.fromkeys(range(3), 3), "behind forward"),
            # One rank has run out before; if its loop goes on, it leaves with the others.
            train(mode, [2, 8, 6], dict.fromkeys(range(3), 5)),
            train(mode, [2, 8, 0], dict.fromkeys(range(3), 4), "begin"),
            # They leave after the last step, so nobody leaves early.
            train(mode, [2, 4, 4], dict.fromkeys(range(3), 4)),
        ]

    found = three.run(case)
    cases = [([8, 10, 9], 3)] * 2 + [([8, 8, 8], 1), ([8, 10, 9], 3)]
    cases += [([2, 8, 6], 5), ([2, 8, 0], 4), ([2, 4, 4], 4)]
    for number, (lengths, total) in enumerate(cases):
        for rank in range(3):
            parameters, steps, epochs, text = found[rank][number]
            where = f"case {number}, rank {rank}"
            assert text == "", where
            assert (steps, epochs) == (total, total), where
            torch.testing.assert_close(
                parameters, alone(lengths, total), rtol=1e-10, atol=1e-12, msg=where
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_leaving_on_one_rank_alone_is_an_error_that_names_it(
    three: Ranks, mode: str, place: str
) -> None:
    def case() -> list[str]:
        return [
            train(mode, [8, 10, 9], {1: 3}, place)[3],
            train(mode, [8, 10, 9], {0: 2, 1: 4, 2: 4}, place)[3],
            # It has run out and does not wait for the others.
            train(mode, [2, 6, 6], {0: 3}, place)[3] if "hooks" not in mode else "",
            train(mode, [6, 6, 6], {2: 4}, place)[3],
        ]

    for texts in three.run(case):
        assert texts[0].startswith("JoinError rank 1 left its loop after 3 steps; rank")
        total = 10 if mode == "replay" else 9  # there all ranks run to the end of the longest
        assert f"went on to step {total}; break out of the loop in the same step" in texts[0]
        assert texts[1].startswith(
            "JoinError rank 0 left its loop after 2 steps; ranks 1, 2 went on to step 4"
        )
        if mode not in (PLANNED, "hooks", "hooks in windows"):
            assert texts[2].startswith(
                "JoinError rank 0 left its loop after 3 steps; ranks 1, 2 went"
            )
        assert texts[3].startswith(
            "JoinError rank 2 left its loop after 4 steps; ranks 0, 1 went on to step 6"
        )


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_users_is_raised_as_it_is_and_ends_the_loop_there(
    three: Ranks, mode: str
) -> None:
    def case() -> list[Any]:
        return [
            train(mode, [8, 10, 9], dict.fromkeys(range(3), 3), place, error=True)[1:]
            for place in PLACES
        ]

    for rank, found in enumerate(three.run(case)):
        assert found == [(3, 3, f"KeyError 'of rank {rank}'")] * 3


def test_leaving_where_hooks_cannot_match_what_the_others_do() -> None:
    def case(leave: dict[int, int]) -> tuple[int, str]:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(3)
        model = nn.Linear(FEATURES, 1).double()
        fully_shard(model)
        rank = dist.get_rank()
        done, text = 0, ""
        try:
            with Join([model]) as join:
                for batch in join.batches(batches_of(rank, 5 + rank)):
                    model(batch).sum().backward()
                    done += 1
                    if join.step + 1 == leave.get(rank):
                        break
        except (JoinError, RuntimeError) as error:
            text = f"{type(error).__name__} {error}"
        return done, text

    # A rank that left waits for the others as long as a collective of this group may take.
    with contextlib.closing(Ranks(2, group_timeout=5)) as ranks:
        assert ranks.run(case, {}) == [(6, "")] * 2
        assert ranks.run(case, {0: 3, 1: 3}) == [(3, "")] * 2
        (done, text), other = ranks.run(case, {0: 3})
        assert done == 3
        assert text.startswith(
            "JoinError rank 0 left its loop early, and rank 1 did not leave within 5 s"
        )
        assert other[1].startswith("RuntimeError")


@pytest.mark.parametrize("mode", [PLANNED, "hooks"])
def test_an_error_on_one_rank_alone_ends_the_others_when_it_ends(mode: str) -> None:
    def case() -> str:
        import os

        rank = dist.get_rank()
        _, _, _, text = train(mode, [4, 6, 5], {1: 2}, error=rank == 1)
        if text.startswith("KeyError"):
            os._exit(1)  # as an uncaught error ends a process
        return text

    with contextlib.closing(Ranks(3)) as ranks:
        found = ranks.outcomes(case)
    assert found[1] == (False, "its process has ended")
    for ok, text in (found[0], found[2]):
        # torch's own error, from the closed connection. In a ring, a rank may have sent all that the dead one needs and wait for
        # the other one, which has failed by then but whose process goes on here: then its time runs out.
        assert not ok, text
        said = ("Connection closed by peer", "Connection reset", "Timed out waiting")
        assert any(each in text for each in said), text
