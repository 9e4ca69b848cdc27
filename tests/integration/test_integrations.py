"""rallypoint.integrations: what tqdm knows of a loop is what `rally ps` shows. (The other frameworks: tests/wild.)"""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rallypoint._core import step_reports
from rallypoint.integrations import reporting
from supervisors import RALLY


pytest.importorskip("tqdm", reason="tqdm is missing: requirements-dev.txt has it")

from rallypoint.integrations import tqdm as of_tqdm
from rallypoint.integrations.tqdm import tqdm, trange


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is reported: step, total, metrics."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        reporting, "progress", lambda step, total, **numbers: found.append((step, total, numbers))
    )
    return found


@pytest.mark.parametrize("disable", [False, True, None])
def test_each_step_of_a_loop_is_reported(told: list[Any], disable: bool | None) -> None:
    drawn = io.StringIO()
    bar = tqdm("abc", disable=disable, file=drawn, mininterval=0, miniters=1)
    assert list(bar) == ["a", "b", "c"]
    steps = [step for step, *_ in told]
    assert sorted(set(steps)) == [1, 2, 3] and steps == sorted(steps)
    assert {total for _, total, _ in told} == {3}
    assert ("3/3" in drawn.getvalue()) is (disable is False)


@pytest.mark.parametrize("disable", [False, True])
def test_a_loop_may_count_by_itself_from_any_number_on(told: list[Any], disable: bool) -> None:
    with tqdm(total=10, initial=4, disable=disable, file=io.StringIO()) as bar:
        bar.update()
        bar.update(2)
        bar.set_postfix({"lr": 0.1}, loss=0.5, what="text")
        bar.update(3)
    assert told == [
        (5, 10, {}),
        (7, 10, {}),
        (10, 10, {"lr": 0.1, "loss": 0.5, "what": "text"}),
    ]


def test_a_loop_that_is_left_early_has_reported_what_is_complete(told: list[Any]) -> None:
    for item in trange(5, 9, file=io.StringIO()):
        if item == 7:
            break
    assert [(step, total) for step, total, _ in told][-1] == (2, 4)
    assert [step for step, *_ in told if step > 2] == []


def test_iterators_without_a_length_have_no_total(told: list[Any]) -> None:
    list(tqdm(iter("ab"), file=io.StringIO()))
    assert {total for _, total, _ in told} == {None}


def test_names_and_numbers_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def progress(step: object, total: object = None, **metrics: object) -> None:
        found.append((step, total, metrics))

    monkeypatch.setattr(reporting, "progress", progress)
    reporting.report(1, math.inf, {"step": 3, "total": 4, "train/loss": torch.tensor(1.0)})
    reporting.report(2, math.nan, {f"m{i}": i for i in range(40)})
    assert found[0] == (1, None, {"train/loss": torch.tensor(1.0)})
    assert found[1][:2] == (2, None) and len(found[1][2]) == step_reports.MAX_METRICS


def test_rally_ps_shows_a_loop_of_tqdm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from rallypoint.integrations.tqdm import trange\n"
        "for step in (bar := trange(40, disable=True)):\n"
        "    bar.set_postfix(loss=0.25)\n"
        "    if step == 12 and os.environ['RANK'] == '0':\n"
        f"        said = subprocess.run([{RALLY!r}, 'ps', '--json'], capture_output=True, text=True)\n"
        "        print('PS', said.stdout.strip(), flush=True)\n"
    )
    done = subprocess.run(
        [RALLY, "run", "--nproc-per-node", "1", "--rdzv-id", f"bar-{tmp_path.name}", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Other jobs of this user are listed, too.
    line = next(each for each in done.stdout.splitlines() if f'"id": "bar-{tmp_path.name}"' in each)
    status = json.loads(line[line.index("{") :])
    assert status["progress"]["step"] == 12 and status["progress"]["total"] == 40
    assert status["progress"]["metrics"] == {"loss": 0.25}


def test_it_is_tqdm() -> None:
    assert issubclass(tqdm, of_tqdm.plain_tqdm)
    assert sys.modules["tqdm"].tqdm is of_tqdm.plain_tqdm
