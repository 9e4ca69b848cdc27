"""This machine's network interfaces and the addresses they have."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path


_SIOCGIFCONF = 0x8912  # linux/sockios.h
# struct ifreq: the name, then an address; together 40 bytes on 64-bit machines.
_NAME, _RECORD = 16, 40
_MOST = 1024


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of an interface.

    Args:
        name: ``eth0``.
        address: numeric.
        is_bridge: it connects containers or virtual machines of this machine.
    """

    name: str
    address: str
    is_bridge: bool = False


def interfaces() -> tuple[Interface, ...]:
    """The addresses of all interfaces that are up, IPv4 first."""
    found = [*_ipv4(), *_ipv6()]
    return tuple(
        Interface(name, address, Path("/sys/class/net", name, "bridge").is_dir())
        for name, address in found
    )


def _ipv4() -> list[tuple[str, str]]:
    records = array.array("B", bytes(_MOST * _RECORD))
    where, size = records.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", size, where))
    (used, _) = struct.unpack("iP", answer)
    data = records.tobytes()[:used]
    found = []
    for start in range(0, used, _RECORD):
        name = data[start : start + _NAME].partition(b"\0")[0].decode()
        # An address may have a label, eth0:1; the interface is eth0.
        address = socket.inet_ntoa(data[start + _NAME + 4 : start + _NAME + 8])
        found.append((name.partition(":")[0], address))
    return found


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []  # a machine without IPv6
    fields = [line.split() for line in lines]
    return [(each[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(each[0]))) for each in fields]
