"""``rally logs``: the output of a job's workers."""

from __future__ import annotations

import os
import re
import select
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rallypoint._core import clock, env as environment, log_folder, standard_streams
from rallypoint._core.log_folder import LogFile
from rallypoint._core.log_records import Line
from rallypoint._core.rank_words import in_words
from rallypoint.control import client
from rallypoint.errors import ConfigError, ControlError

from . import log_answers, log_lines, log_readers, log_reading
from .log_lines import Choice


HELP = """\
usage: rally logs [JOB | FOLDER] [--rank R[,R…]] [-f] [--tail N] [--since T] [--grep RE] [--generation G]

Show the output of a job's workers, each line with its rank.

  JOB             its id, or the start of it, or the supervisor's pid (see rally ps); not needed if only one job runs
  FOLDER          for a job that has ended or, with -f, for a running one: the folder given as --log-dir, or a run's folder
                  in it
  --rank R        only these ranks
  -f, --follow    keep printing new lines until the job ends
  --tail N        only the last N lines of each stream of each worker (with -f: 10)
  --since T       only lines that are no older than this: 90s, 10m, 2h, 1d
  --grep RE       only lines that match this regular expression
  --generation G  the output of this generation; by default, the newest

Output is in files if the job was started with --redirects or --tee (add --log-dir to keep them). With --log-format json
as well, each line has its time, so the lines of a host are shown in the order in which they were written. Otherwise the
streams are shown one after another. From other nodes, only the last 512 KiB are shown (less with more than 128 nodes) and,
with -f, all that follows."""

_WITH_VALUE = ("--rank", "--tail", "--since", "--grep", "--generation")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Seconds between two looks with --follow.
INTERVAL = 0.5
# The same for other nodes; how long they may take to answer, and the extra time for the way there and back.
OTHERS_INTERVAL = 2.0
PATIENCE, WAY = 5.0, 5.0


@dataclass(slots=True)
class _Wanted:
    names: list[str] = field(default_factory=list)
    choice: Choice = field(default_factory=Choice)
    follow: bool = False
    generation: int | None = None
    seconds: float | None = None  # given by --since


def command(words: Sequence[str]) -> int:
    """Run ``rally logs``; returns the exit code.

    Raises:
        ConfigError: a flag is unknown, or has a wrong value.
        ControlError: there is no such job, or its output is not in files, or in files that this user may not read.
    """
    if {"-h", "--help"} & set(words):
        standard_streams.write(HELP + "\n")
        return 0
    try:
        _show(_parse(words))
    except PermissionError as error:
        raise ControlError(
            f"cannot read {error.filename}: {error.strerror} (the output of a job is for the user that started it;"
            " another one needs that user's permission: chmod)"
        ) from None
    return 0


def _show(wanted: _Wanted) -> None:
    name = wanted.names[0] if wanted.names else ""
    colour = standard_streams.has_colour(1, environment.snapshot())
    job, folder = _find(name, follow=wanted.follow)
    generation = _generation(folder, wanted.generation)
    files = log_folder.log_files(folder, generation)
    if not files:
        raise ControlError(_why_nothing(folder, generation))
    _check_ranks(wanted.choice.ranks, job, {each.origin.rank for each in files})
    others = _Others(job, wanted)
    lines = _now(folder, generation, wanted.choice, others)
    if wanted.follow and job is not None:
        lines = _following(job, folder, wanted, others)
    for line in lines:
        text = log_lines.shown(line, colour=colour)
        standard_streams.write(f"{text}\n", flush=wanted.follow)
    standard_streams.write("")


def last_lines(job: client.RunningJob, ranks: Collection[int], tail: int) -> list[str]:
    """The last lines that a job's workers have written, each with its rank.

    Args:
        job: a running job.
        ranks: the ranks to show; empty: all.
        tail: how many lines of each stream of each worker.

    Raises:
        ControlError: the job has ended, or its output is not in files.
    """
    wanted = _Wanted(choice=Choice(ranks=frozenset(ranks), tail=tail))
    folder = _folder_of(job)
    generation = _generation(folder, None)
    if not log_folder.log_files(folder, generation):
        raise ControlError(_why_nothing(folder, generation))
    lines = _now(folder, generation, wanted.choice, _Others(job, wanted))
    return [log_lines.shown(line, colour=False) for line in lines]


# -- the arguments --------------------------------------------------------------------------------


