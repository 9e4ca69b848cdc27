"""``rally profile``: what the workers of a job spend their time on."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint._core.rank_words import in_words
from rallypoint.control import client, command_line
from rallypoint.control.tables.worker_table import size
from rallypoint.errors import ConfigError, ControlError

from . import profile_probe, trace_merging
from .trace_merging import Trace


HELP = """\
usage: rally profile [JOB] [--seconds S] [--rank R[,R…]] [--output FILE] [--sampling [--native]] [--here]

Record what the workers of a running job do, and write it as one trace, with a process for each rank. The script needs no changes.

  JOB            its id, or the start of it, or the supervisor's pid (see rally ps); not needed if only one job runs
  --seconds S    how long (default 10, at most 60)
  --rank R       only these ranks; needed if there are more than 16
  --output FILE  default JOB.trace.json (JOB.speedscope.json with --sampling); compressed if it ends with .gz
  --sampling     use py-spy, 100 samples per second: for workers without a process group, and for stacks of Python code
  --native       with --sampling: C frames as well
  --here         only the workers on this host

Without --sampling, torch's profiler records all threads of a worker: operators, collectives, kernels on GPUs. Open the file at
https://ui.perfetto.dev. With --sampling, open it at https://www.speedscope.app."""

# The most ranks that are recorded without being named.
MOST_RANKS = 16
# How long the supervisors may take beyond the time for recording and writing.
WAY = 10.0


def command(words: Sequence[str]) -> str:
    """Run ``rally profile``; returns the text to print. Blocks for the duration of the recording.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
        ControlError: there is no such job, it does not answer, or nothing could be recorded.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    switches, values = ("--sampling", "--native", "--here"), ("--seconds", "--output")
    given = command_line.parse("profile", words, switches=switches, values=values)
    seconds = _seconds(given.values.get("--seconds", "10"))
    sampling = "--sampling" in given.switches
    if "--native" in given.switches and not sampling:
        raise ConfigError("profile", "--native", "only py-spy shows C frames", "add --sampling")
    job = client.connect(given.job)
    status = job.status()
    if not given.ranks and status["world_size"] > MOST_RANKS:
        why = f"the job has {status['world_size']} ranks"
        raise ConfigError("profile", status["id"], why, "name some with --rank 0,1")
    path = _place(given.values.get("--output"), status["id"], sampling=sampling)
    folder = tempfile.mkdtemp(prefix="rally-profile-")
    try:
        patience = seconds + profile_probe.WRITING
        question = {
            "ask": "profile",
            "ranks": given.ranks,
            "seconds": seconds,
            "sampling": sampling,
            "native": "--native" in given.switches,
            "folder": folder,
            "here": "--here" in given.switches,
            "patience": patience,
        }
        answer = job.ask(question, patience + WAY)
        remarks = [f"node {node} did not answer" for node in answer["silent"]]
        traces, failed = _traces(answer["processes"])
        remarks += [
            f"rank {each['rank']}: only part of that time was recorded: the script started torch's profiler"
            for each in answer["processes"]
            if not each["whole"]
        ]
        if not traces:
            raise ControlError(
                f"no trace: {'; '.join([*failed, *remarks]) or 'no worker runs now'}"
            )
        about: list[str] = []
        if sampling:
            body = trace_merging.speedscope(traces)
        else:
            body, about = trace_merging.chrome(traces)
        _write(path, body)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    where = "https://www.speedscope.app" if sampling else "https://ui.perfetto.dev"
    ranks = in_words([each.rank for each in traces])
    first = f"{path}: {ranks}, {seconds:g} s, {size(path.stat().st_size)}; open it at {where}"
    return "\n".join([first, *about, *failed, *remarks])


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise ConfigError(
            "--seconds", text, "expected seconds, from 0.1 to 60", "rally profile --help"
        )
    return seconds


def _place(output: str | None, job: str, *, sampling: bool) -> Path:
    """The file for the trace. An existing file is overwritten only if the user named it."""
    kind = "speedscope" if sampling else "trace"
    path = Path(output or f"{job.replace('/', '_')}.{kind}.json")
    if output is None and path.exists():
        raise ConfigError("--output", None, f"{path} exists", f"--output {path} overwrites it")
    if not path.absolute().parent.is_dir():
        raise ConfigError("--output", str(path), "there is no such folder")
    return path


def _traces(processes: Sequence[Mapping[str, Any]]) -> tuple[list[Trace], list[str]]:
    """The traces ordered by rank, and why some ranks have none."""
    traces, failed = [], []
    for each in processes:
        why = each["why"]
        body: object = None
        if not why:
            try:
                packed = each["packed"]
                data = (
                    profile_probe.unpacked(packed) if packed else Path(each["trace"]).read_bytes()
                )
                body = json.loads(data)
            except (OSError, ValueError) as error:
                why = f"its trace cannot be read: {error}"
        if isinstance(body, dict):
            traces.append(
                Trace(
                    rank=each["rank"],
                    pid=each["pid"],
                    host=each["host"],
                    body=body,
                    entered=each["entered"],
                    clock=each["clock"],
                )
            )
        else:
            failed.append(f"rank {each['rank']}: {why or 'its trace is not one'}")
    return sorted(traces, key=lambda trace: trace.rank), failed


def _write(path: Path, body: Mapping[str, Any]) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError("--output", str(path), error.strerror or str(error)) from None
