"""What the loss of one of four workers costs: in a session, and with a restart from a checkpoint; prints JSON.

    python bench/recovery.py --quick
    python bench/recovery.py --output bench/results/recovery.json --plot bench/results/recovery.png

DistributedDataParallel and Adam, with 1 and with 100 million parameters, and with a script that needs 3 s of set-up. A worker is
killed at a random instant, again and again in the same job. Compared are a session of rallypoint.elastic, `rally run` and
torchrun, which restart all workers, and, if installed, torchft and NVRx's in-process restart. Also measured: what a session
costs per step, and how fast the state of 100 million parameters arrives. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import recovery_rivals
from jobs import RALLY, TORCHRUN, Job, Progress, adopt_orphans, machine, publish, ratio, spread

from rallypoint.control.client import connect


WORKERS = 4
# One line of the board for each rank: its pid, how many steps it has completed, when it completed the last one, and when the
# first one after its newest recovery, if it knows of any.
LINE = struct.Struct("=qqdd")
GIVE_UP = 120.0
# Steps of a job without a loss, and how many of the first ones are not counted.
CALM_STEPS, WARM_UP = 260, 60
# Parameters of a large model: 100 million. The state of Adam is twice that.
LARGE = 10_000
# The cases for rivals: a part of the name, width, seconds of set-up.
RIVALS = (("", 1000, 0.0), (", 3 s of set-up", 1000, 3.0))
# Promised seconds: without a spare; with one, for four and for eight workers.
WITHOUT_SPARE = 0.4
WITH_SPARE, WITH_SPARE_OF_8 = 0.2, 0.25

TRAIN = """
import mmap, os, struct, sys, time
width, mode, setup = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
folder = os.environ["NOTES"]
LINE = struct.Struct("=qqdd")
board = mmap.mmap(os.open(f"{folder}/board", os.O_RDWR), 0)
if mode == "session":
    from rallypoint import elastic
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

time.sleep(setup)
torch.manual_seed(0)
dist.init_process_group("gloo")
net = DDP(torch.nn.Linear(width, width, bias=False), gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(net.parameters())
x = torch.ones(8, width)
saved, every = f"{folder}/saved", 1 if width < 5000 else 5
limit = int(os.environ.get("STEPS", 10**9))

def train():
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def note(step, recovered=0.0):
    LINE.pack_into(board, rank * LINE.size, os.getpid(), step, time.monotonic(), recovered)

def over(step):
    stop = torch.tensor([float(step >= limit or os.path.exists(f"{folder}/stop"))])
    dist.all_reduce(stop)
    return stop.item() > 0

spent = []
if mode == "session":
    with elastic.session(net, optimizer) as session:
        rank = dist.get_rank()  # asked here, a spare can be any
        done, met, recovered = False, 0, 0.0
        while not done:
            if session.position % 11 == 10:
                done = session.run(over, session.position)
                continue
            began = time.perf_counter()
            with session.step():
                train()
            spent.append(time.perf_counter() - began)
            if len(session.history) != met:
                met, recovered = len(session.history), time.monotonic()
            note(session.position, recovered)
else:
    step, rank = 0, dist.get_rank()
    if mode == "restart" and os.path.exists(saved):
        state = torch.load(saved, mmap=True)
        net.load_state_dict(state["net"]), optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        began = time.perf_counter()
        train()
        spent.append(time.perf_counter() - began)
        step += 1
        note(step)
        if mode == "restart" and rank == 0 and step % every == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved + ".new")
            os.replace(saved + ".new", saved)
        if step % 10 == 0 and over(step):
            break
if rank == 0:
    with open(f"{folder}/spent", "w") as file:
        file.write(repr(spent))
os._exit(0)
"""

# A bare copy between two processes on this host: one writes shared memory, and the other copies from it.
COPY = """
import mmap, os, sys, time
size = int(sys.argv[1])
fd = os.memfd_create("copy")
os.ftruncate(fd, size)
shared = mmap.mmap(fd, size)
source = (bytearray(os.urandom(1 << 20)) * (-(-size >> 20)))[:size]
target = bytearray(size)
ready, done = os.pipe(), os.pipe()
pid = os.fork()
step = 16 << 20
if pid == 0:
    os.close(ready[1])
    for start in range(0, size, step):
        assert os.read(ready[0], 1)
        target[start:start + step] = shared[start:start + step]
    os.write(done[1], b"x")
    os._exit(0)
