"""What both kinds of groups have in common: a static group forms once, a dynamic one can be joined and left.

The store is the caller's ``torch.distributed.Store``, which the caller also closes; preferably a ``PrefixStore`` for
this group alone. Keys::

    rpc/kind              "static" or "dynamic", as the first member says
    rpc/rank/<rank>       static: that member's record, {"world_size", "member"}
    rpc/formed            static: the group that all have seen, or the member that gave up
    rpc/left/<rank>       static: why a member has left
    rpc/next              dynamic: the highest number taken
    rpc/entry/<number>    dynamic: the journal (membership.py)
    rpc/outline           dynamic: an outline of a view, at most about 256 entries old
    rpc/gone/<rank>/<incarnation>   dynamic: a claim on reporting this member lost
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rallypoint.errors import RpcError

from .group_store import Calls
from .member import Member


@runtime_checkable
class Group(Protocol):
    """A group of either kind."""

    is_static: bool

    @property
    def me(self) -> Member: ...

    @property
    def epoch(self) -> int: ...

    def members(self) -> tuple[int, tuple[Member, ...]]:
        """The epoch, and the members at it, by rank."""

    def find(self, key: str | int) -> Member:
        """The member of that name or rank.

        Raises:
            RpcError: there is none, in torch's words.
        """

    def last_words(self, member: Member) -> str | None:
        """Why a member has left or was reported lost; None if it has not."""

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process leaves, and why."""

    def close(self) -> None:
        """Release the group's resources. Idempotent. Does not close the store."""


def agree_on_kind(calls: Calls, kind: bytes) -> None:
    held = calls.put_new("kind", kind)
    if held != kind:
        raise RpcError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
            f" This member is {kind.decode()}, the first one is {held.decode(errors='replace')}; give all"
            " members the same world_size, or none"
        )


def no_destination(key: str | int, members: Sequence[Member]) -> RpcError:
    what = f"rank {key}" if isinstance(key, int) else repr(key)
    there = ", ".join(str(member) for member in members[:16]) or "no members"
    more = f" and {len(members) - 16} more" if len(members) > 16 else ""
    return RpcError(f"could not find destination {what}; the group has {there}{more}")
