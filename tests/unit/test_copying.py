"""Copies by several threads: every byte is copied once, and nobody waits for a helper that does not come."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rallypoint.wire.copying import LEAST, PIECE, Copier


def block(size: int, seed: int) -> bytearray:
    pattern = bytes((seed + n * 7) % 251 for n in range(4099))
    return bytearray((pattern * (size // len(pattern) + 1))[:size])


def address(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


@pytest.fixture
def copier():
    made = Copier(3)
    yield made
    made.close()
    assert not [each for each in threading.enumerate() if each.name == "rally-copier"]


@pytest.mark.parametrize(
    "size",
    [0, 1, LEAST - 1, LEAST, LEAST + 4097, 11 * PIECE - 1, 11 * PIECE, 11 * PIECE + 1, 30_000_001],
)
def test_every_byte_arrives_and_none_beside_them_changes(copier, size):
    source, target = block(size + 2, 1), bytearray(size + 2)
    copier.move(address(target) + 1, address(source) + 1, size)
    assert target[1 : size + 1] == source[1 : size + 1]
    assert target[0] == target[-1] == 0


def test_small_copies_start_no_thread(copier):
    before = threading.active_count()
    source, target = block(LEAST - 1, 2), bytearray(LEAST - 1)
    copier.move(address(target), address(source), LEAST - 1)
    assert threading.active_count() == before
    assert target == source


def test_many_at_once_do_not_mix(copier):
    size = 3 * LEAST
    sources = [block(size, seed) for seed in range(6)]
    targets = [bytearray(size) for _ in sources]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            list(
                pool.map(
                    lambda pair: copier.move(address(pair[1]), address(pair[0]), size),
                    zip(sources, targets, strict=True),
                )
            )
    assert targets == sources


def test_helpers_that_do_not_come_are_not_waited_for(copier, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(Copier, "_help", lambda _: never.wait())
    size = 4 * LEAST
    source, target = block(size, 3), bytearray(size)
    copier.move(address(target), address(source), size)
    assert target == source
    never.set()


def test_a_closed_one_still_copies():
    copier = Copier(2)
    size = 2 * LEAST
    source, target = block(size, 4), bytearray(size)
    copier.move(address(target), address(source), size)
    copier.close()
    copier.close()
    target[:] = bytes(size)
    copier.move(address(target), address(source), size)
    assert target == source
