"""Every attack from every vantage point against every protection: nothing runs, no secret is read, the job ends well.

The attackers have no secret. One is another user of the host of rank 0, the other is on another host, which for rank 0 is
also the router on the way to rank 1. docs/security.md has the table of what is tried here and with what result.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic import PORT, Cluster, Hosts, make_hosts, wait_until
from relays import ALTERED


pytestmark = [
    pytest.mark.faults,
    pytest.mark.netns,
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.timeout(600),
]

TESTS = Path(__file__).parents[1]
WORKER = TESTS / "faults/scripts/attacked_worker.py"
NOBODY = 65534
# Hosts: rank 0's, rank 1's, the attacker's.
CALLER, CALLEE, OTHER = 0, 1, 2
FORBIDDEN = 666
CROWD = 1500
PATIENCE = 120.0

PROTECTIONS = {
    "one node, defaults": (1, {}),
    "secret file": (2, {}),
    "secret file and TLS": (2, {"tls": True}),
}


class Program:
    """A process that answers each line with a line of JSON."""

    def __init__(self, words: list[str], log: Path) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self._log = log

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.read()

    def do(self, what: str, *arguments: Any) -> Any:
        return self.ask(json.dumps([what, *arguments]))

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Attacked:
    """A job of two workers on one or two hosts, and the strangers around it."""

    def __init__(self, folder: Path, hosts: Hosts, num_nodes: int, stack: ExitStack) -> None:
        self.folder = folder
        self.hosts = hosts
        self.num_nodes = num_nodes
        self._stack = stack
        (folder / "given").touch(mode=0o600)
        (folder / "given").write_text("a secret that was given in a file")
        self.cluster = Cluster(folder, hosts)
        stack.callback(self.cluster.close)
        for rank in range(2):
            os.mkfifo(folder / f"ask-{rank}", 0o600)
            os.mkfifo(folder / f"say-{rank}", 0o600)
        words = ["--nproc-per-node", str(2 // num_nodes)]
        if num_nodes == 2:
            words += ["--nnodes", "2", "--rdzv-endpoint", f"{hosts.addr(CALLER)}:{PORT}"]
            words += ["--secret-file", str(folder / "given")]
        for node in range(num_nodes):
            script = (str(WORKER), str(folder))
            self.cluster.start(f"n{node}", *words, host=node, script=script)
        self._asks = [stack.enter_context(self._open(f"ask-{rank}", "w")) for rank in range(2)]
        self._says = [stack.enter_context(self._open(f"say-{rank}", "r")) for rank in range(2)]
        self.facts = [self.do(rank, "facts") for rank in range(2)]
        self.store = self.facts[0]["store"]
        self.strangers = {host: self._stranger(host) for host in (CALLER, OTHER)}

    def _open(self, name: str, mode: str) -> Any:
        # For reading and writing, so that opening it does not block on either side.
        fd = os.open(self.folder / name, os.O_RDWR)
        return os.fdopen(fd, mode)

    def on(self, host: int, *words: str) -> list[str]:
        return ["nsenter", f"--net={self.hosts.net(host)}", *words]

    def program(self, host: int, name: str, *words: str) -> Program:
        command = self.on(host, sys.executable, str(TESTS / name), *words)
        made = Program(command, self.folder / f"{name}.log")
        self._stack.callback(made.close)
        return made

    def _stranger(self, host: int) -> Program:
        made = self.program(host, "stranger.py", str(NOBODY))
        assert made.read() is None
        return made

    def relay(self, host: int, kind: str, place: Any, to: Any, *words: str) -> tuple[Program, Any]:
        """A relay that runs as another user, and its address."""
        where = [place[0], str(place[1]), to[0], str(to[1])]
        made = self.program(host, "relays.py", kind, *where, "--uid", str(NOBODY), *words)
        return made, made.read()

    def begin(self, rank: int, what: str, *arguments: Any) -> None:
        self._asks[rank].write(json.dumps([what, *arguments]) + "\n")
        self._asks[rank].flush()

    def end(self, rank: int) -> Any:
        assert select.select([self._says[rank]], [], [], PATIENCE)[0], str(self.cluster)
        return json.loads(self._says[rank].readline())

    def do(self, rank: int, what: str, *arguments: Any) -> Any:
        self.begin(rank, what, *arguments)
        return self.end(rank)

    def ip(self, host: int, *words: str) -> None:
        done = subprocess.run(self.on(host, "ip", *words), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def set(self, host: int, name: str, value: int) -> None:
        write = f"echo {value} > /proc/sys/net/ipv4/{name}"
        subprocess.run(self.on(host, "sh", "-c", write), check=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from make_hosts(3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that others may enter and read, as they may most home folders."""
    os.umask(0o022)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.geteuid() and str(each).startswith("/tmp/"):
            each.chmod(each.stat().st_mode | 0o055)
    return tmp_path


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_strangers_run_nothing_and_learn_nothing_and_stop_nothing(
    hosts: Hosts, folder: Path, protection: str
) -> None:
    num_nodes, options = PROTECTIONS[protection]
    with ExitStack() as stack:
        job = Attacked(folder, hosts, num_nodes, stack)
        asked = [1]
        # Whether an attacker on that host can reach the job at all.
        reached = {CALLER: True, OTHER: num_nodes == 2}
        for host, stranger in job.strangers.items():
            assert stranger.do("reach", [job.store]) == [reached[host]], host

        # Rank 1's record is rewritten before rank 0 reads it.
        job.begin(1, "join", options)
        for host, stranger in job.strangers.items():
            if reached[host]:
                trap = "a-socket-of-a-stranger" if num_nodes == 1 else [hosts.addr(host), 1]
                assert stranger.do("rewrite", job.store, "1", trap, 24) == 24
        addresses = job.do(0, "join", options) and job.end(1)
        is_tcp = num_nodes == 2
        assert is_tcp == any(each.startswith("tcp") for each in addresses)
        place = addresses[("tcp+tls" if options else "tcp") if is_tcp else "uds"]
        kind = "tls" if options else "sealed"
        if is_tcp:
            _relays_at_their_own_addresses(job, kind, place, asked)
        _goes_on(job, asked)

        for host, stranger in job.strangers.items():
            assert stranger.do("reach", [place]) == [reached[host]], host
            if reached[host]:
                _speak_to_it(job, stranger, place, asked)
        if is_tcp:
            _relay_of_another_user(job, kind, place, asked)
            _relay_on_the_way(job, kind, place, asked)

        for host, stranger in job.strangers.items():
            seen = folder / f"seen-{host}"
            seen.touch()
            seen.chmod(0o666)
            stranger.do("spy", str(folder), job.store if reached[host] else None, str(seen))
            data = seen.read_bytes()
            assert b"attacked_worker" in data, "what is public is seen"
            assert job.facts[0]["secret"] == job.facts[1]["secret"]
            _hidden(bytes.fromhex(job.facts[0]["secret"]), data)
            _hidden(bytes.fromhex(job.facts[0]["secret"]), str(job.cluster).encode())

        found = job.do(1, "seen")["done"]
        assert FORBIDDEN not in found
        assert found == sorted(set(found)), "nothing is done twice"
        assert set(found) <= set(asked), "and nothing that was not asked for"
        for rank in range(2):
            job.begin(rank, "leave")
        for node in job.cluster.nodes:
            assert node.wait() == 0, str(node)


