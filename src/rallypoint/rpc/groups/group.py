"""The processes of an RPC group, as the store tells: static ones form together, dynamic ones come and go.

The store is c10d's (``torch.distributed.Store``) and the caller's: nothing here closes it. It is best given under a
``PrefixStore`` of the group's own. Keys::

    rpc/kind              "static" or "dynamic", the first member's
    rpc/rank/<rank>       static: that member's record, {"world_size", "member"}
    rpc/formed            static: the group that all have seen, or who gave up
    rpc/left/<rank>       static: a member's last words
    rpc/next              dynamic: the last number that was taken
    rpc/entry/<number>    dynamic: the journal (membership.py)
    rpc/outline           dynamic: an outline of a view, at most some 256 entries old
    rpc/gone/<rank>/<incarnation>   dynamic: somebody has reported this member lost
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rallypoint.errors import RpcError

from .group_store import Calls
from .member import Member


@runtime_checkable
class Group(Protocol):
    """What both kinds of groups are."""

    is_static: bool

    @property
    def me(self) -> Member: ...

    @property
    def epoch(self) -> int: ...

    def members(self) -> tuple[int, tuple[Member, ...]]:
        """The epoch, and who is in at it, by rank."""

    def find(self, key: str | int) -> Member:
        """The member of that name or rank.

        Raises:
            RpcError: there is none, in torch's words.
        """

    def last_words(self, member: Member) -> str | None:
        """Why a member has left or is taken for lost, or None if nothing is known of that."""

    def leave(self, reason: str = "") -> None:
        """Tell the others that this process goes, and why."""

    def close(self) -> None:
        """Give back what the group holds; a second call does nothing. The store stays the caller's."""


def agree_on_kind(calls: Calls, kind: bytes) -> None:
    held = calls.put_new("kind", kind)
    if held != kind:
        raise RpcError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
            f" This one is {kind.decode()}, the first was {held.decode(errors='replace')}; give all"
            " members the same world_size, or none"
        )


def no_destination(key: str | int, members: Sequence[Member]) -> RpcError:
    what = f"rank {key}" if isinstance(key, int) else repr(key)
    there = ", ".join(str(member) for member in members[:16]) or "nobody"
    more = f" and {len(members) - 16} more" if len(members) > 16 else ""
    return RpcError(f"could not find destination {what}; the group has {there}{more}")
