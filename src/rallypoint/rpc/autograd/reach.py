"""What a graph of torch's autograd depends on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .transfer import RECEIVED


_leaf = torch.empty(0, device="cpu", requires_grad=True)
_ACCUMULATE: Any = type(_leaf.view_as(_leaf).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Reached(NamedTuple):
    """An input of a local graph.

    Args:
        target: where its gradient is collected.
        leaf: the leaf; None for a received tensor.
        context_id: a received tensor's context.
        source: the worker that sent a received tensor, and the tensor's number there.
        needs: the outputs that depend on it.
    """

    target: GradientEdge
    leaf: Tensor | None
    context_id: int | None
    source: tuple[int, int] | None
    needs: list[Hashable]


def reach(outputs: Mapping[Hashable, GradientEdge]) -> dict[Hashable, Reached]:
    """The leaves and received tensors that outputs depend on."""
    # Bit k of a node's mask: output k depends on it.
    keys = list(outputs)
    masks: dict[Any, int] = {}
    for bit, key in enumerate(keys):
        node = outputs[key].node
        masks[node] = masks.get(node, 0) | 1 << bit
    found: dict[Hashable, Reached] = {}
    order, following = _downwards(list(masks))
    for node in reversed(order):
        mask = masks[node]
        below = following[node]
        kind = type(node)
        if kind is RECEIVED:
            context_id, *source = node.source
            one = Reached(GradientEdge(node, 0), None, context_id, tuple(source), _of(keys, mask))
            found[node.source] = one
        elif kind is _ACCUMULATE:
            one = Reached(GradientEdge(node, 0), node.variable, None, None, _of(keys, mask))
            found[id(node.variable)] = one
        else:
            for each in below:
                masks[each] = masks.get(each, 0) | mask
    return found


def _of(keys: list[Hashable], mask: int) -> list[Hashable]:
    if len(keys) == 1:
        return keys
    needs = []
    while mask:
        bit = mask & -mask
        needs.append(keys[bit.bit_length() - 1])
        mask ^= bit
    return needs


def _downwards(starts: list[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
    """All nodes from ``starts`` on down, each after those that follow it; and for each node, those that follow it."""
    order: list[Any] = []
    following: dict[Any, list[Any]] = {}
    for start in starts:
        if start in following:
            continue
        below = following[start] = _following(start)
        stack = [(start, iter(below))]
        while stack:
            node, left = stack[-1]
            for each in left:
                if each not in following:
                    below = following[each] = _following(each)
                    stack.append((each, iter(below)))
                    break
            else:
                stack.pop()
                order.append(node)
    return order, following


def _following(node: Any) -> list[Any]:
    if type(node) is RECEIVED:
        return []
    return [each for each, _ in node.next_functions if each is not None]
