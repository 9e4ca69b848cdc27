"""`rally run --hosts`: lists, orders, and the output of several hosts in one terminal."""

import os
import select
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.given import parse
from rallypoint.launch.hosts.listing import Host, read_file, read_list
from rallypoint.launch.hosts.merging import Merger, Part, must_end, told, verdict
from rallypoint.launch.hosts.orders import (
    Meeting,
    Orders,
    forwarded,
    least_hosts,
    ssh_command,
    words_for,
)
from rallypoint.launch.hosts.terminal_output import TerminalOutput


def test_a_list_and_a_file_of_hosts() -> None:
    assert read_list("a, me@b:8,[fd00::1]:2,fd00::2,me@[fd00::3]:4,") == (
        *(Host("a"), Host("me@b", 8), Host("fd00::1", 2), Host("fd00::2"), Host("me@fd00::3", 4)),
    )
    lines = ["# a comment", "", "a", "b:8  # MPICH", "c slots=4 max_slots=4"]
    assert read_file(lines, "--hostfile x") == (Host("a"), Host("b", 8), Host("c", 4))


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:0", "a:x", "-oProxyCommand=x", "a b", "a,a:2", ":8", "a,,b", ",a"),
        # Slurm's lists
        *("node[01-04]", "node[01,03]:8", "[a]", "a]"),
    ],
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ConfigError):
        read_list(text)


def test_variables_that_go_to_other_hosts() -> None:
    env = dict.fromkeys(
        ("NCCL_X", "RALLY_EVENTS", "RALLY_SECRET", "RALLY_SECRET_FILE", "PATH", "WANDB_A", "HOME"),
        "1",
    )
    assert set(forwarded(env, [])) == {"NCCL_X", "RALLY_EVENTS"}
    assert set(forwarded(env, ["WANDB_*"])) == {"NCCL_X", "RALLY_EVENTS", "WANDB_A"}


def test_orders_survive_the_line() -> None:
    secret = b"\xff\x00 no text".decode("utf-8", "surrogateescape")
    orders = Orders(folder="/a b", env={"A": "é\n"}, words=("x", "y"), secret=secret, token="t")
    line = orders.to_line()
    assert line.count(b"\n") == 1
    assert Orders.from_line(line) == orders


def test_options_of_the_user_come_before_ours() -> None:
    command = ssh_command(Host("b"), "-o 'ConnectTimeout=3' -p 22", "/a b/python", {})
    assert command.index("ConnectTimeout=3") < command.index("ConnectTimeout=10")
    assert command[-2:] == ("b", "exec env '/a b/python' -m rallypoint node")


HOSTS = (Host("a"), Host("b", 8))
FIXED = Meeting(least=2, master="a", port=20000, run_id="x")
ELASTIC = Meeting(least=1, master="fd00::1", port=20000, run_id="x")


def test_the_words_of_a_host() -> None:
    given = parse(["--hosts", "a,b:8", "--nproc-per-node", "4", "-m", "train", "--lr", "1"])
    assert words_for(given, HOSTS, 1, FIXED) == (
        *("--nproc-per-node=8", "--module", "--nnodes=2", "--rdzv-id=x", "--node-rank=1"),
        *("--master-addr=a", "--master-port=20000", "--", "train", "--lr", "1"),
    )
    assert "--nproc-per-node=4" in words_for(given, HOSTS, 0, FIXED)
    elastic = words_for(given, HOSTS, 1, ELASTIC)
    assert "--nnodes=1:2" in elastic and "--rdzv-endpoint=[fd00::1]:20000" in elastic
    assert words_for(given, HOSTS[:1], 0, FIXED)[:2] == ("--nproc-per-node=4", "--module")


@pytest.mark.parametrize(("text", "least"), [("", 2), ("--nnodes 2", 2), ("--nnodes 1:2", 1)])
def test_the_fewest_hosts(text: str, least: int) -> None:
    assert least_hosts(parse(text.split()), 2) == least


@pytest.mark.parametrize("text", ["--nnodes 3", "--nnodes 1:3", "--node-rank 1", "--nnodes x"])
def test_flags_that_contradict_the_list(text: str) -> None:
    with pytest.raises(ConfigError):
        least_hosts(parse(text.split()), 2)


def merger() -> Merger:
    return Merger([Part("a"), Part("b"), Part("c")], "token")


@pytest.mark.parametrize("size", [1 << 16, 1 << 20], ids=["64 KiB pieces", "one piece"])
def test_a_long_line_is_searched_for_its_end_once(size: int) -> None:
    made = merger()
    text = b"x" * 300_000
    before = time.process_time()
    shown = b"".join(
        made.take(0, 1, text[start : start + size]) for start in range(0, len(text), size)
    )
    assert shown == b""
    assert made.take(0, 1, b"\nnext") == text + b"\n"
    assert made.take(0, 1, b"") == b"next\n"
    # Milliseconds; it took 35 s when each byte was tried as the start of a line.
    assert time.process_time() - before < 3


