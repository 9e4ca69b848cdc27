"""While a group forms, one request finds the addresses of all ranks; what was found is not requested again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rallypoint.elastic.communication.forming_store import FormingStore


class Asked:
    """A store that remembers what it was asked for."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: list[list[str]] = []

    def set(self, key: str, value: bytes) -> None:
        self.held[key] = value

    def get(self, key: str, timeout: float) -> bytes:
        self.asked.append([key])
        return self.held[key]

    def get_filled(self, keys: Sequence[str]) -> list[bytes | None]:
        self.asked.append(list(keys))
        return [self.held.get(key) for key in keys]


def forming(size: int = 4) -> tuple[Asked, Any]:
    store = Asked()
    formed = FormingStore(store)  # type: ignore[arg-type]
    formed.expect("a/0/1/", size)
    return store, formed


def test_all_addresses_come_with_the_first() -> None:
    store, formed = forming()
    store.held = {f"a/0/1/0/{rank}": b"%d" % rank for rank in range(4)}
    for rank in range(4):
        assert formed.get_many([f"a/0/1/0/{rank}"]) == [b"%d" % rank]
        assert formed.get(f"a/0/1/0/{rank}", 1.0) == b"%d" % rank
    assert store.asked == [[f"a/0/1/0/{rank}" for rank in range(4)]]


def test_one_that_is_late_is_waited_for_alone() -> None:
    store, formed = forming()
    formed.set("a/0/1/0/0", b"own")
    store.held["a/0/1/0/2"] = b"two"
    assert formed.get_many(["a/0/1/0/0"]) == [b"own"]
    assert formed.get_many(["a/0/1/0/1"]) == [None]
    store.held |= {"a/0/1/0/1": b"one", "a/0/1/0/3": b"three"}
    assert formed.get("a/0/1/0/1", 1.0) == b"one"
    assert formed.get_many(["a/0/1/0/1", "a/0/1/0/2"]) == [b"one", b"two"]
    assert formed.get_many(["a/0/1/0/3"]) == [b"three"]
    assert store.asked == [
        [f"a/0/1/0/{rank}" for rank in (1, 2, 3)],
        ["a/0/1/0/1"],
        ["a/0/1/0/3"],
    ]


def test_other_names_are_found_too() -> None:
    store, formed = forming()
    store.held = {"a/0/1/name": b"x", "elsewhere/0": b"y"}
    assert formed.get_many(["a/0/1/name"]) == [b"x"]
    assert formed.get_many(["elsewhere/0"]) == [b"y"]
    assert store.asked == [["a/0/1/name"], ["elsewhere/0"]]


def test_nothing_stays_of_a_group_that_is_formed() -> None:
    store, formed = forming()
    store.held["a/0/1/0/0"] = b"old"
    assert formed.get_many(["a/0/1/0/0"]) == [b"old"]
    formed.forget("a/0/1/")
    store.held["a/0/1/0/0"] = b"new"
    assert formed.get_many(["a/0/1/0/0"]) == [b"new"]