def _speak_to_it(job: Attacked, stranger: Program, place: Any, asked: list[int]) -> None:
    """Speak to it without a proof, without a secret, and over so many connections that no other would fit."""
    for said in stranger.do("knock", place):
        alert = said.startswith("\x15\x03") and len(said) == 7  # of TLS, if it is still on its way
        assert alert or said in ("", "ConnectionResetError", "BrokenPipeError") or "refused" in said
    said = stranger.do("join", job.store)
    assert len(said) >= 3
    assert all("do not share a secret" in each for each in said), said
    assert stranger.do("crowd", place, CROWD) >= 1
    job.do(0, "hang_up")
    _goes_on(job, asked)


def _goes_on(job: Attacked, asked: list[int]) -> None:
    """The call that hits the broken connection may be lost; the next one is not."""
    wait_until(lambda: _call(job, asked).isdigit(), "calls arrive again", 60)


def _call(job: Attacked, asked: list[int]) -> str:
    asked.append(asked[-1] + 1)
    return str(job.do(0, "call", asked[-1]))


def _alters(job: Attacked, relay: Program, asked: list[int]) -> None:
    for how in ALTERED:
        _goes_on(job, asked)
        before = job.do(1, "seen")["changed"]
        relay.ask(f"alter {how}")
        said = [_call(job, asked) for _ in range(3)]
        assert relay.ask("counts")["altered"] == 1, how
        assert said[2].isdigit(), said
        assert any(each.startswith("lost") for each in said) or how == "said twice", (how, said)
        # TLS ends the connection itself.
        assert job.do(1, "seen")["changed"] >= before


