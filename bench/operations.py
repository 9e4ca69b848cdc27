"""What it costs a job to be watched, and how soon an observer sees something; prints JSON.

    python bench/operations.py --output bench/results/operations.json
    python bench/operations.py --turns 100

Two jobs train the same small model with DDP in two workers each, a few steps in turn, so neighbouring turns saw the same machine.
One has everything on: it is watched for hangs and slow ranks, reports each step, writes events, logs and metrics, and `rally top`
looks at it. The other has nothing on. Each turn of the first is compared with the mean of the other's two turns around it. On a
shared machine turns vary by a tenth, so it takes thousands of them. Pairs of jobs also differ, by up to 2 %, so there are many.

The watchers delay the steps of both jobs, by no more than the CPU time they use. So their share of a core is added on top.

The cost is also added up from its parts: reporting a step in a worker, its slower collectives, and the watchers.

Finally, one job has 64 workers, for `rally stacks`, `rally top` and `rally ps`.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from jobs import BIN, RALLY, Progress, machine, publish, spread
from turns import FIRST, SECOND, SETTLING, Turns, compare, median_error, take


WORKERS = 2
TURN = 5  # steps
PART = 1000  # turns per line of progress
# Once a job's processes use this little of a core, the template for restarted workers has been imported.
IDLE = 0.02
MANY = 64
TOP = 20.0  # seconds
OFF, ON = FIRST, SECOND
ON_FLAGS = ("--progress", "lines")
OFF_FLAGS = ("--hang-after", "0", "--slow-after", "0", "--progress", "off")


# -- workers ---------------------------------------------------------------------------------------


def train(mine: int, folder: Path, turns: int) -> None:
    """Train for ``turns`` turns. Rank 0 records how long each one took."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import rallypoint

    torch.set_num_threads(1)
    # A core for each worker: a step varies much more if threads move between cores.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [torch.nn.Linear(384, 384) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(128, 384)
    times, collectives, reports, step = [], [], [], 0
    one = torch.zeros(1)
    for _turn in take(folder, mine, rank, turns):
        dist.all_reduce(one)  # both ranks start together
        spent = 0.0
        for _ in range(TURN):
            began = time.monotonic()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            value = loss.item()
            asked = time.monotonic()
            if mine == ON:
                rallypoint.progress(step, loss=value)
            reports.append(time.monotonic() - asked)  # in both jobs: their memory is compared
            spent += time.monotonic() - began
        times.append(spent / TURN)
        began = time.monotonic()
        dist.all_reduce(one)
        collectives.append(time.monotonic() - began)
    if rank == 0:
        told = {"steps": times, "collectives": collectives, "reports": reports}
        (folder / f"times-{mine}").write_text(json.dumps(told))
    dist.destroy_process_group()


