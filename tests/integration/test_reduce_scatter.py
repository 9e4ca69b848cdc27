"""A reduce-scatter made of all-reduces, beside torch's own over Gloo: the same to the bit, the same errors."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.elastic.communication import reduce_scatter
from rallypoint.testing import Ranks, run_ranks


OPERATIONS = ("SUM", "AVG", "MAX", "PRODUCT")
TYPES = (torch.float32, torch.bfloat16, torch.int64)


def every_form(
    group: Any, op: Any, dtype: torch.dtype, columns: int
) -> list[tuple[str, list[Any]]]:
    """By name, the arguments of each reduce-scatter of torch, the outputs first."""
    size = group.size()
    whole = (torch.randn(2 * size, columns) * 10).to(dtype)
    part = torch.zeros(2, columns, dtype=dtype)
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    pieces = [each.clone() for each in whole.chunk(size)]
    two = [whole, whole.flatten().flip(0)]
    return [
        ("reduce_scatter", [[part], [pieces], options]),
        ("reduce_scatter", [part, pieces, op, timedelta(seconds=30)]),
        ("_reduce_scatter_base", [part, whole, options]),
        ("reduce_scatter_single", [part, whole, options]),
        ("reduce_scatter_tensor_coalesced", [[part, part.flatten()], two, options]),
        ("reduce_scatter_single_coalesced", [[part, part.flatten()], two, options]),
    ]


def fresh(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return torch.zeros_like(outputs)
    return [torch.zeros_like(each) for each in outputs]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return all(map(torch.equal, first, second))


def reduce_scatters_are_torchs(op: str, columns: int) -> int:
    group: Any = dist.group.WORLD
    torch.manual_seed(group.rank())
    compared = 0
    for dtype in TYPES:
        if op == "AVG" and not dtype.is_floating_point:
            continue
        for name, args in every_form(group, getattr(dist.ReduceOp, op), dtype, columns):
            outputs, inputs, *options = args
            ours, before = fresh(outputs), [each.clone() for each in flat(inputs)]
            work = reduce_scatter.begun(
                group.allreduce, group.rank(), group.size(), (ours, inputs, *options)
            )
            assert work is not None
            work.wait(timedelta(seconds=30))
            assert work.is_completed()
            assert same(list(flat(inputs)), before), (name, "changed its inputs")
            theirs = fresh(outputs)
            getattr(group, name)(theirs, inputs, *options).wait()
            assert same(ours, theirs), (name, dtype)
            compared += 1
    return compared


def flat(inputs: Any) -> list[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return [one for each in inputs for one in flat(each)]


def test_results_are_torchs_to_the_bit() -> None:
    with contextlib.closing(Ranks(3)) as ranks:
        for op in OPERATIONS:
            for columns in (1, 501):
                compared = ranks.run(reduce_scatters_are_torchs, op, columns)
                assert min(compared) == max(compared) >= 12


def wrong_tensors_are_left_to_torch() -> list[str]:
    group: Any = dist.group.WORLD
    size, one, two = group.size(), torch.ones(1), torch.ones(2)
    wrong: list[tuple[str, Any, Any]] = [
        ("reduce_scatter_single", two, torch.ones(size)),
        ("reduce_scatter_single", torch.ones(1, dtype=torch.int64), torch.ones(size)),
        ("reduce_scatter_single", torch.ones(1, 2), torch.ones(2 * size)),
        ("reduce_scatter", [two], [[torch.ones(3)] * size]),
        ("reduce_scatter", [two], [[two]]),
        ("reduce_scatter", one, [one] * (size + 1)),
        ("reduce_scatter_tensor_coalesced", [], []),
        ("reduce_scatter_tensor_coalesced", [one], [torch.ones(size)] * 2),
    ]
    told = []
    for name, outputs, inputs in wrong:
        args = (outputs, inputs)
        assert reduce_scatter.begun(group.allreduce, group.rank(), size, args) is None, name
        try:
            getattr(group, name)(outputs, inputs)
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_wrong_tensors_are_left_to_torch_which_says_why() -> None:
    for told in run_ranks(wrong_tensors_are_left_to_torch, 2):
        assert len(told) == 8
        assert "invalid input tensor list size" in told[4]


def tensors_with_gradients_are_reduced() -> list[float]:
    group: Any = dist.group.WORLD
    given = torch.ones(2, requires_grad=True) * 3
    output = torch.zeros(1)
    with torch.inference_mode():
        within = torch.zeros(1)
        work = reduce_scatter.begun(group.allreduce, group.rank(), 2, (within, given))
        assert work is not None
        work.wait()
    work = reduce_scatter.begun(group.allreduce, group.rank(), 2, (output, given))
    assert work is not None
    work.wait()
    work.wait()  # once more does nothing
    assert not output.requires_grad
    return [*within.tolist(), *output.tolist()]


def test_nothing_is_recorded_for_gradients() -> None:
    assert run_ranks(tensors_with_gradients_are_reduced, 2) == [[6.0, 6.0]] * 2