@given(st.lists(st.text("ab\r\n", min_size=1), max_size=6))
def test_lines_are_the_same_in_whatever_pieces_they_come(pieces: list[str]) -> None:
    made, text = merger(), "".join(pieces).encode()
    shown = b"".join(made.take(0, 1, each.encode()) for each in (*pieces, ""))
    unended = text and text[-1:] not in (b"\r", b"\n")
    assert shown == text + (b"\n" if unended else b"")


def test_whole_lines_with_the_host_that_wrote_them() -> None:
    made = merger()
    assert made.take(0, 1, b"one\ntw") == b"one\n"
    assert made.take(1, 1, b"x\ny") == b"[b] x\n"
    assert made.take(0, 1, b"o\n50%\r") == b"two\n50%\r"
    assert made.take(1, 1, b"") == b"[b] y\n"


def test_what_rally_says_in_the_same_words_is_shown_once() -> None:
    made = merger()
    assert made.take(1, 2, b"rally: restarting\n") == b"rally: [b] restarting\n"
    assert made.take(0, 2, b"rally: restarting\n") == b""
    assert made.take(1, 2, b"rally: restarting\n") == b"rally: [b] restarting\n"


def test_what_a_host_tells_in_confidence_is_not_shown() -> None:
    made = merger()
    line = told("token", "ended", exit_code=7, report="why\nit failed")
    assert made.take(1, 1, b"no newline" + line) == b"[b] no newline\n"
    assert (made.parts[1].exit_code, made.parts[1].report) == (7, "why\nit failed")
    other = told("another", "ended", exit_code=0, report="")
    assert made.take(1, 1, other) == b"[b] " + other


def part(host: str, exit_code: int | None, **more) -> Part:
    return Part(host, started=more.pop("started", True), exit_code=exit_code, ssh_code=255, **more)


def test_how_the_job_ended() -> None:
    both = [part("a", 7, report="why"), part("b", 7, report="why too")]
    assert (verdict(both, 2).exit_code, verdict(both, 2).report) == (7, "why")
    lost = [part("a", 0), part("b", None)]
    assert verdict(lost, 1).exit_code == 0
    assert verdict(lost, 2).exit_code == 1
    assert "b is lost" in verdict(lost, 2).remarks[0]


def test_when_the_others_are_told_to_end() -> None:
    waits = Part("c", started=True)
    assert "b refuses" in must_end([part("b", 2), waits], 2)
    assert "b cannot" in must_end([part("b", None, started=False), waits], 2)
    assert must_end([part("b", None, started=False), waits], 1) == ""
    assert must_end([part("b", None), waits], 2) == ""


def test_what_is_printed_is_shown_in_order_while_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "terminal")
    reads = os.open(tmp_path / "terminal", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reads, True)
    with open(tmp_path / "terminal", "w") as terminal:
        output = TerminalOutput(terminal, None)
        assert output.takes(terminal) and output.takes(None) and not output.takes(sys.stdout)
        data = [str(each).encode().rjust(999) + b"\n" for each in range(2000)]
        for each in data:  # far more than a pipe holds
            output.put(terminal, each)
        output.put(None, b"dropped")
        ended = threading.Event()
        waits = threading.Thread(target=output.wait_for_room, args=(ended.is_set,))
        waits.start()
        waits.join(0.1)
        assert waits.is_alive()
        ended.set()
        output.wake()
        waits.join(60)
        assert not waits.is_alive()
        written = output.finish()
        poller = select.poll()
        poller.register(written, select.POLLIN)
        assert not poller.poll(0)
        found = b""
        while len(found) < 2_000_000:
            found += os.read(reads, 1 << 20)
        assert found == b"".join(data)
        assert poller.poll(60_000)
        output.close()
    os.close(reads)


def test_what_a_terminal_that_stands_still_has_not_taken_can_be_given_up(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as terminal:
        output = TerminalOutput(terminal)
        for _ in range(4):
            output.put(terminal, bytes(1 << 16))
        output.finish()
        output.close()
        os.close(reads)  # the thread gets an error and exits


@pytest.mark.parametrize(
    ("said", "started", "dropped"),
    [
        (b"kex_exchange_identification: Connection closed by remote host\r\n", False, True),
        (b"banner\nssh_exchange_identification: read: Connection reset by peer\n", False, True),
        (b"kex_exchange_identification: Connection closed by remote host\r\n", True, False),
        (b"me@a: Permission denied (publickey).\n", False, False),
        (b"ssh: Could not resolve hostname a: Name or service not known\n", False, False),
    ],
)
def test_a_connection_is_begun_again_only_if_the_server_had_too_many(
    said: bytes, started: bool, dropped: bool
) -> None:
    part = Part("a", started=started, ssh_code=255, said=bytearray(said))
    assert part.was_dropped == dropped
    assert ("MaxStartups" in verdict([part], 1).remarks[0]) == dropped
