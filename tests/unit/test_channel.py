"""The line between supervisor and fork server: messages arrive whole, with their descriptors."""

from __future__ import annotations

import os

import pytest

from rallypoint.launch.server.channel import MAX_MESSAGE, Channel, socket_pair


@pytest.fixture
def line():
    ours, theirs = (Channel(sock) for sock in socket_pair())
    yield ours, theirs
    ours.close()
    theirs.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 100, MAX_MESSAGE - 20, MAX_MESSAGE + 20, 3_000_000])
def test_a_message_of_any_length_arrives_with_its_descriptors(line, size):
    """A job with thousands of file names as arguments is longer than one socket message can be."""
    ours, theirs = line
    message = {"do": "spawn", "args": "é" * (size // 6)}
    read, write = os.pipe()
    ours.send(message, [write])
    os.close(write)
    ours.send({"do": "next"})

    (first, fds), (second, none) = theirs.receive()
    assert (first, second, none) == (message, {"do": "next"}, [])
    os.write(fds[0], b"through")
    assert os.read(read, 10) == b"through"
    for fd in (read, *fds):
        os.close(fd)


def test_messages_queue_while_the_peer_is_busy_and_none_is_lost(line):
    ours, theirs = line
    for number in range(500):
        ours.send({"number": number, "filling": "x" * 5000})
    assert ours.wants_write()
    numbers = []
    while len(numbers) < 500:
        numbers += [message["number"] for message, _ in theirs.receive()]
        ours.flush()
    assert numbers == list(range(500))
    assert not ours.wants_write()


def test_a_peer_that_is_gone_is_noticed_and_nothing_is_kept_for_it(line):
    ours, theirs = line
    before = open_descriptors()
    read, write = os.pipe()
    for _ in range(100):
        ours.send({"filling": "x" * 50_000}, [write])
    assert ours.wants_write()
    os.close(write)
    theirs.close()
    ours.flush()
    assert ours.closed_by_peer
    assert os.read(read, 1) == b"", "somebody still holds the other end"
    os.close(read)
    assert open_descriptors() == before - 1  # theirs
