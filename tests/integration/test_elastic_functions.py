"""A session wherever the package was imported: before the worker started, in a function's module, or in a preload."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from supervisors import run


pytestmark = pytest.mark.integration

SCRIPT = """
import atexit, gc, os, pathlib, signal, sys
gc.disable()  # collections are a third of the time that these imports take
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
gc.enable()
from rallypoint.launch import MultiprocessConfig, launch_subprocesses
EARLY

WAY

def setup():
    import rallypoint.elastic

def train():
    LATE
    atexit.register(gc.freeze)  # or an interpreter that ends looks through all of torch for cycles
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 2)
    averaged, *optimizer = made(net)
    with elastic.session(averaged, *optimizer) as session:
        while session.position < 4:
            with session.step():
                if session.position == 2 and dist.get_rank() == 1 and not os.path.exists("fault"):
                    pathlib.Path("fault").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                averaged(torch.ones(1, 2)).sum().backward()
                stepped(net, *optimizer)
        return session.position, net.weight.sum().item()

if __name__ == "__main__":
    method, *early = sys.argv[1:]
    config = MultiprocessConfig(world_size=2, backend="gloo", launch_method=method)
    print(launch_subprocesses(train, config, setup=setup if "setup" in early else None))
"""


WITH_TORCHS_CLASSES = """
def made(net):
    return DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)

def stepped(net, optimizer):
    optimizer.step()
    optimizer.zero_grad()
"""
# For processes that import all by themselves: with torch's classes they would import torch._dynamo, nearly a second more.
BY_HAND = """
def made(net):
    return (net,)

def stepped(net):
    for each in net.parameters():
        dist.all_reduce(each.grad)
        each.data -= 0.1 * each.grad / dist.get_world_size()
        each.grad = None
"""
IMPORT = "from rallypoint import elastic"


def script(*, early: bool, way: str = WITH_TORCHS_CLASSES) -> str:
    """With the import in its module, or in its function."""
    text = SCRIPT.replace("WAY", way)
    return text.replace("EARLY", IMPORT * early).replace("LATE", "pass" if early else IMPORT)


def ended(folder: Path, *words: str, early: bool = False, way: str = WITH_TORCHS_CLASSES) -> str:
    (folder / "train.py").write_text(script(early=early, way=way))
    done = run(
        [sys.executable, "train.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return str(done.stdout + done.stderr)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_function_may_train_in_a_session(tmp_path: Path, method: str) -> None:
    way = BY_HAND if method == "spawn" else WITH_TORCHS_CLASSES
    said = ended(tmp_path, method, early=True, way=way)
    assert (tmp_path / "fault").exists()
    assert said.count("takes its place, the others keep theirs") == 1, said
    first, second = (
        each.split(", ") for each in said.partition("[(")[2].partition(")]")[0].split("), (")
    )
    assert first == second, said
    assert first[0] == "4"


def test_its_set_up_may_import_the_package(tmp_path: Path) -> None:
    said = ended(tmp_path, "fork", "setup")
    assert said.count("takes its place, the others keep theirs") == 1, said


def test_where_it_came_too_late_the_error_says_what_to_do(tmp_path: Path) -> None:
    said = " ".join(ended(tmp_path, "fork").split())
    assert "import the package in the function's module, or in `setup`" in said


def test_the_package_may_be_preloaded(tmp_path: Path) -> None:
    text = script(early=True).partition("if __name__")[0]
    text += "dist.init_process_group('gloo')\nprint(train())\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(text)
    words = ["run", "--nproc-per-node", "2", "--preload", "rallypoint.elastic", "train.py"]
    done = run(
        [sys.executable, "-m", "rallypoint", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("takes its place, the others keep theirs") == 1
    assert len(set(done.stdout.splitlines())) == 1
