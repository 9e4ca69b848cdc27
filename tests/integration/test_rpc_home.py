"""A tensor that a function returns as it came goes back in the memory it came in; one that others still use does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rallypoint.rpc.current_agent import current_agent
from rallypoint.rpc.serialization.sole_reference import memory_of_one
from rpc_workers import Workers


pytestmark = [pytest.mark.integration]

LENGTH = 1 << 18
KEPT: list[Any] = []


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers(2) as workers:
        workers.run(rpc_workers.join)
        yield workers
        workers.run(rpc_workers.leave)


# -- what is called: each returns what came, changed by at most one ------------------------------


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def changed(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def reshaped(x: torch.Tensor) -> torch.Tensor:
    # A view keeps the tensor that it was made of.
    return x.view(2, -1).t()


def by_keyword(*, x: torch.Tensor) -> torch.Tensor:
    return x


class Model:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def kept(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x)
    return x


def kept_view(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x[1:])
    return x


def kept_alias(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x.detach())
    return x


def kept_array(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x.numpy())
    return x


def kept_storage(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x.untyped_storage())
    return x


def kept_in_graph(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(torch.ones(LENGTH, requires_grad=True) * x)
    return x


def kept_in_future(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(torch.futures.Future())
    KEPT[-1].set_result(x)
    return x


def kept_weakly(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(weakref.ref(x))
    return x


def kept_in_cycle(x: torch.Tensor) -> torch.Tensor:
    x.itself = x  # type: ignore[attr-defined]
    return x


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


def one_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    KEPT.append(y)
    return x


def part(x: torch.Tensor) -> torch.Tensor:
    return x[1:]


# -- in the caller -------------------------------------------------------------------------------


def calls(func: Callable[..., Any], name: str = "") -> tuple[bool, list[float]]:
    """Call three times. Returns whether nothing was copied back, and by how much each answer differs from what was sent."""
    given = torch.arange(LENGTH, dtype=torch.float32)
    found = []
    for _ in range(3):
        args, kwargs = ((), {name: given}) if name else ((given,), {})
        back = rpc.rpc_sync("w1", func, args, kwargs)
        flat = back.t().reshape(-1) if back.dim() > 1 else back
        expected = torch.arange(LENGTH, dtype=torch.float32)[LENGTH - len(flat) :]
        found.append(float(flat[0]) - float(expected[0]))
        assert torch.equal(flat.detach() - found[-1], expected)
        # What the caller does with its own is no business of the callee's.
        back.detach().fill_(-1.0)
        assert torch.equal(given, torch.arange(LENGTH, dtype=torch.float32))
        del back, flat
    return not copied_back(), found


def copied_back() -> int:
    agent = current_agent()
    assert agent is not None
    return int(agent.route("w1").sharing.statistics()["mapped_segments"])


def two_views() -> bool:
    x = torch.arange(LENGTH, dtype=torch.float32)
    back = rpc.rpc_sync("w1", one_of_two, (x, x.view(2, -1)))
    back.fill_(-1.0)
    return bool(copied_back())


def kept_there() -> list[float]:
    """The second number of each tensor that the callee has kept."""
    found = []
    for each in KEPT:
        thing = each.wait() if isinstance(each, torch.futures.Future) else each
        if isinstance(thing, torch.UntypedStorage):
            thing = torch.empty(0, dtype=torch.float32).set_(thing)
        if isinstance(thing, torch.Tensor):
            thing = thing.detach().reshape(-1)
        found.append(float(thing[1]))
    return found


def lent_there() -> int:
    gc.collect()
    agent = current_agent()
    assert agent is not None
    return sum(int(each["shared_leased"]) for each in agent.peers())


@pytest.mark.parametrize("func", [same, changed, Model().forward])
def test_what_nobody_keeps_is_not_copied_back(two: Workers, func: Callable[..., Any]) -> None:
    went_home, found = two.on(0, calls, func)
    assert went_home
    assert found == [float(func is changed)] * 3
    assert two.run(lent_there) == [0, 0]


def test_by_keyword_too(two: Workers) -> None:
    went_home, _ = two.on(0, calls, by_keyword, "x")
    assert went_home


@pytest.mark.parametrize(
    ("func", "second"),
    [
        (kept, 1.0),
        (kept_view, 2.0),
        (kept_alias, 1.0),
        (kept_array, 1.0),
        (kept_storage, 1.0),
        (kept_in_graph, 1.0),
        (kept_in_future, 1.0),
    ],
)
def test_what_the_callee_keeps_is_its_own(
    two: Workers, func: Callable[..., Any], second: float
) -> None:
    went_home, found = two.on(0, calls, func)
    assert not went_home
    assert found == [0.0] * 3
    assert two.on(1, kept_there) == [second] * 3


@pytest.mark.parametrize("func", [reshaped, kept_weakly, kept_in_cycle, with_gradient, part])
def test_where_it_cannot_be_told_it_is_copied(two: Workers, func: Callable[..., Any]) -> None:
    went_home, _ = two.on(0, calls, func)
    assert not went_home


def test_tensors_that_share_memory_are_not_alone(two: Workers) -> None:
    assert two.on(0, two_views)
    assert two.on(1, kept_there) == [1.0]


def test_one_variable_is_alone_and_every_other_reference_is_seen() -> None:
    x = torch.zeros(LENGTH)
    assert memory_of_one(x) == x.data_ptr()
    others: list[Callable[[], Any]] = [
        lambda: x,
        lambda: [x],
        lambda: x[:1],
        lambda: x.detach(),
        lambda: x.numpy(),
        lambda: x.untyped_storage(),
        lambda: torch.utils.dlpack.to_dlpack(x),
        lambda: weakref.ref(x),
        lambda: x.unbind(0)[0],
    ]
    for other in others:
        held = other()
        # The lambdas' closure is a cell: not a reference of its own, but one that the count must not miss.
        assert memory_of_one(x) == 0, other
        del held
        assert memory_of_one(x) == x.data_ptr()
    assert memory_of_one(torch.zeros(10)) == 0
    assert memory_of_one(torch.zeros(LENGTH).to_sparse()) == 0
