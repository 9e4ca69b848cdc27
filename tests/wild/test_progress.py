"""rallypoint.integrations: what frameworks know of their steps is what `rally ps` shows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.wild, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("framework", "script", "metrics"),
    [
        ("lightning", "progress_lightning.py", {"train/loss"}),
        ("transformers", "progress_trainer.py", {"loss", "grad_norm", "learning_rate"}),
    ],
)
def test_rally_ps_shows_the_steps_of_a_framework(
    framework: str, script: str, metrics: set[str], tmp_path: Path
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is missing: `make wild` installs it")
    place = tmp_path / "status.json"
    words = ["--nproc-per-node", "2", "--rdzv-id", f"steps-{tmp_path.name}"]
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "run", *words, str(SCRIPTS / script), str(place)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    progress = json.loads(place.read_text())["progress"]
    # Two epochs of 64 samples in batches of 8 on two ranks.
    assert progress["total"] == 8
    assert progress["step"] == 6
    assert set(progress["metrics"]) == metrics
