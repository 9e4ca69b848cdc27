"""Train a small GPT on Python's documentation while workers are killed at random.

    rally run --nproc-per-node 2 examples/elastic_gpt.py --chaos 0.02
    rally run --nproc-per-node 2 examples/elastic_gpt.py --chaos 0.02 --compile
    rally run --nproc-per-node 2 examples/elastic_gpt.py --chaos 0.02 --parallel fsdp
    rally run --nproc-per-node 4 examples/elastic_gpt.py --chaos 0.02 --parallel tp

The model predicts the next character. Each rank has a copy of it (``ddp``), a part of each parameter (``fsdp``), or, in pairs of
ranks, half of each layer's heads and hidden units, with parts of these (``tp``). The loop is the same for all: a lost worker is
replaced, and with parts, all return to the last snapshot. The final loss is the same with and without chaos (docs/sessions.md).

The text is Python's ``help`` on keywords and types: 460 KB from the standard library, so nothing is downloaded.
"""

import argparse
import os
import random
import signal
import sys
from pydoc_data.topics import topics

from rallypoint import elastic  # before init_process_group, so that its groups can be kept


# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


CHARACTERS = 128
CONTEXT = 64  # characters that the model sees
# One in this many pieces of the text is held out.
PARTS = 10


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, width] -> [N, T, width]
        y = self.before_attention(x)
        # With tensor parallelism, these are the heads of this rank: [N, heads, T, head_width].
        query, key, value = (
            each(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.mix(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(gelu(self.up(self.before_mlp(x)))))


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout=0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:  # [N, T] -> [N, T, CHARACTERS]
        x = self.embed(text) + self.position[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


HALVES = {
    **dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()),
    **dict.fromkeys(("mix", "down"), RowwiseParallel()),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's documentation while workers are killed at random.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp", "tp"),
        default="ddp",
        help="what a rank has: all of the model, a part of each parameter, or half of each layer",
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the text")
    parser.add_argument("--characters", type=int, default=460_000, help="how much of the text")
    parser.add_argument("--batch-size", type=int, default=32, help="pieces of text per step")
    parser.add_argument(
        "--chaos",
        type=float,
        default=0.0,
        metavar="P",
        help="probability with which one of the workers kills itself in a step",
    )
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks"
    )
    return parser.parse_args()


def load_text(characters: int, batch: int) -> tuple[Tensor, Tensor]:
    """Pieces one character longer than the model's context, for training and for the test: whole batches of each."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    numbers = torch.frombuffer(bytearray(text[:characters]), dtype=torch.uint8).long()
    pieces = numbers.unfold(0, CONTEXT + 1, CONTEXT)
    is_test = torch.arange(len(pieces)) % PARTS == 0
    train, test = pieces[~is_test], pieces[is_test]
    if len(test) < batch:
        sys.exit(f"--characters {characters} is too little text for batches of {batch} pieces")
    return train[: len(train) // batch * batch], test[: len(test) // batch * batch]


def build_model(arguments: argparse.Namespace, mesh: DeviceMesh) -> nn.Module:
    model = Gpt()
    for block in model.blocks:
        if arguments.parallel == "tp":
            parallelize_module(block, mesh["tp"], HALVES)
        if arguments.compile:
            block.compile(backend=arguments.compile)
    if arguments.parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, pieces: Tensor, mesh: DeviceMesh) -> float:
    """The loss on the test. Each copy of the model reads its share."""
    model.eval()
    total = loss_of(model, pieces[mesh.get_local_rank("dp") :: mesh["dp"].size()])
    model.train()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return total.item() / mesh["dp"].size()


@torch.no_grad()
def write(model: nn.Module, prompt: str, length: int) -> str:
    """What the model writes after the prompt. The same on all ranks."""
    model.eval()
    text, dice = torch.tensor([list(prompt.encode())]), torch.Generator().manual_seed(0)
    for _ in range(length):
        chances = model(text[:, -CONTEXT:])[:, -1].softmax(-1)
        text = torch.cat([text, chances.multinomial(1, generator=dice)], dim=1)
    model.train()
    return bytes(text[0].tolist()).decode()


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit("there are no ranks to share the work: start this with rally run")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = 2 if arguments.parallel == "tp" else 1
    if size % halves or arguments.batch_size % (size // halves):
        sys.exit(
            f"{size} workers cannot share {arguments.batch_size} pieces per step evenly; with --parallel tp, two have one model"
        )
    mesh = init_device_mesh("cpu", (size // halves, halves), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    train, test = load_text(arguments.characters, arguments.batch_size)
    model = build_model(arguments, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = elastic.Sampler(len(train), arguments.batch_size, group=mesh.get_group("dp"))
    loader = DataLoader(TensorDataset(train), batch_sampler=sampler)
    torch.manual_seed(1000 + mesh.get_local_rank("dp"))  # each copy drops different units
    completed = 0  # steps, in this process

    def is_victim(step: int) -> bool:
        """At most one worker per step, and none that has just replaced a lost one: it would die in the same step again."""
        chaos = random.Random(f"step {step}")
        hit, victim = chaos.random() < arguments.chaos, chaos.randrange(size)
        return hit and victim == rank and completed > 0

    with elastic.session(model, optimizer) as session:
        for epoch in session.epochs(arguments.epochs):
            for (pieces,) in session.batches(loader):
                before = session.position
                with session.step():
                    loss = loss_of(model, pieces)
                    if is_victim(before):
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                completed += session.position > before
            loss = session.run(validate, model, test, mesh)
            if rank == 0 and loss is not None:
                print(f"epoch {epoch + 1}  loss {loss:.3f}", file=sys.stderr, flush=True)
        text = session.run(write, model, 'The "for" statement ', 100)
        recoveries = len(session.history)
        loss = validate(model, test, mesh)
    if rank == 0:
        print(text)
        print(f"loss {loss:.6f} after {session.position} steps; {recoveries} recoveries")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
