"""Defaults of a rendezvous, and the options that all backends share. Pure."""

from __future__ import annotations

from .option import Option


# torchrun's defaults (torch/distributed/run.py, 2.13), so that a command line means the same here. Times are in seconds.
JOIN_TIMEOUT, LAST_CALL_TIMEOUT = 600.0, 30.0
RENDEZVOUS_PORT, MASTER_PORT = 29400, 29500
# torchelastic's defaults, used if only one of the two is given.
KEEP_ALIVE_INTERVAL, KEEP_ALIVE_MAX_ATTEMPT = 5.0, 3
# Our own: torchrun notices a silent node after 15 s and does not act on it.
LEASE = 5.0
READ_TIMEOUT = 60.0

# What `rally run` accepts in --rdzv-conf with any backend; aliases are torchrun's names.
COMMON_OPTIONS = (
    Option(
        name="join_timeout",
        kind=float,
        help=f"seconds to wait for all nodes [{JOIN_TIMEOUT:g}]",
        aliases=("timeout",),
    ),
    Option(
        name="last_call_timeout",
        kind=float,
        help=f"seconds to wait for more than MIN nodes [{LAST_CALL_TIMEOUT:g}]",
        aliases=("last_call",),
    ),
    Option(
        name="lease",
        kind=float,
        help=f"seconds of silence until a node counts as lost [{LEASE:g}]",
        aliases=("heartbeat_timeout",),
    ),
    Option(name="is_host", kind=bool, help="whether this node serves the store"),
    Option(name="label", help="rack or switch: nodes with equal labels get adjacent ranks"),
    Option(
        name="split_brain_guard",
        kind=bool,
        help="a minority that is cut off stops [true]",
    ),
)
