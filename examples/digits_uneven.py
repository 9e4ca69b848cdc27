"""Train with FSDP2 on handwritten digits that are divided unevenly, with the result of a single process.

The images are in shards of very different sizes, as collected data often are; each rank reads one shard. Ranks run out of
batches at different times, and last batches are short. Join keeps the ranks together and weights every image equally::

    rally run --nproc-per-node 4 examples/digits_uneven.py
    python examples/digits_uneven.py --shards 4

With the second command, a single process handles the batches of all four ranks in each step. The losses are the same:
DIR/losses.json has them in double precision, so that you can compare them digit by digit.
"""

import argparse
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from rallypoint.join import Join, gather_samples, mean_over_samples


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits that are divided unevenly, with FSDP2 under Join.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="for losses.json"
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        help="without a launcher: simulate this many ranks in one process",
    )
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step of each rank")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    return parser.parse_args()


def shard_of(indices: Tensor, shard: int, shards: int) -> Tensor:
    """One of the shards of the images: shard i is i + 1 times as large as shard 0."""
    ends = [len(indices) * i * (i + 1) // (shards * (shards + 1)) for i in range(shards + 1)]
    return indices[ends[shard] : ends[shard + 1]]


def batches_of(shard: Tensor, arguments: argparse.Namespace, epoch: int) -> list[Tensor]:
    shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
    order = torch.randperm(len(shard), generator=shuffle)
    return list(shard[order].split(arguments.batch_size))


def together(every: list[list[Tensor]]) -> Iterator[Tensor]:
    """In each step, the batches of all ranks."""
    for step in range(max(map(len, every))):
        yield torch.cat([batches[step] for batches in every if step < len(batches)])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def train(arguments: argparse.Namespace) -> None:
    bunch = load_digits()
    images = torch.from_numpy(bunch.images) / 16  # [N, 8, 8]
    labels = torch.from_numpy(bunch.target)
    num_train = len(labels) * 4 // 5  # the last fifth is held out
    indices = torch.arange(num_train)
    many = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    shards = world_size if many else arguments.shards

    torch.manual_seed(arguments.seed)
    model = build_model()
    if many:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)

    losses, own_steps = [], 0
    for epoch in range(arguments.epochs):
        every = [batches_of(shard_of(indices, i, shards), arguments, epoch) for i in range(shards)]
        total, seen = 0.0, 0
        # In a single process there is no other rank, and the block does nothing.
        with Join([model], enable=many, weighting="samples") as join:
            for batch in join.batches(every[rank] if many else together(every)):
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if join.active:
                    total += loss.item() * len(batch)
                    seen += len(batch)
        mean = total / seen if seen else 0.0
        losses.append(mean_over_samples({"loss": mean}, seen)["loss"] if many else mean)
        own_steps += len(every[rank])

    held_out = torch.arange(num_train, len(labels))
    mine = shard_of(held_out, rank, world_size)
    accuracy = evaluate(model, images, mine, many) == labels[held_out]
    if rank == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "losses.json").write_text(json.dumps(losses))
        print(
            f"accuracy {accuracy.double().mean().item():.2%} on {len(held_out)} held-out images;"
            f" rank 0 of {world_size} had {own_steps} batches of its own; loss {losses[-1]:.4f}",
            flush=True,
        )


def evaluate(model: nn.Module, images: Tensor, mine: Tensor, many: bool) -> Tensor:
    """The predictions for all held-out images, in order, on every rank."""
    with torch.no_grad():
        answers = model(images[mine]).argmax(1)  # one pass per rank: it gathers shards
    return gather_samples(answers, mine) if many else answers


def main() -> None:
    arguments = parse_arguments()
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # see leave_process_group in digits_ddp.py


if __name__ == "__main__":
    main()
