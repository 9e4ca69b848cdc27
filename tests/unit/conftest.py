"""Held over every unit test: what it opens and starts has ended when it ends."""

from collections.abc import Iterator

import pytest

from rallypoint.testing import no_leaks


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with no_leaks(patience=60):
        yield
