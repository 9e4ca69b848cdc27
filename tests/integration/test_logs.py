"""Workers' output: where it goes, and that none of it is lost on its way.

Output takes the same path in forks as in plain interpreters (``--start-method exec``). Each way to write is tried with
both; what the supervisor does with the output, mostly with forks. The scripts do without torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import supervisors
from stub_torch import STUB


pytestmark = pytest.mark.integration

RALLY = str(Path(sys.executable).parent / "rally")
TIMEOUT = 240
EXEC = ("--start-method", "exec")
BOTH_STARTS = pytest.mark.parametrize("start", ["exec", "forkserver"])


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    return plain | {"PYTHONPATH": str(STUB)} | more


def command(tmp_path: Path, script: str, *flags: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text("import os, sys, time\nrank = os.environ['RANK']\n" + script)
    return [RALLY, "run", *flags, str(path)]


def run(
    tmp_path: Path, script: str, *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return supervisors.run(
        command(tmp_path, script, *flags),
        env=environment(tmp_path, **(env or {})),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def the_run(base: Path) -> Path:
    (found,) = base.iterdir()
    return found


def logs_of(base: Path) -> dict[str, str]:
    run_folder = the_run(base)
    return {
        str(path.relative_to(run_folder)): path.read_text() for path in run_folder.rglob("*.log")
    }


# -- files ----------------------------------------------------------------------------------------


def test_redirected_streams_are_in_files_alone(tmp_path):
    script = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    done = run(tmp_path, script, *EXEC, "--nproc-per-node", "2", "--log-dir", "logs", "-r", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert logs_of(tmp_path / "logs") == {
        f"attempt_0/{rank}/{name}.log": f"{word} {rank}\n"
        for rank in (0, 1)
        for name, word in (("stdout", "out"), ("stderr", "err"))
    }


@BOTH_STARTS
def test_templates_give_each_worker_arguments_of_its_own(tmp_path, start):
    script = "print(sys.argv[1:])"
    words = (
        *command(tmp_path, script),
        "--seed={rank}",
        "{local_rank}-{node_rank}-{generation}",
        "{x}",
    )
    for flags, shown in ((), list(words[-3:])), (("--templates",), ["--seed=0", "0-0-0", "{x}"]):
        line = [words[0], "run", "--start-method", start, *flags, *words[2:]]
        done = supervisors.run(line, env=environment(tmp_path), capture_output=True, text=True, timeout=TIMEOUT, check=True)  # fmt: skip
        assert done.stdout == f"{shown}\n"


def test_ranks_of_two_digits_can_be_named(tmp_path):
    """torchrun reads one digit: there `--redirects 10:1` is an error."""
    flags = ("--nproc-per-node", "12", "--redirects", "10:1,11:3", "--log-dir", "logs")
    script = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    done = run(tmp_path, script, *flags)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(f"out {rank}" for rank in range(10))
    assert sorted(done.stderr.splitlines()) == sorted(f"err {rank}" for rank in range(11))
    assert logs_of(tmp_path / "logs") == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/11/stdout.log": "out 11\n",
        "attempt_0/11/stderr.log": "err 11\n",
    }


def test_only_the_chosen_ranks_are_shown_but_all_are_kept(tmp_path):
    flags = ("--nproc-per-node", "12", "--local-ranks-filter", "3,10", "--tee", "10:1,11:1")
    script = "print('out', rank)\nprint('err', rank, file=sys.stderr)"
    done = run(tmp_path, script, *flags, "--log-dir", "logs")
    assert sorted(done.stdout.splitlines()) == ["[default10]:out 10", "out 3"]
    assert sorted(done.stderr.splitlines()) == ["err 10", "err 3"]
    assert logs_of(tmp_path / "logs") == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/11/stdout.log": "out 11\n",
    }


def test_each_attempt_keeps_its_files(tmp_path):
    script = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
sys.exit(attempt != "2")
"""
    flags = ("--max-restarts", "2", "--redirects", "1", "--log-dir", "logs")
    done = run(tmp_path, script, *flags)
    assert done.returncode == 0
    assert logs_of(tmp_path / "logs") == {
        f"attempt_{number}/0/stdout.log": f"attempt {number}\n" for number in range(3)
    }
    errors = sorted(str(path.parent) for path in (tmp_path / "logs").rglob("error.json"))
    assert [Path(path).parent.name for path in errors] == ["attempt_0", "attempt_1"]


