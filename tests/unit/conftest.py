"""Applies to every unit test: what it opens and starts has ended when it ends."""

import importlib.util
from collections.abc import Iterator

import pytest

from rallypoint.testing import no_leaks


_HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    if not _HAS_TORCH:  # tests that stop for lack of torch leak
        yield
        return
    with no_leaks(patience=60):
        yield
