"""When a hang is looked for, and how often."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.control.collectives import collective_probe
from rallypoint.errors import ControlError
from rallypoint.launch.watching import hang_watch
from rallypoint.launch.watching.hang_watch import HangWatch


AFTER = 0.02
PATIENCE = 30.0


def process(rank: int, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A process that waits in torch's code if one of its calls is not done."""
    file = "script.py" if all(each["done"] for each in calls) else "/lib/torch/distributed/c10d.py"
    frames = [{"file": file, "line": 1, "function": "f"}]
    return {
        "rank": rank,
        "pid": rank,
        "name": "",
        "threads": [{"name": "", "frames": frames}],
        "why": "",
        "collectives": [{"name": "0", "about": "", "ranks": [0, 1], "calls": calls}],
    }


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    """Two processes that do nothing."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    with open(os.devnull) as line:
        yield [
            SimpleNamespace(
                pid=each.pid,
                status=None,
                questions_fd=line.fileno(),
                ranks=SimpleNamespace(rank=rank, world_size=2),
            )
            for rank, each in enumerate(started)
        ]
    for each in started:
        each.kill()
        each.wait()


class Asked:
    """Answers the question about the workers, and counts."""

    def __init__(self, answer: Callable[[], Mapping[str, Any]]) -> None:
        self.times: list[float] = []
        self._answer = answer

    def __call__(self, what: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        assert what["ask"] == "stacks"
        self.times.append(time.monotonic())
        return self._answer


def watch(workers: list[Any], asked: Asked, enough: Callable[[], bool]) -> list[str]:
    said: list[str] = []
    watch = HangWatch(AFTER, said.append)
    ready = SimpleNamespace(node_rank=0, generation=0)
    deadline = time.monotonic() + PATIENCE
    while not enough():
        assert time.monotonic() < deadline
        watch.look(workers, ready, asked)  # type: ignore[arg-type]
        time.sleep(watch.interval)
    return said


@pytest.mark.parametrize("fails", [False, True])
def test_if_nothing_is_found_out_it_looks_again_ever_more_seldom(
    workers: list[Any], *, fails: bool
) -> None:
    def nothing() -> Mapping[str, Any]:
        if fails:
            raise ControlError("no answer")
        return {"processes": [], "ended": [], "unheard": [], "moving": False}

    asked = Asked(nothing)
    said = watch(workers, asked, lambda: len(asked.times) == 4)
    assert said == []
    first, *_, before, last = asked.times
    assert last - before >= 4 * AFTER
    assert last - first >= 7 * AFTER


def test_nothing_is_asked_twice_while_an_answer_is_on_its_way(workers: list[Any]) -> None:
    go = threading.Event()
    asked = Asked(
        lambda: {"processes": [], "ended": [], "unheard": [], "moving": go.wait(PATIENCE)}
    )
    began = time.monotonic()
    watch(workers, asked, lambda: bool(asked.times) and time.monotonic() - began > 20 * AFTER)
    assert len(asked.times) == 1
    go.set()


def test_a_node_whose_workers_have_ended_asks_the_others(workers: list[Any]) -> None:
    for each in workers:
        each.status = 0
        each.ranks.world_size = 3
    frames = [{"file": "/lib/torch/distributed/distributed_c10d.py", "line": 1, "function": "f"}]
    process = {"rank": 2, "pid": 1, "name": "", "threads": [{"name": "", "frames": frames}]}
    found = {"processes": [process], "ended": [0, 1], "unheard": [], "moving": False}
    asked = Asked(lambda: found)
    said: list[str] = []
    hang = HangWatch(AFTER, said.append)
    deadline = time.monotonic() + PATIENCE
    while not said:
        assert time.monotonic() < deadline
        hang.look(workers, SimpleNamespace(node_rank=0, generation=0), asked)  # type: ignore[arg-type]
        time.sleep(hang.interval)
    assert "ranks 0, 1 have ended" in said[0]


def test_long_steps_are_waited_for(workers: list[Any]) -> None:
    step = 0.1
    for each in workers:
        each.progress = lambda: {"rate": 1 / step}
    workers[1].progress = lambda: None  # it has reported nothing yet
    asked = Asked(lambda: {"processes": [], "ended": [], "unheard": [], "moving": False})
    hang = HangWatch(AFTER, str, 10)
    ready = SimpleNamespace(node_rank=0, generation=0)
    began = time.monotonic()
    while not asked.times:
        assert time.monotonic() < began + PATIENCE
        hang.look(workers, ready, asked)  # type: ignore[arg-type]
        time.sleep(hang.interval)
    assert asked.times[0] - began >= 10 * step


def test_epochs_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, workers: list[Any]) -> None:
    monkeypatch.setattr(hang_watch, "MOST", 3 * AFTER)
    for each in workers:
        each.progress = lambda: {"rate": 1e-5}
    asked = Asked(lambda: {"processes": [], "ended": [], "unheard": [], "moving": False})
    hang = HangWatch(AFTER, str, 10)
    deadline = time.monotonic() + PATIENCE
    while not asked.times:
        assert time.monotonic() < deadline
        hang.look(workers, SimpleNamespace(node_rank=0, generation=0), asked)  # type: ignore[arg-type]
        time.sleep(hang.interval)


def test_another_hang_is_told_although_hardly_any_cpu_was_used_meanwhile(
    monkeypatch: pytest.MonkeyPatch, workers: list[Any]
) -> None:
    begun = {each.pid: 1 for each in workers}
    monkeypatch.setattr(collective_probe, "begun", lambda *_: dict(begun))
    call = {"seq": 2, "op": "all_reduce", "sizes": [[4]], "dtype": "Float", "at": ""}
    waits = {**call, "done": False, "seconds": 60.0}
    before = {**call, "seq": 1, "done": True, "seconds": 0.0}
    processes = [
        {
            "rank": rank,
            "pid": rank,
            "name": "",
            "threads": [],
            "why": "",
            "collectives": [{"name": "0", "about": "", "ranks": [0, 1], "calls": [each]}],
        }
        for rank, each in enumerate((waits, before))
    ]
    asked = Asked(lambda: {"processes": processes, "ended": [], "unheard": [], "moving": False})
    said: list[str] = []
    hang = HangWatch(AFTER, said.append)

    def look_until(count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(said) < count and time.monotonic() < deadline:
            hang.look(workers, SimpleNamespace(node_rank=0, generation=0), asked)  # type: ignore[arg-type]
            time.sleep(hang.interval)

    look_until(1, PATIENCE)
    look_until(2, 20 * AFTER)
    assert len(said) == 1, "told twice"
    begun[workers[0].pid] = 2
    look_until(2, PATIENCE)
    assert len(said) == 2


@pytest.mark.parametrize("steps", [0, 1], ids=["hangs", "steps go on"])
def test_a_rank_that_is_seen_in_a_collective_once_does_not_hang(
    workers: list[Any], steps: int
) -> None:
    """Steps went on at the very moment of the look: the records show no pending collective."""
    frames = [{"file": "/lib/torch/distributed/distributed_c10d.py", "line": 1, "function": "f"}]
    call = {"op": "all_reduce", "sizes": [[4]], "dtype": "Float", "done": True, "seconds": 0.0}
    begun = itertools.count(1, steps)

    def look() -> Mapping[str, Any]:
        seq = next(begun)
        group = {"name": "0", "about": "", "ranks": [0, 1], "calls": [{**call, "seq": seq}]}
        found = [
            {
                "rank": rank,
                "pid": rank,
                "name": "",
                "threads": [{"name": "", "frames": frames}] if rank else [],
                "why": "",
                "collectives": [group],
            }
            for rank in range(2)
        ]
        return {"processes": found, "ended": [], "unheard": [], "moving": False}

    asked = Asked(look)
    said: list[str] = []
    hang = HangWatch(AFTER, said.append)
    deadline = time.monotonic() + PATIENCE
    while len(asked.times) < 5 and not said:
        assert time.monotonic() < deadline
        hang.look(workers, SimpleNamespace(node_rank=0, generation=0), asked)  # type: ignore[arg-type]
        time.sleep(hang.interval)
    if steps:
        assert said == []
        assert asked.times[-1] - asked.times[-2] >= 4 * AFTER, "it looks ever more seldom"
    else:
        assert len(asked.times) == 2
        assert "rank 0 does not come" in said[0]


@pytest.mark.parametrize("silent", [1, 3, math.inf], ids=["once", "longer", "always"])
def test_the_ranks_that_are_missing_are_told_once_they_are_known(
    workers: list[Any], silent: float
) -> None:
    """A node that is too busy to answer may have them."""

    def look() -> Mapping[str, Any]:
        heard = len(asked.times) > silent
        return {
            "processes": both if heard else both[1:],
            "ended": [],
            "unheard": [] if heard else [0],
            "moving": False,
        }

    call = {"seq": 1, "op": "all_reduce", "sizes": [[4]], "dtype": "Float", "at": ""}
    calls = [{**call, "done": done, "seconds": 0.0 if done else 60.0} for done in (True, False)]
    calls[1]["seq"] = 2
    both = [process(0, calls[:1]), process(1, calls)]
    asked = Asked(look)
    said: list[str] = []
    hang = HangWatch(AFTER, said.append)
    deadline = time.monotonic() + PATIENCE
    while len(asked.times) < 6 and (not said or "rank 0 " not in said[-1]):
        assert time.monotonic() < deadline
        hang.look(workers, SimpleNamespace(node_rank=0, generation=0), asked)  # type: ignore[arg-type]
        time.sleep(hang.interval)
    assert hang.hang(0) is not None
    first = [each.partition(" ")[2][:1] for each in said]
    assert first == (["1"] if silent == math.inf else ["1", "0"])
    if first[1:]:
        assert len(asked.times) == silent + 1


@pytest.mark.parametrize("lacks", ["threads", "descriptors"])
def test_a_host_without_threads_or_descriptors_is_looked_at_later(
    lacks: str, workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed look must not end the job."""

    def refuse(*_: object) -> Any:
        raise RuntimeError("can't start new thread") if lacks == "threads" else OSError(24, "none")

    def nothing() -> Mapping[str, Any]:
        return {"processes": [], "ended": [], "unheard": [], "moving": False}

    asked = Asked(nothing)
    refused: list[None] = []

    def ask(what: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        refused.append(None)
        return asked(what) if lacks == "threads" else refuse()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse) if lacks == "threads" else None
        patch.setattr(os, "dup", refuse) if lacks == "descriptors" else None
        watch(workers, ask, lambda: len(refused) > 1)  # type: ignore[arg-type]
    before = len(asked.times)
    watch(workers, asked, lambda: len(asked.times) > before)


def test_ranks_are_not_taken_to_be_at_work_for_having_stood_still_for_long(
    monkeypatch: pytest.MonkeyPatch, workers: list[Any]
) -> None:
    """Only what all stand still for is looked for in calls. Those of other nodes may be at work, though: they say so."""
    monkeypatch.setattr(hang_watch, "LONGEST", AFTER)
    asks_if_still: list[bool] = []
    answers = [False] * 6 + [True] + [False] * 4

    class Told(Asked):
        def __call__(self, what: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
            asks_if_still.append("if_still" in what)
            return super().__call__(what)

    asked = Told(
        lambda: {
            "processes": [],
            "ended": [],
            "unheard": [],
            "moving": answers[len(asked.times) - 1],
        }
    )
    began = time.monotonic()
    watch(workers, asked, lambda: len(asked.times) == len(answers))
    assert time.monotonic() - began > hang_watch.LONGER * AFTER
    # What was moving at the seventh question may go on: that one look is content with ranks that wait for long.
    assert asks_if_still == [True] * 7 + [False] + [True] * 3
