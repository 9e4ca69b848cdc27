"""Jobs whose CPU time is limited, as batch systems limit it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from supervisors import RALLY, run


SCRIPT = """
import os, resource, sys
if os.environ["RANK"] == "1":
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    soft, hard = int(used) + 1, int(used) + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    while True:
        pass
import time
time.sleep(60)
"""


@pytest.mark.parametrize(("hard", "how"), [("1", "SIGKILL"), ("9", "SIGXCPU")])
def test_a_worker_whose_cpu_time_has_run_out_says_so(hard: str, how: str, tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_CPU)[1] == resource.RLIM_INFINITY
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [RALLY, "run", "--nproc-per-node", "2", "train.py", hard]
    done = run(line, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 128 + {"SIGKILL": 9, "SIGXCPU": 24}[how], done.stderr
    assert f"rank 1 was killed by {how}" in done.stderr
    assert "because      it had used up its limit of " in done.stderr
    assert "s of CPU time (ulimit -t)" in done.stderr
