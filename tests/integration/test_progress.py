"""A job's progress: reported by its workers, shown by its supervisor."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import terminals
from pace import pace
from rallypoint.control.client import connect
from rallypoint.errors import ControlError
from rallypoint.launch.cli import main
from rallypoint.launch.output.progress_display import Bar
from supervisors import RALLY, Popen


PATIENCE = 30.0 * pace()

# Rank 0 reports a step; a child of it reports another one, which does not count. Then all wait.
SCRIPT = """
import os, sys, time
import rallypoint

rank = int(os.environ["RANK"])
rallypoint.progress(41, 100)
time.sleep(0.05)
rallypoint.progress(42 + rank, 100, loss=0.25, note="no number")
if rank == 0 and os.fork() == 0:
    rallypoint.progress(99, 100)
    os._exit(0)
print("rank", rank, "stands", flush=True)
if sys.argv[1] == "stay":
    time.sleep(1000)
time.sleep(float(sys.argv[1]))
"""


def wait_until(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    pytest.fail(f"not within {PATIENCE} s: {what}")


@pytest.mark.integration
def test_ps_top_and_status_have_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    name = f"steps-{os.getpid()}"
    words = [RALLY, "run", "--nproc-per-node", "2", "--rdzv-id", name, str(script), "stay"]
    job = Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:

        def reported() -> Any:
            try:
                status = connect(name).status()
            except ControlError:
                return None
            steps = [(each["progress"] or {}).get("step") for each in status["workers"]]
            return status if steps == [42, 43] else None

        status = wait_until(reported, "both ranks have reported")
        found = status["progress"]
        assert (found["step"], found["total"], found["metrics"]) == (42, 100, {"loss": 0.25})
        assert 0 < found["rate"] <= 20 and not found["late"]
        assert main(["ps"]) == 0
        (row,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith(name)]
        assert "running, step 42 of 100" in row
        assert main(["top", name, "--once", "--interval", "0.1"]) == 0
        _, head, first, second = capsys.readouterr().out.splitlines()
        place = head.split().index("STEP")
        assert (first.split()[place], second.split()[place]) == ("42", "43")
    finally:
        job.terminate()
        out, err = job.communicate(timeout=PATIENCE)
    assert "step" not in err and "stands" in out  # the first line comes after half a minute


def on_terminal(words: list[str], rows: int) -> tuple[int, bytes]:
    """Run a program on a terminal with this many rows. Returns its exit code, and what it has written."""
    pid, fd = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", rows, 80, 0, 0))
            os.execve(words[0], words, {**os.environ, "TERM": "xterm"})
        finally:
            os._exit(99)
    written = b""
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        written += data
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written


@pytest.mark.integration
@pytest.mark.parametrize(("rows", "flags"), [(24, ()), (4, ()), (24, ("--progress", "off"))])
def test_the_bar_has_a_row_of_its_own(tmp_path: Path, rows: int, flags: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, written = on_terminal([RALLY, "run", *flags, str(script), f"{2 * pace():g}"], rows)
    assert code == 0 and b"rank 0 stands" in written
    if rows == 4 or flags:
        assert b"step 4" not in written and b"\x1b7" not in written
        return
    reserves = b"\x1b[1;23r"
    begin, shows, end = (
        written.find(reserves),
        written.rfind(b"\x1b[24;1H 42 %"),
        written.rfind(b"\x1b[r"),
    )
    assert 0 <= begin < shows < end  # and the row is given back
    assert b"step 42 of 100" in written[shows:end]


def test_a_terminal_that_nobody_reads_blocks_nobody() -> None:
    """The supervisor draws in its loop. The bar is drawn to the end once somebody reads again."""
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        bar = Bar(theirs)
        bar._is_ours = lambda: True  # type: ignore[method-assign]
        told = {"total": 9000, "rate": None, "late": False, "seconds_left": None, "metrics": {}}

        def draw() -> None:
            for step in range(3000):
                bar.show({**told, "step": step})

        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        drawing.join(PATIENCE)
        assert not drawing.is_alive()
        assert os.get_blocking(theirs)
        written = b""
        while select.select([ours], [], [], 0.5 * pace())[0]:
            written += os.read(ours, 65536)
        bar.show({**told, "step": 8999})
        written += terminals.read_until(ours, b"step 8999 of 9000\x1b[K\x1b8")
        bar.close()
        assert written.count(b"\x1b7") == written.count(b"\x1b8")
    finally:
        os.close(ours)
        os.close(theirs)


COUNTED = """
import os, sys, time
import torch, torch.distributed as dist
from rallypoint import elastic
from rallypoint.join import Join

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()

def wait_for(name):
    while not os.path.exists(f"{__file__}.{name}"):
        time.sleep(0.02)

if sys.argv[1] == "join":
    with Join([model, optimizer]) as joined:
        for batch in joined.batches([torch.ones(3, 2)] * 5):
            train(batch)
else:
    with elastic.session(model, optimizer) as session:
        for _ in range(4):
            with session.step():
                train(torch.ones(3, 2))
wait_for("go")
dist.destroy_process_group()
"""


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize(("what", "step", "total"), [("join", 5, 5), ("session", 4, None)])
def test_joins_and_sessions_count_by_themselves(
    tmp_path: Path, what: str, step: int, total: int | None
) -> None:
    script, name = tmp_path / "train.py", f"{what}-{os.getpid()}"
    script.write_text(COUNTED)
    job = Popen([RALLY, "run", "--rdzv-id", name, str(script), what], stderr=subprocess.DEVNULL)

    def reported() -> Any:
        try:
            found = connect(name).status()["progress"]
        except ControlError:
            return None
        return found if found and found["step"] == step else None

    try:
        assert wait_until(reported, "all steps are reported")["total"] == total
    finally:
        Path(f"{script}.go").touch()
        assert job.wait(PATIENCE) == 0
