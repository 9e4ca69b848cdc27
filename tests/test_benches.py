"""Every benchmark runs, at a size too small to say anything about speed. Its output is JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


BENCH = Path(__file__).parents[1] / "bench"
QUICK = ["--quick"]
LITTLE = {
    "attack_store.py": ["--operations", "200"],
    "autograd.py": QUICK,
    "checkpoints.py": ["--parameters", "100000", "--rounds", "1"],
    "collectives.py": QUICK,
    "elastic.py": QUICK,
    "false_alarms.py": ["--minutes", "0.1"],
    "fuzz_records.py": ["--records", "1000"],
    "fuzz_rpc.py": ["--frames", "2000"],
    "handlers.py": QUICK,
    "gloo.py": QUICK,
    "hang_drill.py": ["--seeds", "1", "--only", "stuck read"],
    "join.py": QUICK,
    "launch.py": QUICK,
    "many_supervisors.py": ["--nodes", "16"],
    "memory_rpc.py": QUICK,
    "node_losses.py": ["--losses", "1"],
    "nodes.py": QUICK,
    "operations.py": ["--pairs", "1", "--turns", "30", "--times", "1"],
    "rendezvous.py": QUICK,
    "recovery.py": QUICK,
    "restart.py": QUICK,
    "root_cause.py": QUICK,
    "rpc.py": QUICK,
    "rpc_protection.py": QUICK,
    "secret.py": QUICK,
    "session_steps.py": ["--pairs", "1", "--turns", "40"],
    "soak.py": QUICK,
    "soak_autograd.py": ["--faults", "10"],
    "soak_elastic.py": ["--faults", "2", "--patience", "120"],
    "soak_resizes.py": ["--faults", "4"],
    "soak_rpc.py": ["--faults", "60"],
    "soak_session_nodes.py": ["--faults", "4"],
    "soak_sessions.py": ["--faults", "3", "--workers", "2"],
    "state_transfer.py": QUICK,
    "step_copies.py": QUICK,
    "strangers.py": QUICK,
    "tracing.py": QUICK,
    "warm.py": QUICK,
}
# These need Ray, or a command that drives a Slurm cluster.
NEEDS_A_CLUSTER = {"slurm_events.py", "ray_kills.py"}


def test_none_is_forgotten() -> None:
    with_options = {path.name for path in BENCH.glob("*.py") if "argparse" in path.read_text()}
    plots = {name for name in with_options if name.startswith("plot_")}
    assert with_options - plots - NEEDS_A_CLUSTER == set(LITTLE)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.netns
@pytest.mark.parametrize("name", sorted(LITTLE))
def test_it_runs(name: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *LITTLE[name], "--output", str(result)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(BENCH)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    # At this size, a missed target means nothing; a soak that found something does.
    assert done.returncode == 0 or (done.returncode == 1 and "soak" not in name), said
    assert "Traceback" not in done.stderr, said
    assert json.loads(result.read_text())