# Whoever is left alone notices.
os.close(ready[0]), os.close(done[1])
began = time.perf_counter()
for start in range(0, size, step):
    shared[start:start + step] = source[start:start + step]
    os.write(ready[1], b"x")
os.read(done[0], 1)
print(time.perf_counter() - began)
"""


def command(
    launcher: list[str],
    mode: str,
    width: int,
    setup: float,
    script: Path,
    workers: int = WORKERS,
    spares: int = 0,
) -> list[str]:
    restarts = ["--max-restarts", "1000"] if mode == "restart" else []
    ours = ["--max-losses", "1000", "--spares", str(spares)] if launcher is RALLY else []
    arguments = [str(script), str(width), mode, str(setup)]
    return [*launcher, "--nproc-per-node", str(workers), *restarts, *ours, *arguments]


class Board:
    """What the workers report about themselves, in shared memory."""

    def __init__(self, folder: Path, workers: int = WORKERS) -> None:
        self._workers = workers
        path = folder / "board"
        path.write_bytes(bytes(LINE.size * workers))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def lines(self) -> list[tuple[int, int, float, float]]:
        return [LINE.unpack_from(self._map, rank * LINE.size) for rank in range(self._workers)]

    def wait(self, what: Any, job: Job) -> list[tuple[int, int, float, float]] | None:
        """The lines once ``what`` is true of them; a bench may poll what it measures."""
        end = time.monotonic() + GIVE_UP
        while time.monotonic() < end and job.popen.poll() is None:
            lines = self.lines()
            if what(lines):
                return lines
            time.sleep(0.001)
        return None


def await_spares(job: Job, count: int) -> None:
    """Wait until ``count`` spares wait in the session."""
    supervisor = connect(str(job.popen.pid))
    end = time.monotonic() + GIVE_UP
    while time.monotonic() < end:
        states = [each["state"] for each in supervisor.status()["spares"]]
        if states == ["waiting"] * count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{count} spares do not wait within {GIVE_UP:g} s")


@dataclass
class Seen:
    """What losses have cost.

    Args:
        survivors_s, all_s: seconds from each kill to the next step of the survivors, and of all.
        lost: completed steps that had to be repeated.
        kept: whether all survivors kept their processes.
    """

    survivors_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    kept: bool = True


def losses(
    launcher: list[str],
    mode: str,
    width: int,
    setup: float,
    kills: int,
    progress: Progress,
    name: str,
    workers: int = WORKERS,
    spares: int = 0,
) -> dict[str, Any]:
    """One job whose workers are killed one by one. NVRx replaces none and does not survive losing rank 0: one job per kill."""
    seen, chance, told = Seen(), random.Random(7), list[str]()
    replaces = mode != "nvrx"
    for first in range(1) if replaces else range(kills):
        numbers = range(1, kills + 1) if replaces else [first + 1]
        line: Callable[[Path], list[str]] = (
            (lambda _: recovery_rivals.command(mode, workers, width, setup))
            if mode in recovery_rivals.MODULES
            else lambda script: command(launcher, mode, width, setup, script, workers, spares)
        )
        told += lose(
            line, numbers, width, progress, name, workers, spares, seen, chance, replaces=replaces
        )
    moved = [each for each in map(json.loads, told) if each.get("kind") == "session_recovered"]
    return {
        "kills": kills,
        "survivors_next_step_s": spread(seen.survivors_s),
        "all_next_step_s": spread(seen.all_s),
        "steps_lost": spread(seen.lost, 0),
        "survivors_keep_their_process": seen.kept and len(seen.survivors_s) == kills,
        "state_bytes": max((each["bytes_received"] for each in moved), default=None),
        "transfer_s": spread([each["transferred"] for each in moved if each["bytes_received"]]),
    }


def lose(
    line: Callable[[Path], list[str]],
    numbers: Iterable[int],
    width: int,
    progress: Progress,
    name: str,
    workers: int,
    spares: int,
    seen: Seen,
    chance: random.Random,
    *,
    replaces: bool,
) -> list[str]:
    """One job, with a kill for each of the numbers. Returns its events."""
    # torchrun's own store would outlive a restart.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        script = folder / "train.py"
        script.write_text(TRAIN)
        board = Board(folder, workers)
        events = folder / "events"
        words = line(script)
        job = Job(
            words, folder, RALLY_EVENTS=str(events), **(env if words[0] == TORCHRUN[0] else {})
        )
        try:
            progress.step(f"{name}: start")
            board.wait(lambda lines: all(step > 3 for _, step, *_ in lines), job)
            for number in numbers:
                progress.step(f"{name}: kill {number}")
                time.sleep(chance.uniform(0.5, 1.5) if width < 5000 else chance.uniform(5.0, 9.0))
                if spares:
                    await_spares(job, spares)
                before = board.lines()
                victim = chance.randrange(0 if replaces else 1, workers)
                at = time.monotonic()
                try:
                    os.kill(before[victim][0], signal.SIGKILL)
                except ProcessLookupError:
                    break
                others = [rank for rank in range(workers) if rank != victim]
                furthest = max(step for _, step, *_ in board.lines())

                def back(lines: Any, ranks: list[int], at: float = at, was: Any = before) -> bool:
                    # A step completed after the kill, but with the lost worker's gradient, is not a recovery.
                    return all(
                        recovered > at
                        or (last > at and (pid != was[rank][0] or step > was[rank][1] + 1))
                        for rank in ranks
                        for pid, step, last, recovered in (lines[rank],)
                    )

                def whole_again(lines: Any, others: Any = others, at: float = at) -> bool:
                    return all(last > at for _, _, last, _ in lines) and back(lines, others)

                def when(line: Any, at: float = at) -> float:
                    _, _, last, recovered = line
                    return (recovered if recovered > at else last) - at

                found = board.wait(lambda lines, ranks=others: back(lines, ranks), job)
                whole = board.wait(whole_again, job) if replaces else found
                if found is None or whole is None:
                    break
                seen.survivors_s.append(max(when(found[rank]) for rank in others))
                if replaces:
                    seen.all_s.append(max(map(when, whole)))
                seen.lost.append(max(0, furthest + 1 - min(found[rank][1] for rank in others)))
                seen.kept = seen.kept and all(before[each][0] == whole[each][0] for each in others)
            (folder / "stop").touch()
            job.wait(GIVE_UP)
            return events.read_text().splitlines() if events.exists() else []
        finally:
            job.clean_up()


def steps(mode: str, number: int) -> float:
    """The median of a step of rank 0, in a job without a loss."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        script = folder / "train.py"
        script.write_text(TRAIN)
        Board(folder)
        line = command(RALLY, mode, 1000, 0.0, script)
        job = Job(line, folder, STEPS=str(number))
        try:
            job.wait(GIVE_UP)
            spent = json.loads((folder / "spent").read_text())
        finally:
            job.clean_up()
    return statistics.median(spent[WARM_UP:])


