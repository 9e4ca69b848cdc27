"""How soon all workers train again after one was killed, with a plain script and its own checkpoint; prints JSON.

    python bench/restart.py --quick
    python bench/restart.py --output bench/results/restart.json

Four workers, DistributedDataParallel, Adam, one million parameters, a checkpoint per step. One worker after the other is
killed in the same job: with the learned preload, with ``--preload``, with neither, and with torchrun. Then first starts
alternate with and without the learned preload: learning must not make them slower. See bench/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, TORCHRUN, Job, Progress, adopt_orphans, machine, publish, ratio, spread


WORKERS = 4
# Seconds of steps before the first kill, in which the template is made, and before each later one.
SETTLE, STEPS = 10.0, 1.0
GIVE_UP = 90.0
LIMIT = 0.5
# First starts of each kind, and how much longer the median may be with learning: less than runs vary anyway.
STARTS, SLOWER = 6, 1.03

TRAIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

folder = os.environ["NOTES"]
generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = DDP(torch.nn.Linear(1000, 1000))
optimizer = torch.optim.Adam(net.parameters())
saved, step = f"{folder}/saved", 0
if os.path.exists(saved):
    state = torch.load(saved)
    net.load_state_dict(state["net"]), optimizer.load_state_dict(state["optimizer"])
    step = state["step"]

def note(name, text):
    with open(f"{folder}/.{name}", "w") as file:
        file.write(text)
    os.replace(f"{folder}/.{name}", f"{folder}/{name}")

first = True
while not os.path.exists(f"{folder}/stop"):
    optimizer.zero_grad()
    net(torch.ones(8, 1000)).sum().backward()
    optimizer.step()
    step += 1
    if first:
        note(f"stepped.{generation}.{rank}", f"{time.monotonic()} {os.getpid()}")
        first = False
    if rank == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved + ".new")
        os.replace(saved + ".new", saved)
    time.sleep(0.02)
    dist.barrier()
os._exit(0)
"""


def measure(
    command: list[str], kills: int, progress: Progress, name: str, seed: int, **env: str
) -> dict[str, Any]:
    """One job: the time to its first step, and from each kill to the last worker's next step."""
    draw = random.Random(seed)
    first: list[float] = []
    again: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TRAIN)
        flags = ["--nproc-per-node", str(WORKERS), "--max-restarts", str(kills)]
        job = Job([*command, *flags, str(script)], Path(folder), **env)
        try:
            progress.step(f"{name}: start")
            stepped = job.wait_for_notes("stepped.0.*", WORKERS, GIVE_UP)
            if stepped is not None:
                first.append(max(float(text.split()[0]) for text in stepped.values()) - job.began)
            for number in range(1, kills + 1):
                progress.step(f"{name}: kill {number}")
                if stepped is None:
                    continue
                time.sleep(STEPS + draw.random() * STEPS if number > 1 else SETTLE)
                pids = [int(text.split()[1]) for text in stepped.values()]
                killed = time.monotonic()
                os.kill(draw.choice(pids), signal.SIGKILL)
                stepped = job.wait_for_notes(f"stepped.{number}.*", WORKERS, GIVE_UP)
                if stepped is not None:
                    last = max(float(text.split()[0]) for text in stepped.values())
                    again.append(last - killed)
            (Path(folder) / "stop").touch()
            job.wait(GIVE_UP)
        finally:
            job.clean_up()
    return {
        "first_step_s": spread(first),
        "kill_to_step_s": spread(again),
        "each": [round(each, 3) for each in again],
        "kills": kills,
    }


def first_starts(count: int, progress: Progress) -> dict[str, Any]:
    """Seconds from the command to the last worker's first step, alternating with and without the learned preload."""
    seen: dict[str, list[float]] = {"learns": [], "does_not": []}
    commands = {"learns": RALLY, "does_not": [*RALLY, "--no-learned-preload"]}
    for turn in range(count):
        for name in sorted(seen, reverse=turn % 2 == 1):
            row = measure(commands[name], 0, progress, f"first start, {name}", turn)
            seen[name] += [row["first_step_s"]["median"]] if row["first_step_s"]["n"] else []
    return {name: spread(each) for name, each in seen.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one kill each, without torchrun")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    adopt_orphans()
    kills = 1 if args.quick else 10
    plans: list[tuple[str, list[str], int, dict[str, str]]] = [
        ("rally", RALLY, kills, {}),
        (
            "rally, --preload torch._dynamo",
            [*RALLY, "--no-learned-preload", "--preload", "torch._dynamo"],
            kills,
            {},
        ),
        ("rally, --no-learned-preload", [*RALLY, "--no-learned-preload"], min(kills, 4), {}),
    ]
    if not args.quick:
        # Without this variable, torchrun's workers cannot start again over Gloo.
        work_around = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        plans.append(("torchrun", TORCHRUN, 3, work_around))
    starts = 1 if args.quick else STARTS
    progress = Progress(sum(1 + count for _, _, count, _ in plans) + 2 * starts)
    result: dict[str, Any] = {"machine": machine(), "workers": WORKERS, "jobs": {}}
    for seed, (name, command, count, env) in enumerate(plans):
        result["jobs"][name] = measure(command, count, progress, name, seed, **env)
    begun = result["first_start_s"] = first_starts(starts, progress)
    progress.close()
    rows = result["jobs"]
    ours, _, before = (rows[name]["kill_to_step_s"] for name, *_ in plans[:3])
    result["ratio_to_no_learned_preload"] = ratio(ours, before)
    if not args.quick:
        result["ratio_to_torchrun"] = ratio(ours, rows["torchrun"]["kill_to_step_s"])
        result["targets"] = [
            {
                "what": f"kill to the next step of all workers, median, at most {LIMIT} s",
                "value": ours["median"],
                "holds": ours["median"] is not None and ours["median"] <= LIMIT,
            },
            {
                "what": f"a first start with the learned preload takes at most {SLOWER} times one without it",
                "value": (found := ratio(begun["learns"], begun["does_not"])),
                "holds": found is not None and found <= SLOWER,
            },
        ]
    return publish(result, args.output)


if __name__ == "__main__":
    sys.exit(main())
