"""What a session costs per step, compared with the same training without one; prints JSON.

    python bench/session_steps.py --output bench/results/session_steps.json
    python bench/session_steps.py --pairs 2
    python bench/session_steps.py --gpu --pairs 1 --turns 40 --output bench/results/session_steps_gpu.json

Two workers on a core each, DistributedDataParallel (replicated state) and FSDP2 (sharded state, with a session's default interval
of snapshots), Adam, a million parameters. The two jobs take turns of five steps each (see turns.py). Two identical jobs differ by
a few per cent for as long as they live, so several pairs are started, one after another, and the two alternate in going first.
With --gpu there are 134 million parameters and one worker over NCCL, which in a session waits for the GPU after each backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jobs import RALLY, Progress, adopt_orphans, machine, publish, spread
from turns import FIRST, SECOND, Turns, compare, mean, take


WORKERS = 2
STEPS = 5  # per turn
FEWEST = 40
GIVE_UP = 120.0
# How much longer a step in a session may take.
ALLOWED = {"ddp": 0.01, "fsdp2": 0.02}


def train(kind: str, job: int, folder: Path, turns: int, *, with_session: bool, gpu: bool) -> None:
    """A worker. Rank 0 records the seconds per step in each turn."""
    import os

    import torch
    import torch.distributed as dist

    from rallypoint import elastic

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    device = torch.device("cuda" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    width, depth, samples = (4096, 8, 1024) if gpu else (512, 4, 64)
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth))).to(device)
    model: Any
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        model = fully_shard(layers)
    else:
        model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randn(samples, width, device=device)
    one = torch.zeros(1, device=device)
    times = []

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def meet() -> None:
        dist.all_reduce(one)
        finish()

    def finish() -> None:
        if gpu:
            torch.cuda.synchronize()

    def plain() -> None:
        for _ in take(folder, job, dist.get_rank(), turns):
            meet()
            began = time.monotonic()
            for _ in range(STEPS):
                step()
            finish()
            times.append((time.monotonic() - began) / STEPS)

    def in_session() -> None:
        with elastic.session(model, optimizer) as session:
            for _ in take(folder, job, dist.get_rank(), turns):
                session.run(meet)
                began = time.monotonic()
                for _ in range(STEPS):
                    with session.step():
                        step()
                finish()
                times.append((time.monotonic() - began) / STEPS)

    in_session() if with_session else plain()
    if dist.get_rank() == 0:
        (folder / f"times-{job}").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure(kind: str, pairs: int, turns: int, progress: Progress, *, gpu: bool) -> dict[str, Any]:
    plain, session, longer = [], [], []
    for number in range(pairs):
        progress.step(f"{kind}: pair {number + 1}, training in turn")
        in_session = SECOND if number % 2 == 0 else FIRST
        times = train_in_turn(kind, turns, in_session, gpu=gpu)
        plain += times[1 - in_session]
        session += times[in_session]
        ratio = 1 + mean(compare(*times))["mean"]
        longer.append(round((ratio if in_session == SECOND else 1 / ratio) - 1, 4))
    return {
        "step_ms_plain": spread([each * 1e3 for each in plain]),
        "step_ms_in_session": spread([each * 1e3 for each in session]),
        "longer": {
            "pairs": pairs,
            "mean": round(statistics.mean(longer), 4),
            "error": round(statistics.stdev(longer) / pairs**0.5, 4) if pairs > 1 else None,
        },
        "longer_median": round(statistics.median(longer), 4),
        "each": longer,
    }


def train_in_turn(kind: str, turns: int, in_session: int, *, gpu: bool) -> list[list[float]]:
    """Seconds per step in each turn of both jobs, one of which has a session."""
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        folder = Path(base)
        workers = 1 if gpu else WORKERS
        both = Turns(folder, workers)
        jobs = []
        for job in (FIRST, SECOND):
            words = [*RALLY, "--nproc-per-node", str(workers), "--progress", "off"]
            words += ["--rdzv-id", f"steps-{kind}-{job}", __file__]
            words += ["--worker", kind, str(job), str(folder), str(turns)]
            words += [*["--session"] * (job == in_session), *["--gpu"] * gpu]
            jobs.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            stack.callback(_end, jobs[-1])
        until = time.monotonic() + GIVE_UP
        while not all(map(both.are_there, (FIRST, SECOND))):
            _must_run(jobs)
            assert time.monotonic() < until, "the workers do not begin"
            time.sleep(0.1)
        time.sleep(5.0)  # for what the supervisors do after a start
        both.begin()
        while both.done() < turns:
            _must_run(jobs)
            time.sleep(0.1)
        both.end()
        for each in jobs:
            assert each.wait(GIVE_UP) == 0
        return [json.loads((folder / f"times-{job}").read_text()) for job in (FIRST, SECOND)]


def _must_run(jobs: list[subprocess.Popen[bytes]]) -> None:
    for each in jobs:
        if each.poll() is not None:
            raise SystemExit(f"a job has ended with {each.returncode}")


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.terminate()
    job.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8, help="of jobs, with each model (8)")
    parser.add_argument("--turns", type=int, default=80, help="of each job (80)")
    parser.add_argument("--kind", choices=sorted(ALLOWED), help="only this model")
    parser.add_argument("--gpu", action="store_true", help="one worker, on a GPU, over NCCL")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--session", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.worker:
        kind, job, folder, turns = options.worker
        where, count = Path(folder), int(turns)
        train(kind, int(job), where, count, with_session=options.session, gpu=options.gpu)
        return 0
    if options.turns < FEWEST:
        parser.error(
            f"--turns is {options.turns}: expected {FEWEST} or more, as the first are left out"
        )
    adopt_orphans()
    kinds = [options.kind] if options.kind else sorted(ALLOWED)
    progress = Progress(len(kinds) * options.pairs)
    result: dict[str, Any] = {"benchmark": "session_steps", "machine": machine()}
    result |= {
        kind: measure(kind, options.pairs, options.turns, progress, gpu=options.gpu)
        for kind in kinds
    }
    progress.close()
    result["targets"] = [
        {
            "what": f"{kind}: a step in a session takes at most {ALLOWED[kind]:.0%} more",
            "value": result[kind]["longer"]["mean"],
            "holds": result[kind]["longer"]["mean"] <= ALLOWED[kind],
        }
        for kind in kinds
    ]
    return 1 if publish(result, options.output) else 0


if __name__ == "__main__":
    sys.exit(main())