def wait(folder: Path) -> None:
    """One of many workers: sets itself up like the others, and waits."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _mark_of(folder, dist.get_rank()).touch()
    threading.Event().wait()


def _mark_of(folder: Path, rank: int) -> Path:
    return folder / f"waits-{rank}"


# -- cost ------------------------------------------------------------------------------------------


def cost(pairs: int, turns: int, progress: Progress) -> dict[str, Any]:
    """The cost, from ``pairs`` pairs of jobs with ``turns`` turns each."""
    # The job that starts first may have its memory in better places.
    found = [_pair(turns, (ON, OFF) if at % 2 else (OFF, ON), progress) for at in range(pairs)]
    of_pairs = [statistics.median(ratios) for _, _, ratios, *_ in found]
    one, two, ratios, reports, longer, cores, threads, private = (
        [each for pair in found for each in pair[part]] for part in range(8)
    )
    # DDP needs one collective for these gradients, and averaging the loss often takes another.
    own = statistics.median(reports) + 2 * max(0.0, statistics.median(longer))
    watchers, by_turns = statistics.median(cores), statistics.median(ratios)
    return {
        "turns": len(ratios),
        "step_ms_nothing_on": spread([each * 1e3 for each in one]),
        "step_ms_everything_on": spread([each * 1e3 for each in two]),
        "cost_of_neighbours": spread(ratios, 4),
        "cost_standard_error": median_error(ratios),
        "cost_of_pairs": [round(each, 4) for each in of_pairs],
        "cost_by_turns": round(by_turns + watchers, 4),
        "report_us": spread([each * 1e6 for each in reports], 2),
        "collective_longer_us": spread([each * 1e6 for each in longer], 2),
        "watchers_cores": spread(cores, 5),
        "cost_added_up": round(own / statistics.median(one) + watchers, 4),
        "more_threads": spread(threads),
        "more_private_mib": spread(private, 2),
    }


def _pair(turns: int, order: Sequence[int], progress: Progress) -> tuple[list[float], ...]:
    """The mean step of each turn with nothing on, and with everything; the ratios of neighbouring turns, less 1; how long a
    report takes; how much longer a collective takes with everything on; the watchers' cores; extra threads and MiB."""
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        folder = Path(base)
        both = Turns(folder, WORKERS)

        def begin(which: int, *flags: str, env: dict[str, str] | None = None) -> Any:
            words = _job(which, folder, train, WORKERS, flags, turns)
            return _begun(words, lambda: both.are_there(which), env or {})

        on_flags = [*ON_FLAGS, "--metrics", str(folder / "metrics"), "--log-dir", str(folder)]
        flags = {ON: on_flags, OFF: OFF_FLAGS}
        env = {ON: {"RALLY_EVENTS": str(folder / "events")}, OFF: {}}
        jobs = {
            each: stack.enter_context(begin(each, *flags[each], env=env[each])) for each in order
        }
        on, off = jobs[ON], jobs[OFF]
        top = subprocess.Popen([str(BIN / "rally"), "top", str(on.pid)], stdout=subprocess.DEVNULL)
        stack.callback(_end, top)
        _await_idle([on, off])
        both.begin()
        cores = []
        for part in range(PART, turns + PART, PART):
            progress.step("training in turn")
            watchers, began = [top.pid, *_others(on.pid)], time.monotonic()
            before = sum(map(_cpu, watchers))
            while both.done() < min(part, turns):
                time.sleep(0.1)
                for job in (on, off):
                    if job.poll() is not None:
                        raise SystemExit(f"a job has ended with {job.returncode}")
            cores.append((sum(map(_cpu, watchers)) - before) / (time.monotonic() - began))
        held = {whose: _held(job.pid) for whose, job in ((ON, on), (OFF, off))}
        both.end()
        for job in (on, off):
            job.wait(60)
        told = {whose: json.loads((folder / f"times-{whose}").read_text()) for whose in (ON, OFF)}

    one, two = (told[whose]["steps"] for whose in (OFF, ON))
    report = statistics.median(told[ON]["reports"])
    off_call, on_call = (statistics.median(told[whose]["collectives"]) for whose in (OFF, ON))
    more = [b - a for a, b in zip(held[OFF], held[ON], strict=True)]
    ratios = compare(one, two)
    one, two = one[SETTLING:], two[SETTLING:]
    return one, two, ratios, [report], [on_call - off_call], cores, more[:1], more[1:]


