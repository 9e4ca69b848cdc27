"""Whether a worker died because /dev/shm was full."""

from __future__ import annotations

import signal

import pytest

from rallypoint.launch.output.shm_space import Space, explain, read


MIB = 1 << 20


@pytest.mark.parametrize(
    ("number", "space", "said"),
    [
        (signal.SIGBUS, Space(64 * MIB, 0), "/dev/shm is full; it has 64 MiB"),
        (signal.SIGBUS, Space(9000 * MIB, MIB - 1), "/dev/shm is full; it has 9000 MiB"),
        (
            signal.SIGBUS,
            Space(64 * MIB, 64 * MIB),
            "/dev/shm may have been full; it has only 64 MiB",
        ),
        (signal.SIGBUS, Space(9000 * MIB, 4000 * MIB), None),
        (signal.SIGBUS, Space(0, 0), None),
        (signal.SIGBUS, None, None),
        (signal.SIGSEGV, Space(64 * MIB, 0), None),
        (None, Space(64 * MIB, 0), None),
    ],
)
def test_a_bus_error_is_explained_by_what_is_left(
    number: int | None, space: Space | None, said: str | None
) -> None:
    found = explain(number, space)
    assert (found and found.partition(" (docker run --shm-size")[0]) == said


def test_the_space_of_this_machine_is_read() -> None:
    space = read()
    assert space is not None and 0 <= space.free <= space.total
