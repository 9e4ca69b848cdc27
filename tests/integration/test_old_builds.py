"""A Python that was built on an old system, such as those of conda and uv: its os, signal and fcntl lack what Linux has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import supervisors
from supervisors import RALLY


# The process to fork from is such a Python, too, and no other file needs it.
IMPORTS = ("torch.distributed", "torch._dynamo")

WITHOUT = """
import atexit, fcntl, gc, os, signal
gc.set_threshold(1_000_000)  # or a fifth of the time that torch's import takes is collections
atexit.register(gc.freeze)  # or an interpreter that ends looks through all of torch for cycles
for module, names in (
    (os, ("pidfd_open", "memfd_create", "copy_file_range", "getrandom", "P_PIDFD", "PIDFD_NONBLOCK")),
    (os, [name for name in dir(os) if name.startswith("MFD_")]),
    (signal, ("pidfd_send_signal",)),
    (fcntl, [name for name in dir(fcntl) if "SEAL" in name]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
SESSION = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rallypoint import elastic

assert not hasattr(os, "memfd_create")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with elastic.session(model, optimizer, checkpoint=sys.argv[1]) as session:
    for batch in session.batches([torch.ones(8, 4)] * 8):
        with session.step():
            if session.position == 4 and dist.get_rank() == 1 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"rank {dist.get_rank()} has done {session.position}")
"""
CALLS = """
import os
import torch
from rallypoint import rpc

assert not hasattr(os, "memfd_create")
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1 << 20), 1))
    print("the answer is right" if (total == 2).all() else total)
rpc.shutdown()
"""
FUNCTIONS = """
import os
from rallypoint.launch import MultiprocessConfig, launch_subprocesses

assert not hasattr(os, "memfd_create")

def double(number):
    return 2 * number

if __name__ == "__main__":
    for method in ("forkserver", "fork", "spawn"):
        config = MultiprocessConfig(world_size=2, launch_method=method)
        print(method, launch_subprocesses(double, config, 21))
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of such a Python."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(folder: Path, env: dict[str, str], script: str, *words: str) -> str:
    (folder / "script.py").write_text(script)
    done = supervisors.run(
        words,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        imports=IMPORTS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_a_session_survives_a_kill_and_leaves_a_checkpoint(
    tmp_path: Path, old: dict[str, str], method: str
) -> None:
    words = (RALLY, "run", "--start-method", method, "--nproc-per-node", "2", "script.py", "saved")
    assert sorted(run(tmp_path, old, SESSION, *words).splitlines()) == [
        "rank 0 has done 8",
        "rank 1 has done 8",
    ]
    assert list((tmp_path / "saved").iterdir())


def test_tensors_are_sent_in_shared_memory(tmp_path: Path, old: dict[str, str]) -> None:
    words = (RALLY, "run", "--nproc-per-node", "2", "script.py")
    assert run(tmp_path, old, CALLS, *words) == "the answer is right\n"


def test_functions_are_launched_in_each_way(tmp_path: Path, old: dict[str, str]) -> None:
    assert run(tmp_path, old, FUNCTIONS, sys.executable, "script.py").splitlines() == [
        "forkserver [42, 42]",
        "fork [42, 42]",
        "spawn [42, 42]",
    ]
