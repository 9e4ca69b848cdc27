"""Arrays, bytes and other large pieces of a message travel apart from its pickle, there and back."""

import array
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rallypoint.errors import NotAllowed
from rallypoint.rpc.serialization import out_of_band
from rallypoint.rpc.serialization.allowlist import AllowList
from rallypoint.rpc.serialization.payload import TooSlow, dumps, dumps_call, loads, loads_call


LARGE = out_of_band.LEAST_CUT


class Tagged(np.ndarray):
    """A user's own class."""


def there(value, *, allowed=None, by_value=False):
    """What arrives, how many buffers it came in, and how long the pickle was."""
    payload, tensors = dumps(value, by_value=by_value)
    buffers = [memoryview(bytearray(each)) for each in tensors.buffers]
    return loads(payload, buffers, allowed=allowed), len(buffers), len(payload)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return (
            type(a) is type(b)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and (a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes())
        )
    if isinstance(a, memoryview):
        return type(b) is memoryview and (a.format, a.shape, a.readonly, a.tolist()) == (
            b.format,
            b.shape,
            b.readonly,
            b.tolist(),
        )
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(type(a) is type(b) and a == b)


SIZES = st.sampled_from([0, 1, 100, 16_384, 70_000, LARGE - 1, LARGE, LARGE + 1])
LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.builds(lambda n: bytes([n % 251]) * n, SIZES),
    st.builds(lambda n: bytearray([n % 251]) * n, SIZES),
    st.builds(lambda n: "ä" * n, SIZES),
    st.builds(lambda n: np.arange(n, dtype=np.uint16), SIZES),
    st.builds(lambda n: memoryview(bytearray(n)), SIZES),
    st.builds(lambda n: torch.arange(n).tolist(), st.integers(0, 9)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(VALUES)
def test_everything_arrives_as_it_was(value) -> None:
    assert same(value, there(value)[0])


@pytest.mark.parametrize("by_value", [False, True])
def test_large_pieces_are_not_in_the_pickle(by_value: bool) -> None:
    value = {
        "array": np.zeros(LARGE),
        "bytes": bytes(LARGE),
        "bytearray": bytearray(LARGE),
        "view": memoryview(bytes(LARGE)),
        "text": "x" * LARGE,
        "machine words": array.array("d", bytes(LARGE)),
        "tensor": torch.zeros(LARGE),
    }
    found, buffers, length = there(value, by_value=by_value)
    assert buffers == len(value)
    assert length < 2000
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    assert same(value, found)


def test_a_call_with_large_bytes_alone_takes_the_same_way() -> None:
    payload, tensors = dumps_call(len, (bytes(LARGE), "a"), None)
    assert tensors is not None and len(payload) < 200
    assert loads(payload, tensors.buffers)[1] == (bytes(LARGE), "a")
    small, none = dumps_call(same, (b"few", 1), None)
    assert none is None and loads_call(small, 0)[1] == (b"few", 1)


@pytest.mark.parametrize(
    "made",
    [
        np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
        np.arange(60_000.0).reshape(200, 300)[::2, ::3],
        np.zeros((0, 3)),
        np.array(5.0),
        np.zeros(30_000, dtype=[("a", "i4"), ("b", "f8", (2,))]),
        np.array([{"x": 1}, None] * 20_000, dtype=object),
        np.array(["ab", "c"] * 20_000),
        np.arange(60_000).astype(">i8"),
        np.arange(60_000).astype("M8[s]"),
        np.ma.masked_array(np.arange(60_000.0), mask=np.arange(60_000) % 2),
        np.zeros((200, 300)).view(Tagged),
        np.zeros(30_000, dtype=[("a", "i4")]).view(np.recarray),
    ],
    ids=lambda made: f"{type(made).__name__} {made.dtype} {made.shape}"[:40],
)
def test_arrays_of_every_kind(made) -> None:
    found, _, _ = there(made)
    assert type(found) is type(made) and found.dtype == made.dtype and found.shape == made.shape
    assert np.array_equal(np.asarray(found), np.asarray(made))
    assert found.flags.f_contiguous == made.flags.f_contiguous or not made.flags.forc


def test_what_was_read_only_is_and_what_was_not_is_not() -> None:
    writable, fixed = np.zeros(LARGE), np.zeros(LARGE)
    fixed.flags.writeable = False
    one, two = there((writable, fixed))[0]
    assert one.flags.writeable and not two.flags.writeable
    one[0] = 1
    both = there([memoryview(bytearray(LARGE)), memoryview(bytes(LARGE))])[0]
    assert [each.readonly for each in both] == [False, True]


def test_what_is_one_object_stays_one() -> None:
    one, data = np.zeros(LARGE), bytearray(LARGE)
    found, buffers, _ = there([one, data, one, data])
    assert buffers == 2
    assert found[0] is found[2] and found[1] is found[3]


def test_views_of_memory() -> None:
    grid = memoryview(bytearray(range(24))).cast("B", (2, 3, 4))
    spread = memoryview(bytes(range(100)))[::3]
    assert same([grid, spread], [there(grid)[0], there(spread)[0]])
    floats = memoryview(array.array("f", [1.5] * LARGE))
    assert same(floats, there(floats)[0])
    with pytest.raises(TypeError, match=r"a memoryview of format 'T\{.*cast\('B'\)"):
        dumps(memoryview(np.zeros(4, dtype=[("a", "i4"), ("b", "f4")])))


class Sheet:
    """Pickles with its own buffer, as pandas' frames do."""

    def __init__(self, cells: bytearray) -> None:
        self.cells = cells

    def __reduce_ex__(self, protocol: int):
        return Sheet, (pickle.PickleBuffer(self.cells),)


def test_classes_with_buffers_of_their_own() -> None:
    found, buffers, length = there(Sheet(bytearray(b"ab") * LARGE))
    assert buffers == 1 and length < 200
    assert bytes(found.cells) == b"ab" * LARGE


def test_thousands_of_arrays_go_in_one_message() -> None:
    made = [np.full(2_100, number) for number in range(out_of_band.MOST_BUFFERS + 100)]
    found, buffers, _ = there(made)
    assert buffers <= out_of_band.MOST_BUFFERS
    assert all(np.array_equal(a, b) for a, b in zip(made, found, strict=True))


def test_an_allow_list_holds() -> None:
    data = [bytes(LARGE), bytearray(LARGE), memoryview(bytes(LARGE))]
    assert same(data, there(data, allowed=AllowList(()))[0])
    for each in (
        np.zeros(LARGE),
        np.arange(6.0).reshape(2, 3).T,
        np.float32(3),
        np.array(["a", None], dtype=object),
        np.zeros(3, dtype=[("a", "f8"), ("b", "i4")]),
    ):
        assert same(each, there(each, allowed=AllowList(()))[0])
    with pytest.raises(NotAllowed, match="numpy"):
        there(np.linspace, allowed=AllowList(()))
    assert there(np.linspace, allowed=AllowList(("numpy",)))[0] is np.linspace


@given(st.binary(max_size=60))
def test_a_damaged_table_is_an_error_and_nothing_else(damage: bytes) -> None:
    with pytest.raises(
        (NotAllowed, pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError)
    ):
        out_of_band.load(b"\x01" + damage + b"\x00", [bytearray(8)])


def test_a_message_that_is_not_pickled_in_time_is_given_up() -> None:
    floats = [float(each) for each in range(1_000_000)]
    with pytest.raises(TooSlow):
        dumps((floats,), until=time.monotonic())
    assert dumps((1,), until=time.monotonic() + 60.0)[0]
