"""A member of an RPC group: who it is and where it can be reached, as the others read it from the store.

The record is versioned JSON with limits; what others have written is checked in full before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Self

from rallypoint._core.host import same_host
from rallypoint.errors import ProtocolError, RpcError
from rallypoint.rpc.device_map import Device, NodeDevices


RECORD_VERSION: Final = 1
# Of a record's bytes. A record with 16 addresses and 64 device maps takes some 10 KiB.
MAX_RECORD: Final = 64 * 1024
# torch's: ids are 32-bit signed there.
MAX_ID: Final = 2**31 - 1
# torch's rule for names: what they consist of, and that they are shorter than this.
NAME: Final = "^[A-Za-z0-9-_:]*$"
NAME_BOUND: Final = 128
# Of host identities, addresses, versions.
MAX_TEXT: Final = 1024
MAX_ADDRESSES: Final = 64

_NAME = re.compile(r"[A-Za-z0-9\-_:]*")
_INCARNATION = re.compile("[0-9a-f]{8,64}")

Address = str | tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process of a group.

    Args:
        name: what it is called by; unique in the group.
        id: its rank; unique in the group.
        incarnation: random hex digits, which tell a process from the one before it that had its name.
        host: as :func:`rallypoint._core.host.host_identity` tells; empty: shares a host with nobody.
        pid: for people.
        addresses: by transport, a path or a host and port.
        devices: its devices and device maps.
        version: of the package that it runs.
        extra: what else the others should know, as JSON.

    Raises:
        RpcError: the name is none, in torch's words.
    """

    name: str
    id: int
    incarnation: str
    host: str = ""
    pid: int = 0
    addresses: Mapping[str, Address] = field(default_factory=dict, hash=False)
    devices: NodeDevices = field(default_factory=NodeDevices, hash=False)
    version: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name(self.name)

    def __str__(self) -> str:
        where = next((each for each in self.addresses.values() if isinstance(each, tuple)), None)
        place = f" at {where[0]}:{where[1]}" if where else ""
        return f"{self.name!r} (rank {self.id}, pid {self.pid}{place})"

    def shares_host(self, other: Member) -> bool:
        """Whether the two can use Unix sockets and shared memory between them."""
        return same_host(self.host, other.host)

    def body(self) -> dict[str, Any]:
        """The record as JSON knows it; :func:`member_from` is its reverse."""
        return {
            "name": self.name,
            "id": self.id,
            "incarnation": self.incarnation,
            "host": self.host,
            "pid": self.pid,
            "addresses": {
                kind: each if isinstance(each, str) else list(each)
                for kind, each in self.addresses.items()
            },
            "devices": {
                "counts": dict(self.devices.counts),
                "devices": [str(each) for each in self.devices.devices],
                "maps": {
                    target: {str(own): str(theirs) for own, theirs in device_map.items()}
                    for target, device_map in self.devices.maps.items()
                },
                "visible": list(self.devices.visible),
            },
            "version": self.version,
            "extra": dict(self.extra),
        }

    def encode(self) -> bytes:
        """The record's bytes.

        Raises:
            ProtocolError: they are more than ``MAX_RECORD``, or what is in the fields is not JSON.
        """
        return dump({"v": RECORD_VERSION, "member": self.body()}, "member")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The member that :meth:`encode` wrote.

        Raises:
            ProtocolError: it did not write these bytes.
        """
        return cls(**_fields_of(load(data, "member").get("member")))


def member_from(body: object) -> Member:
    """A member from its :meth:`Member.body`.

    Raises:
        ProtocolError: it is none.
    """
    return Member(**_fields_of(body))


def check_name(name: object) -> str:
    """A worker's name, by torch's rule and in torch's words.

    Raises:
        RpcError: it cannot be one.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RpcError(f"Worker name must match {NAME}, but got {name!r}")
    if not name:
        raise RpcError("Worker name must be non-empty")
    if len(name) >= NAME_BOUND:
        raise RpcError(
            f"Worker name must be shorter than {NAME_BOUND} characters, but it has {len(name)}: {name}"
        )
    return name


