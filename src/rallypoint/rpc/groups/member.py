"""A member's record: its identity and addresses, as other members read it from the store.

Records are versioned JSON with limits, and are fully validated before use.
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
# Bytes. A record with 16 addresses and 64 device maps has about 10 KiB.
MAX_RECORD: Final = 64 * 1024
# As in torch, where ids are signed 32-bit integers.
MAX_ID: Final = 2**31 - 1
# torch's rules for names: their characters, and their length.
NAME: Final = "^[A-Za-z0-9-_:]*$"
NAME_BOUND: Final = 128
# Characters of a host identity, address or version.
MAX_TEXT: Final = 1024
MAX_ADDRESSES: Final = 64

_NAME = re.compile(r"[A-Za-z0-9\-_:]*")
_INCARNATION = re.compile("[0-9a-f]{8,64}")

Address = str | tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process of a group.

    Args:
        name: unique in the group.
        id: its rank; unique in the group.
        incarnation: random hex digits that distinguish a process from earlier ones of the same name.
        host: as :func:`rallypoint._core.host.host_identity` returns it; empty: shares a host with no other member.
        pid: for messages only.
        addresses: by transport, a path or a host and port.
        devices: its devices and device maps.
        version: the version of its rallypoint package.
        extra: further JSON data for the others.

    Raises:
        RpcError: the name is invalid, in torch's words.
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
        """Whether the two can share Unix sockets and memory."""
        return same_host(self.host, other.host)

    def body(self) -> dict[str, Any]:
        """The record as a JSON object; :func:`member_from` is the inverse."""
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
            ProtocolError: it is larger than ``MAX_RECORD``, or a field is not JSON.
        """
        return dump({"v": RECORD_VERSION, "member": self.body()}, "member")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse of :meth:`encode`.

        Raises:
            ProtocolError: the bytes are not a valid record.
        """
        return cls(**_fields_of(load(data, "member").get("member")))


def member_from(body: object) -> Member:
    """The inverse of :meth:`Member.body`.

    Raises:
        ProtocolError: the body is invalid.
    """
    return Member(**_fields_of(body))


def check_name(name: object) -> str:
    """Check a worker's name by torch's rules.

    Raises:
        RpcError: it is invalid, in torch's words.
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
    """A record's bytes, as compact JSON.

    Raises:
        ProtocolError: it is larger than ``MAX_RECORD``, or not JSON.
    """
    try:
        data = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a {what} record has a value that is not JSON: {error}") from error
    if len(data) > MAX_RECORD:
        raise ProtocolError(
            f"a {what} record of {len(data)} bytes exceeds the limit of {MAX_RECORD}; put less into `extra`"
        )
    return data


def load(data: bytes, what: str, limit: int = MAX_RECORD) -> dict[str, Any]:
    """A record from its bytes: a JSON object of our version.

    Raises:
        ProtocolError: the bytes are not such a record.
    """
    if len(data) > limit:
        raise ProtocolError(f"a {what} record of {len(data)} bytes exceeds the limit of {limit}")
    try:
        record = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and huge numbers are ValueErrors, too
        raise ProtocolError(f"a {what} record is not JSON: {shown(data)}") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"a {what} record is not a JSON object: {shown(data)}")
    if (version := record.get("v")) != RECORD_VERSION or isinstance(version, bool):
        raise ProtocolError(
            f"a {what} record has version {shown(version)}, expected {RECORD_VERSION}: do all members"
            " run the same version of rallypoint?"
        )
    return record


def shown(value: object) -> str:
    """A value for an error's text, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


# -- validation -----------------------------------------------------------------------------------


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
    except ValueError as error:  # including ConfigError, and numbers with too many digits
        raise _bad("device", value, "a device such as 'cuda:0' or 'cpu'") from error


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """A JSON object, or ProtocolError."""
    if not isinstance(value, dict):
        raise _bad(what, value, "an object")
    return value


def text(value: object, what: str) -> str:
    """A short string, or ProtocolError."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _bad(what, value, f"a string of at most {MAX_TEXT} characters")
    return value


def whole(value: object, what: str, most: int = MAX_ID) -> int:
    """A non-negative integer, or ProtocolError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _bad(what, value, f"an integer from 0 to {most}")
    return value


def _bad(what: str, value: object, expected: str) -> ProtocolError:
    return ProtocolError(f"{what} in a record is {shown(value)}, expected {expected}")
