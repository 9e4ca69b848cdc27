"""Train on handwritten digits while workers are killed at random: nothing is lost, and nothing is trained twice.

    rally run --nproc-per-node 2 examples/elastic_digits.py --chaos 0.03
    rally run --nproc-per-node 2 --max-restarts 3 examples/elastic_digits.py --checkpoint runs/digits
    python examples/elastic_digits.py --checkpoint runs/digits
    rally run --nnodes 2:3 --rdzv-endpoint HOST examples/elastic_digits.py --checkpoint runs/digits --ids runs/ids

With ``--chaos P``, one worker kills itself in a step with this probability. The others keep their processes, and a new
process takes the lost one's place (docs/sessions.md). With ``--checkpoint DIR``, a job that is lost as a whole continues
from its last checkpoint (docs/checkpoints.md). The accuracy at the end is the same with and without all this. The job may
also continue with more or fewer workers, on the epoch's remaining images; ``--keep`` chooses which batch size stays the same.

The 1,797 images of 8x8 pixels come with scikit-learn, so nothing is downloaded. ``--ids DIR`` logs the images that each step
trained on, in one file per rank. (Steps after the last checkpoint are trained again after a restart, and logged again.)
"""

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path

from rallypoint import elastic  # before init_process_group, so that its groups can be kept


# isort: split
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


# Every fifth image is held out for the test.
PARTS = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits while workers are killed at random.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks (see --keep)"
    )
    parser.add_argument(
        "--keep",
        choices=("global", "local"),
        default="global",
        help="whose batch stays when a job goes on with another number of workers: a step's, or a rank's",
    )
    parser.add_argument(
        "--chaos",
        type=float,
        default=0.0,
        metavar="P",
        help="probability with which one of the workers kills itself in a step",
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="keep checkpoints here, and continue there"
    )
    parser.add_argument(
        "--every", type=int, default=50, metavar="N", help="steps between two checkpoints"
    )
    parser.add_argument("--ids", type=Path, metavar="DIR", help="log the images of each step here")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The training set (number, image, label), and the images and labels of the test set."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(bunch.target)
    is_test = torch.arange(len(labels)) % PARTS == 0
    train = torch.nonzero(~is_test).flatten()
    return TensorDataset(train, images[train], labels[train]), images[is_test], labels[is_test]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def validate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The accuracy over all test images. Each rank counts its share."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    model.eval()
    with torch.no_grad():
        right = (model(images[share]).argmax(1) == labels[share]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    torch.manual_seed(0)
    data, test_images, test_labels = load_data()
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = elastic.Sampler(len(data), arguments.batch_size, keep=arguments.keep)
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(1000 + rank)  # each rank drops different units
    completed = 0  # steps, in this process
    if arguments.ids:
        arguments.ids.mkdir(parents=True, exist_ok=True)

    def is_victim(step: int) -> bool:
        """At most one worker per step, and none that has just replaced a lost one: it would die in the same step again."""
        chaos = random.Random(f"step {step}")
        hit, victim = chaos.random() < arguments.chaos, chaos.randrange(dist.get_world_size())
        return hit and victim == rank and completed > 0

    def log(step: int, numbers: torch.Tensor) -> None:
        if arguments.ids:
            with (arguments.ids / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "ids": numbers.tolist()}) + "\n")

    def tell(before: int, now: int) -> None:
        if rank == 0:
            print(f"{now} workers now, {before} before", file=sys.stderr, flush=True)

    session = elastic.session(
        model, optimizer, checkpoint=arguments.checkpoint, checkpoint_every=arguments.every
    )
    session.on_resize(tell)
    with session:
        if rank == 0 and session.position:
            print(f"continues at step {session.position}", file=sys.stderr, flush=True)
        for epoch in session.epochs(arguments.epochs):
            for numbers, images, labels in session.batches(loader):
                before = session.position
                with session.step():
                    if is_victim(before):
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss = cross_entropy(model(images), labels)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if session.position > before:  # else the step will be repeated
                    completed += 1
                    log(session.position, numbers)
            accuracy = session.run(validate, model.module, test_images, test_labels)
            if rank == 0 and accuracy is not None:
                print(f"epoch {epoch + 1}  accuracy {accuracy:.1%}", file=sys.stderr, flush=True)
        recoveries = len(session.history)
        accuracy = validate(model.module, test_images, test_labels)
    if rank == 0:
        print(f"accuracy {accuracy:.2%} after {session.position} steps; {recoveries} recoveries")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
