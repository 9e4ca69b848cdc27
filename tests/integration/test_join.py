"""Uneven inputs on real ranks, compared with one process that has all of them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin, Joinable as TorchJoinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from rallypoint.errors import ConfigError, InputsExhausted, JoinError
from rallypoint.join import (
    Join,
    Joinable,
    JoinHook,
    ShardSampler,
    gather_samples,
    mean_over_samples,
)
from rallypoint.testing import CaseFailed, Ranks


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pairs() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long), 4])
def ranks(request: pytest.FixtureRequest, pairs: Ranks) -> Iterator[Ranks]:
    found = pairs if request.param == 2 else Ranks(request.param)
    yield found
    if found is not pairs:
        found.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3)) as ranks:
        yield ranks


# -- data, models, and the one process --------------------------------------------------------------

FEATURES, OUTPUTS = 6, 3


def sizes_of(world_size: int, kind: str) -> list[list[int]]:
    """The samples of each step of each rank."""
    if kind == "even":
        return [[4, 4, 4]] * world_size
    if kind == "short last batches":
        return [[4] * (1 + rank) + [1 + rank] for rank in range(world_size)]
    if kind == "the first has none":
        return [[], *[[3] * (1 + rank) + [2] for rank in range(1, world_size)]]
    if kind == "the last has none":
        return [*[[5] * (world_size - rank) for rank in range(world_size - 1)], []]
    raise ValueError(kind)


KINDS = ["even", "short last batches", "the first has none", "the last has none"]


def batches_of(
    sizes: Sequence[Sequence[int]], rank: int, epoch: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    return [
        (
            torch.randn(n, FEATURES, generator=generator, dtype=torch.float64),
            torch.randn(n, OUTPUTS, generator=generator, dtype=torch.float64),
        )
        for n in sizes[rank]
    ]


def model_of(kind: str = "mlp") -> nn.Module:
    torch.default_generator.manual_seed(7)  # faster than torch's own function, which asks for CUDA
    if kind == "mlp":
        layers = [nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, OUTPUTS)]
    elif kind == "batch norm":
        layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, OUTPUTS)]
    elif kind == "sync batch norm":
        layers = [nn.Linear(FEATURES, 8), CpuSyncBatchNorm(8), nn.Tanh(), nn.Linear(8, OUTPUTS)]
    else:
        layers = [Sometimes()]
    return nn.Sequential(*layers).double()


class Sometimes(nn.Module):
    """A parameter that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(FEATURES, OUTPUTS), nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.seldom(x) if x[0, 0] > 0.5 else y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class CpuSyncBatchNorm(nn.BatchNorm1d):
    """torch's own runs on accelerators only. This has the same arithmetic, with sums over the ranks."""

    exchanges_statistics = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        count = torch.full((1,), float(len(x)), dtype=x.dtype)
        both = torch.cat([x.sum(0), (x * x).sum(0), count])
        sums = _Sum.apply(both) if dist.is_initialized() else both
        mean, square = sums[:-1].chunk(2)[0] / sums[-1], sums[:-1].chunk(2)[1] / sums[-1]
        var = square - mean * mean
        n = sums[-1].item()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / max(n - 1, 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(sizes: list[list[int]], weighting: str, **options: Any) -> torch.Tensor:
    """One process that has, in each step, what all ranks have, weighted by the definition."""
    return _alone(tuple(map(tuple, sizes)), weighting, **options)


@functools.cache
def _alone(
    sizes: tuple[tuple[int, ...], ...],
    weighting: str,
    *,
    kind: str = "mlp",
    accumulation: int = 1,
    epochs: int = 2,
    flush: bool = True,
) -> torch.Tensor:
    model = model_of(kind)
    optimizer = optimizer_of(model)
    world_size, total = len(sizes), max(map(len, sizes))
    for epoch in range(epochs):
        every = [batches_of(sizes, rank, epoch) for rank in range(world_size)]
        for step in range(total):
            here = [each[step] for each in every if step < len(each)]
            if kind == "sometimes":
                samples = sum(len(x) for x, _ in here)
                weights = [
                    len(x) / samples if weighting == "samples" else 1 / len(here) for x, _ in here
                ]
                loss = sum(
                    w * loss_of(model, batch) for w, batch in zip(weights, here, strict=True)
                )
            elif weighting == "samples":
                union = tuple(torch.cat(parts) for parts in zip(*here, strict=True))
                loss = loss_of(model, union)
            else:
                divisor = world_size if weighting == "initial" else len(here)
                loss = sum(loss_of(model, batch) for batch in here) / divisor
            (loss / accumulation).backward()
            if (step + 1) % accumulation == 0 or (flush and step + 1 == total):
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    return flat(model)


# -- on a rank ------------------------------------------------------------------------------------


def train(
    sizes: list[list[int]],
    weighting: str | None,
    mode: str,
    kind: str = "mlp",
    *,
    accumulation: int = 1,
    epochs: int = 2,
    ddp_options: dict[str, Any] | None = None,
    compress: bool = False,
    zero: bool = False,
    optimizer_first: bool = False,
) -> torch.Tensor:
    """Train two epochs under Join in one of its modes. Returns the parameters."""
    rank = dist.get_rank()
    model = DistributedDataParallel(model_of(kind), **(ddp_options or {}))
    if compress:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01
        )
    else:
        optimizer = optimizer_of(model)
    for epoch in range(epochs):
        data = batches_of(sizes, rank, epoch)
        options: dict[str, Any] = {"weighting": weighting, "accumulation": accumulation}
        if mode == "planned":
            options["steps"] = [len(batch[0]) for batch in data]
        elif mode == "shadowing loop":
            options["replay"] = False
        elif mode == "windows":
            options["lookahead"] = 2
        elif mode == "shadowing windows":
            options |= {"lookahead": 2, "replay": False}
        joined = [optimizer, model] if optimizer_first else [model, optimizer]
        with Join(joined, **options) as join:
            if mode in ("planned", "classic"):
                loop: Any = data
            else:
                loop = join.batches(iter(data) if "windows" in mode else data)
            for index, batch in enumerate(loop):
                bare = mode in ("planned", "classic")
                syncs = (index + 1) % accumulation == 0 if bare else join.syncs
                with contextlib.nullcontext() if syncs else model.no_sync():
                    (loss_of(model, batch) / accumulation).backward()
                if syncs:
                    optimizer.step()
                    optimizer.zero_grad()
        if accumulation > 1 and mode in ("planned", "classic"):
            optimizer.zero_grad()  # left over from the last steps; otherwise nothing may be left
    return flat(model.module)


