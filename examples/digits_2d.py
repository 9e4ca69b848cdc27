"""Train on handwritten digits in two dimensions at once: data parallel times tensor parallel.

Run it alone, or with any number of processes that is a multiple of --tensor-parallel::

    python examples/digits_2d.py
    rally run --nproc-per-node 4 examples/digits_2d.py --tensor-parallel 2

In the second run, ranks 0 and 1 hold the two halves of one model, and ranks 2 and 3 those of its replica. The two halves see the
same images. Replicas see different images, and their gradients are summed. The loss of every epoch equals that of a single
process: DIR/losses.json has it in double precision, so that you can compare it digit by digit.
"""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from rallypoint.parallel import (
    ParallelLayout,
    ParallelMesh,
    all_reduce,
    copy_to,
    reduce_from,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits, data parallel times tensor parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder for losses.json",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a model")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    return parser.parse_args()


class DividedPerceptron(nn.Module):
    """Two linear layers: the first split by columns, the second by rows, with one all-reduce in total.

    Each rank computes some of the hidden units and their contribution to the output.
    """

    def __init__(self, mesh: ParallelMesh, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.group = mesh.group("tp")
        # Every rank draws all weights and keeps its part, so the model does not depend on the split.
        first, second = nn.Linear(width_in, hidden), nn.Linear(hidden, width_out)
        size, rank = mesh.degree("tp"), mesh.coordinates["tp"]
        self.first_weight = own(first.weight.chunk(size, dim=0)[rank])
        self.first_bias = own(first.bias.chunk(size, dim=0)[rank])
        self.second_weight = own(second.weight.chunk(size, dim=1)[rank])
        self.second_bias = own(second.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to(x, self.group)  # sums the gradients of all hidden units in backward
        x = torch.relu(linear(x, self.first_weight, self.first_bias))
        # The bias counts once, so it is added after the sum.
        return reduce_from(linear(x, self.second_weight), self.group) + self.second_bias


def own(part: Tensor) -> nn.Parameter:
    return nn.Parameter(part.detach().clone())


def build_model(mesh: ParallelMesh) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),  # small, so each rank has all of it
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        DividedPerceptron(mesh, 16 * 4 * 4, 128, 10),
    )


def train(arguments: argparse.Namespace, mesh: ParallelMesh) -> None:
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).unsqueeze(1) / 16  # [N, 1, 8, 8]
    labels = torch.from_numpy(bunch.target)
    num_train = len(labels) * 4 // 5  # the last fifth is held out
    replica, replicas = mesh.coordinates["dp"], mesh.degree("dp")
    group = mesh.group("dp")

    torch.manual_seed(arguments.seed)
    model = build_model(mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    losses = []
    for epoch in range(arguments.epochs):
        shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
        total = torch.zeros(())
        for batch in torch.randperm(num_train, generator=shuffle).split(arguments.batch_size):
            share = batch[replica::replicas]
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
            optimizer.zero_grad()
            # Each replica contributes its part of the mean over the batch; the parts add up, even if they are uneven.
            (loss / len(batch)).backward()
            for parameter in model.parameters():
                if replicas > 1:
                    dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            total += loss.detach()
        losses.append(all_reduce(total, group).item() / num_train)

    with torch.no_grad():
        share = slice(num_train + replica, None, replicas)
        correct = (model(images[share]).argmax(1) == labels[share]).sum()
        accuracy = all_reduce(correct, group).item() / (len(labels) - num_train)
    if mesh.rank == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "losses.json").write_text(json.dumps(losses))
        held = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"accuracy {accuracy:.2%} on {len(labels) - num_train} held-out images; rank 0 of "
            f"{replicas} x {mesh.degree('tp')} held {held:,} parameters; loss {losses[-1]:.4f}",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    torch.set_default_dtype(torch.float64)
    # Without a launcher there is no group, and every collective is the identity.
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        with ParallelMesh(ParallelLayout(tp=arguments.tensor_parallel)).build() as mesh:
            train(arguments, mesh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # see leave_process_group in digits_ddp.py


if __name__ == "__main__":
    main()
