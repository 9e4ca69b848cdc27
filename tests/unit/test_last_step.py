"""Where all ranks stop for a last checkpoint."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rallypoint.elastic.checkpointing.last_step import LastStep, is_last


class Notes:
    """A board that all ranks share."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}

    def post(self, key: str, note: bytes) -> None:
        self.notes[key] = note

    def drop(self, key: str) -> None:
        del self.notes[key]

    def peek(self, key: str) -> bytes | None:
        return self.notes.get(key)

    def await_note(self, key: str, timeout: float) -> bytes:
        return self.notes[key]


def test_it_is_behind_all_places() -> None:
    assert is_last(4, [3, 2, 3])
    assert not is_last(3, [3, 2, 3])
    assert not is_last(9, [3, None, 3])


def test_alone_it_is_here() -> None:
    assert LastStep(None, 0, 1).is_here(0)


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.lists(st.integers(1, 3), min_size=20, max_size=20),
    st.randoms(),
)
def test_all_ranks_stop_at_the_same_boundary(
    told: list[int], bodies: list[int], order: object
) -> None:
    """Ranks pass the boundaries in any order, but none gets a whole body ahead of another."""
    notes, size = Notes(), len(told)
    ranks = [LastStep(notes, rank, size) for rank in range(size)]
    stopped: dict[int, int] = {}
    steps = 0
    for number, body in enumerate(bodies):
        turn = list(range(size))
        order.shuffle(turn)  # type: ignore[attr-defined]
        for rank in turn:
            if number >= told[rank] and ranks[rank].is_here(steps):
                stopped[rank] = steps
        if stopped:
            break
        steps += body
    assert stopped == dict.fromkeys(range(size), steps)
    assert number == max(told) + 1