def _await_idle(jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if _cores([pid for job in jobs for pid in _others(job.pid)], 3.0) < IDLE:
            return
    raise SystemExit("the processes of a job beside its workers do not come to rest")


def _cores(pids: Sequence[int], seconds: float) -> float:
    """How many cores these processes use in all."""
    before, began = sum(map(_cpu, pids)), time.monotonic()
    time.sleep(seconds)
    return (sum(map(_cpu, pids)) - before) / (time.monotonic() - began)


def _others(supervisor: int) -> list[int]:
    """The processes of a job except its workers."""
    from rallypoint._core import process

    workers = _workers_of(supervisor)
    return [each for each in (supervisor, *process.descendants(supervisor)) if each not in workers]


def _held(supervisor: int) -> tuple[int, float]:
    """The highest number of threads in a worker, and the mean of the workers' private memory in MiB."""
    workers = _workers_of(supervisor)
    threads = [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in workers]
    private = []
    for pid in workers:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        sizes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
        private.append(sum(sizes) / 1024)
    return max(threads), round(statistics.mean(private), 2)


def _workers_of(supervisor: int) -> list[int]:
    from rallypoint.launch import connect

    return [each["pid"] for each in connect(str(supervisor)).usage()]


@contextmanager
def _begun(words: Sequence[str], ready: Callable[[], bool], env: dict[str, str]) -> Iterator[Any]:
    job = subprocess.Popen(
        words, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not ready():
            if job.poll() is not None:
                raise SystemExit(f"the job has ended with {job.returncode}")
            time.sleep(0.1)
        yield job
    finally:
        _end(job)


def _job(
    which: int,
    folder: Path,
    work: Callable[..., None],
    workers: int,
    flags: Sequence[str] = (),
    turns: int = 0,
) -> list[str]:
    """The command of a job."""
    words = [*RALLY, "--nproc-per-node", str(workers), *flags]
    words += ["--rdzv-id", f"bench-{os.getpid()}-{which}", __file__]
    return [*words, "--worker", work.__name__, str(which), str(folder), str(turns)]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    process.wait(60)


# -- looks -----------------------------------------------------------------------------------------


def looks(times: int, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        progress.step(f"{MANY} workers begin")
        marks = [_mark_of(folder, rank) for rank in range(MANY)]
        words = _job(0, folder, wait, MANY)
        with _begun(words, lambda: all(each.exists() for each in marks), {}) as job:
            time.sleep(2.0)
            progress.step("rally stacks")
            stacks = [_seconds("stacks", str(job.pid)) for _ in range(times)]
            progress.step("rally ps")
            ps = [_seconds("ps") for _ in range(4 * times)]
            progress.step("rally top")
            top, supervisor = _top(job.pid)
    words = [sys.executable, "-X", "importtime", "-m", "rallypoint", "ps"]
    imported = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return {
        "workers": MANY,
        "stacks_s": spread(stacks),
        "ps_s": spread(ps),
        "ps_imports_torch": any(
            line.rpartition("|")[2].strip() == "torch" for line in imported.splitlines()
        ),
        "top_cores": top,
        "supervisor_cores": supervisor,
    }


def _seconds(*words: str) -> float:
    began = time.monotonic()
    subprocess.run([str(BIN / "rally"), *words], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def _top(supervisor: int) -> tuple[float, float]:
    """How much of a core `rally top` uses on a terminal, apart from its start, and the supervisor meanwhile."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [str(BIN / "rally"), "top", str(supervisor)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"},
    )
    os.close(theirs)
    reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reader.start()
    time.sleep(4.0)
    before = _cpu(command.pid), _cpu(supervisor)
    time.sleep(TOP)
    after = _cpu(command.pid), _cpu(supervisor)
    os.write(ours, b"q")
    command.wait(60)
    one, two = ((b - a) / TOP for a, b in zip(before, after, strict=True))
    return round(one, 4), round(two, 4)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:
        pass  # the terminal's other side is gone


def _cpu(pid: int) -> float:
    """The CPU seconds of a process's threads, to the nanosecond."""
    total = 0
    with suppress(FileNotFoundError):  # a process or thread that has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=24, help="of jobs")
    parser.add_argument("--turns", type=int, default=250, help="of each of the two jobs")
    parser.add_argument("--times", type=int, default=7, help="looks of each kind")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="write the JSON there as well")
    args = parser.parse_args()
    if args.worker:
        what, which, folder, turns = args.worker
        train(int(which), Path(folder), int(turns)) if what == "train" else wait(Path(folder))
        return 0
    described = machine()
    progress = Progress(args.pairs * -(-args.turns // PART) + 4)
    seen = looks(args.times, progress)
    paid = cost(args.pairs, args.turns, progress)
    progress.close()
    targets = {
        "a step costs 0.5 % more, by its turns": paid["cost_by_turns"] <= 0.005,
        "a step costs 0.5 % more, added up": paid["cost_added_up"] <= 0.005,
        "no thread more": paid["more_threads"]["max"] == 0,
        "2 MiB more for a worker": paid["more_private_mib"]["median"] <= 2,
        "rally stacks of 64 workers in 2 s": seen["stacks_s"]["median"] <= 2,
        "rally top of 64 workers: 5 % of a core": seen["top_cores"] <= 0.05,
        "rally ps in 0.15 s, without torch": seen["ps_s"]["median"] <= 0.15
        and not seen["ps_imports_torch"],
    }
    found = [{"what": what, "holds": holds} for what, holds in targets.items()]
    return publish({**described, **paid, **seen, "targets": found}, args.output)


if __name__ == "__main__":
    sys.exit(main())
