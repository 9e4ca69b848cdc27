"""The identity of this host, to find out whether two processes share one.

Host names do not suffice: containers on one kernel have different names, and two machines may have the same. Two
processes can use Unix sockets and shared memory if they run on the same boot of one kernel, see the same files and
network, and belong to the same user.
"""

from __future__ import annotations

import os


_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = ("net", "mnt")


def host_identity() -> str:
    """Equal for two processes that share a kernel, its network and mount namespace, and the user.

    Empty if unknown, which :func:`same_host` treats as different from every host.
    """
    try:
        with open(_BOOT) as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError:  # no /proc, or these are hidden
        return ""
    return " ".join((boot, *spaces, f"uid:[{os.geteuid()}]")) if boot else ""


def clock_identity() -> str:
    """Equal for two processes with the same wall clock: those on the same boot of one kernel. Empty if unknown."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:
        return ""


def same_host(one: str, other: str) -> bool:
    """Whether two processes with these identities share a host. False if either is unknown."""
    return bool(one) and one == other
