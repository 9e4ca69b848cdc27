"""How many collectives each worker of a session has begun, also as a record for the other nodes."""

from __future__ import annotations

from collections.abc import Mapping


# Rank -> group -> the collectives that it has begun there.
Tables = Mapping[int, Mapping[int, int]]


def to_json(tables: Tables) -> dict[str, dict[str, int]]:
    """The tables as a record."""
    return {
        str(rank): {str(group): count for group, count in table.items()}
        for rank, table in tables.items()
    }


def from_json(record: object) -> dict[int, dict[int, int]]:
    """The tables in another node's record; empty if the record cannot be read."""
    try:
        assert isinstance(record, dict)
        return {
            int(rank): {int(group): int(count) for group, count in table.items()}
            for rank, table in record.items()
        }
    except (AssertionError, AttributeError, TypeError, ValueError):
        return {}
