"""Several hosts on one machine: network namespaces on one switch. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from typing import Self

import psutil


def available() -> bool:
    """Whether this user can create them on this machine."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def address(index: int) -> str:
    return f"10.78.0.{index + 1}"


class Network:
    """Hosts 0 to ``count - 1`` on one switch; removed at the end of the block."""

    def __init__(self, count: int) -> None:
        tag = str(os.getpid())[-5:]
        self.switch = f"rs{tag}"
        self.hosts = [f"rh{tag}-{index}" for index in range(count)]

    def __enter__(self) -> Self:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "sw", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "sw", "up")
        for index, host in enumerate(self.hosts):
            _ip("netns", "add", host)
            port = f"p{index}"
            peer = ("peer", "name", "eth0", "netns", host)
            _ip("-n", self.switch, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self.switch, "link", "set", port, "master", "sw", "up")
            _ip("-n", host, "addr", "add", f"{address(index)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.hosts, self.switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def command(self, index: int, words: list[str]) -> list[str]:
        """The command line that runs ``words`` on that host, in the same process."""
        return ["ip", "netns", "exec", self.hosts[index], *words]

    def open_sockets(self) -> list[str]:
        """Sockets on these hosts that a process holds. (Those that the kernel is still closing have no inode.)"""
        found = []
        for host in self.hosts:
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                lines = _ip("netns", "exec", host, "cat", f"/proc/net/{kind}").splitlines()[1:]
                found += [f"{host} {kind} {each}" for each in lines if each.split()[9] != "0"]
            lines = _ip("netns", "exec", host, "cat", "/proc/net/unix").splitlines()[1:]
            found += [f"{host} unix {each}" for each in lines]
        return found

    def cable(self, index: int, state: str) -> None:
        """Pull the host's cable ("down") or plug it in again ("up")."""
        _ip("-n", self.switch, "link", "set", f"p{index}", state)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
    return done.stdout


def named_things() -> set[str]:
    """What outlives its process unless removed: named shared memory, and paths of Unix sockets."""
    found = {os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm")}
    for root in {tempfile.gettempdir(), "/tmp", f"/run/user/{os.geteuid()}"}:
        for folder, _, names in os.walk(root):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.lstat(path).st_mode):
                        found.add(path)
    return found


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes whose environment has this variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found
