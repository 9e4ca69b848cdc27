"""Commands about a job that is not there, is one of several, dead, mute, another user's, of another version: one clear line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rallypoint._core import user_folder
from rallypoint.control import client, messages, sockets
from rallypoint.launch.cli import main


COMMANDS = ("ps", "top", "stacks", "memory", "logs", "profile", "web")
# Those for which a job need not be named: they show all.
OF_ALL = ("ps", "web")
Answers = Callable[[str, dict[str, Any]], Path]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for this test's sockets alone. Their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="rp-") as base:
        folder = Path(base) / "of-user"
        monkeypatch.setattr(user_folder, "candidates", lambda: (folder, Path(base) / "none" / "x"))
        yield folder


@pytest.fixture
def answers() -> Iterator[Answers]:
    """Starts a supervisor that gives each question the same answer."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def begin(name: str, answer: dict[str, Any]) -> Path:
        listener, path = sockets.bind(name)
        listener.setblocking(True)

        def serve() -> None:
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return  # the test has ended
                with line:
                    if line.recv(messages.MAX_REQUEST):
                        line.sendall(messages.pack(answer))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        listeners.append(listener)
        threads.append(thread)
        return path

    yield begin
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that exits with 1."""
    assert main(list(words)) == 1, words
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("rally: ") and len(shown.err.splitlines()) == 1, shown.err
    return shown.err.removeprefix("rally: ").removesuffix("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_job(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = "no job of this user runs on this host"
    assert said(capsys, command, "train").startswith(nothing)
    if command not in OF_ALL:
        assert said(capsys, command).startswith(nothing)


def test_a_folder_that_others_may_enter_is_named(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_folder.mkdir()
    own_folder.chmod(0o755)
    why = f"{own_folder}: its mode is 0755, expected 0700; "
    assert why in said(capsys, "stacks")
    assert main(["ps"]) == 0
    assert why in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_another_name(command: str, answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers("train", {"id": "train"})
    line = said(capsys, command, "eval")
    assert line.startswith("no job 'eval' of this user runs on this host; there are: train (pid ")


@pytest.mark.parametrize("command", COMMANDS)
def test_two_jobs(command: str, answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train-a", "train-b"):
        answers(name, {"id": name})
    pid = os.getpid()
    both = f"name one by its id or pid: train-a (pid {pid}), train-b (pid {pid})"
    line = said(capsys, command, "train")
    assert line.startswith(f"several jobs match 'train'; {both}")
    if command not in OF_ALL:
        assert said(capsys, command).startswith(f"several jobs run on this host; {both}")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dead_job(command: str, answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    listener, path = sockets.bind("killed")
    listener.close()  # as the kernel does for a supervisor that is killed
    answers("train", {"id": "train"})
    line = said(capsys, command, "killed")
    assert line.startswith("no job 'killed' of this user runs on this host; there are: train (")
    assert not path.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mute_job(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "ANSWER_PATIENCE", 0.1)
    listener, path = sockets.bind("train")
    with closing(listener):
        line = said(capsys, command, "train")
    assert line == (
        f"job train (pid {os.getpid()}) does not answer within 0.1 s: is its supervisor stopped?"
    )
    path.unlink()


@pytest.mark.parametrize("command", COMMANDS)
def test_another_version(
    command: str, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers("train", {"id": "train", "version": 2})
    assert said(capsys, command, "train") == (
        f"job train (pid {os.getpid()}) speaks version 2 of the control protocol, this is version 1:"
        " use the same rallypoint as the job"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("command", COMMANDS)
def test_another_users_job(
    command: str, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers("train", {"id": "train"})
    with subprocess.Popen(["sleep", "60"], user=65534) as theirs:
        try:
            line = said(capsys, command, str(theirs.pid))
        finally:
            theirs.send_signal(signal.SIGTERM)
    assert line.startswith(f"process {theirs.pid} belongs to user nobody, and only nobody may ask ")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_flag_and_two_names(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--what"], ["one", "two"]):
        assert main([command, *wrong]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert len(shown.err.splitlines()) == 1, shown.err
        assert wrong[-1] in shown.err and f"rally {command} --help" in shown.err


def test_one_of_two_jobs_is_listed(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "eval"):
        answers(name, {"id": name, "state": "running"})
    assert main(["ps", "--json", "eval"]) == 0
    assert [line.count('"eval"') for line in capsys.readouterr().out.splitlines()] == [1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", command]) == 0
    assert capsys.readouterr().out.startswith(f"usage: rally {command} ")


def test_help_of_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "lgs"]) == 2
    assert "did you mean logs?" in capsys.readouterr().err


def test_logs_of_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").touch()
    for name, problem in (("nope", "no such folder"), ("a file", "a file, not a folder")):
        path = str(tmp_path / name)
        assert main(["logs", path]) == 2
        assert f"logs '{path}': {problem}" in capsys.readouterr().err
