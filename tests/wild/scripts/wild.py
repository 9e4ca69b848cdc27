"""What all scripts share: data, where to fail or to wait, and what they leave for the test."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch


OUT = Path(os.environ["WILD_OUT"])
# train; fail: rank 1 raises; restart: it raises in the first attempt, after two checkpoints; stop: it never ends on its own;
# kill: in a session, ranks are killed.
MODE = os.environ.get("WILD_MODE", "train")
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EPOCHS = 100_000 if MODE == "stop" else 4  # of four steps each: 64 samples, 2 ranks, batches of 8


def dataset() -> torch.utils.data.TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x @ torch.arange(8.0) + 0.5)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def after_step(step: int) -> None:
    """Called after each step, counted from 1."""
    if RANK == 1 and (MODE, step) == ("fail", 3):
        raise ValueError("shard 7 has no labels")
    if RANK == 1 and (MODE, step) == ("restart", 10) and ATTEMPT == 0:
        raise ValueError("shard 8 has no labels")
    if MODE == "stop" and step == 3:
        (OUT / f"{RANK}.pid").write_text(str(os.getpid()))
    if MODE == "stop" and step >= 3:
        time.sleep(0.02)


def killed_in(step: int) -> None:
    """Called in each step, counted from 0: each rank is killed once in the first epoch, and once later."""
    mark = OUT / f"killed {step}"
    if ("kill", step % 2) == (MODE, RANK) and step in {1, 2, 10, 13} and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def finish(trained: torch.nn.Module, **facts: object) -> None:
    """What must be the same under both launchers."""
    digest = hashlib.sha256()
    for name, value in sorted(trained.state_dict().items()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    told = {"weights": digest.hexdigest(), "attempt": ATTEMPT, **facts}
    (OUT / f"{RANK}.json").write_text(json.dumps(told))
