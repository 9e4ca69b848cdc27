"""NumPy's dtypes under an allow-list: all real ones arrive unchanged, and none arrives that NumPy would not make."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rallypoint.errors import NotAllowed
from rallypoint.rpc.serialization import payload
from rallypoint.rpc.serialization.allowlist import AllowList


LIST = AllowList((), None, exported=True)
POINT = np.dtype([("x", "<f4"), ("y", ">i2", (2, 3)), ("name", "S5")])
DTYPES = [
    *(
        np.dtype(each)
        for each in ("f8", ">f8", "<i4", ">u2", "?", "c16", "S5", "U7", "V8", "O", "f2")
    ),
    *(np.dtype(each) for each in ("M8[ns]", "M8[25s]", ">m8[D]", "m8", "M8")),
    POINT,
    np.dtype([("a", POINT), ("b", "O"), ("c", "M8[us]")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [4, 16], "itemsize": 40}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 4}),
    np.dtype([(("a title", "a"), "i4"), ("b", "f8")]),
    np.dtype(("f4", (2, 2))),
    np.dtype("f8", metadata={"unit": "m"}),
]


def restored(data: bytes) -> Any:
    return payload.loads(data, allowed=LIST)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_arrive_as_they_are(dtype: np.dtype[Any]) -> None:
    found, again = restored(pickle.dumps((dtype, dtype), 5))
    assert found is again
    assert (found, found.type, found.flags, found.alignment) == (
        dtype,
        dtype.type,
        dtype.flags,
        dtype.alignment,
    )
    assert (found.str, found.isalignedstruct, found.hasobject) == (
        dtype.str,
        dtype.isalignedstruct,
        dtype.hasobject,
    )
    assert dict(found.metadata or {}) == dict(dtype.metadata or {})
    assert found.fields == dtype.fields
    if dtype.subdtype is None and not dtype.hasobject:
        array = np.zeros(3, dtype)
        data = pickle.dumps(array, 5)
        same = restored(data)
        assert same.dtype == pickle.loads(data).dtype
        assert same.tobytes() == array.tobytes()


def name(text: str) -> bytes:
    module, _, attribute = text.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def value(given: Any) -> bytes:
    return pickle.dumps(given, 2)[2:-1]


V8 = name("numpy.dtype") + value(("V8", False, True)) + b"R"
OVER = (3, "|", None, ("f", "g"), {"f": (np.dtype("O"), 0), "g": (np.dtype("<i8"), 0)}, 8, 8, 63)
HIDDEN = (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 8, 0)


def test_a_field_over_an_object_is_refused() -> None:
    with pytest.raises(NotAllowed, match="a dtype that NumPy would not make"):
        restored(b"\x80\x02" + V8 + value(OVER) + b"b.")


def test_flags_are_not_believed() -> None:
    found = restored(b"\x80\x02" + V8 + value(HIDDEN) + b"b.")
    assert found.hasobject
    assert found == np.dtype([("f", "O")])


def test_a_dtype_that_an_array_has_is_not_changed() -> None:
    """It is filled a second time, after an array has been made from bytes with it."""
    what = name("numpy.ndarray") + b"K\x00\x85C\x01b\x87"
    make = name("numpy._core.multiarray._reconstruct") + what + b"R"
    # The array's state is (1, (1,), dtype 0 of the memo, False, bytes); then the dtype is built again.
    state = b"(K\x01K\x01\x85h\x00\x89C\x08" + b"A" * 8 + b"t"
    message = (
        b"\x80\x02"
        + V8
        + b"q\x00"
        + b"0"
        + make
        + state
        + b"b"
        + b"h\x00"
        + value(HIDDEN)
        + b"b\x86."
    )
    array, dtype = restored(message)
    assert array.dtype == np.dtype("V8")
    assert not array.dtype.hasobject
    assert array.tobytes() == b"A" * 8
    assert dtype.hasobject


@pytest.mark.parametrize(
    "state",
    [
        (2, "|", None, None, None, -1, -1, 0),
        (3, "x", None, None, None, -1, -1, 0),
        (3, "|", None, None, None, 4096, 1, 0),
        (3, "|", None, ("f",), {}, 8, 1, 0),
        (3, "|", None, ("f",), {"f": ("O", -8)}, 8, 1, 0),
        (3, "|", (np.dtype("O"), (-1,)), None, None, 8, 1, 0),
        (4, "<", None, None, None, -1, -1, 0, (None, (b"parsec", 1, 1, 1))),
        None,
        (),
        "x",
    ],
    ids=str,
)
def test_what_is_no_dtype_is_refused(state: Any) -> None:
    made = V8 if state is None or len(state) < 9 else V8.replace(b"V8", b"M8")
    with pytest.raises(NotAllowed):
        restored(b"\x80\x02" + made + value(state) + b"b.")
