"""Train a small transformer on handwritten digits with FSDP2 and a sharded checkpoint.

Each rank keeps a part of every parameter and of its optimizer state. The parameters of a layer are gathered when the layer
runs, and freed afterwards. The checkpoint works in the same way: every rank writes its own part::

    rally run --nproc-per-node 2 examples/digits_fsdp2.py
    torchrun --nproc-per-node 2 examples/digits_fsdp2.py
"""

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


class RowTransformer(nn.Module):
    """Reads an image as a sequence of its eight rows."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:  # [N, 8, 8] -> [N, 10]
        hidden = self.embed(images) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.flatten(1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer on handwritten digits with FSDP2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder for the sharded checkpoint, DIR/fsdp2",
    )
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    return parser.parse_args()


def build_sharded_model(mesh: DeviceMesh) -> nn.Module:
    model = RowTransformer()
    # One group per layer, then one for the rest: only one layer is gathered at a time.
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    # The forward pass gathers parameters, so it is collective: every rank must call it the same
    # number of times, here once, with its own images.
    share = slice(dist.get_rank(), None, dist.get_world_size())
    correct = (model(images[share]).argmax(1) == labels[share]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(labels)


def train(arguments: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    bunch = load_digits()
    images, labels = torch.from_numpy(bunch.images).float() / 16, torch.from_numpy(bunch.target)
    num_train = len(labels) * 4 // 5  # the last fifth is held out

    # Each rank cuts its shards from weights that it initialised itself, so they must be the same.
    torch.manual_seed(arguments.seed)
    model = build_sharded_model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    for epoch in range(arguments.epochs):
        shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
        for batch in torch.randperm(num_train, generator=shuffle).split(arguments.batch_size):
            share = batch[rank::world_size]
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
            # FSDP averages over the ranks; with this scale, the average is the mean over the batch.
            (loss * world_size / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    # These state dicts hold shards: every rank writes its part, and no rank needs all of it.
    path = arguments.output / "fsdp2"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

    # Evaluate what was saved: a new model with other weights until it loads the checkpoint.
    restored = build_sharded_model(mesh)
    restored_state = {"model": get_model_state_dict(restored)}
    dcp.load(restored_state, checkpoint_id=path)
    set_model_state_dict(restored, restored_state["model"])
    accuracy = measure_accuracy(restored, images[num_train:], labels[num_train:])
    if rank == 0:
        held_here = sum(parameter.to_local().numel() for parameter in model.parameters())
        in_all = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"accuracy {accuracy:.2%} on {len(labels) - num_train} held-out images; rank 0 of "
            f"{world_size} held {held_here:,} of {in_all:,} parameters; checkpoint: {path}",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit("there is nothing to shard over: start this with rally run or torchrun")
    dist.init_process_group("gloo")
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()
        gc.collect()  # see leave_process_group in digits_ddp.py


if __name__ == "__main__":
    main()
