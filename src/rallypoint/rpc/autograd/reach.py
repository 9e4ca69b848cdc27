"""What a graph of torch's autograd depends on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rallypoint.errors import RpcError

from .transfer import source_of


_leaf = torch.empty(0, requires_grad=True)
_ACCUMULATE: Any = type(_leaf.view_as(_leaf).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Reached(NamedTuple):
    """An input of a local graph.

    Args:
        target: where its gradient is collected.
        leaf: the leaf; None for a received tensor.
        source: of a received tensor, the worker that sent it and its number there.
        needs: the outputs that depend on it.
    """

    target: GradientEdge
    leaf: Tensor | None
    source: tuple[int, int] | None
    needs: list[Hashable]


def reach(outputs: Mapping[Hashable, GradientEdge], context_id: int) -> dict[Hashable, Reached]:
    """The leaves and received tensors that outputs depend on.

    Raises:
        RpcError: an output depends on a tensor that was received in another context.
    """
    # Bit k of a node's mask: output k depends on it.
    keys = list(outputs)
    masks: dict[Any, int] = {}
    for bit, key in enumerate(keys):
        node = outputs[key].node
        masks[node] = masks.get(node, 0) | 1 << bit
    found: dict[Hashable, Reached] = {}
    for node in _downwards(list(masks)):
        mask = masks[node]
        source = source_of(node)
        if source is None and type(node) is not _ACCUMULATE:
            for following, _ in node.next_functions:
                if following is not None:
                    masks[following] = masks.get(following, 0) | mask
            continue
        needs = [key for bit, key in enumerate(keys) if mask >> bit & 1]
        target = GradientEdge(node, 0)
        if source is None:
            found[id(node.variable)] = Reached(target, node.variable, None, needs)
        elif source[0] != context_id:
            raise RpcError(
                f"a gradient of context {context_id} would have to pass through a tensor that was received in context"
                f" {source[0]}: send the tensor again in this context, or use tensor.detach()"
            )
        else:
            found[source[1:]] = Reached(target, None, source[1:], needs)
    return found


def _downwards(starts: list[Any]) -> list[Any]:
    """All nodes below some, each before those that follow it."""
    order: list[Any] = []
    seen: set[Any] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(_following(start)))]
        while stack:
            node, left = stack[-1]
            for each in left:
                if each not in seen:
                    seen.add(each)
                    stack.append((each, iter(_following(each))))
                    break
            else:
                stack.pop()
                order.append(node)
    order.reverse()
    return order


def _following(node: Any) -> list[Any]:
    if source_of(node) is not None:
        return []
    return [each for each, _ in node.next_functions if each is not None]
