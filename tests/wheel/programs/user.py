"""What a user writes against the public names. It is type-checked, and never run."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import SGD

import rallypoint
from rallypoint import ConfigError, WorkersFailed, join, launch, parallel, rpc


def batches() -> Iterator[torch.Tensor]:
    yield torch.ones(4, 8)


def train(steps: int) -> float:
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(1)
    with join.Join([model, optimizer], steps=steps, weighting="samples") as joined:
        for batch in joined.batches(batches()):
            loss = torch.mean(model(batch))
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # torch declares no types here
    sampler = join.ShardSampler(range(10), rank=0, world_size=2, shuffle=True)
    sampler.set_epoch(1)
    means: dict[str, float] = join.mean_over_samples({"loss": loss}, len(sampler))
    return means["loss"]


def exchange(x: torch.Tensor) -> list[int]:
    layout = parallel.ParallelLayout(tp=2).resolve(8)
    mesh = parallel.ParallelMesh(layout, backends={"dp": "gloo"})
    total: torch.Tensor = parallel.all_reduce(x, mesh.group("tp"), op="mean")
    rows, received = parallel.all_to_all_dynamic(total, [1, 1], mesh.group("tp"))
    return [*received, rows.shape[0], *layout.coordinates(0).values()]


def add(x: int, y: int) -> int:
    return x + y


def call() -> int:
    rpc.init_rpc("worker0", rank=0, world_size=1)
    answer: int = rpc.rpc_sync("worker0", add, args=(1, 2))
    rpc.shutdown()
    return answer


def main() -> None:
    try:
        means: list[float] = launch.launch_subprocesses(
            train, launch.MultiprocessConfig(world_size=2), 3
        )
        assert len(means) == 2
    except WorkersFailed as failure:
        first: str = str(failure.report)
        raise SystemExit(first) from failure
    except ConfigError as error:
        raise SystemExit(f"{error.field}: {error.problem}") from error


VERSION: str = rallypoint.__version__
