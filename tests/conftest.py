"""Held over every test: what a test changes in its own process, it puts back."""

import os
from collections.abc import Iterator

import pytest


# pytest's own note of where it is.
_EXPECTED = {"PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} - _EXPECTED
    for name in changed:  # so that one leak is one failure
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left the environment changed: {sorted(changed)}"
