"""`rally run --hosts` whose terminal does not take what is printed, or that loses a host; on this host, without ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic import wait_until
from pace import pace
from rallypoint._core import process
from rallypoint.launch.hosts.orders import SILENCE
from supervisors import RALLY


pytestmark = pytest.mark.integration

# 104 KB: what neither the pipe to the test nor the reader of the host's output can hold fits into the pipe from the host, so
# that the host's part can end.
PRINTS = "import sys\nfor i in range(1100):\n    print(i, 'x' * 90)\nsys.exit(int(sys.argv[1]))\n"
FAILS = "import sys\nfor i in range(1100):\n    print(i, 'x' * 90)\nraise ValueError('no luck')\n"

# It saves for longer than a host would allow it after a hang-up.
SAVES = """
import os, signal, time
def save(*_):
    time.sleep(5.0)
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
# One second instead of the half minute that hosts have on top of --shutdown-timeout.
IN_A_SECOND = """
import sys
from rallypoint.launch.hosts import launcher
launcher._ENDING = 1.0
from rallypoint.launch.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("code", [0, 7])
def test_output_that_stands_still_at_the_end_is_no_lost_host(tmp_path: Path, code: int) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    begun = _start(tmp_path, "train.py", str(code))
    _let_it_stand(begun)
    out, err = (each.decode() for each in begun.communicate(timeout=60))
    assert begun.returncode == code, err
    assert "lost" not in err
    assert [line.split()[0] for line in out.splitlines()] == [str(each) for each in range(1100)]


def test_the_report_comes_after_all_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS)
    begun = _start(tmp_path, "train.py", stderr=subprocess.STDOUT)
    _let_it_stand(begun)
    lines = begun.communicate(timeout=60)[0].decode().splitlines()
    assert begun.returncode == 1
    # The worker's own traceback is on another stream, and may come before its last lines.
    (last,) = (at for at, line in enumerate(lines) if line.startswith("1099 "))
    (report,) = (at for at, line in enumerate(lines) if line.startswith("rally: the job failed"))
    assert report > last
    assert any("ValueError: no luck" in line for line in lines[report:])


def test_ctrl_c_ends_what_waits_for_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    begun = _start(tmp_path, "train.py", "0")
    _let_it_stand(begun)
    begun.send_signal(signal.SIGINT)
    began = time.monotonic()
    begun.wait(60)
    assert time.monotonic() - began < 5 * pace()
    begun.communicate()


def test_workers_of_a_host_may_save_when_another_host_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES)
    words = ["run", "--start-method", "exec", "--hosts", "localhost,127.0.0.1", "train.py"]
    begun = subprocess.Popen(
        [sys.executable, "-c", IN_A_SECOND, *words],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert begun.stdout is not None
    ready = {begun.stdout.readline() for _ in range(2)}
    assert ready == {"ready\n", "[127.0.0.1] ready\n"}
    os.kill(max(process.children(begun.pid)), signal.SIGKILL)  # the second host's part
    out, _ = begun.communicate(timeout=60)
    assert (begun.returncode, out) == (1, "saved\n")


def _let_it_stand(begun: subprocess.Popen[bytes]) -> None:
    """Wait until the host's part has ended, and then for the time after which it used to be taken for lost."""
    wait_until(lambda: process.descendants(begun.pid), "the host's part has started", 60)
    wait_until(lambda: not process.descendants(begun.pid), "the host's part has ended", 60)
    time.sleep(6.0)
    assert begun.poll() is None


def _start(folder: Path, *words: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [RALLY, "run", "--start-method", "exec", "--hosts", "localhost:1", *words],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        process_group=0,  # as under a shell with job control: otherwise Ctrl-Z stops nothing
    )


STEPS = """
import os, pathlib, time
for step in range(1000):
    pathlib.Path("step").write_text(str(step))
    if pathlib.Path("end").exists():
        print("ended at", step, flush=True)
        break
    time.sleep(0.05)
"""


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _step(folder: Path) -> int:
    return int((folder / "step").read_text() or "0") if (folder / "step").exists() else 0


@pytest.mark.parametrize("then", ["fg", "kill -9"])
def test_ctrl_z_stops_what_is_seen_and_not_the_job(tmp_path: Path, then: str) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    begun = _start(tmp_path, "train.py")
    wait_until(lambda: _step(tmp_path) > 0, "the job runs")
    begun.send_signal(signal.SIGTSTP)
    wait_until(lambda: _is_stopped(begun.pid), "it stops")
    before = _step(tmp_path)
    time.sleep(SILENCE + 1.0)  # after which a host that hears nothing ends its part
    wait_until(lambda: _step(tmp_path) > before + 10, "the job goes on")
    if then == "kill -9":
        begun.kill()
        begun.communicate(timeout=60)
        wait_until(lambda: not _in(tmp_path), "nothing is left", 30)
        return
    begun.send_signal(signal.SIGCONT)
    begun.send_signal(signal.SIGTSTP)  # and once more
    wait_until(lambda: _is_stopped(begun.pid), "it stops")
    begun.send_signal(signal.SIGCONT)
    time.sleep(SILENCE + 1.0)
    (tmp_path / "end").touch()
    out, err = (each.decode() for each in begun.communicate(timeout=60))
    assert (begun.returncode, err) == (0, "")
    assert out.startswith("ended at")


def _in(folder: Path) -> list[int]:
    """Processes that run in a folder."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                if (each / "cwd").samefile(folder):
                    found.append(int(each.name))
    return found
