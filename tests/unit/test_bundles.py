"""Small tensors travel in one message; what arrives is what was sent, whatever its type and layout."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.elastic.state import bundles
from rallypoint.elastic.state.bundles import MOST, SMALL, bundled


sizes = st.lists(st.one_of(st.integers(0, 64), st.integers(0, SMALL), st.integers(SMALL, MOST * 2)))


@given(sizes)
def test_each_tensor_that_is_not_empty_travels_once(sizes: list[int]) -> None:
    found = [index for message in bundled(sizes) for index in message]
    assert sorted(found) == [index for index, size in enumerate(sizes) if size]


@given(sizes)
def test_large_ones_travel_alone_and_small_ones_in_few_messages(sizes: list[int]) -> None:
    messages = bundled(sizes)
    shared = [each for each in messages if sizes[each[0]] <= SMALL]
    assert all(len(each) == 1 for each in messages if each not in shared)
    assert all(sum(sizes[index] for index in each) <= MOST for each in shared)
    # Each but the last is so full that another small one might not have fit.
    assert all(sum(sizes[index] + 15 for index in each) > MOST - SMALL - 15 for each in shared[:-1])


class Group:
    """Whatever is sent goes to whoever receives."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send_now(self, tensor: torch.Tensor, *to: int) -> None:
        assert tensor.is_contiguous()
        self.sent.append(tensor.clone())

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        sent = self.sent.pop(0)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(sent)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("count", [1, 3])
def test_all_kinds_arrive(count: int) -> None:
    torch.manual_seed(0)
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn]
    kinds += [torch.float32, torch.float64, torch.complex64, torch.complex128]
    tensors = [torch.randn(3, 5).to(kind) for kind in kinds]
    tensors += [
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.randn(4, 6).T,
        torch.randn(1, 9)[:, ::2],
    ]
    tensors += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    tensors += [torch.randn(300, 300), torch.randn(300, 301).T, torch.randn(2, requires_grad=True)]
    tensors *= count
    group: Any = Group()
    assert bundles.send(tensors, group, [1]) == sum(each.nbytes for each in tensors)
    assert len(group.sent) == 2 * count + 1
    places = [torch.zeros_like(each) for each in tensors]
    places[-1].requires_grad_(True)
    with torch.no_grad():
        bundles.receive(places, group, 0)
    assert not group.sent
    for place, each in zip(places, tensors, strict=True):
        assert torch.equal(_bits(place), _bits(each))