MODES = ["planned", "replay", "shadowing loop", "windows", "shadowing windows"]


def assert_all_equal(found: list[torch.Tensor], expected: torch.Tensor) -> None:
    for rank, each in enumerate(found):
        torch.testing.assert_close(each, found[0], rtol=0, atol=0, msg=f"rank {rank} is not rank 0")
    torch.testing.assert_close(found[0], expected, rtol=1e-10, atol=1e-12)


def every(cases: list[tuple[str, str]]) -> Callable[..., list[torch.Tensor]]:
    """On a rank: :func:`train` with each of these weightings and modes."""

    def train_all(sizes: list[list[int]], **options: Any) -> list[torch.Tensor]:
        return [train(sizes, weighting, mode, **options) for weighting, mode in cases]

    return train_all


def train_everywhere(
    ranks: Ranks, cases: list[tuple[str, str]], sizes: list[list[int]], **options: Any
) -> list[list[torch.Tensor]]:
    """What all ranks have, for each of these weightings and modes."""
    found = ranks.run(functools.partial(every(cases), **options), sizes)
    return [list(each) for each in zip(*found, strict=True)]


WEIGHTINGS = ("samples", "ranks", "initial")


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_equals_one_process(ranks: Ranks, kind: str) -> None:
    sizes = sizes_of(ranks.world_size, kind)
    cases = [(weighting, mode) for weighting in WEIGHTINGS for mode in MODES]
    if ranks.world_size > 2:  # two ranks cover every pair: here each mode and each weighting
        cases = [(WEIGHTINGS[(KINDS.index(kind) + i) % 3], mode) for i, mode in enumerate(MODES)]
    expected = {weighting: alone(sizes, weighting) for weighting in WEIGHTINGS}
    found = train_everywhere(ranks, cases, sizes)
    for (weighting, _), each in zip(cases, found, strict=True):
        assert_all_equal(each, expected[weighting])


@pytest.mark.parametrize("kind", KINDS)
def test_classic_ddp_equals_one_process(ranks: Ranks, kind: str) -> None:
    def optimizer_first(*args: Any) -> torch.Tensor:
        return train(*args, optimizer_first=True)

    sizes = sizes_of(ranks.world_size, kind)
    for weighting in ("ranks", "initial"):
        assert_all_equal(ranks.run(train, sizes, weighting, "classic"), alone(sizes, weighting))
    if kind == "even":  # whichever is first in the list, the DDP tells the others
        ranks.run(optimizer_first, sizes_of(ranks.world_size, KINDS[1]), "ranks", "classic")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_zero_equals_one_process(ranks: Ranks, kind: str) -> None:
    sizes = sizes_of(ranks.world_size, kind)
    cases = [("ranks", "classic"), *(("samples", mode) for mode in MODES)]
    found = train_everywhere(ranks, cases, sizes, zero=True)
    for (weighting, _), each in zip(cases, found, strict=True):
        assert_all_equal(each, alone(sizes, weighting))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_of_a_rank_that_runs_out_are_not_lost(
    three: Ranks, kind: str
) -> None:
    sizes = sizes_of(3, kind)
    cases = [("samples", mode) for mode in MODES]
    found = train_everywhere(three, cases, sizes, accumulation=2)
    for mode, each in zip(MODES, found, strict=True):
        # A user's own loop cannot know which step is the very last.
        expected = alone(sizes, "samples", accumulation=2, flush=mode != "planned")
        assert_all_equal(each, expected)


