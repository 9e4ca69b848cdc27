"""Wrong arguments to join and parallel: the error names the argument, its value, and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rallypoint import parallel
from rallypoint.errors import ConfigError
from rallypoint.join import Join, ShardSampler, gather_samples, mean_over_samples
from rallypoint.parallel import ParallelLayout, ParallelMesh


X = torch.zeros(2, 2)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


def join(*args: Any, **options: Any) -> Join:
    return Join([ddp()], *args, **options)


def batches(loader: Any, **options: Any) -> None:
    with join(**options) as block:
        list(block.batches(loader))


def twice() -> None:
    model = ddp()
    Join([model, model])


LOADER = "expected a DataLoader, a list of batches, or another iterable"
JOIN: list[tuple[Callable[[], Any], str]] = [
    (lambda: batches(None), f"loader 'NoneType': {LOADER}"),
    (lambda: batches(3), f"loader 'int': {LOADER}"),
    (lambda: batches("data.csv"), f"loader 'str': {LOADER}"),
    (lambda: batches(nn.Linear(1, 1)), f"loader 'Linear': {LOADER}"),
    (lambda: batches(torch.utils.data.DataLoader), f"loader 'type': {LOADER}"),
    (lambda: batches(None, enable=False), f"loader 'NoneType': {LOADER}"),
    (lambda: join(lookahead="8"), "lookahead '8': expected a number of steps"),
    (lambda: join(lookahead=2.5), "lookahead 2.5: expected a number of steps"),
    (lambda: join(accumulation=None), "accumulation: expected a number of steps"),
    (lambda: join(accumulation=True), "accumulation True: expected a number of steps"),
    (lambda: join(steps="5"), "steps '5': expected a number of steps, the samples"),
    (lambda: join(steps=5.0), "steps 5.0: expected a number of steps, 0 or more"),
    (lambda: join(steps=[3, -1]), "steps [3, -1]: expected whole numbers, 0 or more"),
    (lambda: join(steps={"a": 1}), "steps {'a': 1}: expected a number of steps"),
    (lambda: join(samples=3), "samples 3: expected a function"),
    (
        lambda: batches([X], weighting="samples", samples=lambda _: None),
        "samples 'None': expected a function that returns a whole number",
    ),
    (
        lambda: batches([X], weighting="samples", samples=lambda _: 2.5),
        "samples 2.5: expected a function that returns a whole number",
    ),
    (lambda: join("no"), "enable 'str': expected True or False"),
    (
        lambda: Join([ddp()], torch.optim.SGD(nn.Linear(1, 1).parameters())),  # type: ignore[arg-type]
        "enable 'SGD': expected True or False (as in Join([model, optimizer]))",
    ),
    (lambda: join(replay="no"), "replay 'no': expected True or False"),
    (twice, "joinables 'DistributedDataParallel': the list has it twice"),
    (lambda: join(process_group="gloo"), "process_group 'str': expected a process group"),
    (lambda: ShardSampler(None), "data_source 'NoneType': expected a data set with a length"),  # type: ignore[arg-type]
    (lambda: ShardSampler(X, rank="0"), "rank '0': expected a whole number"),  # type: ignore[arg-type]
    (lambda: ShardSampler(X).set_epoch("a"), "epoch 'a': expected a whole number"),  # type: ignore[arg-type]
    (lambda: gather_samples(X, [0, 1]), "indices 'list': expected a tensor of whole numbers"),  # type: ignore[arg-type]
    (lambda: gather_samples(X, X[0]), "indices torch.float32: expected a tensor of whole"),
    (lambda: gather_samples(X, None, "g"), "group 'str': expected a process group"),  # type: ignore[arg-type]
    (lambda: mean_over_samples([1.0], 2), "metrics 'list': expected names and means"),  # type: ignore[arg-type]
    (lambda: mean_over_samples({"a": 1.0}, None), "num_samples 'None': expected a whole"),  # type: ignore[arg-type]
    (lambda: mean_over_samples({"a": X}, 2), "metrics['a'] [2, 2]: expected one number"),
    (lambda: mean_over_samples({"a": None}, 2), "metrics['a']: expected one number"),  # type: ignore[dict-item]
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("call", "text"), JOIN)
def test_join_names_the_argument(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        call()


@pytest.mark.usefixtures("group")
def test_whole_numbers_of_other_libraries_are_fine() -> None:
    import numpy as np

    three: Any = np.int64(3)
    join(steps=three, lookahead=three, accumulation=three)
    join(steps=torch.tensor(3))
    assert len(ShardSampler(range(3), rank=np.int64(0), world_size=1)) == 3
    assert mean_over_samples({"a": np.float32(2)}, three) == {"a": 2.0}
    splits: Any = [np.int64(2)]
    assert parallel.all_to_all(X, send_splits=splits, recv_splits=splits) is X


@pytest.mark.usefixtures("group")
def test_a_metric_may_be_a_loss_with_its_graph(recwarn: pytest.WarningsRecorder) -> None:
    assert mean_over_samples({"loss": torch.ones((), requires_grad=True)}, 2) == {"loss": 1.0}
    assert not recwarn


COLLECTIVES: list[Any] = [
    *(parallel.all_gather, parallel.reduce_scatter, parallel.all_reduce, parallel.broadcast),
    *(parallel.copy_to, parallel.reduce_from, parallel.scatter_to, parallel.gather_from),
    *(parallel.gather_sequence, parallel.reduce_scatter_sequence, parallel.all_to_all),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_name_what_is_no_tensor_and_no_group(collective: Any) -> None:
    for x, name in ((None, "NoneType"), ([1.0], "list")):
        with pytest.raises(ConfigError, match=f"x '{name}': expected a tensor"):
            collective(x)
    for wrong in ("tp", [0], ParallelMesh(ParallelLayout())):
        name = type(wrong).__name__
        with pytest.raises(ConfigError, match=f"group '{name}': expected a process group"):
            collective(X, group=wrong)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: parallel.all_gather(X, dim="0"), "dim '0': expected a whole number"),  # type: ignore[arg-type]
        (lambda: parallel.broadcast(X, "0"), "src '0': expected a whole number"),  # type: ignore[arg-type]
        (lambda: parallel.all_to_all_dynamic(X, 2), "send_splits 2: expected a list of whole"),  # type: ignore[arg-type]
        (lambda: parallel.all_to_all_dynamic(X, "2"), "send_splits '2': expected a list"),  # type: ignore[arg-type]
        (lambda: ParallelLayout().resolve("8"), "world_size '8': expected a whole number"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(dp=2).coordinates("0"), "rank '0': expected a whole number"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(dp=2).rank_at(dp="1"), "dp '1': expected a whole number"),  # type: ignore[arg-type]
        (lambda: ParallelMesh({"tp": 1}), "layout 'dict': expected a ParallelLayout"),  # type: ignore[arg-type]
        (
            lambda: ParallelMesh(ParallelLayout(), backends="gloo"),  # type: ignore[arg-type]
            "backends 'gloo': expected a backend for each axis",
        ),
        (
            lambda: ParallelMesh(ParallelLayout(), timeout="30"),  # type: ignore[arg-type]
            "timeout '30': expected seconds: a number above 0",
        ),
        (
            lambda: ParallelMesh(ParallelLayout(), timeout=timedelta(seconds=30)),  # type: ignore[arg-type]
            "timeout datetime.timedelta(seconds=30): expected seconds: a number above 0",
        ),
        (lambda: ParallelMesh(ParallelLayout(), timeout=0), "timeout 0: expected seconds: a"),
        (lambda: ParallelMesh(ParallelLayout()).build(3), "axes 3: expected an axis"),  # type: ignore[arg-type]
        (lambda: parallel.set_current_mesh("x"), "mesh 'x': expected a ParallelMesh"),  # type: ignore[arg-type]
    ],
)
def test_parallel_names_the_argument(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        call()