def dump(record: Mapping[str, Any], what: str) -> bytes:
    """A record's bytes, as short as JSON gets.

    Raises:
        ProtocolError: they are more than ``MAX_RECORD``, or what it holds is not JSON.
    """
    try:
        data = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a {what} record can hold JSON only: {error}") from error
    if len(data) > MAX_RECORD:
        raise ProtocolError(
            f"a {what} record of {len(data)} bytes: at most {MAX_RECORD} are read; put less into `extra`"
        )
    return data


def load(data: bytes, what: str, limit: int = MAX_RECORD) -> dict[str, Any]:
    """A record from its bytes: an object of our version.

    Raises:
        ProtocolError: it is none.
    """
    if len(data) > limit:
        raise ProtocolError(f"a {what} record of {len(data)} bytes: at most {limit} are read")
    try:
        record = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and huge numbers are ValueErrors, too
        raise ProtocolError(f"a {what} record that is not JSON: {shown(data)}") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"a {what} record that is no object: {shown(data)}")
    if (version := record.get("v")) != RECORD_VERSION or isinstance(version, bool):
        raise ProtocolError(
            f"a {what} record of version {shown(version)}, expected {RECORD_VERSION}: do all members"
            " run the same rallypoint?"
        )
    return record


def shown(value: object) -> str:
    """A value in an error's text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# -- reading with suspicion -----------------------------------------------------------------------


def _fields_of(body: object) -> dict[str, Any]:
    record = mapping(body, "member")
    incarnation = text(record.get("incarnation"), "incarnation")
    if not _INCARNATION.fullmatch(incarnation):
        raise _bad("incarnation", incarnation, "8 to 64 hex digits")
    addresses = mapping(record.get("addresses"), "addresses")
    if len(addresses) > MAX_ADDRESSES:
        raise _bad("addresses", len(addresses), f"at most {MAX_ADDRESSES}")
    try:
        name = check_name(record.get("name"))
    except ProtocolError:
        raise
    except RpcError as error:
        raise ProtocolError(str(error)) from error
    return {
        "name": name,
        "id": whole(record.get("id"), "id"),
        "incarnation": incarnation,
        "host": text(record.get("host"), "host"),
        "pid": whole(record.get("pid"), "pid"),
        "addresses": {
            text(kind, "addresses"): _address(each, kind) for kind, each in addresses.items()
        },
        "devices": _devices(record.get("devices")),
        "version": text(record.get("version"), "version"),
        "extra": dict(mapping(record.get("extra"), "extra")),
    }


def _address(value: object, kind: str) -> Address:
    match value:
        case str():
            return text(value, f"addresses[{kind}]")
        case [str(host), int(port)] if not isinstance(port, bool) and 0 < port < 65536:
            return text(host, f"addresses[{kind}]"), port
        case _:
            raise _bad(f"addresses[{kind}]", value, "a path, or a host and port")


def _devices(value: object) -> NodeDevices:
    record = mapping(value, "devices")
    listed = record.get("devices")
    if not isinstance(listed, list):
        raise _bad("devices", listed, "a list")
    visible = record.get("visible", [])
    if not isinstance(visible, list):
        raise _bad("visible", visible, "a list")
    counts = mapping(record.get("counts"), "counts")
    maps = mapping(record.get("maps"), "maps")
    return NodeDevices(
        counts={text(kind, "counts"): whole(count, "counts") for kind, count in counts.items()},
        devices=tuple(_device(each) for each in listed),
        maps={
            text(target, "maps"): {
                _device(own): _device(theirs) for own, theirs in mapping(device_map, "maps").items()
            }
            for target, device_map in maps.items()
        },
        visible=tuple(text(each, "visible") for each in visible),
    )


def _device(value: object) -> Device:
    try:
        return Device.parse(text(value, "device"))
    except ValueError as error:  # ConfigError is one; so are more digits than Python takes
        raise _bad("device", value, "one as 'cuda:0' or 'cpu'") from error


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """An object of JSON, or ProtocolError."""
    if not isinstance(value, dict):
        raise _bad(what, value, "an object")
    return value


def text(value: object, what: str) -> str:
    """A short text, or ProtocolError."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _bad(what, value, f"a text of at most {MAX_TEXT} characters")
    return value


def whole(value: object, what: str, most: int = MAX_ID) -> int:
    """A whole number from 0, or ProtocolError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _bad(what, value, f"a whole number from 0 to {most}")
    return value


def _bad(what: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"a record with {what} {shown(value)}, expected {expected}")
