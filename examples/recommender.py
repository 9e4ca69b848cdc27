"""Train a recommender whose embeddings are spread over processes, with gradients through calls.

Rank 0 has the small dense part and runs the training; every other rank has a part of the embedding table::

    rally run --nproc-per-node 4 examples/recommender.py
    python examples/recommender.py

The data are made up: each user and each item has a hidden taste, and the rating is their product. In each step the trainer asks
every other rank for its part of the users and items of the batch, computes the loss, and sends the gradients back the same way.
Only rows that a batch uses have a gradient, and only these are sent. With the second command, a single process does the same;
its losses in DIR/losses.json are the same.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from rallypoint import rpc
from rallypoint.rpc import autograd
from rallypoint.rpc.optim import DistributedOptimizer


SHARDS = 3
TASTES = 4  # hidden
WIDTH = 8  # of an embedding


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a recommender with sharded embeddings.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="for losses.json"
    )
    parser.add_argument("--steps", type=int, default=150, help="batches")
    parser.add_argument("--batch-size", type=int, default=128, help="ratings per batch")
    parser.add_argument("--users", type=int, default=120, help="number of users, and of items")
    parser.add_argument("--learning-rate", type=float, default=0.3, help="Adagrad's step size")
    return parser.parse_args()


class Shard:
    """Every third row of the table: the users and items whose number modulo 3 is the shard's number."""

    def __init__(self, shard: int, users: int) -> None:
        source = torch.Generator().manual_seed(shard)
        rows = len(range(shard, 2 * users, SHARDS))
        start = torch.randn(rows, WIDTH, generator=source, dtype=torch.float64) * 0.3
        self.table = nn.Embedding.from_pretrained(start, freeze=False, sparse=True)

    def look_up(self, rows: Tensor) -> Tensor:
        return self.table(rows // SHARDS)

    def parameter(self) -> rpc.RRef[Tensor]:
        return rpc.RRef(self.table.weight)


class Ratings:
    """Made-up ratings. Any rank could compute them; only the trainer does."""

    def __init__(self, users: int) -> None:
        self.source = torch.Generator().manual_seed(7)
        self.users = users
        self.tastes = torch.randn(2 * users, TASTES, generator=self.source, dtype=torch.float64)

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of users, rows of items (which come after the users' rows in the table), and ratings."""
        users = torch.randint(self.users, (size,), generator=self.source)
        items = torch.randint(self.users, (size,), generator=self.source) + self.users
        return users, items, (self.tastes[users] * self.tastes[items]).sum(1) / TASTES


class Dense(nn.Module):
    """Turns the embeddings of a user and an item into a rating."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (users * items) @ self.weight + self.bias


def train(arguments: argparse.Namespace, look_up, take_step) -> list[float]:
    """Train; return the losses.

    `look_up` takes the wanted rows of each shard and returns their embeddings. `take_step` calls a function that computes the
    loss, updates all parameters with its gradients, and returns the loss.
    """
    ratings = Ratings(arguments.users)
    losses = []
    for _ in range(arguments.steps):
        users, items, wanted = ratings.batch(arguments.batch_size)
        rows = torch.cat([users, items])
        losses.append(take_step(partial(loss_of, rows, wanted, look_up)))
    return losses


dense = Dense()


def loss_of(rows: Tensor, wanted: Tensor, look_up) -> Tensor:
    places = [(rows % SHARDS == shard).nonzero()[:, 0] for shard in range(SHARDS)]
    parts = look_up([rows[each] for each in places])
    # Back into the order of the batch.
    order = torch.cat(places).argsort()
    users, items = torch.cat(parts)[order].chunk(2)
    return nn.functional.mse_loss(dense(users, items), wanted)


def train_over_processes(arguments: argparse.Namespace) -> list[float]:
    shards = [rpc.remote(f"shard{k}", Shard, (k, arguments.users)) for k in range(SHARDS)]
    parameters = [each.rpc_sync().parameter() for each in shards]
    parameters += [rpc.RRef(each) for each in dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=arguments.learning_rate)

    def look_up(rows: list[Tensor]) -> list[Tensor]:
        asked = [shard.rpc_async().look_up(each) for shard, each in zip(shards, rows, strict=True)]
        return [each.wait() for each in asked]

    def take_step(forward) -> float:
        with autograd.context() as context_id:
            loss = forward()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return loss.item()

    return train(arguments, look_up, take_step)


def train_alone(arguments: argparse.Namespace) -> list[float]:
    shards = [Shard(k, arguments.users) for k in range(SHARDS)]
    parameters = [each.table.weight for each in shards]
    # One for the sparse and one for the dense gradients, as with several processes, where each rank has its own.
    optimizers = [
        torch.optim.Adagrad(each, lr=arguments.learning_rate)
        for each in (parameters, dense.parameters())
    ]

    def take_step(forward) -> float:
        loss = forward()
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()
        return loss.item()

    return train(
        arguments,
        lambda rows: [shard.look_up(each) for shard, each in zip(shards, rows, strict=True)],
        take_step,
    )


def report(arguments: argparse.Namespace, losses: list[float]) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "losses.json").write_text(json.dumps(losses))
    last = sum(losses[-10:]) / len(losses[-10:])
    Console().print(f"loss {losses[0]:.4f} at first, {last:.4f} in the last steps")


def main() -> None:
    arguments = parse_arguments()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        report(arguments, train_alone(arguments))
        return
    if size != SHARDS + 1:
        raise SystemExit(f"start {SHARDS + 1} processes (a trainer and {SHARDS} shards), or one")
    rank = int(os.environ["RANK"])
    name = "trainer" if rank == 0 else f"shard{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=size)
    if rank == 0:
        report(arguments, train_over_processes(arguments))
    rpc.shutdown()


if __name__ == "__main__":
    main()
