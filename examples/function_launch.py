"""Run a function on four processes and use its results, from an ordinary script.

You need no script for the workers, no environment variables and no store address. The function and everything it refers to
are sent to the workers, which join a process group before they call it::

    python examples/function_launch.py

Here each of four workers reads a quarter of the digit images of scikit-learn. Together they compute the mean and the
variance of the ink per image.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor

from rallypoint.launch import MultiprocessConfig, launch_subprocesses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compute a mean and a variance on several processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--world-size", type=int, default=4, help="number of worker processes")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    ink = torch.from_numpy(load_digits().data).sum(dim=1)  # [1797], float64

    # A nested function that uses a variable of its enclosing scope: pickle alone rejects both.
    def mean_and_variance(unbiased: bool) -> tuple[int, float, float]:
        share = ink[dist.get_rank() :: dist.get_world_size()]

        def total(values: Tensor) -> float:
            result = values.sum()
            dist.all_reduce(result)
            return result.item()

        mean = total(share) / len(ink)
        # A second pass over the deviations, because the difference of two large sums loses digits.
        variance = total((share - mean) ** 2) / (len(ink) - unbiased)
        return len(share), mean, variance

    # The tensors are on the CPU, so use Gloo even if there are GPUs.
    config = MultiprocessConfig(world_size=arguments.world_size, backend="gloo")
    results = launch_subprocesses(mean_and_variance, config, unbiased=True)

    for rank, (num_images, mean, variance) in enumerate(results):
        print(f"rank {rank}: saw {num_images} images, mean {mean:.6f}, variance {variance:.6f}")
    print(f"one process: {len(ink)} images, mean {ink.mean():.6f}, variance {ink.var():.6f}")


# Workers do not import this file again, so this guard is not required.
if __name__ == "__main__":
    main()
