"""Scripts and flags that are seldom used: a script through a pipe, one that closes every descriptor, signals that are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import supervisors
from stub_torch import STUB


pytestmark = pytest.mark.integration

RALLY = (sys.executable, "-m", "rallypoint", "run")


def rally(
    folder: Path, *words: object, through: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return supervisors.run(
        [*RALLY, "--log-dir", folder / "logs", *words],
        cwd=folder,
        input=through,
        env={**os.environ, "PYTHONPATH": str(STUB), **(env or {})},
        capture_output=True,
        text=True,
    )


def in_a_shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line.replace("{rally}", f"{' '.join(RALLY)} --log-dir logs")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(STUB)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("print('it ran')", 0, ""),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("x = (", 1, "SyntaxError: '(' was never closed"),
    ],
)
def test_a_script_may_come_through_a_pipe(
    tmp_path: Path, source: str, code: int, said: str
) -> None:
    done = rally(tmp_path, "--nproc-per-node", 1, "/dev/stdin", through=source)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stdout == ("it ran\n" if code == 0 else "")


EVERY_WORKER = """
import os, sys
assert sys.stdin.read() == ""
with open(f"ran.{os.environ['RANK']}.{os.environ['RALLY_GENERATION']}", "w"):
    sys.exit(os.environ["RALLY_GENERATION"] == "0")
"""


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_every_worker_runs_what_comes_through_a_pipe_also_after_a_restart(
    tmp_path: Path, name: str
) -> None:
    """One worker read it, once. The others, and those after a restart, ran nothing and succeeded."""
    flags = ("--nproc-per-node", 2, "--max-restarts", 1)
    done = rally(tmp_path, *flags, name, through=EVERY_WORKER)
    assert done.returncode == 0, done.stderr
    assert {"ran.0.1", "ran.1.1"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("- </dev/null", "rally: script '-': stdin is empty (/dev/null)"),
        ("- <&-", "rally: script '-': stdin is "),
        (
            "/dev/fd/5 5</dev/null",
            "rally: script '/dev/fd/5': a descriptor that workers do not have",
        ),
    ],
)
def test_a_script_that_no_worker_can_read_is_refused(tmp_path: Path, words: str, said: str) -> None:
    done = in_a_shell(tmp_path, f"exec {{rally}} {words}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


# As daemons do before they open files of their own; then it is asked for its stacks, and fails.
CLOSES_ALL = """
import os, signal, sys
os.closerange(3, 256)
files = [open(f"weights.{number}", "w") for number in range(12)]
for file in files:
    print("weights", file=file, flush=True)
os.kill(os.getpid(), signal.SIGRTMIN + 22)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGRTMIN + 22)
    os._exit(0)
os.wait()
print("still itself")
raise RuntimeError("its own error")
"""


@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_files_of_a_script_that_closes_all_descriptors_are_its_own(
    tmp_path: Path, method: str
) -> None:
    """Nothing of ours is written into them, and what became of the script is still reported."""
    (tmp_path / "train.py").write_text(CLOSES_ALL)
    done = rally(tmp_path, "--nproc-per-node", 1, "--start-method", method, "train.py")
    assert done.returncode == 1
    assert done.stdout == "still itself\n"
    files = sorted(tmp_path.glob("weights.*"))
    assert len(files) == 12
    assert {file.read_text() for file in files} == {"weights\n"}
    assert "raised RuntimeError" in done.stderr


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('its own error')")
    done = in_a_shell(tmp_path, "ulimit -n 64; exec {rally} --nproc-per-node 1 train.py")
    assert done.returncode == 1
    assert "raised RuntimeError" in done.stderr


# As clients of web services define their errors.
ATTRIBUTES_OF_ITS_OWN = """
import atexit
atexit.register(print, "atexit ran")
class ApiError(Exception):
    def __getattr__(self, name):
        return self.__dict__["body"][name]
error = ApiError("quota exceeded")
error.body = {}
raise error
"""


def test_an_exception_with_attributes_of_its_own_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ATTRIBUTES_OF_ITS_OWN)
    done = rally(tmp_path, "--nproc-per-node", 1, "train.py")
    assert done.returncode == 1
    assert done.stdout == "atexit ran\n"
    assert "ApiError: quota exceeded" in done.stderr
    assert "bootstrap.py" not in done.stderr


def test_a_reader_that_has_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("while True:\n    print('a line')")
    done = in_a_shell(tmp_path, "{rally} --nproc-per-node 2 train.py | head -n 1")
    assert done.stdout == "a line\n"
    assert "whoever read the output has closed it" in " ".join(done.stderr.split())
    assert "cause unknown" not in done.stderr
    assert "whole_writes.py" not in done.stderr.partition("the job failed")[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_flag_for_other_signals_leaves_ctrl_c_and_a_closed_terminal(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('ready')\ntime.sleep(600)")
    with supervisors.Popen(
        [*RALLY, "--log-dir", tmp_path / "logs", "--signals-to-handle", "TERM", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(STUB)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(120) == 128 + number


def test_files_of_the_current_folder_do_not_stand_in_for_modules_of_ours(tmp_path: Path) -> None:
    """Only files beside a script do, for that script; a program that is not Python has none."""
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "train.py").write_text("print('it ran')\n")
    for name in ("contextlib", "signal", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    for words, times in (
        (("--start-method", "exec", "--nproc-per-node", "2", "beside/train.py"), 2),
        (("--no-python", "echo", "it ran"), 1),
    ):
        done = subprocess.run(
            [supervisors.RALLY, "run", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert (done.returncode, done.stdout) == (0, "it ran\n" * times), done.stderr
