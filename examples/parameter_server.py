"""Train on handwritten digits with a parameter server: workers send gradients and receive parameters.

Rank 0 is the server, all others are workers::

    rally run --nproc-per-node 5 examples/parameter_server.py
    python examples/parameter_server.py

The server keeps the model. Workers hold a reference to it and call its `update` in each step. The calls of one step wait for each
other on the server without holding a thread, become one step of Adam, and are answered together. With the second command, a
single process handles the images of all workers in each step. The losses are the same: DIR/losses.json has them in double
precision, so that you can compare them digit by digit.
"""

import argparse
import json
import os
import queue
import sys
import threading
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rallypoint import rpc


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with a parameter server.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR", help="for losses.json"
    )
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all workers"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="Adam's step size")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the initial weights and the shuffling"
    )
    return parser.parse_args()


class Digits:
    """The images. Every process loads them itself: only gradients and parameters are sent."""

    def __init__(self) -> None:
        bunch = load_digits()
        images = torch.from_numpy(bunch.images).unsqueeze(1) / 16  # [N, 1, 8, 8]
        labels = torch.from_numpy(bunch.target)
        # The split ignores --seed: runs with different seeds are evaluated on the same images.
        train, test = train_test_split(
            range(len(labels)), test_size=0.2, stratify=labels, random_state=0
        )
        self.images, self.labels = images[train], labels[train]
        self.held_out_images, self.held_out_labels = images[test], labels[test]

    def batches(self, arguments: argparse.Namespace, epoch: int) -> tuple[Tensor, ...]:
        shuffle = torch.Generator().manual_seed(arguments.seed * 100_003 + epoch)
        return torch.randperm(len(self.labels), generator=shuffle).split(arguments.batch_size)


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class ParameterServer:
    """The model and its optimizer. Lives on the server; workers call `update` through a reference."""

    def __init__(self, arguments: argparse.Namespace, num_workers: int) -> None:
        self.data = Digits()
        self.model = build_model(arguments.seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=arguments.learning_rate)
        self.num_workers = num_workers
        self.steps_per_epoch = len(self.data.batches(arguments, epoch=0))
        self.num_steps = 0
        self.epoch_loss = 0.0
        self.losses: list[float] = []
        self.progress = ProgressReport(arguments.epochs, self.steps_per_epoch)
        # Calls arrive on several threads. The lock guards the parts of the current step.
        self.lock = threading.Lock()
        self.gradients: list[Tensor] = []
        self.answer: Future[Tensor] = Future()

    @rpc.async_execution
    def update(self, gradient: Tensor, loss: float) -> Future[Tensor]:
        """Add a worker's part of a step. All workers of the step get the new parameters together.

        The thread is free as soon as this returns; only the future waits.
        """
        with self.lock:
            answer = self.answer
            self.gradients.append(gradient)
            self.epoch_loss += loss
            if len(self.gradients) < self.num_workers:
                return answer
            gradients, self.gradients, self.answer = self.gradients, [], Future()
        # No worker calls again before this step is answered, so the lock is no longer needed.
        answer.set_result(self.apply(torch.stack(gradients).sum(0)))
        return answer

    def apply(self, gradient: Tensor) -> Tensor:
        """Take one optimizer step; return the new parameters."""
        parameters = list(self.model.parameters())
        parts = gradient.split([each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.num_steps += 1
        self.progress.step()
        if self.num_steps % self.steps_per_epoch == 0:
            self.losses.append(self.epoch_loss / len(self.data.labels))
            self.epoch_loss = 0.0
            self.progress.epoch(len(self.losses), self.losses[-1], self.accuracy())
        return parameters_to_vector(parameters).detach()

    def accuracy(self) -> float:
        with torch.no_grad():
            answers = self.model(self.data.held_out_images).argmax(1)
        return (answers == self.data.held_out_labels).double().mean().item()

    def report(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "losses.json").write_text(json.dumps(self.losses))
        print(
            f"accuracy {self.accuracy():.2%} on {len(self.data.held_out_labels)} held-out images;"
            f" {self.num_steps} steps of {self.num_workers} workers; loss {self.losses[-1]:.4f}",
            flush=True,
        )


class ProgressReport:
    """A progress bar on a terminal, occasional lines in a log."""

    def __init__(self, epochs: int, steps_per_epoch: int) -> None:
        self.epochs = epochs
        self.lines = not sys.stderr.isatty()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=self.lines,
        )
        self.task = self.bar.add_task("training", total=epochs * steps_per_epoch)
        self.bar.start()

    def step(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, epoch: int, loss: float, accuracy: float) -> None:
        text = f"epoch {epoch}/{self.epochs}  loss {loss:.4f}  accuracy {accuracy:.1%}"
        self.bar.update(self.task, description=text)
        if self.lines and (epoch % 4 == 0 or epoch in (1, self.epochs)):
            print(text, file=sys.stderr, flush=True)
        if epoch == self.epochs:
            self.bar.stop()


def work(
    server: rpc.RRef[ParameterServer], arguments: argparse.Namespace, worker: int, num_workers: int
) -> None:
    """Train to the end on every num_workers-th image of each batch. Runs on a worker."""
    data = Digits()
    model = build_model(arguments.seed)
    for epoch in range(arguments.epochs):
        for batch in data.batches(arguments, epoch):
            share = batch[worker::num_workers]
            loss = cross_entropy(model(data.images[share]), data.labels[share], reduction="sum")
            model.zero_grad()
            # Each worker contributes its part of the mean over the batch; the parts add up, even if they are uneven.
            (loss / len(batch)).backward()
            gradient = parameters_to_vector(each.grad for each in model.parameters())
            vector_to_parameters(
                server.rpc_sync().update(gradient, loss.item()), model.parameters()
            )


def serve(arguments: argparse.Namespace, workers: list[str]) -> None:
    """Make the workers train. Runs on the main thread of the server; other threads serve calls."""
    server = ParameterServer(arguments, len(workers))
    reference = rpc.RRef(server)
    finished: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
    for number, name in enumerate(workers):
        what = (reference, arguments, number, len(workers))
        # No timeout, because this lasts for the whole training.
        rpc.rpc_async(name, work, what, timeout=0).add_done_callback(finished.put)
    for _ in workers:
        finished.get().value()  # raises the error of a worker at once
    server.report(arguments.output)


def main() -> None:
    arguments = parse_arguments()
    torch.set_default_dtype(torch.float64)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    names = ["server", *(f"worker-{number}" for number in range(1, world_size))]
    # Without a launcher there is one process, which calls itself; the address does not matter.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size)
    if rank == 0:
        serve(arguments, names[1:] or names)
    # Waits for all processes; until then the workers serve calls. Not in a `finally`, because after a failure the
    # others may be gone.
    rpc.shutdown()


if __name__ == "__main__":
    main()
