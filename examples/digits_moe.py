"""A mixture of experts spread over ranks: images travel to their expert and back.

Run it alone, or with any number of processes that is a multiple of --expert-parallel::

    python examples/digits_moe.py
    rally run --nproc-per-node 2 examples/digits_moe.py --expert-parallel 2

A router sends each image to one of four experts (Switch Transformer, arXiv 2101.03961). Every rank has its own images and its own
experts. So an all-to-all whose sizes are not known in advance sends rows there and back, and gradients take the same route in
reverse. No image is dropped, so the loss of every epoch equals that of a single process: DIR/losses.json has it in double
precision, so that you can compare it digit by digit.
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
from torch.nn.functional import cross_entropy

from rallypoint.parallel import (
    ParallelLayout,
    ParallelMesh,
    all_reduce,
    all_to_all,
    all_to_all_dynamic,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a mixture of experts on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="for losses.json"
    )
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that share experts")
    parser.add_argument("--experts", type=int, default=4, help="in all")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    return parser.parse_args()


class MixtureOfExperts(nn.Module):
    """Each row goes through the expert that the router prefers; the result is added to the row.

    After a forward pass, ``balance`` is this rank's share of a loss that is smallest when all experts are used equally.
    """

    def __init__(self, mesh: ParallelMesh, width: int, num_experts: int) -> None:
        super().__init__()
        self.group, self.size = mesh.group("ep"), mesh.degree("ep")
        self.everyone, self.num_ranks = mesh.group("dp"), mesh.degree("dp")
        self.router = nn.Linear(width, num_experts, bias=False)
        # Every rank draws all experts and keeps its own, so the model does not depend on the split.
        every = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        ]
        here = num_experts // self.size
        self.first = mesh.coordinates["ep"] * here
        self.experts = nn.ModuleList(every[self.first : self.first + here])
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """``[N, width]`` to ``[N, width]``. N may differ between ranks, and may be 0."""
        probabilities = self.router(x).softmax(1)
        weight, chosen = probabilities.max(1)
        self.balance = self.share_of_balance(probabilities, chosen)

        # There: rows sorted by expert, and so by the rank that holds the expert.
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(probabilities.t()))
        sent = counts.view(self.size, -1).sum(1).tolist()
        rows, received = all_to_all_dynamic(x[order], sent, self.group)
        splits = {"send_splits": sent, "recv_splits": received}
        expert_of_row = all_to_all(chosen[order], self.group, **splits)

        # Each expert gets its rows from all ranks at once. An expert without rows takes part with a gradient of zero.
        seen = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts, self.first):
            mine = (expert_of_row == index).nonzero().flatten()
            seen = seen.index_add(0, mine, expert(rows[mine]))

        # And back: with the splits swapped, then in the original order.
        back = all_to_all(seen, self.group, send_splits=received, recv_splits=sent)
        return x + weight[:, None] * torch.zeros_like(x).index_add(0, order, back)

    def share_of_balance(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        num_experts = probabilities.shape[1]
        # Means over the images of all ranks. Every rank computes the same number, so each returns its share of it.
        used = chosen.bincount(minlength=num_experts).to(probabilities)
        liked = all_reduce(probabilities.sum(0), self.everyone)
        used = all_reduce(used, self.everyone)
        return num_experts * (liked * used).sum() / used.sum() ** 2 / self.num_ranks


class Network(nn.Module):
    def __init__(self, mesh: ParallelMesh, num_experts: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mixture = MixtureOfExperts(mesh, 32, num_experts)
        self.read = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.read(self.mixture(self.embed(images)))


def sum_gradients(model: Network, mesh: ParallelMesh) -> None:
    """Sum gradients over the ranks that hold the same parameter: all ranks, or ``edp`` for an expert."""
    experts = {id(parameter) for parameter in model.mixture.experts.parameters()}
    for parameter in model.parameters():
        axis = "edp" if id(parameter) in experts else "dp"
        if mesh.degree(axis) > 1:
            dist.all_reduce(parameter.grad, group=mesh.group(axis))


def train(arguments: argparse.Namespace, mesh: ParallelMesh) -> None:
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).flatten(1) / 16  # [N, 64]
    labels = torch.from_numpy(bunch.target)
    num_train = len(labels) * 4 // 5  # the last fifth is held out
    rank, size, group = mesh.coordinates["dp"], mesh.degree("dp"), mesh.group("dp")

    torch.manual_seed(arguments.seed)
    model = Network(mesh, arguments.experts)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
    losses = []
    for epoch in range(arguments.epochs):
        shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
        total = torch.zeros(())
        for batch in torch.randperm(num_train, generator=shuffle).split(arguments.batch_size):
            share = batch[rank::size]
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
            optimizer.zero_grad()
            # The losses of the ranks add up to the mean over the batch; the collectives return the gradient of that sum.
            (loss / len(batch) + 0.01 * model.mixture.balance).backward()
            sum_gradients(model, mesh)
            optimizer.step()
            total += loss.detach()
        losses.append(all_reduce(total, group).item() / num_train)

    with torch.no_grad():
        share = slice(num_train + rank, None, size)
        correct = (model(images[share]).argmax(1) == labels[share]).sum()
        accuracy = all_reduce(correct, group).item() / (len(labels) - num_train)
    if mesh.rank == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "losses.json").write_text(json.dumps(losses))
        print(
            f"accuracy {accuracy:.2%} on {len(labels) - num_train} held-out images; rank 0 of "
            f"{size} held {len(model.mixture.experts)} of {arguments.experts} experts; "
            f"loss {losses[-1]:.4f}",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.experts % arguments.expert_parallel:
        raise SystemExit("--experts must be a multiple of --expert-parallel")
    torch.set_default_dtype(torch.float64)
    # Without a launcher there is no group, and every collective is the identity.
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        with ParallelMesh(ParallelLayout(ep=arguments.expert_parallel)).build() as mesh:
            train(arguments, mesh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # see leave_process_group in digits_ddp.py


if __name__ == "__main__":
    main()
