"""`rally submit`: what engines are given."""

import json
import subprocess

import pytest

from rallypoint.errors import ConfigError
from rallypoint.launch.placement import clusters
from rallypoint.launch.submit.command import command
from rallypoint.launch.submit.kubernetes import manifest
from rallypoint.launch.submit.request import read
from rallypoint.launch.submit.slurm import script


def test_a_script_for_slurm() -> None:
    words = [
        "slurm",
        "--nodes",
        "4",
        "--gpus=8",
        "--partition=big",
        "--time=1:00",
        "--",
        "--max-restarts",
        "2",
        "train.py",
    ]
    text = script(read([*words, "a b"]), "/env/python")
    assert text.splitlines() == [
        "#!/bin/bash",
        *("#SBATCH --job-name=rally", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1"),
        *("#SBATCH --gpus-per-node=8", "#SBATCH --partition=big", "#SBATCH --time=1:00"),
        "exec srun --kill-on-bad-exit=0 /env/python -m rallypoint run --nproc-per-node=8"
        " --max-restarts 2 train.py 'a b'",
    ]
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=60)


def test_a_node_of_the_manifest_knows_where_it_stands() -> None:
    words = [
        "k8s",
        "--image",
        "i",
        "--nodes",
        "3",
        "--gpus",
        "2",
        "--name",
        "net",
        "--",
        "--nproc_per_node=1",
        "train.py",
    ]
    service, job = json.loads(manifest(read(words)))["items"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][3:] == ["run", "--nproc_per_node=1", "train.py"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    placement = clusters.detect({**env, "JOB_COMPLETION_INDEX": "1"}, list)
    assert placement is not None
    assert (placement.num_nodes, placement.node_rank) == (3, 1)
    assert placement.master_addr == "net-0.net"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "pbs -- x.py",
            "slurm",
            "slurm --",
            "slurm --nodes 0 -- x.py",
            "slurm --nodes x -- x.py",
        ),
        *("slurm --partition big -- x.py", "k8s -- x.py", "k8s --image i --time=1 -- x.py"),
        "k8s --image i --name A_b -- x.py",
    ],
)
def test_what_cannot_be_submitted(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text.split())


def test_a_dry_run_hands_over_nothing(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    shown: list[str] = []
    assert command(["slurm", "--dry-run", "--", "x.py"], shown.append) == 0
    assert shown[0].startswith("#!/bin/bash")
    with pytest.raises(ConfigError, match="not installed"):
        command(["slurm", "--", "x.py"], shown.append)
