"""A job that fails on purpose, to show what the launcher reports.

Every step ends in an all-reduce. At ``--step``, one rank fails in the way given by ``--how``. The
other ranks then fail as well, because their peer has closed its connections. A good report names
the first rank as the cause and the others as its victims::

    rally run --nproc-per-node 4 examples/failing_job.py
    rally run --nproc-per-node 4 examples/failing_job.py --how segfault --rank 2

Nothing here records errors (no decorator, no try): the launcher finds them on its own.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor


IMAGE_SHAPE = (1, 8, 8)


def check_batch(images: Tensor, source: str) -> None:
    """Raise if ``images`` is not a batch of one-channel 8x8 images."""
    if images.shape[1:] != IMAGE_SHAPE:
        raise ValueError(
            f"{source}: expected images of shape [N, {', '.join(map(str, IMAGE_SHAPE))}], "
            f"got {list(images.shape)}; was the shard written without its channel axis?"
        )


def load_bad_batch() -> None:
    check_batch(torch.zeros(32, 8, 8), "shard digits-00017")


def leave() -> None:
    print("the licence server refused this host", file=sys.stderr)
    sys.exit(3)


def read_null_pointer() -> None:
    ctypes.string_at(0)


def kill_myself() -> None:
    # Like the kernel's out-of-memory killer: no traceback, no handler, no message.
    os.kill(os.getpid(), signal.SIGKILL)


def allocate_too_much() -> None:
    # A petabyte exceeds the address space, so this fails at once and uses no memory.
    torch.empty(2**50, dtype=torch.uint8)


def load_broken_config() -> None:
    compile("layers = [64, 64\nlearning_rate = 1e-3\n", "model_config.py", "exec")


def import_missing_module() -> None:
    import fused_attention_kernels  # noqa: F401


def hang_then_raise() -> None:
    # Meanwhile the other ranks wait in the all-reduce: this is what a hang looks like.
    time.sleep(5)
    raise TimeoutError("no answer from the data server storage-3:9000 within 5 s")


FAILURES: dict[str, Callable[[], None]] = {
    "raise": load_bad_batch,
    "exit": leave,
    "segfault": read_null_pointer,
    "kill": kill_myself,
    "oom-like": allocate_too_much,
    "syntax": load_broken_config,
    "import": import_missing_module,
    "hang-then-raise": hang_then_raise,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fail on purpose, to show what the launcher reports.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--how", choices=FAILURES, default="raise", help="the kind of failure")
    parser.add_argument(
        "--rank", type=int, default=1, help="the rank that fails; the last rank if there are fewer"
    )
    parser.add_argument("--step", type=int, default=3, help="the step at which it fails, from 0")
    arguments = parser.parse_args()
    if arguments.rank < 0 or arguments.step < 0:
        parser.error("--rank and --step count from 0")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    failing_rank = min(arguments.rank, dist.get_world_size() - 1)
    for step in count():
        if dist.get_rank() == failing_rank and step == arguments.step:
            FAILURES[arguments.how]()
        gradient = torch.ones(1000)
        dist.all_reduce(gradient)
        if dist.get_rank() == 0:
            print(f"step {step} done", flush=True)


if __name__ == "__main__":
    main()
