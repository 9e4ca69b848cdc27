"""`rally run --hosts` whose terminal does not take what is printed; on this host, without ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elastic import wait_until
from pace import pace
from rallypoint._core import process
from supervisors import RALLY


pytestmark = pytest.mark.integration

# 104 KB: what does not fit into the pipe to the test, and into the hand of who reads from the host, fits into the pipe from
# there, so that the host's part ends.
PRINTS = "import sys\nfor i in range(1100):\n    print(i, 'x' * 90)\nsys.exit(int(sys.argv[1]))\n"
FAILS = "import sys\nfor i in range(1100):\n    print(i, 'x' * 90)\nraise ValueError('no luck')\n"


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


def _let_it_stand(begun: subprocess.Popen[bytes]) -> None:
    """Until its host's part has ended, and for the time after which that was taken for lost."""
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
    )
