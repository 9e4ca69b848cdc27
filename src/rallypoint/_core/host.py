"""Which host this is, for those who want to know whether they share one.

Names do not tell: containers have names of their own on one kernel, and two machines may share one name. Two
processes can meet at a Unix socket and in shared memory if they run on one boot of one kernel, see the same files
and the same network, and belong to the same user.
"""

from __future__ import annotations

import os


_BOOT = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = ("net", "mnt")


def host_identity() -> str:
    """Equal in two processes that share a kernel, its network and mount namespace, and the user.

    Empty where the system does not tell; it is nobody's host then, see :func:`same_host`.
    """
    try:
        with open(_BOOT) as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except OSError:  # no /proc, or one that hides these
        return ""
    return " ".join((boot, *spaces, f"uid:[{os.geteuid()}]")) if boot else ""


def same_host(one: str, other: str) -> bool:
    """Whether two processes with these identities share a host; not if either is unknown."""
    return bool(one) and one == other