def _parse(words: Sequence[str]) -> _Wanted:
    wanted = _Wanted()
    choice = wanted.choice
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag in _WITH_VALUE and not has_value:
            value = rest.pop(0) if rest else ""
        if flag in _WITH_VALUE and not value:
            raise ConfigError("logs", flag, "expected a value", "rally logs --help")
        match flag:
            case "-f" | "--follow":
                wanted.follow = True
            case "--rank":
                ranks = {_number("--rank", each) for each in value.split(",")}
                choice = replace(choice, ranks=choice.ranks | ranks)
            case "--tail":
                choice = replace(choice, tail=_number("--tail", value))
            case "--generation":
                wanted.generation = _number("--generation", value)
            case "--since":
                wanted.seconds = _seconds(value)
                choice = replace(choice, since=clock.wall() - wanted.seconds)
            case "--grep":
                choice = replace(choice, pattern=_pattern(value))
            case _ if flag.startswith("-"):
                known = "--rank, --follow, --tail, --since, --grep, --generation"
                problem = f"no such flag (known: {known})"
                raise ConfigError("logs", word, problem, "rally logs --help")
            case _:
                wanted.names.append(word)
    if len(wanted.names) > 1:
        raise ConfigError("logs", " ".join(wanted.names), "expected one job", "rally logs --help")
    if wanted.follow and choice.tail is None:
        choice = replace(choice, tail=10)
    wanted.choice = choice
    return wanted


