"""Losses that arrive after the next round has formed."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.backends.memory import MemoryStore
from rallypoint.rendezvous.departures import Departures
from rallypoint.rendezvous.liveness import Loss, Neighbour
from rallypoint.rendezvous.record_store import RecordStore
from rallypoint.rendezvous.records import Codec
from rallypoint.rendezvous.round_watch import RoundWatch


@pytest.mark.parametrize(("generation", "is_told"), [(0, False), (1, True)])
def test_a_loss_counts_only_in_the_round_in_which_the_node_was_watched(
    generation: int, is_told: bool
) -> None:
    told: list[Loss] = []
    departures = Departures()
    watch = RoundWatch(
        "me",
        60.0,
        departures,
        on_loss=told.append,
        on_store_lost=lambda _: None,
        on_waiting=lambda _: None,
    )
    records = RecordStore(MemoryStore(), Codec("job"))
    records.write("1/node/1", {"id": "other", "host": "there"})
    watch.watch(records, 1, 0, {"order": [0, 1]}, room=False, read=records.look)
    try:
        # As the pulse calls it; it may have been about to when the round formed.
        neighbour = Neighbour(node_id="other", rank=1, host="there", generation=generation)
        watch._heed_loss(Loss(neighbour, certain=False, reason="it was silent"))
    finally:
        watch.stop(leaving=False)
    assert [each.neighbour.node_id for each in told] == ["other"] * is_told
    assert departures.gone() == {"other"} if is_told else not departures.gone()
