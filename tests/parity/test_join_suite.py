"""A quick sample of torch's own tests of uneven inputs, run against our Join.

All of it: ``python tests/parity/join_suite.py``.
"""

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from parity.join_suite import (
    ABSENT,
    MODES,
    OURS,
    SUITE,
    TESTS,
    WORLD_SIZE,
    markdown,
    prepare,
    run_test,
)
from rallypoint.testing import Ranks


pytestmark = pytest.mark.parity

# Small, and each of a kind of its own.
SAMPLE = [
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_join_respects_forward_sync_buffers_false",
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(WORLD_SIZE)) as found:
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("test", SAMPLE)
def test_torchs_own_test_passes(ranks: Ranks, test: str) -> None:
    prepare(ranks)
    for mode in OURS:
        assert ranks.run(run_test, test, mode, limit=200)[0]["passed"], mode


def test_every_test_of_the_wheel_is_run() -> None:
    source = Path(importlib.util.find_spec(SUITE).origin).read_text("utf-8")  # type: ignore[union-attr, arg-type]
    named = re.findall(r"def (test_\w*(?:uneven_input|_join_)\w*)\(", source)
    assert set(named) == set(TESTS)
    assert len(re.findall(r"with \w+\.join\(", source)) == 8


def test_the_table_names_every_mode_and_what_is_not_run() -> None:
    passed = {"result": "passed", "passed": 3, "left_out": 2, "seconds": 1.0}
    failed = {"result": "failed", "error": "ValueError: no", "seconds": 1.0}
    versions = {"torch": "2", "python": "3", "rallypoint": "0"}
    tests = {TESTS[0]: dict.fromkeys(OURS, passed) | {"torch": failed}}
    text = markdown({"versions": versions, "machine": "one", "tests": tests})
    assert text.count("passes (3 of 5 cases)") == len(OURS)
    assert "**failed**: ValueError: no" in text
    assert "Cases left out" in text
    assert all(mode in text for mode in MODES)
    assert all(what in text for what in ABSENT)
