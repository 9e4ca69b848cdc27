"""Launch speed and memory compared with torchrun, in one run on one machine; prints JSON.

    python bench/launch.py --quick
    python bench/launch.py --output bench/results/launch.json --plot bench/results/launch.png

Competitors alternate (A B A B) after a warm-up, so that changes of the machine affect all of them. Every process is
started by its console command. See bench/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs import RALLY, TORCHRUN, Progress, adopt_orphans, job, machine, publish, ratio, spread


# One script for all measurements. Times are on CLOCK_MONOTONIC, which all processes share.
WORKER = """
import os, sys, time
import torch
import torch.distributed as dist

notes, mode = os.environ["NOTES"], sys.argv[1]
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def note(name, text):
    path = f"{notes}/{name}.{attempt}.{rank}"
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
note("first", f"{time.monotonic()} {os.getpid()}")
if mode == "hold":
    while not os.path.exists(notes + "/go"):
        time.sleep(0.02)
if mode == "restart" and attempt == 0:
    while True:
        dist.all_reduce(tensor)
        time.sleep(0.001)
dist.barrier()
dist.destroy_process_group()
"""

# What a worker's output costs: it prints lines of 100 bytes into a pipe that is being read.
PRINTER = """
import os, sys, time
began = time.monotonic()
for number in range(int(sys.argv[1])):
    print(f"{number:9}", "x" * 89)
sys.stdout.flush()
with open(os.environ["NOTES"] + "/printed." + os.environ["RANK"], "w") as file:
    file.write(str(time.monotonic() - began))
