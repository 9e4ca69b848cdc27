"""Nodes meet at a store that one of them serves: :mod:`.tcp_home`."""

from __future__ import annotations

import logging
from typing import Any

from rallypoint.rendezvous.backend import Backend, Meeting, Scheme
from rallypoint.rendezvous.defaults import RENDEZVOUS_PORT
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.store import Store


_log = logging.getLogger(__name__)


def _home(meeting: Meeting) -> Home:
    from rallypoint.rendezvous.notes import Moved, age, is_news, to_lead_to, written
    from rallypoint.rendezvous.record_store import RecordStore
    from rallypoint.rendezvous.records import Codec

    from .tcp_home import TcpHome

    codec = Codec(meeting.run_id, meeting.secret)
    served_by: dict[str, Any] = {} if meeting.prepare is None else {"prepare": meeting.prepare}
    home = TcpHome(
        [(each.host, each.port) for each in meeting.endpoint.hosts],
        silence=meeting.lease,
        is_host=meeting.is_host,
        say=meeting.say or _log.info,
        bind=meeting.bind,
        option=meeting.flag,
        **served_by,
    )

    def leave_note(
        one: Store, other: Store, place: tuple[str, int], others: tuple[str, int] | None
    ) -> None:
        stores = [RecordStore(each, codec) for each in (one, other)]
        here, there = (age(*each.look(["head", "store"])) for each in stores)
        newer = to_lead_to(here, there)
        wrong, right = (stores[1], place) if newer == here else (stores[0], others)
        if newer is None or right is None:
            return
        note = Moved(*right, newer)
        wrong.improve("moved", lambda held: written(note) if is_news(note, held) else None)

    home.forward_with(leave_note)
    return home


TCP = Scheme(name="tcp", example=f"tcp://node0:{RENDEZVOUS_PORT}", default_port=RENDEZVOUS_PORT)

TCPSTORE = Backend(
    name="tcpstore",
    help="the first of these nodes serves the store; another one does if it is lost",
    aliases=("c10d", "tcp"),
    schemes=(TCP,),
    home=_home,
    served=True,
)

STATIC = Backend(
    name="static",
    help="node 0 serves the store; ranks are given by --node-rank",
    schemes=(TCP,),
    home=_home,
    served=True,
    given_ranks=True,
)
