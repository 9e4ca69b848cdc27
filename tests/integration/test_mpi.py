"""Under real MPI launchers: tasks find each other, and two jobs on one machine never meet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Trains with the peers it finds, and exits when the test says so.
PROBE = """
import json, os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
jobs = [None] * dist.get_world_size()
dist.all_gather_object(jobs, os.environ["JOB"])
names = "RANK LOCAL_RANK TORCHELASTIC_RUN_ID JOB".split()
line = {name: os.environ[name] for name in names} | {"jobs": jobs}
folder = pathlib.Path(os.environ["FOLDER"])
new = folder / f"new-{os.environ['JOB']}-{os.getpid()}"
new.write_text(json.dumps(line))
new.rename(folder / f"{os.environ['JOB']}-{os.getpid()}.json")
while len(list(folder.glob("*.json"))) < 4:
    time.sleep(0.05)
dist.destroy_process_group()
"""
LAUNCHERS = {
    "mpich": ("mpiexec.hydra", "-n", "2"),
    "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
}


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_two_jobs_on_one_machine_never_meet(tmp_path: Path, launcher: str) -> None:
    words = LAUNCHERS[launcher]
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} ({launcher})")
    (tmp_path / "probe.py").write_text(PROBE)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PBS", "PMI"))}
    command = [*words, sys.executable, "-m", "rallypoint", "run", str(tmp_path / "probe.py")]
    jobs = [
        subprocess.Popen(
            command, env={**env, "JOB": name, "FOLDER": str(tmp_path)}, stderr=subprocess.PIPE
        )
        for name in ("first", "second")
    ]
    try:
        said = [job.communicate(timeout=500)[1].decode() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], said
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert all(record["jobs"] == [record["JOB"]] * 2 for record in records)
    assert sorted((r["JOB"], r["RANK"], r["LOCAL_RANK"]) for r in records) == [
        (job, rank, rank) for job in ("first", "second") for rank in ("0", "1")
    ]
    assert len({record["TORCHELASTIC_RUN_ID"] for record in records}) == 2
