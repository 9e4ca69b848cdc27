"""Elastic jobs for tests: supervisors on their own hosts, what they say and when, and what their workers note.

A *host* is a network namespace with its own address on a bridge and a host name that cannot be looked up.
It is isolated: no name server is reachable.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rallypoint._core import process
from supervisors import Popen


WORKER = Path(__file__).parent / "faults" / "scripts" / "elastic_worker.py"
MARK = "RALLY_TEST_JOB"
# Seconds between an event and what must follow from it, on a machine that is busy with other things.
PATIENCE = 180.0
PORT = 29400

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], what: str, timeout: float = PATIENCE, every: float = 0.02
) -> T:
    """The first true value of ``condition()``, which is asked for after each ``every`` seconds."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(every)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# -- hosts ----------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.decode().strip()}")


class Hosts:
    """Hosts 0 to ``count - 1`` at 10.78.0.1 and up, joined by a switch that can be taken apart."""

    def __init__(self, count: int) -> None:
        tag = f"rally{os.getpid()}x{uuid.uuid4().hex[:4]}"
        self.count = count
        self._switch = f"{tag}sw"
        self._names = [f"{tag}h{index}" for index in range(count)]
        self._made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in (self._switch, *self._names):
            _ip("netns", "add", name)
            self._made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        for bridge in ("left", "right"):
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switch, "link", "set", bridge, "up")
        for index, name in enumerate(self._names):
            peer = ("peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "add", f"port{index}", "type", "veth", *peer)
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", "left", "up")
            _ip("-n", name, "addr", "add", f"{self.addr(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def addr(self, index: int) -> str:
        return f"10.78.0.{index + 1}"

    def prefix(self, index: int) -> tuple[str, ...]:
        """The words that run a command on that host, in the same process."""
        # In its own UTS namespace, so it has its own host name.
        name = 'hostname "$0" && exec "$@"'
        net = f"--net=/run/netns/{self._names[index]}"
        return ("nsenter", net, "unshare", "--uts", "sh", "-c", name, f"host-{index}")

    def net(self, index: int) -> str:
        """Path of the host's network namespace."""
        return f"/run/netns/{self._names[index]}"

    def cut(self, index: int) -> float:
        """Pull the cable; returns when."""
        _ip("-n", self._switch, "link", "set", f"port{index}", "down")
        return time.monotonic()

    def mend(self, index: int) -> float:
        _ip("-n", self._switch, "link", "set", f"port{index}", "up")
        return time.monotonic()

    def part(self, *indices: int) -> float:
        """Make a partition: these hosts see each other and none of the others."""
        for index in indices:
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", "right")
        return time.monotonic()

    def join(self) -> float:
        for index in range(self.count):
            _ip("-n", self._switch, "link", "set", f"port{index}", "master", "left")
            _ip("-n", self._switch, "link", "set", f"port{index}", "up")
        return time.monotonic()

    def listening(self, index: int) -> list[str]:
        """Addresses that somebody listens on."""
        net = f"--net=/run/netns/{self._names[index]}"
        files = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        words = ["nsenter", net, "cat", *files]
        text = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
        rows = [line.split() for line in text.splitlines()]
        return [row[1] for row in rows if len(row) > 3 and row[3] == "0A"]

    def close(self) -> None:
        for name in self._made:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", name)


def make_hosts(count: int) -> Iterator[Hosts]:
    """For a fixture: skips where network namespaces are unavailable; in CI it fails instead."""
    tools = all(shutil.which(tool) for tool in ("ip", "nsenter", "unshare"))
    if os.geteuid() != 0 or not tools:
        why = "needs root, iproute2 and util-linux for network namespaces"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{why}, and CI=true")
        pytest.skip(why)
    hosts = Hosts(count)
    try:
        yield hosts
    finally:
        hosts.close()


# -- supervisors ----------------------------------------------------------------------------------


class Node:
    """One `rally run`: its process, and what it says on stderr, each line with its time."""

    def __init__(self, name: str, process: Any, tmp: Path) -> None:
        self.name = name
        self.lines: list[tuple[float, str]] = []
        self.killed = False
        self.tmp = tmp
        self.process = process
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        fd, rest = self.process.stderr.fileno(), b""
        while True:
            select.select([fd], [], [])
            with self._busy:
                data = os.read(fd, 1 << 16)
                *whole, rest = (rest + data).split(b"\n")
                whole += [rest] if rest and not data else []
                at = time.monotonic()
                self.lines += [(at, line.decode(errors="replace").rstrip()) for line in whole]
            if not data:
                return

    def _await_reader(self) -> None:
        """Blocks until `lines` holds everything that is in the pipe. (Others may keep its other end open.)"""
        left = array.array("i", [1])
        while left[0] and self._thread.is_alive():
            time.sleep(0.002)
            fcntl.ioctl(self.process.stderr.fileno(), termios.FIONREAD, left)
        with self._busy:
            pass

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def says(self) -> str:
        return "\n".join(text for _, text in list(self.lines))

    def said(self, text: str, since: float = 0.0) -> float | None:
        """When it first said that."""
        return next((at for at, line in list(self.lines) if at > since and text in line), None)

    def wait_said(self, text: str, since: float = 0.0, timeout: float = PATIENCE) -> float:
        return wait_until(
            lambda: self.said(text, since), f"{self.name} says {text!r}; it said:\n{self}", timeout
        )

    def signal(self, number: int) -> float:
        """Send the signal to the supervisor; returns when."""
        self.killed = self.killed or number == signal.SIGKILL
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def tree(self) -> list[int]:
        return [self.pid, *process.descendants(self.pid)]

    def wait(self, timeout: float = PATIENCE) -> int:
        try:
            code: int = self.process.wait(timeout)
            self._await_reader()
            return code
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; it said:\n{self.says()}") from None

    def close(self) -> None:
        assert self.process.stderr is not None
        self._thread.join(5)
        if not self._thread.is_alive():
            self.process.stderr.close()

    def __str__(self) -> str:
        return self.says()


class Cluster:
    """The supervisors of one job, its workers' notes, and orders to them."""

    def __init__(self, folder: Path, hosts: Hosts | None = None) -> None:
        self.folder = folder
        self.hosts = hosts
        self.mark = uuid.uuid4().hex
        self.nodes: list[Node] = []
        self.measured: list[str] = []

    def start(
        self,
        name: str,
        *words: str,
        host: int | None = None,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        script: Sequence[str] = (str(WORKER),),
    ) -> Node:
        tmp = self.folder / "tmp" / name
        tmp.mkdir(parents=True)
        full = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        full |= {
            MARK: self.mark,
            "TMPDIR": str(tmp),
            "ELASTIC_FOLDER": str(self.folder),
            "ELASTIC_NODE": name,
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        place = {}
        if host is not None:
            assert self.hosts is not None
            place = {"net": self.hosts.net(host), "host": f"host-{host}"}
            # Gloo binds to the address of the host's name unless told which interface to use.
            full["GLOO_SOCKET_IFNAME"] = "eth0"
        full |= env or {}
        if prefix and host is not None:
            prefix, place = (*self.hosts.prefix(host), *prefix), {}
        begun = Popen(
            [*prefix, sys.executable, "-m", "rallypoint", "run", *words, *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=full,
            cwd=self.folder,
            start_new_session=True,  # a Ctrl-C at the tests must not reach it
            **place,
        )
        self.nodes.append(Node(name, begun, tmp))
        return self.nodes[-1]

    # -- what the workers note --------------------------------------------------------------------

    def notes(self, what: str = "", since: float = 0.0) -> list[dict[str, Any]]:
        try:
            text = (self.folder / "notes.jsonl").read_text()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        return [each for each in found if what in {"", each["what"]} and each["at"] > since]

    def formed(self, world: int, after: int = -1, timeout: float = PATIENCE) -> Formed:
        """Wait for the next generation with that many workers that is complete and has done a collective."""

        def look() -> Formed | None:
            by_generation: dict[int, list[dict[str, Any]]] = {}
            for each in self.notes("generation"):
                if each["generation"] > after:
                    by_generation.setdefault(each["generation"], []).append(each)
            for generation, members in sorted(by_generation.items()):
                if len(members) == world == members[0]["world"]:
                    return Formed(generation, sorted(members, key=lambda each: each["rank"]))
            return None

        try:
            return wait_until(look, f"a generation after {after} with {world} workers", timeout)
        except AssertionError as error:
            seen = [
                (e["generation"], e["rank"], e["world"], e["node"])
                for e in self.notes("generation")
            ]
            raise AssertionError(f"{error}; seen: {seen}\n{self}") from None

    def goes_on(self, formed: Formed, steps: int = 3) -> None:
        """Wait until that generation has trained for some steps."""
        wait_until(
            lambda: (
                len([e for e in self.notes("step") if e["generation"] == formed.generation])
                >= steps
            ),
            f"steps in generation {formed.generation}",
        )

    def order(self, what: str) -> float:
        (self.folder / what).touch()
        return time.monotonic()

    def node(self, name: str) -> Node:
        return next(each for each in self.nodes if each.name == name)

    def server(self) -> Node:
        """The node that serves the job's store: the one that listens on its port."""

        def look() -> Node | None:
            for each in self.nodes:
                if (
                    each.alive
                    and not each.killed
                    and (each.said("serving it here") or each is self.nodes[0])
                ):
                    return each
            return None

        return wait_until(look, "a node that serves the store")

    # -- what must hold in the end ----------------------------------------------------------------

    def check_history(self) -> None:
        """Nobody trained twice in a generation or in two at once, and no step was lost or repeated."""
        pids: dict[tuple[int, int], int] = {}
        agreed: dict[int, tuple[Any, ...]] = {}
        for each in self.notes("generation"):
            key = (each["generation"], each["rank"])
            assert pids.setdefault(key, each["pid"]) == each["pid"], f"{key} is there twice"
            master = each["master"].replace("localhost", "127.0.0.1")
            facts = (each["world"], each["restarts"], each["resumed"], master)
            before = agreed.setdefault(each["generation"], facts)
            assert before == facts, f"generation {each['generation']}: {before} and {facts}"
        last: dict[str, Any] | None = None
        for each in self.notes("step"):
            if last is not None and each["generation"] == last["generation"]:
                assert each["step"] == last["step"] + 1 and each["pid"] == last["pid"]
            else:
                assert last is None or each["generation"] > last["generation"], (last, each)
                assert each["step"] == agreed[each["generation"]][2] + 1
                if last is not None:
                    # Rank 0 may have died between writing the checkpoint and noting that.
                    assert agreed[each["generation"]][2] - last["step"] in {0, 1}, (last, each)
            last = each

    def alive(self) -> list[int]:
        below = process.marked_processes(f"{MARK}={self.mark}".encode(), exclude=())
        return [*below, *(node.pid for node in self.nodes if node.alive)]

    def check_nothing_left(self) -> None:
        wait_until(
            lambda: not self.alive(), f"no process is left; there are {self.alive()}", timeout=60
        )
        if self.hosts is not None:
            for index in range(self.hosts.count):
                assert not self.hosts.listening(index), f"somebody listens on host {index}"
        for node in self.nodes:
            left = [path for path in node.tmp.iterdir() if not path.name.startswith("rally_")]
            assert not left, f"{node.name} has left {left}"
            for folder in node.tmp.iterdir():
                # Only logs of failed workers; of a killed node, all of its logs.
                assert not [p for p in folder.rglob("*") if p.is_socket() or p.is_fifo()]

    def measure(self, what: str, seconds: float) -> None:
        self.measured.append(f"{what}: {seconds * 1000:.0f} ms")

    def close(self) -> None:
        for line in self.measured:
            print(line)
        for node in self.nodes:
            print(f"-- {node.name} (exit code {node.process.poll()})")
            print("\n".join(f"{at:10.3f} {line}" for at, line in node.lines))
        process.send(self.alive(), signal.SIGKILL)
        for node in self.nodes:
            if node.alive:
                node.process.kill()
            node.process.wait(60)
        wait_until(lambda: not self.alive(), "the tests' processes are gone", timeout=60)
        for node in self.nodes:
            node.close()

    def __str__(self) -> str:
        return "\n".join(f"-- {node.name}\n{node}" for node in self.nodes)


class Formed:
    """A generation that is under way: the notes of its workers, by rank."""

    def __init__(self, generation: int, workers: list[dict[str, Any]]) -> None:
        self.generation = generation
        self.workers = workers

    @property
    def at(self) -> float:
        """When the last of them had done its first collective."""
        return max(each["at"] for each in self.workers)

    @property
    def restarts(self) -> int:
        (count,) = {each["restarts"] for each in self.workers}
        return int(count)

    @property
    def names(self) -> list[str]:
        """Node names by node rank."""
        by_rank = {each["group_rank"]: each["node"] for each in self.workers}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def of(self, node: str) -> list[dict[str, Any]]:
        return [each for each in self.workers if each["node"] == node]
