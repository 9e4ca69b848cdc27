"""``session.local``: small values that only one rank has, kept the way its random generators are."""

from __future__ import annotations

import json
from typing import Any, Self

from rallypoint.errors import ElasticError


# Bytes of all values as JSON. Several states of a step are kept, each with its own values.
LIMIT = 16 * 1024
_PLAIN = (type(None), bool, int, float, str)


class LocalValues(dict[str, Any]):
    """A dict whose values survive the loss of their rank: numbers, strings, lists and dicts of these.

    A process that takes over the rank has the values as they were at the step where it continues. In a rank that
    repeats a step, they are reset to what they were at its beginning.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        check(value, f"session.local[{key!r}]", key)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def pack(self) -> bytes:
        """As JSON; empty if there are none.

        Raises:
            ElasticError: they are too large, or a value now holds something that JSON does not preserve.
        """
        if not self:
            return b""
        for key, value in self.items():
            check(value, f"session.local[{key!r}]", key)
        data = json.dumps(self, separators=(",", ":")).encode()
        if len(data) > LIMIT:
            largest = max(self, key=lambda key: len(json.dumps(self[key])))
            raise ElasticError(
                f"session.local holds {len(data):,} bytes, at most {LIMIT:,} are kept with each step; the largest value is"
                f" {largest!r}. If it is the same on all ranks, give the session an object with state_dict and load_state_dict that holds it"
            )
        return data

    def restore(self, data: bytes) -> None:
        """Make these values the current ones."""
        super().clear()
        super().update(json.loads(data) if data else {})


def check(value: Any, name: str, key: object = "") -> None:
    """Check that JSON preserves a value as it is.

    Raises:
        ElasticError: it does not.
    """
    if not isinstance(key, str):
        raise ElasticError(f"{name}: the key is a {type(key).__name__}, expected a str")
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is list:
        for number, each in enumerate(value):
            check(each, f"{name}[{number}]")
    elif kind is dict:
        for inner, each in value.items():
            check(each, f"{name}[{inner!r}]", inner)
    else:
        raise ElasticError(
            f"{name} is a {kind.__name__}, expected None, a bool, an int, a float, a str, or a list or dict of these"
        )
