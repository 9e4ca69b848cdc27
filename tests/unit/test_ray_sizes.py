"""Jobs on Ray: sizes, the nodes' command line, and what becomes of bundles. Without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import given as command_lines
from rallypoint.ray.roster import Roster
from rallypoint.ray.sizes import Meeting, Shape, shape_of, sizes_from, words_of


def sizes(num_nodes: Any = 2, workers: int | None = None, resources: Any = None) -> Any:
    return sizes_from(num_nodes, workers, resources, "STRICT_SPREAD")


@pytest.mark.parametrize(
    ("workers", "resources", "expected"),
    [
        (None, None, (1, {"CPU": 1.0})),
        (3, None, (3, {"CPU": 3.0})),
        (None, {"GPU": 4}, (4, {"CPU": 4.0, "GPU": 4})),
        (2, {"GPU": 4, "CPU": 0, "x": 1}, (2, {"GPU": 4, "x": 1})),
    ],
)
def test_workers_and_resources(workers: int | None, resources: Any, expected: Any) -> None:
    found = sizes(2, workers, resources)
    assert (found.workers, found.bundle) == expected


@pytest.mark.parametrize(
    ("num_nodes", "workers", "resources"),
    [(0, 1, None), ((2, 1), 1, None), (1, 0, None), (1, 3, {"GPU": 2}), (1, 1, {"CPU": -1})],
)
def test_sizes_that_cannot_be(num_nodes: Any, workers: int, resources: Any) -> None:
    with pytest.raises(ConfigError):
        sizes(num_nodes, workers, resources)
    with pytest.raises(ConfigError, match="strategy"):
        sizes_from(1, 1, None, "TOGETHER")


def test_the_words_of_all_nodes_are_read_back() -> None:
    given = command_lines.parse(
        ["--max-restarts", "3", "-m", "--rdzv-conf=lease=2", "train", "--x", "a b"]
    )
    meeting = Meeting(run_id="job", host="fd00::1", port=7)
    read = command_lines.parse(words_of(given, sizes((1, 2)), meeting, {"--preload": "a"}))
    assert read.target == ("train", "--x", "a b")
    assert read.values == {
        "--max-restarts": "3",
        "--module": "1",
        "--preload": "a",
        "--nproc-per-node": "1",
        "--nnodes": "1:2",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "[fd00::1]:7",
        "--rdzv-id": "job",
        "--rdzv-conf": "lease=2,is_host=false",
    }
    alone = command_lines.parse(words_of(given, sizes(1), None, {}))
    assert "--nnodes" not in alone.values


def test_flags_that_the_trainer_sets() -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        words_of(command_lines.parse(["--nnodes=3", "x.py"]), sizes(), None, {})


def test_a_bundle_that_is_lost_is_asked_for_until_the_job_is_over() -> None:
    roster = Roster(2, max_losses=2)
    for index in range(2):
        roster.start(index)
    assert roster.lose(1)
    assert roster.running == [0]
    assert not roster.done
    roster.start(1)
    roster.end(0, 0, worker_failed=False)
    assert not roster.done
    assert not roster.lose(1)
    assert roster.done
    assert roster.exit_code == 0
    assert not roster.lose(1)
    assert roster.too_many_losses


@pytest.mark.parametrize(
    ("ends", "exit_code"),
    [
        ([(0, False), (0, False)], 0),
        ([(7, True), (0, False)], 7),  # its workers had ended well, another node's had not
        ([(1, False), (0, False)], 0),  # a node that left, and one that finished the job
        ([(1, False), (7, True)], 7),
        ([(3, False), (3, False)], 3),
    ],
)
def test_the_exit_code_of_the_job(ends: list[tuple[int, bool]], exit_code: int) -> None:
    roster = Roster(len(ends), max_losses=0)
    for index, (code, failed) in enumerate(ends):
        roster.start(index)
        roster.end(index, code, worker_failed=failed)
    assert roster.done
    assert roster.exit_code == exit_code


@pytest.mark.parametrize(
    ("world", "local", "nodes", "gpus", "expected"),
    [
        (4, None, None, 0, Shape(nodes=4, workers=1, strategy="PACK")),
        (4, 2, None, 0, Shape(nodes=2, workers=2, strategy="STRICT_SPREAD")),
        (8, None, None, 4, Shape(nodes=2, workers=4, strategy="STRICT_SPREAD")),
        (None, 2, 3, 8, Shape(nodes=3, workers=2, strategy="STRICT_SPREAD")),
        (None, None, 3, 0, Shape(nodes=3, workers=1, strategy="STRICT_SPREAD")),
        (6, None, 3, 0, Shape(nodes=3, workers=2, strategy="STRICT_SPREAD")),
        (1, None, None, 0, Shape(nodes=1, workers=1, strategy="PACK")),
    ],
)
def test_bundles_of_a_function(
    world: int | None, local: int | None, nodes: int | None, gpus: int, expected: Shape
) -> None:
    assert shape_of(world, local, nodes, gpus) == expected


@pytest.mark.parametrize(
    ("world", "local", "nodes", "gpus", "error"),
    [
        (None, None, None, 0, "is not set, and no number of nodes either"),
        (None, 2, None, 0, "is not set, and no number of nodes either"),
        (5, 2, None, 0, "cannot be divided among nodes of 2 workers"),
        (5, None, 2, 0, "cannot be divided among 2 nodes"),
        (5, 2, 2, 0, "2 nodes of 2 workers have 4"),
        (0, None, None, 0, "cannot be divided"),
    ],
)
def test_bundles_that_cannot_be(
    world: int | None, local: int | None, nodes: int | None, gpus: int, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        shape_of(world, local, nodes, gpus)