OPTIONS = {
    "unused parameters": ("sometimes", {"find_unused_parameters": True}),
    "static graph": ("mlp", {"static_graph": True}),
    "gradients as views": ("mlp", {"gradient_as_bucket_view": True}),
    "many buckets": ("mlp", {"bucket_cap_mb": 0.0001}),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_options_of_ddp(three: Ranks, option: str, kind: str) -> None:
    model, options = OPTIONS[option]
    sizes = sizes_of(3, kind)
    # A rank learns a static graph in its own first backward pass.
    needs_replay = option == "static graph" and [] in sizes
    modes = ["replay", "windows"] if needs_replay else ["classic", *MODES]
    cases = [("ranks" if mode == "classic" else "samples", mode) for mode in modes]
    found = train_everywhere(three, cases, sizes, kind=model, ddp_options=options)
    for (weighting, _), each in zip(cases, found, strict=True):
        assert_all_equal(each, alone(sizes, weighting, kind=model))


def test_a_static_graph_that_a_rank_cannot_learn_is_refused_on_every_rank(pairs: Ranks) -> None:
    def case(mode: str) -> str:
        model = DistributedDataParallel(model_of(), static_graph=True)
        data = batches_of([[], [2, 2]], dist.get_rank(), 0)
        options: dict[str, Any] = {"steps": len(data)} if mode == "planned" else {"replay": False}
        with pytest.raises(JoinError) as caught:
            with Join([model], **options) as join:
                for batch in data if mode == "planned" else join.batches(data):
                    loss_of(model, batch).backward()
        return str(caught.value)

    for mode in ("planned", "shadowing loop"):
        for text in pairs.run(case, mode):
            assert "static_graph learns" in text


def test_a_communication_hook_of_the_user(three: Ranks) -> None:
    cases = [("samples", mode) for mode in MODES]
    for kind in KINDS:
        sizes = sizes_of(3, kind)
        found = train_everywhere(three, cases, sizes, compress=True, accumulation=2)
        for mode, each in zip(MODES, found, strict=True):
            expected = alone(sizes, "samples", accumulation=2, flush=mode != "planned")
            assert_all_equal(each, expected)


# -- other joinables ------------------------------------------------------------------------------


def sharded(
    sizes: list[list[int]], weighting: str, mode: str, mesh: str, accumulation: int
) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = model_of()
    shape, names = (
        ((2, world_size // 2), ("replicate", "shard"))
        if mesh == "hsdp"
        else ((world_size,), ("shard",))
    )
    grid = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=grid)
    fully_shard(model, mesh=grid)
    optimizer = optimizer_of(model)
    for epoch in range(2):
        data = batches_of(sizes, rank, epoch)
        lookahead = 2 if mode == "windows" else None
        with Join(
            [model], weighting=weighting, lookahead=lookahead, accumulation=accumulation
        ) as join:
            for batch in join.batches(data):
                model.set_requires_gradient_sync(join.syncs)
                (loss_of(model, batch) / accumulation).backward()
                if join.syncs:
                    optimizer.step()
                    optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_equals_one_process(ranks: Ranks, kind: str) -> None:
    sizes = sizes_of(ranks.world_size, kind)
    cases = [
        ("samples", "replay", 1),
        ("samples", "windows", 2),
        ("ranks", "replay", 1),
        ("initial", "replay", 1),
    ]

    def case() -> list[torch.Tensor]:
        return [sharded(sizes, weighting, mode, "fsdp", times) for weighting, mode, times in cases]

    found = zip(*ranks.run(case), strict=True)
    for (weighting, _, accumulation), each in zip(cases, found, strict=True):
        assert_all_equal(list(each), alone(sizes, weighting, accumulation=accumulation))


@pytest.mark.parametrize("kind", KINDS)
def test_hsdp_equals_one_process(ranks: Ranks, kind: str) -> None:
    if ranks.world_size == 3:
        return  # two replicas
    sizes = sizes_of(ranks.world_size, kind)
    found = ranks.run(sharded, sizes, "samples", "replay", "hsdp", 1)
    assert_all_equal(found, alone(sizes, "samples"))


@pytest.mark.parametrize("kind", KINDS)
def test_sync_batch_norm_sees_the_rows_of_those_that_have_some(ranks: Ranks, kind: str) -> None:
    def case(*args: Any) -> torch.Tensor:
        return train(*args, "sync batch norm", ddp_options={"broadcast_buffers": False})

    sizes = sizes_of(ranks.world_size, kind)
    expected = alone(sizes, "samples", kind="sync batch norm")
    for mode in ("replay", "windows"):
        found = ranks.run(case, sizes, "samples", mode)
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-10)


def test_sync_batch_norm_statistics_are_the_same_everywhere(three: Ranks) -> None:
    def case(sizes: list[list[int]]) -> list[torch.Tensor]:
        model = DistributedDataParallel(model_of("sync batch norm"), broadcast_buffers=False)
        with Join([model], weighting="samples") as join:
            for batch in join.batches(batches_of(sizes, dist.get_rank(), 0)):
                loss_of(model, batch).backward()
        return [buffer.clone() for buffer in model.buffers()]

    found = three.run(case, sizes_of(3, "the first has none"))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    assert found[0][2] == 4  # steps, also on the rank that had none


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two accelerators")
def test_torchs_sync_batch_norm_equals_one_process() -> None:
    def case(sizes: list[list[int]]) -> torch.Tensor:
        rank = dist.get_rank()
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
        layers = [nn.Linear(FEATURES, 8), nn.SyncBatchNorm(8, process_group=group), nn.Tanh()]
        torch.manual_seed(7)
        inner = nn.Sequential(*layers, nn.Linear(8, OUTPUTS)).double().to(device)
        model = DistributedDataParallel(inner, device_ids=[rank], process_group=group)
        optimizer = optimizer_of(model)
        for epoch in range(2):
            with Join([model, optimizer], weighting="samples") as join:
                for x, y in join.batches(batches_of(sizes, rank, epoch)):
                    loss_of(model, (x.to(device), y.to(device))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(inner).cpu()

    with contextlib.closing(Ranks(2)) as ranks:
        sizes = sizes_of(2, "short last batches")
        for each in ranks.run(case, sizes):
            expected = alone(sizes, "samples", kind="sync batch norm")
            torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-10)


def test_hooks_do_not_pretend_to_match_what_only_the_model_can(pairs: Ranks) -> None:
    def case() -> str:
        model = DistributedDataParallel(model_of("sync batch norm"))
        with pytest.raises(JoinError, match=r"SyncBatchNorm exchanges.*join\.batches") as caught:
            with Join([model], steps=1):
                model(torch.zeros(2, FEATURES).double())
        return str(caught.value)

    pairs.run(case)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_come_from_a_rank_that_had_inputs(three: Ranks, kind: str) -> None:
    def case(sizes: list[list[int]], mode: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        rank = dist.get_rank()
        model = DistributedDataParallel(model_of("batch norm"))
        data = batches_of(sizes, rank, 0)
        steps = {"steps": len(data)} if mode == "planned" else {}
        with Join([model], replay=mode == "replay", **steps) as join:
            for batch in data if mode in ("planned", "classic") else join.batches(data):
                loss_of(model, batch).backward()
                model.zero_grad()
        return [buffer.clone() for buffer in model.buffers()]

    sizes = [[max(n, 2) for n in each] for each in sizes_of(3, kind)]  # one row has no variance
    results = {
        mode: three.run(case, sizes, mode) for mode in ("classic", "planned", "replay", "shadow")
    }
    expected = buffers_of_one_process(sizes)
    for mode, found in results.items():
        for rank, buffers in enumerate(found):
            if kind == "even" and rank != 2:
                continue  # each rank has its own until the next forward pass
            for mine, theirs in zip(buffers, expected, strict=True):
                torch.testing.assert_close(mine, theirs, msg=f"{mode}: rank {rank}")


def buffers_of_one_process(sizes: list[list[int]]) -> list[torch.Tensor]:
    """Before each step, every rank takes the buffers of the highest rank that has inputs."""
    models = [model_of("batch norm") for _ in sizes]
    every = [batches_of(sizes, rank, 0) for rank in range(len(sizes))]
    source = len(sizes) - 1
    for step in range(max(map(len, sizes))):
        active = [rank for rank, each in enumerate(every) if step < len(each)]
        source = max(active)
        for rank in active:
            models[rank].load_state_dict(models[source].state_dict())
        for rank in active:
            models[rank](every[rank][step][0])
    return list(models[source].buffers())


def test_a_model_with_collectives_of_its_own(three: Ranks) -> None:
    class Mean(nn.Module):
        """Adds the mean of all ranks' hidden layers, and averages its gradients itself."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 0 * _Sum.apply(x.sum())

    def case(sizes: list[list[int]]) -> tuple[torch.Tensor, list[bool]]:
        model, active = Mean(), []
        optimizer = optimizer_of(model)
        for epoch in range(2):
            with Join([model], weighting="samples") as join:
                for batch in join.batches(batches_of(sizes, dist.get_rank(), epoch)):
                    loss_of(model, batch).backward()
                    for p in model.parameters():
                        dist.all_reduce(p.grad)
                        p.grad /= dist.get_world_size()
                    optimizer.step()
                    optimizer.zero_grad()
                    active.append(join.active)
        return flat(model), active

    for kind in KINDS:
        sizes = sizes_of(3, kind)
        found = three.run(case, sizes)
        assert_all_equal([each for each, _ in found], alone(sizes, "samples"))
        for rank, (_, active) in enumerate(found):
            own, total = len(sizes[rank]), max(map(len, sizes))
            assert active == 2 * ([True] * own + [False] * (total - own))


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_gradient_through_two_joined_modules_has_its_weight_once(three: Ranks, wrap: str) -> None:
    def case(sizes: list[list[int]]) -> torch.Tensor:
        whole = model_of()
        parts: list[Any] = [whole[:2], whole[2:]]
        if wrap == "ddp":
            parts = [DistributedDataParallel(part) for part in parts]
        else:
            from torch.distributed.fsdp import fully_shard

            for part in parts:
                fully_shard(part)
        optimizer = optimizer_of(whole)
        for epoch in range(2):
            with Join(parts, weighting="samples") as join:
                for x, y in join.batches(batches_of(sizes, dist.get_rank(), epoch)):
                    nn.functional.mse_loss(parts[1](parts[0](x)), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found = [p.full_tensor() if wrap == "fsdp" else p for p in whole.parameters()]
        return torch.cat([p.detach().flatten() for p in found])

    for kind in KINDS:
        sizes = sizes_of(3, kind)
        assert_all_equal(three.run(case, sizes), alone(sizes, "samples"))


@pytest.mark.parametrize("mode", ["planned", "replay"])
def test_local_sgd_averages_the_models_of_those_that_have_inputs(ranks: Ranks, mode: str) -> None:
    def case(sizes: list[list[int]]) -> torch.Tensor:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        rank = dist.get_rank()
        model = model_of()
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            PeriodicModelAverager(period=2, warmup_steps=1),
        )
        joined = [optimizer] if mode == "planned" else [Local(model), optimizer]
        for epoch in range(2):
            data = batches_of(sizes, rank, epoch)
            steps = {"steps": len(data)} if mode == "planned" else {}
            with Join(joined, **steps) as join:
                for batch in data if mode == "planned" else join.batches(data):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model)

    class Local(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    def reference(sizes: list[list[int]]) -> torch.Tensor:
        models = [model_of() for _ in sizes]
        for epoch in range(2):
            every = [batches_of(sizes, rank, epoch) for rank in range(len(sizes))]
            for step in range(max(map(len, sizes))):
                active = [rank for rank, each in enumerate(every) if step < len(each)]
                for rank in active:
                    model = models[rank]
                    loss_of(model, every[rank][step]).backward()
                    with torch.no_grad():
                        for p in model.parameters():
                            p -= 0.1 * p.grad
                            p.grad = None
                if step >= 1 and (step - 1) % 2 == 0:
                    with torch.no_grad():
                        for same in zip(*(model.parameters() for model in models), strict=True):
                            mean = sum(same[rank] for rank in active) / len(active)
                            for p in same:
                                p.copy_(mean)
        return flat(models[max(range(len(sizes)), key=lambda rank: len(sizes[rank]))])

    size = ranks.world_size
    for lengths in ([2, 4, 4, 1], [0, 4, 6, 6], [6, 4, 6, 0], [4] * 4):  # the last step averages
        lengths = lengths[:size]
        sizes = [[3] * n for n in lengths]
        found = ranks.run(case, sizes)
        longest = max(range(size), key=lambda rank: lengths[rank])
        torch.testing.assert_close(found[longest], reference(sizes))
        for each in found:
            torch.testing.assert_close(each, found[longest])


@pytest.mark.parametrize("mode", ["planned", "replay"])
def test_local_sgd_with_the_hook_that_torch_has_for_it(ranks: Ranks, mode: str) -> None:
    def case(lengths: list[int]) -> torch.Tensor:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        rank, start = dist.get_rank(), 2
        model = DistributedDataParallel(model_of())
        alone, _ = dist.new_subgroups(group_size=1)
        state = local_sgd.PostLocalSGDState(None, alone, start)
        model.register_comm_hook(state, local_sgd.post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=start + 1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        for epoch in range(2):
            data = batches_of([[3] * n for n in lengths], rank, epoch)
            steps = {"steps": len(data)} if mode == "planned" else {}
            with Join([model, optimizer], **steps) as join:
                for batch in data if mode == "planned" else join.batches(data):
                    loss_of(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return flat(model)

    for lengths in ([6, 3, 2, 6], [1, 6, 4, 0], [4] * 4):
        found = ranks.run(case, lengths[: ranks.world_size])
        for each in found:
            torch.testing.assert_close(each, found[0])


# -- whatever somebody may do -----------------------------------------------------------------------


@st.composite
def configurations(draw: st.DrawFn) -> tuple[list[list[int]], str, str, str, int, dict[str, Any]]:
    world_size = draw(st.integers(2, 4))
    one_rank = st.lists(st.integers(1, 4), max_size=5)
    sizes = draw(st.lists(one_rank, min_size=world_size, max_size=world_size))
    joined = draw(st.sampled_from(["ddp", "ddp and zero", "fsdp"]))
    modes = ["replay", "windows"] if joined == "fsdp" else ["classic", *MODES]
    mode = draw(st.sampled_from(modes))
    weighting = draw(st.sampled_from(["initial", "ranks"] + ["samples"] * 2 * (mode != "classic")))
    # torch's protocol drops what a rank had accumulated when it ran out.
    accumulation = 1 if mode == "classic" else draw(st.integers(1, 3))
    options = (
        {} if joined == "fsdp" else draw(st.sampled_from([{}, *(o for _, o in OPTIONS.values())]))
    )
    if mode not in ("replay", "windows") and options == {"static_graph": True}:
        options = {}
    if accumulation > 1 and options == {"static_graph": True}:
        options = {}  # torch refuses it with no_sync()
    return sizes, joined, mode, weighting, accumulation, options


@pytest.fixture(scope="module")
def crowds(pairs: Ranks, three: Ranks) -> Iterator[dict[int, Ranks]]:
    with contextlib.closing(Ranks(4)) as four:
        yield {2: pairs, 3: three, 4: four}


def check_configuration(
    crowds: dict[int, Ranks],
    found: tuple[list[list[int]], str, str, str, int, dict[str, Any]],
) -> None:
    sizes, joined, mode, weighting, accumulation, options = found
    ranks = crowds[len(sizes)]
    if joined == "fsdp":
        results = ranks.run(sharded, sizes, weighting, mode, "fsdp", accumulation)
    else:
        results = ranks.run(
            functools.partial(
                train,
                accumulation=accumulation,
                ddp_options=options,
                zero=joined == "ddp and zero",
            ),
            sizes,
            weighting,
            mode,
        )
    flush = mode not in ("planned", "classic")
    expected = alone(sizes, weighting, accumulation=accumulation, flush=flush)
    assert_all_equal(results, expected)


@given(found=configurations())
@settings(max_examples=6, deadline=None)
def test_random_configurations(crowds: dict[int, Ranks], found: Any) -> None:
    check_configuration(crowds, found)


@pytest.mark.long
@pytest.mark.timeout(900)
@given(found=configurations())
@settings(max_examples=200, deadline=None)
def test_two_hundred_random_configurations(crowds: dict[int, Ranks], found: Any) -> None:
    check_configuration(crowds, found)


# -- the protocol, with joinables of one's own ------------------------------------------------------


class Adder(JoinHook):
    """All-reduces a number in each step; a rank that has run out adds ``offset`` instead."""

    def __init__(self, joinable: Any, offset: float, last: bool) -> None:
        self.joinable, self.offset, self.last = joinable, offset, last

    def main_hook(self) -> None:
        self.joinable.add(self.offset)

    def post_hook(self, is_last_joiner: bool) -> None:
        if not self.last:
            return
        ranks = torch.tensor([dist.get_rank() if is_last_joiner else -1])
        dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        self.joinable.final = torch.tensor([float(self.joinable.total)])
        dist.broadcast(self.joinable.final, src=int(ranks.item()))


def adders(base: type, context: type) -> type:
    class AllReducer(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.total, self.seen, self.final = 0.0, {}, None

        def join_hook(self, **kwargs: Any) -> JoinHook:
            self.seen = kwargs
            return Adder(self, kwargs.get("offset", 0.0), kwargs.get("last", False))

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return dist.group.WORLD

        def add(self, value: float) -> None:
            x = torch.tensor([value])
            dist.all_reduce(x)
            self.total += x.item()

        def step(self) -> None:
            context.notify_join_context(self)
            self.add(1.0)

    return AllReducer


@pytest.mark.parametrize("written_for", ["torch", "us"])
@pytest.mark.parametrize("mode", ["classic", "planned", "torch's Join"])
@pytest.mark.parametrize("how_many", [1, 3])
def test_classes_written_for_either_join(
    three: Ranks, written_for: str, mode: str, how_many: int
) -> None:
    def case(lengths: list[int]) -> tuple[list[float], list[float], list[dict[str, Any]]]:
        base, context = (TorchJoinable, TorchJoin) if written_for == "torch" else (Joinable, Join)
        reducers = [adders(base, context)() for _ in range(how_many)]
        steps = lengths[dist.get_rank()]
        join = TorchJoin if mode == "torch's Join" else Join
        options = {"steps": steps} if mode == "planned" else {}
        with join(reducers, **options, offset=0.25, last=True):
            for _ in range(steps):
                for each in reducers:
                    each.step()
        disabled = [each._join_config.enable for each in reducers]
        assert mode == "torch's Join" or disabled == [False] * how_many
        return (
            [r.total for r in reducers],
            [r.final.item() for r in reducers],
            [r.seen for r in reducers],
        )

    for lengths in ([3, 1, 2], [0, 2, 0], [2, 2, 2]):
        expected = sum(
            sum(1.0 if step < n else 0.25 for n in lengths) for step in range(max(lengths))
        )
        if mode == "planned" and len(set(lengths)) == 1:
            continue  # no rank has run out before the others: there is nothing to correct
        for totals, finals, seen in three.run(case, lengths):
            longest = [rank for rank in range(3) if lengths[rank] == max(lengths)]
            assert finals == [expected] * how_many, longest
            assert totals[0] == expected
            assert seen == [{"offset": 0.25, "last": True}] * how_many


@pytest.mark.parametrize("mode", ["classic", "planned", "replay", "windows"])
def test_all_ranks_end_when_the_first_has_run_out(three: Ranks, mode: str) -> None:
    def case(lengths: list[int]) -> tuple[int, str, bool]:
        rank = dist.get_rank()
        model = DistributedDataParallel(model_of())
        data = batches_of([[2] * n for n in lengths], rank, 0)
        options = {"planned": {"steps": len(data)}, "windows": {"lookahead": 2}}.get(mode, {})
        done, text, ours = 0, "", False
        try:
            with Join([model], throw_on_early_termination=True, **options) as join:
                for batch in data if mode in ("classic", "planned") else join.batches(data):
                    loss_of(model, batch).backward()
                    done += 1
        except RuntimeError as error:
            text, ours = str(error), isinstance(error, InputsExhausted)
        return done, text, ours

    for lengths in ([3, 1, 2], [2, 0, 2], [2, 1, 1]):
        found = three.run(case, lengths)
        first = min(lengths)
        for rank, (done, text, ours) in enumerate(found):
            assert done == first
            if lengths[rank] == first:
                assert text.startswith(f"Rank {rank} exhausted all inputs")
                assert ours
            else:
                assert "exhausted" in text
    assert [text for _, text, _ in three.run(case, [2, 2, 2])] == ["", "", ""]


def collectives() -> int:
    """How many collectives there have been in this process's group."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def test_a_planned_join_needs_no_collective_of_its_own(pairs: Ranks) -> None:
    def case(mode: str, lengths: list[int]) -> tuple[int, int, int]:
        model = DistributedDataParallel(model_of())
        optimizer = optimizer_of(model)
        data = batches_of([[3] * n for n in lengths], dist.get_rank(), 0)
        for _ in range(2):  # DDP rebuilds its buckets in its second step
            loss_of(model, batches_of([[3], [3]], 0, 0)[0]).backward()
        plain = collectives()
        loss_of(model, batches_of([[3], [3]], 0, 0)[0]).backward()
        plain = collectives() - plain
        counted = 0
        if mode == "none":
            before = collectives()
            for batch in data:
                loss_of(model, batch).backward()
            counted = collectives() - before
        else:
            options = {"steps": [3] * len(data)} if mode == "planned" else {}
            with Join([model, optimizer], weighting="samples", **options) as join:
                loop = iter(data if mode == "planned" else join.batches(data))
                batch = next(loop)
                before = collectives()  # the block has been entered
                while batch is not None:
                    loss_of(model, batch).backward()
                    batch = next(loop, None)
                counted = collectives() - before
        after = collectives()
        loss_of(model, batches_of([[3], [3]], 0, 0)[0]).backward()
        return counted, collectives() - after, plain

    for counted, after, plain in pairs.run(case, "none", [4, 4]):
        assert counted == 4 * plain
        assert after == plain > 0
    for mode in ("planned", "replay"):
        for counted, after, plain in pairs.run(case, mode, [4, 4]):
            assert counted == 4 * plain, mode
            assert after == plain
        for counted, after, plain in pairs.run(case, mode, [4, 2]):
            assert counted in (4 * plain, 2 * plain)  # a rank that has run out shadows as it leaves
            assert after == plain


def test_after_a_classic_join_everything_is_as_before(pairs: Ranks) -> None:
    def case() -> None:
        rank = dist.get_rank()
        model = DistributedDataParallel(model_of())
        batch = batches_of([[4], [4]], rank, 3)[0]
        for _ in range(2):
            loss_of(model, batch).backward()
        model.zero_grad()
        loss_of(model, batch).backward()
        expected = flat_gradients(model)
        before = collectives()
        loss_of(model, batch).backward()
        plain = collectives() - before
        filters = list(warnings.filters)
        attributes = set(model.__dict__)
        with Join([model], weighting="ranks"):
            for each in batches_of([[4] * 3, [4]], rank, 4):
                loss_of(model, each).backward()
        assert list(warnings.filters) == filters
        assert set(model.__dict__) - attributes <= {"_authoritative_rank"}
        with torch.no_grad():
            for p, q in zip(model.parameters(), model_of().parameters(), strict=True):
                p.copy_(q)
        model.zero_grad()
        before = collectives()
        loss_of(model, batch).backward()
        assert collectives() - before == plain
        # What comes now must not be divided by the number of ranks that last had inputs.
        torch.testing.assert_close(flat_gradients(model), expected)

    pairs.run(case)


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_an_error_inside_is_raised_at_once_and_leaves_nothing(pairs: Ranks) -> None:
    def case() -> None:
        model = DistributedDataParallel(model_of())
        attributes = dict(model.__dict__)
        for options in ({}, {"steps": 3}):
            with pytest.raises(KeyError, match="mine"), Join([model], **options):
                raise KeyError("mine")
        with pytest.raises(KeyError, match="mine"):
            with Join([model], weighting="samples") as join:
                for _ in join.batches(batches_of([[1, 2], [2]], dist.get_rank(), 0)):
                    if join.step == 1:
                        raise KeyError("mine")
                    loss_of(model, _).backward()
        left = {k: v for k, v in model.__dict__.items() if k not in attributes}
        assert not left
        assert not model._join_config.enable
        assert all(not p._backward_hooks for p in model.parameters())
        assert not model._forward_pre_hooks

    pairs.run(case)


def test_a_replay_leaves_no_trace(pairs: Ranks) -> None:
    def case() -> None:
        import random

        import numpy as np

        rank = dist.get_rank()
        model = DistributedDataParallel(
            nn.Sequential(
                nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, OUTPUTS)
            ).double(),
            broadcast_buffers=False,
        )
        states = None
        with Join([model]) as join:
            for batch in join.batches(batches_of([[4] * 2, [4] * 5], rank, 0)):
                loss_of(model, batch).backward()
                random.random(), np.random.rand()
                if rank == 0 and join.step == 1:
                    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
                    buffers = [b.clone() for b in model.buffers()]
                assert join.active == (join.step < (2 if rank == 0 else 5))
        if rank == 0:
            assert torch.equal(torch.get_rng_state(), states[0])
            assert random.getstate() == states[1]
            assert (np.random.get_state()[1] == states[2]).all()
            for mine, then in zip(model.buffers(), buffers, strict=True):
                assert torch.equal(mine, then)

    pairs.run(case)


def test_the_body_may_change_a_batch(pairs: Ranks) -> None:
    class Box:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    def case(mode: str) -> list[float]:
        rank = dist.get_rank()
        model = DistributedDataParallel(model_of())
        data: list[Any] = []
        if rank or mode != "example":
            data = [
                {"x": x, "box": Box(x.clone()), "labels": y}
                for x, y in batches_of([[3] * 2, [3] * 5], rank, 0)
            ]
        example = {"x": torch.ones(3, FEATURES).double(), "box": Box(torch.ones(1))}
        options: dict[str, Any] = {"lookahead": 2} if mode == "windows" else {}
        if mode == "example":
            options["example"] = example | {"labels": torch.ones(3, OUTPUTS).double()}
        seen = []
        with Join([model], weighting="samples", **options) as join:
            for batch in join.batches(iter(data) if mode == "windows" else data):
                labels, x = batch.pop("labels"), batch["x"].mul_(10)
                batch["box"].x.mul_(10)
                nn.functional.mse_loss(model(x), labels).backward()
                if not join.active:
                    seen += [float(x.abs().sum()), float(batch["box"].x.abs().sum())]
        return seen

    for mode in ("planned", "windows", "example"):
        replayed, none = pairs.run(case, mode)
        assert not none
        assert len(replayed) == (10 if mode == "example" else 6)
        assert len(set(replayed[::2])) == len(set(replayed[1::2])) == 1, f"{mode}: {replayed}"


def test_a_block_that_is_turned_off_counts_its_steps(pairs: Ranks) -> None:
    def case(enable: bool) -> list[list[tuple[int, bool]]]:
        model = DistributedDataParallel(model_of())
        found = []
        for number in (6, 4):
            for accumulation in (4, 1):
                with Join([model], enable=enable, accumulation=accumulation) as join:
                    found += [
                        [(join.step, join.syncs) for _ in join.batches(data)]
                        for data in (["batch"] * number, iter(["batch"] * 3))
                    ]
                assert (join.step, join.syncs) == (-1, True)
        return found

    assert pairs.run(case, False) == pairs.run(case, True)


def test_loaders_that_do_not_keep_their_word(pairs: Ranks) -> None:
    class Liar:
        def __init__(self, says: int, gives: int) -> None:
            self.says, self.gives = says, gives

        def __len__(self) -> int:
            return self.says

        def __iter__(self) -> Iterator[Any]:
            return iter(batches_of([[2] * self.gives], 0, 0))

    def case(says: int, gives: int) -> str:
        model = DistributedDataParallel(model_of())
        with pytest.raises(JoinError) as caught, Join([model]) as join:
            for batch in join.batches(Liar(says, gives)):
                loss_of(model, batch).backward()
        return str(caught.value)

    assert "rank 0's loader ended after 2 batches, but its length is 3" in pairs.run(case, 3, 2)[0]
    assert "rank 1's loader yields more than 1 batches" in pairs.run(case, 1, 2)[1]


def test_steps_that_were_not_announced(pairs: Ranks) -> None:
    def case() -> None:
        model = DistributedDataParallel(model_of())
        data = batches_of([[2] * 3] * 2, dist.get_rank(), 0)
        with pytest.raises(JoinError, match=r"rank \d began step 2, but announced steps=2"):
            with Join([model], steps=2):
                for batch in data:
                    loss_of(model, batch).backward()
        with pytest.raises(JoinError, match=r"under no_sync.*every step.*accumulation"):
            with Join([model], steps=3), model.no_sync():
                for batch in data:
                    loss_of(model, batch).backward()
        with pytest.raises(JoinError, match="weighting='samples' needs to know"):
            with Join([model], weighting="samples"):
                loss_of(model, data[0]).backward()

    pairs.run(case)


def test_what_cannot_be_joined(pairs: Ranks) -> None:
    def case() -> None:
        class Half(Joinable):
            def __init__(self) -> None:
                pass

            join_hook = join_device = join_process_group = None  # type: ignore[assignment]

        model = DistributedDataParallel(model_of())
        for joinables, text in (
            ([], "joinables .*: expected at least one"),
            (model, r"joinables 'DistributedDataParallel': expected a list .*Join\(\["),
            (model_of(), r"joinables '\w+': expected a list"),
            (None, "joinables 'NoneType': expected a list"),
            ([Half()], "constructor did not call Joinable's"),
            (["model"], "joinables 'str': expected a Joinable, a module"),
        ):
            with pytest.raises(ConfigError, match=text):
                Join(joinables)
        other = dist.new_group([0, 1])
        with pytest.raises(ConfigError, match="another process group"):
            Join([model, DistributedDataParallel(model_of(), process_group=other)])
        for options, text in (
            ({"steps": -1}, "steps -1: expected a number of steps, 0 or more"),
            ({"steps": object()}, "steps 'object'"),
            ({"lookahead": 0}, "lookahead 0"),
            (
                {"weigthing": "samples"},
                "weigthing 'samples': Join has no such.*did you mean weighting",
            ),
            ({"colour": "red"}, "colour 'red': Join has no such.*Join takes.*weighting"),
            ({"weighting": "mean"}, "expected one of 'initial'"),
            ({"weighting": "ranks", "divide_by_initial_world_size": True}, "means 'initial'"),
        ):
            with pytest.raises(ConfigError, match=text):
                Join([model], **options)
        with Join([model], enable=False) as join:
            assert list(join.batches([1, 2])) == [1, 2]
        with pytest.raises(JoinError, match="inside the block"):
            next(iter(Join([model]).batches([1])))

    pairs.run(case)


def test_a_batch_that_nobody_can_describe(pairs: Ranks) -> None:
    class Odd:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __len__(self) -> int:
            return len(self.x)

    def case(example: bool) -> str:
        model = DistributedDataParallel(model_of())
        data = [Odd(torch.zeros(2, FEATURES).double())] if dist.get_rank() == 1 else []
        options = {"example": Odd(torch.zeros(1, FEATURES).double())} if example else {}
        try:
            with Join([model], **options) as join:
                for batch in join.batches(data):
                    model(batch.x).sum().backward()
        except JoinError as error:
            return str(error)
        return "fine"

    for text in pairs.run(case, False):
        assert "rank 0 has no batches" in text
        assert "pass example=" in text
    assert pairs.run(case, True) == ["fine", "fine"]


# -- evaluation -----------------------------------------------------------------------------------


def test_every_sample_once_and_in_order(three: Ranks) -> None:
    def case(total: int, with_indices: bool) -> Any:
        sampler = ShardSampler(range(total), shuffle=True, seed=3)
        sampler.set_epoch(2)
        rows = torch.tensor([list(sampler)], dtype=torch.int64).reshape(-1, 1)
        values = {"prediction": rows.to(torch.bfloat16) * 2, "label": rows[:, 0], "mask": rows > 1}
        if not len(sampler):
            return gather_samples(None)
        return gather_samples(values, sampler.indices if with_indices else None)

    for total in (10, 3, 2):
        for found in three.run(case, total, total >= 3):
            labels = found["label"].tolist()
            assert sorted(labels) == list(range(total))
            assert total < 3 or labels == list(range(total))
            assert found["prediction"].dtype == torch.bfloat16
            assert found["prediction"][:, 0].tolist() == [2.0 * each for each in labels]
            assert found["mask"][:, 0].tolist() == [each > 1 for each in labels]
    assert three.run(case, 0, False) == [None] * 3


def test_a_sample_that_several_ranks_have_counts_once(pairs: Ranks) -> None:
    def case() -> list[int]:
        indices = torch.tensor([[4, 0, 2], [2, 1, 3]][dist.get_rank()])
        return gather_samples(10 * indices, indices).tolist()

    assert pairs.run(case) == [[0, 10, 20, 30, 40]] * 2


def test_what_does_not_go_together_is_an_error_on_every_rank(pairs: Ranks) -> None:
    def case() -> list[str]:
        rank = dist.get_rank()
        found = []
        for values, indices in (
            (torch.zeros(2, 3 + rank), None),
            (torch.zeros(2, dtype=torch.float32 if rank else torch.float64), None),
            ([torch.zeros(2)] * (1 + rank), None),
            (torch.zeros(2), torch.arange(2) if rank else None),
        ):
            with pytest.raises(JoinError) as caught:
                gather_samples(values, indices)
            found.append(str(caught.value))
        with pytest.raises(ConfigError, match="one row per sample"):
            gather_samples(torch.tensor(1.0))
        return found

    for texts in pairs.run(case):
        assert (
            "differ in tensor 0 (rank 0: [N, 3] torch.float32, rank 1: [N, 4] torch.float32)"
            in texts[0]
        )
        assert "rank 0: [N] torch.float64" in texts[1].replace("[N, ]", "[N]")
        assert "number of tensors (rank 0: 1, rank 1: 2)" in texts[2]
        assert "whether indices are given (rank 0: False, rank 1: True)" in texts[3]


def test_structures_that_differ_or_cannot_be_sent_are_an_error_on_every_rank(pairs: Ranks) -> None:
    def case() -> list[str]:
        class Pair(NamedTuple):
            a: torch.Tensor
            b: torch.Tensor

        rank, found = dist.get_rank(), []
        a, b = torch.ones(1), torch.full((1,), 2.0)
        for mine, others in (
            ({"a": a, "b": b}, {"b": b, "a": a}),
            ({"a": a}, {"c": a}),
            ([a, b], {"a": a, "b": b}),
            ([a, b], (a, b)),
            (None, Pair(a, b)),
            (None, {("a", 1): a}),
        ):
            with pytest.raises(JoinError) as caught:
                gather_samples(others if rank else mine)
            found.append(str(caught.value))
        # What all ranks have need not be sent.
        for same in (Pair(a, b), {("a", 1): a}, defaultdict(lambda: 0, {"a": a})):
            assert all(len(each) == 2 for each in tree_leaves(gather_samples(same)))
        return found

    for texts in pairs.run(case):
        assert (
            "differ in structure (rank 0: {'a': 'tensor', 'b': 'tensor'}, rank 1: {'b': 'tensor', 'a'"
            in texts[0]
        )
        assert "rank 1: {'c': 'tensor'}" in texts[1]
        assert "rank 0: ['tensor', 'tensor'], rank 1: {" in texts[2]
        assert "rank 1: ('tensor', 'tensor')" in texts[3]
        assert (
            "rank 0 passes None, and the structure Pair(a='tensor', b='tensor') of rank 1"
            in texts[4]
        )
        assert "the structure {('a', 1): 'tensor'} of rank 1 cannot be sent" in texts[5]


def test_metrics_are_means_over_samples(three: Ranks) -> None:
    def case(sizes: list[int]) -> dict[str, float]:
        n = sizes[dist.get_rank()]
        mean = torch.arange(n).double().mean() if n else float("nan")
        return mean_over_samples({"mean": mean, "rank": dist.get_rank()}, n)

    for found in three.run(case, [4, 0, 1]):
        assert found == {
            "mean": pytest.approx((0 + 1 + 2 + 3 + 0) / 5),
            "rank": pytest.approx(2 / 5),
        }
    for found in three.run(case, [0, 0, 0]):
        assert all(value != value for value in found.values())


def test_a_failed_case_names_its_rank(pairs: Ranks) -> None:
    def case() -> None:
        assert dist.get_rank() == 0

    with pytest.raises(CaseFailed, match="rank 1: Traceback"):
        pairs.run(case)


@pytest.mark.parametrize("sizes", [[3, 3, 3], [2, 4, 3]], ids=["even", "uneven"])
def test_models_may_be_listed_in_another_order_than_they_run(
    three: Ranks, sizes: list[int]
) -> None:
    """A step starts with the model that runs first, wherever it is in the list."""

    def case(names: str) -> tuple[torch.Tensor, float]:
        rank = dist.get_rank()
        torch.manual_seed(0)
        first = DistributedDataParallel(nn.Linear(FEATURES, FEATURES).double())
        second = DistributedDataParallel(nn.Linear(FEATURES, OUTPUTS).double())
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        listed = {"f": first, "s": second}
        data = batches_of([[2] * n for n in sizes], rank, 0)
        with Join([*(listed[each] for each in names), optimizer, schedule], steps=len(data)):
            for x, y in data:
                optimizer.zero_grad()
                nn.functional.mse_loss(second(first(x)), y).backward()
                optimizer.step()
                schedule.step()
        return torch.cat([flat(first), flat(second)]), optimizer.param_groups[0]["lr"]

    as_they_run, other = three.run(case, "fs"), three.run(case, "sf")
    for (weights, rate), (same, same_rate) in zip(as_they_run, other, strict=True):
        torch.testing.assert_close(weights, same, rtol=0, atol=0)
        torch.testing.assert_close(weights, as_they_run[0][0], rtol=0, atol=0)
        assert rate == same_rate == 0.5 ** (max(sizes) + 1)


def test_local_sgd_leaves_frozen_parameters_alone(three: Ranks) -> None:
    def case(lengths: list[int]) -> torch.Tensor:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        model = model_of()
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(False)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            PeriodicModelAverager(period=1, warmup_steps=0),
        )
        rank = dist.get_rank()
        data = batches_of([[3] * n for n in lengths], rank, 0)
        with Join([optimizer], steps=len(data)):
            for batch in data:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model[0].weight.detach()

    before = model_of()
    assert isinstance(before, nn.Sequential)
    for each in three.run(case, [2, 6, 4]):
        torch.testing.assert_close(each, before[0].weight.detach(), rtol=0, atol=0)


# -- last, since all ranks are started again after it ------------------------------------------------


def test_a_killed_peer_ends_the_others(three: Ranks, tmp_path: Path) -> None:
    def case(mode: str, notes: str) -> None:
        import os
        import signal
        import time

        rank = dist.get_rank()
        model = DistributedDataParallel(model_of())
        data = batches_of([[2] * 6, [2] * 4, [2] * 2], rank, 0)
        began = time.monotonic()
        with contextlib.suppress(RuntimeError), Join([model], steps=len(data)) as join:
            for index, batch in enumerate(data if mode == "planned" else join.batches(data)):
                if rank == 1 and index == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss_of(model, batch).backward()
        Path(notes, f"{mode}.{rank}").write_text(str(time.monotonic() - began))
        # As a script that fails: a rank that waits for this one, and not for the killed one, sees that it is gone.
        os._exit(1)

    for mode in ("planned", "replay"):
        three.outcomes(case, mode, str(tmp_path))
    found = {each.name: float(each.read_text()) for each in tmp_path.iterdir()}
    assert found.keys() == {"planned.0", "planned.2", "replay.0", "replay.2"}
    assert all(seconds < 20 for seconds in found.values())
