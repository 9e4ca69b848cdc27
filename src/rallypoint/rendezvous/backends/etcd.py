"""Nodes meet in an etcd cluster: :mod:`.etcd_store`."""

from __future__ import annotations

import math
from functools import partial

from rallypoint.rendezvous.backend import Backend, Meeting, Scheme
from rallypoint.rendezvous.end_mark import ENDED_FOR
from rallypoint.rendezvous.fixed_home import fixed_home
from rallypoint.rendezvous.home import Home
from rallypoint.rendezvous.option import Option


# How long a job's keys stay in etcd after its last node was seen (seconds), and so how long an outage may last.
TTL = 60
PREFIX = "rally"


def _home(meeting: Meeting) -> Home:
    from .etcd_store import EtcdStore

    endpoint, options = meeting.endpoint, meeting.options
    tls = endpoint.tls or options.get("protocol") == "https"
    above = options.get("prefix", PREFIX).strip("/")
    opened = partial(
        EtcdStore,
        endpoints=[f"https://{each}" if tls else str(each) for each in endpoint.hosts],
        prefix=f"{above}/{meeting.name}",
        ca_cert=options.get("ca"),
        cert=options.get("cert"),
        key=options.get("key"),
        user=options.get("user", endpoint.user),
        password=options.get("password", endpoint.password),
        ttl=options.get("ttl", max(TTL, math.ceil(3 * meeting.lease))),
    )
    opened().close()  # connects to nothing, but raises now if a setting cannot work
    return fixed_home(
        meeting,
        opened,
        clear=lambda store: store.delete_prefix(),
        # Below the prefix, since a user may be confined to it; it clashes with no job, because their names have no slash.
        open_ended=partial(opened, prefix=f"{above}/ended/{meeting.name}", ttl=ENDED_FOR),
    )


ETCD = Backend(
    name="etcd",
    help="an etcd cluster (pip install 'rallypoint[etcd]')",
    # torch's "etcd-v2" and "etcd" are two clients of etcd's v2 API. Servers have dropped it: both mean our client (v3).
    aliases=("etcd-v2",),
    schemes=(
        Scheme(
            name="etcd",
            example="etcd://node0:2379",
            default_port=2379,
            users=True,
            mistaken=("http",),
        ),
        Scheme(
            name="etcds",
            example="etcds://node0:2379",
            default_port=2379,
            users=True,
            tls=True,
            mistaken=("https",),
        ),
    ),
    # Aliases are torch's names.
    options=(
        Option(
            name="ca",
            help="file: the authority of the servers' certificates",
            aliases=("ca_cert",),
            tls=True,
        ),
        Option(name="cert", help="file: our certificate", aliases=("ssl_cert",), tls=True),
        Option(name="key", help="file: its key", aliases=("ssl_cert_key",), tls=True),
        Option(name="user", help="user name"),
        Option(name="password", help="the user's password"),
        Option(name="prefix", help=f"prefix of all keys [{PREFIX}]"),
        Option(name="protocol", help="https: as etcds://"),
        Option(name="ttl", kind=int, help=f"seconds that keys outlive the job's last node [{TTL}]"),
    ),
    home=_home,
)