def bare_copy(size: int) -> float:
    found = [
        float(
            subprocess.run(
                [sys.executable, "-c", COPY, str(size)], capture_output=True, check=True
            ).stdout
        )
        for _ in range(3)
    ]
    return statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few kills, the small model only")
    parser.add_argument(
        "--spares",
        action="store_true",
        help="only the losses with a spare and those of eight workers",
    )
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--plot", type=Path, help="write a plot here")
    options = parser.parse_args()
    adopt_orphans()
    quick = options.quick
    kills = 2 if quick else 8
    cases = [
        ("session", RALLY, "session", 1000, 0.0, kills),
        ("restart", RALLY, "restart", 1000, 0.0, kills),
        *([] if quick else [("torchrun", TORCHRUN, "restart", 1000, 0.0, 3)]),
        *([] if quick else [("session, 3 s of set-up", RALLY, "session", 1000, 3.0, 4)]),
        *([] if quick else [("restart, 3 s of set-up", RALLY, "restart", 1000, 3.0, 4)]),
        *([] if quick else [("torchrun, 3 s of set-up", TORCHRUN, "restart", 1000, 3.0, 2)]),
        *([] if quick else [("session, 100 M", RALLY, "session", LARGE, 0.0, 3)]),
        *([] if quick else [("restart, 100 M", RALLY, "restart", LARGE, 0.0, 2)]),
        *(
            (f"{name}{more}", [], name, width, setup, 1 if quick else 4)
            for name in recovery_rivals.MODULES
            if recovery_rivals.is_installed(name)
            for more, width, setup in RIVALS[: 1 if quick else None]
        ),
    ]
    # Workers, seconds of set-up, spares, kills, promised seconds.
    promises = {
        "session, a spare, 3 s of set-up": (WORKERS, 3.0, 1, 1 if quick else 8, WITH_SPARE),
        **({} if quick else {"session, a spare, 3 s, 8 workers": (8, 3.0, 1, 8, WITH_SPARE_OF_8)}),
        **({} if quick else {"session, 8 workers": (8, 0.0, 0, 8, WITHOUT_SPARE)}),
    }
    if options.spares:
        cases = []
    turns = 0 if options.spares else 1 if quick else 7
    # Each job and each kill has a line of progress.
    lines = sum(count + (count if mode == "nvrx" else 1) for _, _, mode, *_, count in cases)
    lines += sum(1 + count for *_, count, _ in promises.values())
    progress = Progress(lines + 2 * turns + (not quick))
    result: dict[str, Any] = {"benchmark": "recovery", "machine": machine(), "workers": WORKERS}
    rows = result["losses"] = {
        name: losses(launcher, mode, width, setup, count, progress, name)
        for name, launcher, mode, width, setup, count in cases
    }
    result["targets"] = []
    for name, (workers, setup, spares, count, promised) in promises.items():
        row = losses(RALLY, "session", 1000, setup, count, progress, name, workers, spares)
        rows[name] = {"workers": workers, **row}
        found = row["all_next_step_s"]["median"]
        holds = None if quick else found is not None and found <= promised
        what = f"{name}: kill to the next step of all at most {promised} s, median"
        result["targets"].append({"what": what, "value": found, "holds": holds})
    if options.spares:
        progress.close()
        return 1 if publish(result, options.output) else 0
    spent: dict[str, list[float]] = {"plain": [], "session": []}
    for turn in range(turns):
        for mode in ("plain", "session") if turn % 2 else ("session", "plain"):
            progress.step(f"steps without a loss: {mode}")
            spent[mode].append(steps(mode, CALM_STEPS) * 1000)
    calm = result["step_ms"] = {mode: spread(each) for mode, each in spent.items()}
    ratios = [mine / theirs for mine, theirs in zip(spent["session"], spent["plain"], strict=True)]
    # These few turns cannot show whether it is at most 1 %, as promised; session_steps.py can.
    result["step_ratio"] = spread(ratios)
    found = rows["session"]["all_next_step_s"]["median"]
    result["ratio_to_restart"] = ratio(
        rows["session"]["all_next_step_s"], rows["restart"]["all_next_step_s"]
    )
    result["targets"] += [
        {
            "what": f"kill to the next step of all at most {WITHOUT_SPARE} s, median",
            "value": found,
            "holds": None if quick else found is not None and found <= WITHOUT_SPARE,
        },
    ]
    if not quick:
        large = rows["session, 100 M"]
        if large["state_bytes"]:
            progress.step("a bare copy")
            bare = bare_copy(large["state_bytes"])
            result["bare_copy_s"] = round(bare, 3)
            share = bare / large["transfer_s"]["median"]
            what = "100 M parameters and Adam arrive at half the speed of a bare copy or more"
            result["targets"].append(
                {"what": what, "value": round(share, 2), "holds": share >= 0.5}
            )
        result["ratio_to_torchrun"] = ratio(
            rows["session"]["all_next_step_s"], rows["torchrun"]["all_next_step_s"]
        )
    progress.close()
    print(
        f"step: {calm['plain']['median']} ms plain, {calm['session']['median']} ms in a session",
        file=sys.stderr,
    )
    if options.plot is not None:
        plot(rows, options.plot)
    return 1 if publish(result, options.output) else 0


def plot(rows: dict[str, Any], path: Path) -> None:
    """Seconds from the kill to the next step of all workers, for each case."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    found = {}
    for name, row in rows.items():
        everybody, survivors = (
            row[each]["median"] for each in ("all_next_step_s", "survivors_next_step_s")
        )
        if survivors is not None:
            which = name if everybody is not None else f"{name} (survivors: nobody else comes)"
            found[which] = survivors if everybody is None else everybody
    names, values = list(found), list(found.values())
    colours = ["tab:blue" if name.startswith("session") else "tab:gray" for name in names]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(names) + 1.2), layout="constrained")
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, labels=[f"{value:.2f} s" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds from the kill of one of four workers to the next step of all")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
