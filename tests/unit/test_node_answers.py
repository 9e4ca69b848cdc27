"""Answers of nodes as records."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given, strategies as st

from rallypoint.launch import node_answers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_an_answer_comes_back(body: dict[str, object]) -> None:
    assert node_answers.unpack(node_answers.pack(body)) == body


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"zlib": 3},
        {"zlib": "not base64!"},
        {"zlib": base64.b64encode(b"not compressed").decode()},
        {"zlib": base64.b64encode(zlib.compress(b"[1]")).decode()},
        {"zlib": base64.b64encode(zlib.compress(b"{")).decode()},
    ],
)
def test_anything_else_is_none(record: dict[str, object]) -> None:
    assert node_answers.unpack(record) is None


def test_an_answer_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    bomb = zlib.compress(b'{"a": "' + bytes(node_answers.MAX_ANSWER) + b'"}')
    assert node_answers.unpack({"zlib": base64.b64encode(bomb).decode()}) is None