def _number(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(flag, text, "expected a whole number", "rally logs --help")
    return int(text)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ConfigError("--since", text, "expected a time such as 90s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError("--grep", text, f"not a regular expression: {error}") from None


# -- finding the output ---------------------------------------------------------------------------


def _find(name: str, *, follow: bool) -> tuple[client.RunningJob | None, Path]:
    """The job, if it runs and is named or followed, and the folder of its run."""
    if name and os.path.isdir(name) and not client.is_id(name):
        folder = _run_folder(Path(name))
        job = _writer(folder) if follow else None
        if follow and job is None:
            _remark(f"no job of this user on this host writes to {folder} now: nothing to follow")
        return job, folder
    try:
        job = client.connect(name)
    except client.NoSuchJobError as error:
        if os.sep in name and not os.path.isdir(name):
            problem = "a file, not a folder" if os.path.exists(name) else "no such folder"
            raise ConfigError("logs", name, problem, "rally logs --help") from None
        raise ControlError(f"{error}; of a job that has ended: rally logs FOLDER") from None
    return job, _folder_of(job)


def _writer(folder: Path) -> client.RunningJob | None:
    """The running job that writes to a folder, or None."""
    for job, told in client.running():
        place = told["log_folder"] if isinstance(told, dict) else ""
        if place and Path(place).resolve() == folder.resolve():
            return job
    return None


def _folder_of(job: client.RunningJob) -> Path:
    folder = job.status()["log_folder"]
    if not folder:
        raise ControlError(_why_nothing(None, 0))
    return Path(folder)


def _run_folder(folder: Path) -> Path:
    """The folder itself if it is a run's, or else the newest run in it that this user may read."""
    if log_folder.generations(folder):
        return folder
    runs = [each for each in folder.iterdir() if each.is_dir() and _is_run(each)]
    if not runs:
        raise ControlError(f"{folder} is not the folder of a run, and contains none")
    newest = max(runs, key=lambda each: each.stat().st_mtime)
    if len(runs) > 1:
        _remark(f"the newest of {len(runs)} runs: {newest}")
    return newest


def _is_run(folder: Path) -> bool:
    try:
        return bool(log_folder.generations(folder))
    except PermissionError:  # another user's
        return False


def _generation(folder: Path, wanted: int | None) -> int:
    known = log_folder.generations(folder)
    if not known or (wanted is not None and wanted not in known):
        has = ", ".join(map(str, known)) or "none"
        what = "any" if wanted is None else str(wanted)
        raise ControlError(f"no output of generation {what} in {folder} (there: {has})")
    return known[-1] if wanted is None else wanted


def _check_ranks(
    wanted: Collection[int], job: client.RunningJob | None, here: Collection[int]
) -> None:
    """Check that the wanted ranks exist: in this host's files (-1: an unknown rank), or on other nodes of a running job.

    Raises:
        ControlError: a rank does not exist.
    """
    if -1 in here:
        return
    known = set(here)
    if job is not None:
        known |= set(range(job.status()["world_size"]))
    if unknown := sorted(set(wanted) - known):
        raise ControlError(f"no output of {in_words(unknown)} (there: {in_words(sorted(known))})")


def _why_nothing(folder: Path | None, generation: int) -> str:
    where = "" if folder is None else f" ({folder} has none of generation {generation})"
    return (
        f"the output of this job is in no file{where}: it is where `rally run` was started. Start it with"
        " --log-dir DIR and --tee 3 (files and console) or --redirects 3 (files)"
    )


def _remark(text: str) -> None:
    standard_streams.say(f"rally: {text}")


# -- lines ----------------------------------------------------------------------------------------


def _chosen(files: Sequence[LogFile], choice: Choice) -> list[LogFile]:
    """The files that may have wanted lines."""
    found = [each for each in files if not choice.ranks or each.origin.rank in {-1, *choice.ranks}]
    if choice.since is not None:
        found = [each for each in found if _changed(each.path) >= choice.since]
    return found


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class _Others:
    """The output of the job's other nodes.

    Args:
        job: the job; None if it has ended.
        wanted: what to show.
    """

    def __init__(self, job: client.RunningJob | None, wanted: _Wanted) -> None:
        self._job = job
        self._wanted = wanted
        self._reader = uuid.uuid4().hex
        self._number = -1
        self._missed: list[int] | str = []
        self._silent: set[str] = set()

    def look(self) -> list[list[Line]]:
        """The new lines, file by file: first the last lines, then what has been written since."""
        if self._job is None:
            return []
        self._number += 1
        question = {
            "ask": "logs",
            "ranks": sorted(self._wanted.choice.ranks),
            "generation": self._wanted.generation,
            "since": self._wanted.seconds,
            "reader": self._reader,
            "number": self._number,
            "missed": self._missed,
            "patience": PATIENCE,
        }
        try:
            nodes = self._job.ask(question, PATIENCE + WAY)["nodes"]
        except ControlError:
            self._missed = log_readers.ALL
            return []  # the job is ending, which the caller notices
        now = clock.MONOTONIC.now()
        found: list[list[Line]] = []
        self._missed = [int(node) for node in nodes if nodes[node] is None]
        for node, answer in nodes.items():
            try:
                found += log_answers.read(answer, now)
            except (TypeError, ValueError):
                if node not in self._silent:
                    self._silent.add(node)
                    _remark(f"no output of node {node}: it does not answer, or has none in files")
        return found

    def chosen(self, choice: Choice) -> list[Iterator[Line]]:
        """The wanted lines of :meth:`look`."""
        # The other hosts have already applied ``since``: they know how old their lines are.
        choice = replace(choice, since=None)
        return [choice.of(each) for each in self.look()]


def _now(folder: Path, generation: int, choice: Choice, others: _Others) -> Iterator[Line]:
    files = _chosen(log_folder.log_files(folder, generation), choice)
    own = [choice.of(log_reading.every_line(each)) for each in files]
    return log_lines.in_order([*own, *others.chosen(choice)])


def _following(
    job: client.RunningJob, folder: Path, wanted: _Wanted, others: _Others
) -> Iterator[Line]:
    """The last lines so far, then new ones as they are written, until the job ends."""
    generation = _generation(folder, wanted.generation)
    places: dict[Path, log_reading.Place | None] = {}
    choice = wanted.choice
    ask_at = clock.MONOTONIC.now()
    while True:
        runs = client.is_running(job)
        if wanted.generation is None:
            newest = _newest(folder, generation)
            # The last lines of the previous workers matter most: they say why there is a new generation.
            for over in range(generation, newest):
                ends = [_last_of(each, places) for each in _files(folder, over)]
                yield from log_lines.in_order([choice.of(each) for each in ends])
                choice = replace(choice, tail=None)
            if newest != generation:
                generation, places = newest, {}
        found = _files(folder, generation)
        news = [_news(each, places) if runs else _last_of(each, places) for each in found]
        streams = [choice.of(each) for each in news]
        if clock.MONOTONIC.now() >= ask_at or not runs:
            streams += others.chosen(choice)
            ask_at = clock.MONOTONIC.now() + OTHERS_INTERVAL
        yield from log_lines.in_order(streams)
        choice = replace(choice, tail=None)
        if not runs:
            return
        select.select([], [], [], INTERVAL)


def _last_of(file: LogFile, places: dict[Path, log_reading.Place | None]) -> Iterator[Line]:
    """The unread rest of a file to which nothing is written any more."""
    yield from _news(file, places)
    yield from log_reading.rest(file, places.get(file.path))


def _files(folder: Path, generation: int) -> list[LogFile]:
    try:
        return log_folder.log_files(folder, generation)
    except OSError:  # a temporary folder is removed with its job
        return []


def _newest(folder: Path, generation: int) -> int:
    try:
        return max(log_folder.generations(folder), default=generation)
    except OSError:
        return generation


def _news(file: LogFile, places: dict[Path, log_reading.Place | None]) -> Iterator[Line]:
    place = places.get(file.path)
    while True:
        lines, following = log_reading.read(file, place)
        yield from lines
        if following == place:
            break
        place = following
    places[file.path] = place
