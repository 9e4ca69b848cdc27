"""Several hosts on one machine: network namespaces on one switch. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import Self

import psutil


def available() -> bool:
    """Whether this machine and this user can have them."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def address(index: int) -> str:
    return f"10.78.0.{index + 1}"


class Network:
    """Hosts 0 to ``count - 1`` on one switch; gone at the end of the block."""

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
        """Words that run ``words`` on that host, in the same process."""
        return ["ip", "netns", "exec", self.hosts[index], *words]

    def cable(self, index: int, state: str) -> None:
        """Pull the host's cable ("down") or plug it in again ("up")."""
        _ip("-n", self.switch, "link", "set", f"p{index}", state)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes whose environment has this variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process)
    return found
