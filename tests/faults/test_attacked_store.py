"""A stranger who has reached the port of an elastic job's store replays, moves and rewrites its records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(600)]

BENCH = Path(__file__).parents[2] / "bench" / "attack_store.py"


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("another user", id="another-user"),
        pytest.param(
            "another host", id="another-host", marks=[pytest.mark.netns, pytest.mark.long]
        ),
    ],
)
def test_a_job_whose_records_are_replayed_and_rewritten_has_no_wrong_round_and_ends_well(
    where: str,
) -> None:
    command = [sys.executable, str(BENCH), "--hosts", "2", "--operations", "300"]
    if where == "another user":
        command.append("--here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["attack"]
    assert found["namespaces"] == (where == "another host")
    assert found["operations"] == 300
    assert set(found["by kind"]) == {"replayed", "moved", "changed", "unsigned"}
    assert found["wrong rounds"] == 0
    assert found["exit codes"] == [0, 0]
    assert found["rounds"] > 1, "a worker was killed meanwhile"
