"""The places of a store that a round's plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rallypoint.rendezvous.home import LastRound

from .places import Place


def standbys(last: LastRound | None) -> list[Place]:
    """Where nodes of the round stand by to serve the store, in the order in which they do."""
    return [place for each in _listed(last) if (place := _place(each, "port")) is not None]


def served_at(last: LastRound | None) -> Place | None:
    """Where the plan's store was, if the plan says so: not all nodes that know the plan were connected there.

    None on the node that served it: if it has lost its store, another node's may be there by now.
    """
    for each in _listed(last):
        if last is not None and last.node_id != each.get("id") == last.plan.get("store"):
            place = _place(each, "serves_at")
            return None if place is None else replace(place, node_id="")
    return None


def _listed(last: LastRound | None) -> list[dict[str, Any]]:
    listed = None if last is None else last.plan.get("standbys")
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _place(told: Mapping[str, Any], port_key: str) -> Place | None:
    addr, port, watch = told.get("addr"), told.get(port_key), told.get("watch")
    if not isinstance(addr, str) or not isinstance(port, int) or not 0 < port < 65536:
        return None
    return Place(addr, port, str(told.get("id")), watch if isinstance(watch, int) else 0)