def test_two_jobs_share_a_log_folder(tmp_path):
    for word in ("one", "two"):
        run(tmp_path, f"print({word!r})", "-r", "1", "--log-dir", "logs", "--rdzv-id", "a/b")
    texts = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted(texts) == ["one\n", "two\n"]
    assert all(path.name.startswith("a-b_") for path in (tmp_path / "logs").iterdir())


def test_a_private_folder_goes_after_success_and_stays_after_failure(tmp_path):
    assert run(tmp_path, "print('fine')", *EXEC).returncode == 0
    assert list((tmp_path / "tmp").iterdir()) == []

    done = run(tmp_path, "raise ValueError('why')", *EXEC)
    assert done.returncode == 1
    folder = the_run(tmp_path / "tmp")
    assert str(folder) in done.stderr
    assert json.loads((folder / "report.json").read_text())["root_cause"]["rank"] == 0
    assert "why" in (folder / "attempt_0" / "0" / "error.json").read_text()


def test_a_private_folder_goes_after_a_restart_that_led_to_success(tmp_path):
    script = "assert os.environ['RALLY_GENERATION'] == '1', 'the first time'"
    done = run(tmp_path, script, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "restarting all workers" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_private_folder_with_output_is_kept_and_named(tmp_path):
    done = run(tmp_path, "print('find me')", "--redirects", "1")
    folder = the_run(tmp_path / "tmp")
    assert done.stderr == f"rally: output redirected to files is in {folder}\n"
    assert (folder / "attempt_0" / "0" / "stdout.log").read_text() == "find me\n"


def test_without_a_folder_nothing_is_hidden(tmp_path):
    done = run(tmp_path, "print('x')", "--redirects", "3", "--log-dir", os.devnull)
    assert (done.stdout, done.stderr) == ("x\n", "")
    done = run(tmp_path, "sys.exit(3)", "--log-dir", os.devnull)
    assert done.returncode == 3
    assert list((tmp_path / "tmp").iterdir()) == []


def test_stderr_stands_in_the_report_wherever_it_went(tmp_path):
    for flags in ((), ("--redirects", "2"), ("--tee", "2")):
        done = run(tmp_path, "os.write(2, b'the disk is on fire\\n'); os._exit(5)", *flags)
        assert done.returncode == 5
        assert re.search("│ the disk is on fire", done.stderr), flags


# -- nothing is lost ------------------------------------------------------------------------------

# 3 workers with 10 MB each, in lines of different lengths, some longer than a pipe takes at once.
LINES = 4000
BURST = f"""
for i in range({LINES}):
    n = 100_000 if i % 100 == 0 else i % 4000
    print(rank, i, "abc"[int(rank)] * n, n)
print("err", rank, file=sys.stderr)
"""
BURST_LINE = re.compile(r"\[default(\d)\]:(\d) (\d+) ([abc]*) (\d+)")


def check_burst(text: str) -> None:
    """Every line of each worker is there, whole and in order."""
    seen: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    for line in text.splitlines():
        found = BURST_LINE.fullmatch(line)
        assert found, f"a line was cut: {line[:60]!r}…{line[-60:]!r}"
        local_rank, rank, number, payload, size = found.groups()
        assert local_rank == rank
        assert payload == "abc"[int(rank)] * int(size)
        seen[rank].append(int(number))
    for rank in seen:
        assert seen[rank] == list(range(LINES)), f"lines of rank {rank} are missing"


@contextmanager
def job(
    command: list[str], cwd: Path, stdout: int, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = supervisors.Popen(
        command,
        cwd=cwd,
        env=environment(cwd),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL if stderr is None else stderr,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("start", "console"),
    [
        ("forkserver", "eager"),
        ("exec", "eager"),
        pytest.param("exec", "late", marks=pytest.mark.long),
        ("exec", "non-blocking"),
    ],
)
def test_a_burst_is_complete_in_files_and_on_the_console(tmp_path, start, console):
    """``late`` reads nothing until the workers are long gone; Python's own writers would wait too."""
    flags = ("--nproc-per-node", "3", "--tee", "1", "--log-dir", "logs", "--start-method", start)
    read, write = os.pipe()
    if console == "non-blocking":
        os.set_blocking(write, False)
    with job(command(tmp_path, BURST, *flags), tmp_path, write) as process:
        os.close(write)
        if console == "late":
            time.sleep(5)
        with open(read) as file:
            text = file.read()
        assert process.wait(TIMEOUT) == 0
    check_burst(text)
    logs = logs_of(tmp_path / "logs")
    assert len(logs) == 3
    for name, payload in logs.items():
        rank = Path(name).parent.name
        numbers = [line.split(" ")[:2] for line in payload.splitlines()]
        assert numbers == [[rank, str(number)] for number in range(LINES)]


def test_stderr_passes_whole_without_tee(tmp_path):
    script = "for i in range(20000): print(rank, i, 'x' * 100, file=sys.stderr)"
    done = run(tmp_path, script, "--nproc-per-node", "2")
    lines = done.stderr.splitlines()
    assert len(lines) == 40_000
    assert {len(line) - len(line.split()[1]) for line in lines} == {103}


def test_a_last_line_without_an_end_is_shown(tmp_path):
    script = "sys.stdout.write('no end'); sys.stderr.write('none either')"
    done = run(tmp_path, script, *EXEC, "--tee", "3", "--log-dir", "logs")
    assert done.stdout == "[default0]:no end\n"
    assert done.stderr == "[default0]:none either\n"
    assert logs_of(tmp_path / "logs")["attempt_0/0/stdout.log"] == "no end"


def test_states_of_a_progress_bar_are_lines_of_a_teed_stream(tmp_path):
    script = """
for i in range(3):
    sys.stderr.write(f"\\r{i} of 3")
    sys.stderr.flush()
    time.sleep(0.02)
sys.stderr.write("\\r\\n")
print("windows\\r")
"""
    done = run(tmp_path, script, "--tee", "3", "--log-dir", "logs")
    assert done.stderr.splitlines() == [f"[default0]:{i} of 3" for i in range(3)]
    assert done.stdout.splitlines() == ["[default0]:windows"]
    assert "\r1 of 3\r2 of 3" in (
        next((tmp_path / "logs").rglob("stderr.log")).read_bytes().decode()
    )


@pytest.mark.parametrize("tee", ["0", "1"])
def test_a_reader_that_leaves_does_not_stop_us_from_ending(tmp_path, tee):
    """``rally run … | head -1``"""
    script = "for i in range(50_000): print('line', i)"
    words = command(tmp_path, script, "--tee", tee, "--log-dir", "logs")
    read, write = os.pipe()
    with job(words, tmp_path, write) as process:
        os.close(write)
        with subprocess.Popen(["head", "-1"], stdin=read, stdout=subprocess.PIPE) as head:
            os.close(read)
            assert (
                head.communicate(timeout=TIMEOUT)[0] == b"[default0]:line 0\n"[11 * (tee == "0") :]
            )
        code = process.wait(240)
    if tee == "1":
        # Our console is gone, the worker's is not: it goes on, and its file is complete.
        assert code == 0
        text = logs_of(tmp_path / "logs")["attempt_0/0/stdout.log"]
        assert len(text.splitlines()) == 50_000
    else:
        assert code != 0  # a BrokenPipeError, as under plain python


def test_a_blocked_console_does_not_stop_us_from_ending_when_told_to(tmp_path):
    script = "for i in range(40_000): print('line', i)"
    read, write = os.pipe()
    words = command(tmp_path, script, "--tee", "1", "--log-dir", "logs")
    with job(words, tmp_path, write) as process:
        os.close(write)
        _wait_for(lambda: list((tmp_path / "logs").rglob("stdout.log")))
        time.sleep(1)  # the pipe is full and nobody reads
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 128 + signal.SIGINT
    os.close(read)


def _wait_for(holds, seconds: float = 240):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount one")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_worker_goes_on(tmp_path, small_disk):
    script = "for i in range(20_000): print('x' * 99)\nprint('done', file=sys.stderr)"
    done = run(tmp_path, script, "--tee", "1", "--log-dir", str(small_disk))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 20_000
    said = [line for line in done.stderr.splitlines() if line.startswith("rally:")]
    assert len(said) == 1
    assert re.search(r"stdout\.log: No space left on device", said[0])


# -- stdout is live ---------------------------------------------------------------------------------

LIVE = """
import pathlib, signal, subprocess
print("begin", rank, end=" ")
print("of", "it")
print("\\r1%", end="")
print("\\r2%", end="\\n")
subprocess.run(["echo", "child", rank])
sys.stdout.buffer.write(b"bytes\\n")
os.write(1, b"descriptor\\n")
while not pathlib.Path("go").exists():
    time.sleep(0.01)
print("last", rank)
os.kill(os.getpid(), signal.SIGKILL)
"""


@BOTH_STARTS
@pytest.mark.parametrize("where", ["pipe", "file", "redirects", "tee"])
def test_what_a_worker_prints_is_there_at_once_and_when_it_is_killed(tmp_path, start, where):
    flags = {"redirects": ("-r", "1"), "tee": ("--tee", "1")}.get(where, ())
    words = command(tmp_path, LIVE, "--start-method", start, "--log-dir", "logs", *flags)
    output = tmp_path / "output"
    output.touch()

    def shown() -> str:
        files = list((tmp_path / "logs").rglob("stdout.log")) if where == "redirects" else [output]
        return "".join(file.read_text() for file in files).replace("[default0]:", "")

    through = ["sh", "-c", '"$@" | cat >output', "sh"] if where == "pipe" else []
    with output.open("ab") as file, job([*through, *words], tmp_path, file.fileno()) as process:
        try:
            _wait_for(lambda: "descriptor\n" in shown())
            before = shown()
        finally:
            (tmp_path / "go").touch()
        process.wait(TIMEOUT)
    lines = [line for line in before.splitlines() if line]
    assert lines == ["begin 0 of it", "1%", "2%", "child 0", "bytes", "descriptor"]
    assert shown().splitlines()[-1] == "last 0"


@BOTH_STARTS
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_lines_of_two_ranks_do_not_cut_into_each_other_in_a_pipe(tmp_path, start, stream):
    """They are longer than what a pipe takes in one piece (4 KiB), and the pipe is full all the time."""
    script = BURST.replace(", n)", f", n, file=sys.{stream})")
    words = command(tmp_path, script, "--start-method", start, "--nproc-per-node", "3")
    read, write = os.pipe()
    ends = {"stdout": (write, None), "stderr": (subprocess.DEVNULL, write)}[stream]
    with job(words, tmp_path, *ends) as process:
        os.close(write)
        _wait_for(lambda: _is_full(read))
        with open(read) as file:
            lines = [line for line in file if not line.startswith("err")]
        assert process.wait(TIMEOUT) == 0
    check_burst("".join(f"[default{line[0]}]:{line}" for line in lines))


@BOTH_STARTS
def test_lines_of_two_ranks_do_not_cut_into_each_other_in_a_file(tmp_path, start):
    """As a shell redirects them: one file for all ranks, which is not opened for appending."""
    words = command(tmp_path, BURST, "--start-method", start, "--nproc-per-node", "3")
    output = tmp_path / "output"
    with output.open("wb") as file, job(words, tmp_path, file.fileno()) as process:
        assert process.wait(TIMEOUT) == 0
    lines = output.read_text().splitlines()
    check_burst("\n".join(f"[default{line[0]}]:{line}" for line in lines))


def _is_full(pipe: int) -> bool:
    waiting = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(waiting, sys.byteorder) >= 60_000


def test_a_signal_handler_may_print_while_its_worker_prints(tmp_path):
    script = """
import signal, threading
signal.signal(signal.SIGUSR1, lambda *_: print("handler"))
main = threading.main_thread().ident
def disturb():
    for _ in range(500):
        signal.pthread_kill(main, signal.SIGUSR1)
        time.sleep(0.0005)
thread = threading.Thread(target=disturb)
thread.start()
n = 0
while thread.is_alive():
    print("line", n)
    n += 1
print("end", n)
"""
    done = run(tmp_path, script, *EXEC, "--nproc-per-node", "2", "--tee", "0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ends = sorted(int(line.split()[1]) for line in lines if line.startswith("end"))
    printed = sorted(int(line.split()[1]) for line in lines if line.startswith("line"))
    assert printed == sorted([*range(ends[0]), *range(ends[1])])
    assert set(lines) - {f"line {n}" for n in printed} == {"handler", *(f"end {n}" for n in ends)}


def test_a_killed_supervisor_takes_no_output_with_it(tmp_path):
    script = """
n = 0
while True:
    print(rank, n)
    with open(f"printed-{rank}", "w") as file: file.write(str(n))
    n += 1
"""
    words = command(tmp_path, script, "--nproc-per-node", "2")
    read, write = os.pipe()
    with subprocess.Popen(["cat"], stdin=read, stdout=subprocess.PIPE, text=True) as cat:
        os.close(read)
        with job(words, tmp_path, write) as process:
            os.close(write)
            _wait_for(lambda: all((tmp_path / f"printed-{rank}").exists() for rank in (0, 1)))
            process.kill()
        text = cat.communicate(timeout=TIMEOUT)[0]
    for rank in (0, 1):
        printed = int((tmp_path / f"printed-{rank}").read_text() or 0)
        seen = [int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{rank} ")]
        assert seen == list(range(len(seen))) and len(seen) > printed


def test_lines_are_whole_in_an_image_that_sets_pythonunbuffered(tmp_path):
    # Each of these prints would be seven writes.
    script = "for n in range(2000): print('a', 'b', 'c', n)"
    done = run(tmp_path, script, *EXEC, "--nproc-per-node", "2", env={"PYTHONUNBUFFERED": "1"})
    assert Counter(done.stdout.splitlines()) == {f"a b c {n}": 2 for n in range(2000)}


def test_blocks_and_no_buffer_are_to_be_had(tmp_path):
    script = "print('lost', end='')\nos._exit(0)"
    words = (*EXEC, "--nproc-per-node", "2")
    assert run(tmp_path, script, *words, "--block-buffered").stdout == ""
    assert run(tmp_path, script, *words, "-u").stdout == "lostlost"
    done = run(tmp_path, script, *words, "-u", "--block-buffered")
    assert done.returncode == 2 and "--block-buffered: cannot be combined" in done.stderr


# -- terminals ------------------------------------------------------------------------------------


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, list[bytes]]]:
    """A terminal, and what appears on it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, columns, 0, 0))
    shown: list[bytes] = []

    def look() -> None:
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:
                return  # the last writer is gone
            if not data:
                return
            shown.append(data)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield theirs, shown
    finally:
        os.close(theirs)
        thread.join(10)
        os.close(ours)


TERMINAL = """
print(sys.stderr.isatty(), sys.stdout.isatty(), os.get_terminal_size(2).columns, flush=True)
sys.stderr.write("\\rbar 1\\rbar 2\\x1b[31mred\\x1b[0m\\n")
sys.exit(4)
"""


@BOTH_STARTS
def test_a_terminal_stays_one_for_stderr(tmp_path, start):
    read, write = os.pipe()
    with (
        terminal(77) as (theirs, shown),
        job(
            command(tmp_path, TERMINAL, "--start-method", start), tmp_path, write, theirs
        ) as process,
    ):
        os.close(write)
        with open(read) as file:
            assert file.read() == "True False 77\n"
        assert process.wait(TIMEOUT) == 4
    text = b"".join(shown)
    # The terminal itself made \r\n of the newline; nothing was translated twice.
    assert b"\rbar 1\rbar 2\x1b[31mred\x1b[0m\r\n" in text
    assert text.count(b"bar 1") == 1, "what a worker writes came back as an echo"


RESIZED = """
deadline = time.monotonic() + 240
print(os.get_terminal_size(2).columns, flush=True)
while os.get_terminal_size(2).columns != 52 and time.monotonic() < deadline:
    time.sleep(0.02)
print(os.get_terminal_size(2).columns, flush=True)
"""


def test_a_resized_terminal_resizes_the_workers(tmp_path):
    read, write = os.pipe()
    words = command(tmp_path, RESIZED, *EXEC)
    with terminal(77) as (theirs, _), job(words, tmp_path, write, theirs) as process:
        os.close(write)
        with open(read) as file:
            assert file.readline() == "77\n"
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, 52, 0, 0))
            process.send_signal(signal.SIGWINCH)  # as the kernel does to a terminal's programs
            assert file.readline() == "52\n"
        assert process.wait(TIMEOUT) == 0


def test_a_teed_stream_is_no_terminal(tmp_path):
    read, write = os.pipe()
    words = command(
        tmp_path, "print(sys.stderr.isatty()); print('x', file=sys.stderr)", *EXEC, "--tee", "2"
    )
    with terminal(80) as (theirs, shown), job(words, tmp_path, write, theirs) as process:
        os.close(write)
        with open(read) as file:
            assert file.read() == "False\n"
        assert process.wait(TIMEOUT) == 0
    assert b"[default0]:x\r\n" in b"".join(shown)


def test_closed_standard_streams_are_no_trouble(tmp_path):
    words = command(tmp_path, "open('ran', 'w').close(); print('x', file=sys.stderr)", *EXEC)
    for closing in ("2>&-", ">&-", "<&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closing}', "sh", *words],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, closing
        assert (tmp_path / "ran").exists()
        (tmp_path / "ran").unlink()