def _relay_of_another_user(job: Attacked, kind: str, place: Any, asked: list[int]) -> None:
    """On rank 0's host, as if it could divert packets to itself."""
    relay, where = job.relay(CALLER, kind, [job.hosts.addr(CALLER), 0], place)
    job.do(0, "divert", where)
    job.do(0, "hang_up")
    _goes_on(job, asked)
    assert relay.ask("counts")["connections"] > 0
    _alters(job, relay, asked)
    job.do(0, "divert", None)
    relay.ask("cut")
    _goes_on(job, asked)


def _relay_on_the_way(job: Attacked, kind: str, place: Any, asked: list[int]) -> None:
    """On another host, the router to rank 1, which takes the packets for itself."""
    callee = job.hosts.addr(CALLEE)
    assert place[0] == callee
    job.set(OTHER, "ip_forward", 1)
    for device in ("all", "eth0"):
        job.set(OTHER, f"conf/{device}/rp_filter", 0)
        job.set(OTHER, f"conf/{device}/send_redirects", 0)  # "there is a shorter way"
    job.ip(OTHER, "route", "add", "local", callee, "dev", "lo", "table", "77")
    packets = ["iif", "eth0", "to", callee, "ipproto", "tcp", "dport", str(place[1])]
    rule = ["rule", "add", "pref", "5", *packets, "lookup", "77"]
    job.ip(OTHER, *rule)
    job.ip(CALLER, "route", "add", callee, "via", job.hosts.addr(OTHER), "dev", "eth0")
    try:
        relay, _ = job.relay(OTHER, kind, ["0.0.0.0", place[1]], place, "--transparent")
        job.do(0, "hang_up")
        _goes_on(job, asked)
        assert relay.ask("counts")["connections"] > 0, "calls go through the router's hands"
        _alters(job, relay, asked)
    finally:
        job.ip(CALLER, "route", "del", callee)
        rule[1] = "del"
        job.ip(OTHER, *rule)
        job.ip(OTHER, "route", "del", "local", callee, "dev", "lo", "table", "77")
    job.do(0, "hang_up")
    _goes_on(job, asked)


def _relays_at_their_own_addresses(job: Attacked, kind: str, place: Any, asked: list[int]) -> None:
    """As if the records were believed. On the first connection only: a member that was there and cannot be reached is lost."""
    for host in job.strangers:
        if kind == "tls":
            # A relay that only passes TLS on is no more than a router, so this one has a certificate.
            to = [job.hosts.addr(host), 0, *place, NOBODY]
            relay = job.program(host, "tls_relay.py", *map(str, to))
            where = relay.read()
        else:
            relay, where = job.relay(host, kind, [job.hosts.addr(host), 0], place)
        true = job.do(0, "lead_astray", where)
        said = _call(job, asked)
        assert "do not share a secret" in said or "refused the connection" in said, said
        assert relay.ask("counts")["connections"] > 0
        job.do(0, "lead_astray", true)


def _hidden(secret: bytes, seen: bytes) -> None:
    assert len(secret) >= 16
    coded = base64.b64encode(secret)[:-2]
    for form in (secret, secret.hex().encode(), coded, repr(secret)[2:-1].encode()):
        assert form not in seen
