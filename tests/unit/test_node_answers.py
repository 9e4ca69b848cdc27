"""Answers of nodes as records."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.launch.coordination import node_answers
from rallypoint.launch.coordination.interface import LoneNode, RoundReady
from rallypoint.launch.watching.job_questions import JobQuestions


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


STACK = {
    "rank": 1,
    "pid": 7,
    "name": "",
    "why": "",
    "host": "h",
    "threads": [{"name": "", "frames": [{"file": "a.py", "line": 3, "function": "f"}]}],
}
USED = {
    "rank": 1,
    "pid": 7,
    "host": "h",
    "state": "S",
    "collectives": None,
    **dict.fromkeys(("cpu", "memory", "threads", "children", "read", "written", "at"), 1.0),
}


def test_records_of_workers_are_taken() -> None:
    assert node_answers.processes({"processes": [STACK, USED]}) == [STACK, USED]


@given(st.data())
def test_a_record_with_anything_else_in_it_is_left_out(data: st.DataObject) -> None:
    """Another node may run another version."""
    whole = data.draw(st.sampled_from([STACK, USED]))
    key = data.draw(st.sampled_from(sorted(whole)))
    if data.draw(st.booleans()):
        broken = {name: value for name, value in whole.items() if name != key}
        if key == "collectives":
            return
    else:
        broken = {**whole, key: {"nothing": 1}}
    assert node_answers.processes({"processes": [broken, 3, None]}) == []


@pytest.mark.parametrize("body", [None, {}, {"processes": 3}, {"processes": {"a": 1}}])
def test_an_answer_without_records_has_none(body: dict[str, object] | None) -> None:
    assert node_answers.processes(body) == []


STATUS = {
    "id": "llm",
    "pid": 7,
    "host": "h",
    "seconds": 1.5,
    "state": "running",
    "target": "train.py",
    "args": [],
    "node_rank": 1,
    "nodes": 2,
    "world_size": 8,
    "generation": 0,
    "restarts": 0,
    "max_restarts": 3,
    "workers": [{"rank": 1, "state": "running"}],
    "spares": [],
    "progress": None,
}


def test_what_a_node_says_of_its_job_is_taken() -> None:
    assert node_answers.status({"status": STATUS}) == STATUS
    before = {**STATUS, "node_rank": None, "generation": None}  # the first round
    assert node_answers.status({"status": before}) == before


@given(st.data())
def test_what_a_node_says_of_its_job_in_another_form_is_left_out(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(STATUS)))
    value = data.draw(st.sampled_from([{"nothing": 1}, [3], b"", 1j]))
    if (key, value) != ("args", [3]):
        assert node_answers.status({"status": {**STATUS, key: value}}) is None
    assert node_answers.status({"status": [STATUS]}) is node_answers.status(None) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"ended": [3, 4]}, {3, 4}),
        ({"ended": [3, "4", True, None]}, {3}),
        ({"ended": 3}, set()),
        ({}, set()),
        (None, set()),
    ],
)
def test_who_has_ended_is_read_with_care(
    body: dict[str, object] | None, expected: set[int]
) -> None:
    assert node_answers.ended(body) == expected


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [([], None), ([0], {0}), ([3], {0}), ([4], {1}), ([11], {3}), ([0, 5, 4, 9], {0, 1, 3})],
)
def test_only_the_nodes_of_the_ranks_that_are_meant_are_asked(
    ranks: list[int], nodes: set[int] | None
) -> None:
    asked: list[Any] = []

    class Others(LoneNode):
        def ask_nodes(self, question: Any, patience: float, nodes: Any = None) -> Any:
            asked.append(nodes)
            return {}

    ready = RoundReady(
        generation=0,
        node_rank=0,
        workers_of_nodes=(4, 4, 1, 3),
        master_addr="",
        master_port=0,
    )
    others = Others()
    questions = JobQuestions(others, dict, dict, dict)
    questions.logs({"ask": "logs", "ranks": ranks}, ready)()
    assert asked == [nodes]
    others.close("")