"""
PRINTERS: dict[str, list[str]] = {
    "rally": RALLY,
    "rally --block-buffered": [*RALLY, "--block-buffered"],
    "rally -u": [*RALLY, "-u"],
    "torchrun": [*TORCHRUN, "--standalone"],
}

LAUNCHERS: dict[str, list[str]] = {
    "rally": RALLY,
    "rally exec": [*RALLY, "--start-method", "exec"],
    "torchrun": [*TORCHRUN, "--standalone"],
}
# 32 plain interpreters, each with its own import of torch, show nothing that 8 do not show.
MAX_EXEC_WORKERS = 8
JOB_TIMEOUT = 120.0
# torchrun's default restart may hang for as long as Gloo waits for a missing peer.
RESTART_TIMEOUT = 60.0
RESTART_WORKERS = 8
# torchrun's first restart finds addresses of the previous attempt, unless this is set.
WORK_AROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Bench:
    def __init__(self, folder: Path, quick: bool, sizes: list[int], repeats: int | None) -> None:
        self.folder = folder
        self.quick = quick
        self.sizes = sizes
        self.given_repeats = repeats
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self._count = 0
        self._random = random.Random(0)
        self.progress = Progress(self._steps())

    # -- plan -------------------------------------------------------------------------------------

    def repeats(self, size: int) -> int:
        if self.given_repeats is not None:
            return self.given_repeats
        return 1 if self.quick else 3 if size > 8 else 7

    def restart_plan(self) -> list[tuple[str, str, dict[str, str], int]]:
        """Name, launcher, environment, repeats."""
        if self.quick:
            return [
                ("rally", "rally", {}, 1),
                ("torchrun, work-around", "torchrun", WORK_AROUND, 1),
            ]
        return [
            ("rally", "rally", {}, 20),
            ("torchrun", "torchrun", {}, 3),
            ("torchrun, work-around", "torchrun", WORK_AROUND, 3),
        ]

    def rivals(self, size: int) -> list[str]:
        return [name for name in LAUNCHERS if name != "rally exec" or size <= MAX_EXEC_WORKERS]

    def _steps(self) -> int:
        starts = sum(self.repeats(n) * (len(self.rivals(n)) + 1) for n in self.sizes)
        printed = len(PRINTERS) * (1 if self.quick else 5)
        restarts = sum(repeats for *_, repeats in self.restart_plan())
        return (
            len(LAUNCHERS)
            + starts
            + restarts
            + 2 * self.memory_repeats()
            + self.shell_repeats()
            + printed
        )

    def memory_repeats(self) -> int:
        return 1 if self.quick else 3

    def shell_repeats(self) -> int:
        return 2 if self.quick else 11

    # -- measurements -----------------------------------------------------------------------------

    def _job(self, launcher: str, workers: int, mode: str, *flags: str, **env: str):
        self._count += 1
        command = [*LAUNCHERS[launcher], "--nproc-per-node", str(workers), *flags]
        return job([*command, str(self.script), mode], self.folder / str(self._count), **env)

    def warm_up(self) -> None:
        for launcher in LAUNCHERS:
            self.progress.step(f"warm-up: {launcher}")
            self.start_once(launcher, 2)

    def start_once(self, launcher: str, workers: int) -> tuple[float, float] | None:
        """Seconds from the command to the last rank's first all-reduce, and to its exit."""
        with self._job(launcher, workers, "end") as running:
            code = running.wait(JOB_TIMEOUT)
            ended = time.monotonic()
            firsts = [float(text.split()[0]) for text in running.notes("first.0.*[0-9]").values()]
        if code != 0 or len(firsts) != workers:
            return None
        return max(firsts) - running.began, ended - running.began

    def starts(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        imports: list[float] = []
        found: dict[tuple[int, str], list[tuple[float, float] | None]] = {}
        for size in self.sizes:
            for repeat in range(self.repeats(size)):
                self.progress.step(f"import torch ({repeat + 1})")
                imports.append(self.seconds([sys.executable, "-c", "import torch"]))
                for launcher in self.rivals(size):
                    self.progress.step(f"{launcher}: {size} workers ({repeat + 1})")
                    found.setdefault((size, launcher), []).append(self.start_once(launcher, size))
        import_torch = spread(imports)
        rows = []
        for (size, launcher), results in found.items():
            good = [result for result in results if result is not None]
            row: dict[str, Any] = {
                "workers": size,
                "launcher": launcher,
                "failed": len(results) - len(good),
                "to_first_all_reduce_s": spread([first for first, _ in good]),
                "to_exit_s": spread([exit_ for _, exit_ in good]),
            }
            row["to_exit_over_import"] = ratio(row["to_exit_s"], import_torch)
            rows.append(row)
        for row in rows:
            rival = next(
                (r for r in rows if r["workers"] == row["workers"] and r["launcher"] == "torchrun"),
                None,
            )
            row["to_exit_over_torchrun"] = rival and ratio(row["to_exit_s"], rival["to_exit_s"])
        return import_torch, rows

    def restart_once(
        self, launcher: str, workers: int, env: dict[str, str]
    ) -> tuple[float | None, int | None]:
        """Seconds from a worker's death to the next all-reduce of all workers, and the attempt in which that was."""
        with self._job(launcher, workers, "restart", "--max-restarts", "3", **env) as running:
            firsts = running.wait_for_notes("first.0.*[0-9]", workers, JOB_TIMEOUT)
            if firsts is None:
                return None, None
            time.sleep(0.3)  # by now all are in their loops
            victim = self._random.choice([int(text.split()[1]) for text in firsts.values()])
            died = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            running.wait(RESTART_TIMEOUT)
            for attempt in (1, 2, 3):
                notes = running.notes(f"first.{attempt}.*[0-9]")
                if len(notes) == workers:
                    return max(float(text.split()[0]) for text in notes.values()) - died, attempt
        return None, None

    def restarts(self) -> dict[str, Any]:
        workers = 2 if self.quick else RESTART_WORKERS
        plan = self.restart_plan()
        results: dict[str, list[tuple[float | None, int | None]]] = {name: [] for name, *_ in plan}
        for turn in range(max(repeats for *_, repeats in plan)):
            for name, launcher, env, repeats in plan:
                if turn < repeats:
                    self.progress.step(f"restart: {name} ({turn + 1})")
                    results[name].append(self.restart_once(launcher, workers, env))
        rows: dict[str, Any] = {
            "workers": workers,
            "max_restarts": 3,
            "given_up_after_s": RESTART_TIMEOUT,
        }
        for name, found in results.items():
            seconds = [took for took, _ in found if took is not None]
            rows[name] = {
                "repeats": len(found),
                "first_attempt_succeeded": sum(attempt == 1 for _, attempt in found),
                "never_succeeded": sum(attempt is None for _, attempt in found),
                "death_to_next_all_reduce_s": spread(seconds),
            }
        return rows

    def memory_once(self, launcher: str, workers: int) -> dict[str, float] | None:
        with self._job(launcher, workers, "hold") as running:
            firsts = running.wait_for_notes("first.0.*[0-9]", workers, JOB_TIMEOUT)
            if firsts is None:
                return None
            time.sleep(0.2)
            pids = [int(text.split()[1]) for text in firsts.values()]
            figures = [_memory(pid) for pid in pids]
            total = sum(_memory(pid)["pss"] for pid in running.alive())
            (running.folder / "go").touch()
            running.wait(JOB_TIMEOUT)
        return {
            "worker_pss_mib": sum(each["pss"] for each in figures) / workers,
            "worker_uss_mib": sum(each["uss"] for each in figures) / workers,
            "worker_rss_mib": sum(each["rss"] for each in figures) / workers,
            "job_pss_mib": total,
        }

    def memory(self) -> dict[str, Any]:
        workers = 2 if self.quick else 8
        found: dict[str, list[dict[str, float]]] = {"rally": [], "torchrun": []}
        for repeat in range(self.memory_repeats()):
            for launcher, figures in found.items():
                self.progress.step(f"memory: {launcher} ({repeat + 1})")
                result = self.memory_once(launcher, workers)
                if result is not None:
                    figures.append(result)
        rows: dict[str, Any] = {"workers": workers}
        for launcher, figures in found.items():
            names = figures[0] if figures else {}
            rows[launcher] = {name: spread([f[name] for f in figures], 1) for name in names}
        return rows

    def printing(self) -> dict[str, Any]:
        """Seconds that each of two workers needs to print, with each way of buffering."""
        lines, repeats = (10_000, 1) if self.quick else (200_000, 5)
        script = self.folder / "printer.py"
        script.write_text(PRINTER)
        found: dict[str, list[float]] = {name: [] for name in PRINTERS}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        for repeat in range(repeats):
            for name, launcher in PRINTERS.items():
                self.progress.step(f"printing: {name} ({repeat + 1})")
                notes = self.folder / f"printing {name} {repeat}"
                notes.mkdir()
                command = [*launcher, "--nproc-per-node", "2", str(script), str(lines)]
                subprocess.run(
                    command,
                    env={**env, "NOTES": str(notes)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    timeout=JOB_TIMEOUT,
                    check=True,
                )
                found[name] += [float(file.read_text()) for file in notes.iterdir()]
        rows: dict[str, Any] = {"workers": 2, "megabytes_each": lines / 10_000}
        return rows | {f"{name}_s": spread(values) for name, values in found.items()}

    def seconds(self, command: list[str], code: int | None = 0) -> float:
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, check=False)
        took = time.monotonic() - began
        if code is not None and done.returncode != code:
            raise SystemExit(f"{command} exited with {done.returncode}:\n{done.stderr.decode()}")
        return took

    def command_lines(self) -> dict[str, Any]:
        rally, python = RALLY[0], sys.executable
        commands: dict[str, tuple[list[str], int | None]] = {
            "python -c pass": ([python, "-c", "pass"], 0),
            "import rallypoint.launch": ([python, "-c", "import rallypoint.launch"], 0),
            "rally --help": ([rally, "--help"], 0),
            "rally run --help": ([rally, "run", "--help"], 0),
            "torchrun --help": ([TORCHRUN[0], "--help"], 0),
            "rally, a typo": ([rally, "run", "--nproc-per-nod", "2", "x.py"], 2),
            "torchrun, a typo": ([TORCHRUN[0], "--nproc-per-nodes", "2", "x.py"], None),
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for repeat in range(self.shell_repeats()):
            self.progress.step(f"command lines ({repeat + 1})")
            for name, (command, code) in commands.items():
                found[name].append(self.seconds(command, code))
        has_torch = subprocess.run(
            [python, "-c", "import rallypoint.launch, sys; print('torch' in sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
        )
        figures: dict[str, Any] = {f"{name}_s": spread(values) for name, values in found.items()}
        figures["importing rallypoint.launch imports torch"] = has_torch.stdout.strip() == "True"
        return figures


def _memory(pid: int) -> dict[str, float]:
    """PSS, USS and RSS of a process in MiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {"pss": 0.0, "uss": 0.0, "rss": 0.0}
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    uss = kb["Private_Clean"] + kb["Private_Dirty"]
    return {"pss": kb["Pss"] / 1024, "uss": uss / 1024, "rss": kb["Rss"] / 1024}


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The launcher's promises, with the measured values; None if this run did not measure it."""

    def start(size: int, field: str) -> Any:
        rows = [r for r in result["start"] if (r["workers"], r["launcher"]) == (size, "rally")]
        return rows[0][field] if rows else None

    restart = result["restart"]
    whole = restart["workers"] == RESTART_WORKERS
    rally = restart["rally"]
    lines = result["command_line"]
    rows = [
        ("8 workers to exit, times import torch", start(8, "to_exit_over_import"), 1.4),
        ("8 workers to exit, times torchrun", start(8, "to_exit_over_torchrun"), 0.25),
        ("32 workers to exit, times import torch", start(32, "to_exit_over_import"), 2.5),
        (
            "8 workers: death to next all-reduce, s",
            rally["death_to_next_all_reduce_s"]["median"] if whole else None,
            0.6,
        ),
        (
            "8 workers: restarts whose first attempt failed",
            rally["repeats"] - rally["first_attempt_succeeded"] if whole else None,
            0,
        ),
        ("rally --help, s", lines["rally --help_s"]["median"], 0.25),
        ("rally run --help, s", lines["rally run --help_s"]["median"], 0.25),
        ("a typo's answer, s", lines["rally, a typo_s"]["median"], 0.2),
        (
            "importing rallypoint.launch imports torch",
            int(lines["importing rallypoint.launch imports torch"]),
            0,
        ),
    ]
    return [
        {"what": what, "measured": value, "limit": limit, "holds": None if value is None else value <= limit}
        for what, value, limit in rows
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="plot the results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="2 workers, each case once, as a quick check"
    )
    parser.add_argument("--workers", help="numbers of workers, for example 2,8,32")
    parser.add_argument(
        "--repeats", type=int, help="repetitions of each start (default 7; 3 beyond 8 workers)"
    )
    args = parser.parse_args()
    sizes = [int(n) for n in (args.workers or ("2" if args.quick else "2,8,32")).split(",")]

    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="rally-bench-"))
    os.environ["TMPDIR"] = str(folder)  # failed jobs keep their logs there
    bench = Bench(folder, args.quick, sizes, args.repeats)
    result: dict[str, Any] = {"benchmark": "launch", "quick": args.quick, "machine": machine()}
    try:
        bench.warm_up()
        result["import_torch_s"], result["start"] = bench.starts()
        result["restart"] = bench.restarts()
        result["memory"] = bench.memory()
        result["printing"] = bench.printing()
        result["command_line"] = bench.command_lines()
    finally:
        bench.progress.close()
        shutil.rmtree(folder, ignore_errors=True)
    result["targets"] = targets(result)

    publish(result, args.output)
    if args.plot:
        from plot_launch import plot

        plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
