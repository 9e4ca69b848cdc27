"""Train a small network on handwritten digits with DistributedDataParallel.

The same file runs alone, under torchrun and under rally::

    python examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py
    rally run --nproc-per-node 2 examples/digits_ddp.py

The 1,797 images of 8x8 pixels come with scikit-learn, so nothing is downloaded. The job
writes a checkpoint after every epoch and continues from it when the launcher restarts it
(try ``rally run --max-restarts 1`` and kill a worker) or when it is given ``--resume``. At
the end ``demo-output/digits.png`` shows its predictions for images it has never seen.
"""

import argparse
import gc
import math
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Digits(NamedTuple):
    """Images are ``[N, 1, 8, 8]`` with values in 0..1, labels are ``[N]`` with values in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits with DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder for the checkpoint and the picture",
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in DIR, if any"
    )
    parser.add_argument(
        "--min-accuracy",
        type=float,
        default=0.95,
        metavar="A",
        help="exit with status 1 if the accuracy is below this",
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return arguments


def join_process_group() -> torch.device:
    """Join the other ranks, if a launcher started any; return this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL needs one GPU per rank; with fewer GPUs than ranks, train on the CPU.
    use_cuda = torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        # Without a launcher, use a group of one, so that the code below has only one case.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave_process_group() -> None:
    dist.destroy_process_group()
    # DDP is in a reference cycle that keeps the group alive. If the interpreter's shutdown broke
    # the cycle, Gloo's threads could free their last tensors too late and abort the process after
    # all work is done (pytorch/pytorch#179291).
    gc.collect()


def load_data(device: torch.device) -> Digits:
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target)
    # The split ignores --seed: runs with different seeds are evaluated on the same images.
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    parts = (images[train], labels[train], images[test], labels[test])
    return Digits(*(part.to(device) for part in parts))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Checkpoint:
    """The state of the training after an epoch, in one file that is always complete."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path = path
        self.model = model
        self.optimizer = optimizer
        self.losses: list[float] = []  # one entry per finished epoch, as in accuracies
        self.accuracies: list[float] = []

    def save(self) -> None:
        state = {
            "epoch": len(self.losses),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "accuracies": self.accuracies,
        }
        # A worker may be killed at any moment, including here. The rename replaces a complete old
        # file by a complete new one, so a restart never finds a partial checkpoint.
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)

    def load(self) -> None:
        """Restore the last saved state, if there is one, on every rank."""
        # Only rank 0 reads. If each rank looked for the file and one did not see it, the ranks
        # would start at different epochs and wait for each other forever.
        found = [None]
        if dist.get_rank() == 0 and self.path.exists():
            found = [torch.load(self.path, map_location="cpu", weights_only=True)]
        dist.broadcast_object_list(found)
        state = found[0]
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.accuracies = state["losses"], state["accuracies"]


class ProgressReport:
    """Rank 0: a progress bar on a terminal, occasional lines in a log. Other ranks: nothing."""

    def __init__(self, total_epochs: int, steps_per_epoch: int, finished_epochs: int) -> None:
        watched = sys.stderr.isatty()
        self.lines = dist.get_rank() == 0 and not watched
        self.total_epochs = total_epochs
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=dist.get_rank() != 0 or not watched,
        )
        self.task = self.bar.add_task(
            "training",
            total=total_epochs * steps_per_epoch,
            completed=finished_epochs * steps_per_epoch,
        )

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.stop()

    def step(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        text = f"epoch {epoch}/{self.total_epochs}  loss {loss:.4f}  accuracy {accuracy:.1%}"
        self.bar.update(self.task, description=text)
        if self.lines and (epoch % 5 == 0 or epoch in (1, self.total_epochs)):
            print(text, file=sys.stderr, flush=True)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Digits,
    batches: tuple[Tensor, ...],
    progress: ProgressReport,
) -> float:
    """Take one step per batch; return this rank's share of the summed loss."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = 0.0
    model.train()
    for batch in batches:
        share = batch[rank::world_size]
        loss = cross_entropy(
            model(data.train_images[share]), data.train_labels[share], reduction="sum"
        )
        optimizer.zero_grad()
        # DDP averages the gradients of the ranks. In the last batch, ranks have different numbers of
        # images, so an average of their means would weight images unequally. With this scale the
        # average is the exact mean over the batch, so the world size does not change the result.
        (loss * world_size / len(batch)).backward()
        optimizer.step()
        total += loss.item()
        progress.step()
    return total


@torch.no_grad()
def count_correct(model: nn.Module, data: Digits) -> int:
    """Count the held-out images in this rank's share that the model reads correctly."""
    # A plain stride instead of DistributedSampler, which repeats images until all ranks have the
    # same number; repeated images would count twice. Unequal shares are fine here: without
    # gradients, the ranks need not stay in step.
    share = slice(dist.get_rank(), None, dist.get_world_size())
    model.eval()
    return int((model(data.test_images[share]).argmax(1) == data.test_labels[share]).sum())


