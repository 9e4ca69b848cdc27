"""A socket at a path: nobody who looks mistakes it for a dead process's."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint._core import unix_listener
from rallypoint.control import client, sockets
from rallypoint.launch.server import warm_client


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r-") as found:
        yield Path(found)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What others find when a socket is bound but does not listen yet. They remove sockets that refuse them."""
    found: list[list[str]] = []
    listen = socket.socket.listen

    def look_first(listener: socket.socket, backlog: int) -> None:
        folder = Path(listener.getsockname()).parent
        present = sorted(folder.glob("*.sock"))
        found.append([each.name for each in present])
        list(client.running())
        for each in present:
            warm_client._dial(each)
        listen(listener, backlog)

    monkeypatch.setattr(socket.socket, "listen", look_first)
    return found


def connects(path: Path, kind: int = socket.SOCK_STREAM) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as line:
        return line.connect_ex(str(path)) == 0


def test_a_job_that_starts_is_not_taken_for_a_dead_one(
    looked: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "folders", lambda: [folder / "user" / "jobs"])
    (folder / "user").mkdir(mode=0o700)
    listener, path = sockets.bind("a job")
    with listener:
        assert looked == [[]]
        assert connects(path)
        assert sockets.present() == [path]


def test_nor_is_a_warm_server(looked: list[list[str]], folder: Path) -> None:
    path = folder / "server.sock"
    with warm_client._listening(path):
        assert looked == [[]]
        assert connects(path, socket.SOCK_SEQPACKET)
        assert stat.S_IMODE(path.stat().st_mode) == warm_client.STARTING


def test_what_one_that_was_killed_has_left_is_replaced(folder: Path) -> None:
    path = folder / "a.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path.with_suffix(".new")))
    with socket.socket(socket.AF_UNIX) as listener:
        unix_listener.listen(listener, path, 1)
        assert connects(path)
    assert [each.name for each in folder.iterdir()] == ["a.sock"]


def test_nothing_is_left_of_one_that_cannot_be_had(folder: Path) -> None:
    path = folder / "a.sock"
    path.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="directory"):
        unix_listener.listen(listener, path, 1)
    assert [each.name for each in folder.iterdir()] == ["a.sock"]
