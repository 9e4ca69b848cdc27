"""The parts that rallypoint offers for tests: what they promise when something goes wrong."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from rallypoint.testing import CaseFailed, FaultProxy, Leak, ManualClock, no_leaks, run_ranks


@pytest.fixture
def nothing_is_left() -> None:
    """Overrides the check: the first ranks start multiprocessing's own fork server, which stays."""


def test_ranks_return_their_results_in_order() -> None:
    pytest.importorskip("torch")

    def where() -> tuple[int, int]:
        import torch.distributed as dist

        return dist.get_rank(), dist.get_world_size()

    assert run_ranks(where, 2) == [(0, 2), (1, 2)]


def test_the_error_of_a_rank_is_in_the_failure() -> None:
    pytest.importorskip("torch")

    def fails() -> None:
        import torch.distributed as dist

        assert dist.get_rank() == 0, "only the other one"

    with pytest.raises(
        CaseFailed, match=r"(?s)^rank 1: .*test_testing.py\", line .*only the other one"
    ):
        run_ranks(fails, 2)


def test_a_descriptor_that_is_left_open_is_named() -> None:
    with tempfile.NamedTemporaryFile() as file:
        left = -1
        with pytest.raises(Leak, match=rf"descriptor \d+ of {file.name}"), no_leaks():
            left = os.open(file.name, os.O_RDONLY)
        os.close(left)


def test_a_thread_and_a_child_that_go_on_are_named() -> None:
    end = threading.Event()
    children: list[subprocess.Popen[bytes]] = []
    with (
        pytest.raises(Leak, match=r"child process \d+ \(sleep 60\); thread stays"),
        no_leaks(patience=0.1),
    ):
        threading.Thread(target=end.wait, name="stays").start()
        children.append(subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL))
    end.set()
    children[0].kill()
    children[0].wait()


def test_what_ends_soon_is_no_leak() -> None:
    end = threading.Event()
    with no_leaks(patience=60):
        threading.Thread(target=end.wait).start()
        threading.Timer(0.05, end.set).start()


def test_shared_memory_that_stays_mapped_is_named() -> None:
    import mmap

    kept: list[mmap.mmap] = []
    with pytest.raises(Leak, match="shared memory /memfd:kept"), no_leaks():
        fd = os.memfd_create("kept")
        os.ftruncate(fd, mmap.PAGESIZE)
        kept.append(mmap.mmap(fd, mmap.PAGESIZE))
        os.close(fd)
    kept[0].close()


def test_what_may_stay_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "stays").touch()
    left = -1
    with no_leaks(ignore=lambda what: "stays" in what):
        left = os.open(tmp_path / "stays", os.O_RDONLY)
    os.close(left)


def test_an_error_of_the_block_is_not_replaced_by_a_leak(tmp_path: Path) -> None:
    left = -1
    with pytest.raises(ZeroDivisionError), no_leaks():
        left = os.open(tmp_path, os.O_RDONLY)
        _ = 1 / 0
    os.close(left)


def test_the_pipe_that_torch_keeps_is_no_leak_of_the_block_that_imports_torch() -> None:
    pytest.importorskip("torch")
    # Collections while torch is imported, and taking it apart at exit, are a third of the time.
    block = """
import gc, os, sys
gc.disable()
from rallypoint.testing import no_leaks
with no_leaks():
    import torch.distributed as dist
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if sys.argv[1:]:
        os.pipe()
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", block], check=False).returncode == 0
    more = subprocess.run(
        [sys.executable, "-c", block, "a pipe of its own"],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert more.stderr.count(" of pipe:") == 2


def test_a_clock_goes_on_when_told_and_not_back() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_a_proxy_holds_and_cuts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, no_leaks():
        proxy = FaultProxy(server.getsockname())
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            there, _ = server.accept()
            with there:
                proxy.stall()
                client.sendall(b"held")
                there.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    there.recv(4)
                proxy.resume()
                there.settimeout(60)
                assert there.recv(4) == b"held"
                proxy.cut()
                client.settimeout(60)
                with contextlib.suppress(ConnectionResetError):  # if not everything has been read
                    assert client.recv(1) == b""
        proxy.close()