def train(arguments: argparse.Namespace, checkpoint: Checkpoint, data: Digits) -> None:
    num_train, num_test = len(data.train_labels), len(data.test_labels)
    finished = len(checkpoint.losses)
    model = DistributedDataParallel(checkpoint.model)
    progress = ProgressReport(
        arguments.epochs, math.ceil(num_train / arguments.batch_size), finished
    )
    with progress:
        for epoch in range(finished, arguments.epochs):
            # Every rank draws the same order and takes its part of it. The seed contains the
            # epoch, so a resumed job uses the same order as the interrupted one.
            shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
            order = torch.randperm(num_train, generator=shuffle)
            loss = train_epoch(
                model, checkpoint.optimizer, data, order.split(arguments.batch_size), progress
            )
            # model.module: evaluation has no gradients to average, so it does not need DDP.
            sums = torch.tensor(
                [loss, count_correct(model.module, data)], device=data.test_labels.device
            )
            dist.all_reduce(sums)
            checkpoint.losses.append(sums[0].item() / num_train)
            checkpoint.accuracies.append(sums[1].item() / num_test)
            if dist.get_rank() == 0:
                checkpoint.save()
            progress.epoch(epoch + 1, checkpoint.losses[-1], checkpoint.accuracies[-1])


@torch.no_grad()
def draw(checkpoint: Checkpoint, data: Digits, path: Path) -> None:
    """Draw sample predictions beside the loss and the accuracy of each epoch."""
    # Imported here, because only one rank plots, and the others need not load matplotlib. A Figure
    # created without pyplot uses Agg, which needs no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rows, columns = 6, 8
    predictions = checkpoint.model(data.test_images).argmax(1)
    wrong = (predictions != data.test_labels).nonzero().flatten()
    right = (predictions == data.test_labels).nonzero().flatten()
    # Mistakes are rare and the most interesting, so show them first.
    shown = torch.cat([wrong, right])[: rows * columns].tolist()

    figure = Figure(figsize=(13, 6.4), layout="constrained")
    samples, curves = figure.subfigures(1, 2, width_ratios=(1.35, 1))
    samples.suptitle(
        f"Held-out images: {len(wrong)} of {len(predictions)} misread (in red, listed first)\n"
        "prediction / truth",
        fontsize=12,
    )
    for axes, index in zip(samples.subplots(rows, columns).flat, shown, strict=False):
        predicted, truth = int(predictions[index]), int(data.test_labels[index])
        axes.imshow(data.test_images[index, 0].cpu(), cmap="gray_r")
        axes.set_title(
            f"{predicted} / {truth}", color="black" if predicted == truth else "red", fontsize=10
        )
        axes.set(xticks=[], yticks=[])

    epochs = range(1, len(checkpoint.losses) + 1)
    loss_axes, accuracy_axes = curves.subplots(2, 1, sharex=True)
    loss_axes.plot(epochs, checkpoint.losses, marker=".")
    loss_axes.set(title="Training loss", ylabel="cross-entropy", yscale="log")
    accuracy_axes.plot(epochs, checkpoint.accuracies, marker=".", color="tab:green")
    accuracy_axes.set(title=f"Held-out accuracy: {checkpoint.accuracies[-1]:.1%}", xlabel="epoch")
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    accuracy_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, accuracy_axes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    device = join_process_group()
    try:
        torch.manual_seed(arguments.seed)
        data = load_data(device)
        model = build_model().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=arguments.learning_rate)
        checkpoint = Checkpoint(arguments.output / "checkpoint.pt", model, optimizer)

        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if restarted or arguments.resume:
            checkpoint.load()
        if dist.get_rank() == 0:
            arguments.output.mkdir(parents=True, exist_ok=True)
            if checkpoint.losses:
                print(f"resumed after epoch {len(checkpoint.losses)}", file=sys.stderr, flush=True)
            else:
                # If this job restarted before its first checkpoint, it would continue from the
                # checkpoint of an older job. So remove that one.
                checkpoint.path.unlink(missing_ok=True)

        train(arguments, checkpoint, data)

        # Nothing below is collective: the other ranks are done.
        if dist.get_rank() == 0:
            picture = arguments.output / "digits.png"
            draw(checkpoint, data, picture)
            accuracy = checkpoint.accuracies[-1]
            print(
                f"accuracy {accuracy:.2%} on {len(data.test_labels)} held-out images "
                f"after {len(checkpoint.losses)} epochs on {dist.get_world_size()} rank(s) "
                f"in {time.perf_counter() - started:.1f} s; "
                f"checkpoint: {checkpoint.path}, picture: {picture}",
                flush=True,
            )
            # One failed rank fails the job; the launcher stops the others.
            if accuracy < arguments.min_accuracy:
                sys.exit(
                    f"accuracy {accuracy:.2%} is below --min-accuracy {arguments.min_accuracy:.2%}"
                )
    finally:
        leave_process_group()


if __name__ == "__main__":
    main()
