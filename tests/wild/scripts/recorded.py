"""A script that was written for torchrun's reports."""

import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import wild


@record
def main():
    dist.init_process_group("gloo")
    for step in range(1, 5):
        dist.barrier()
        wild.after_step(step)
    wild.finish(wild.model(), argv=sys.argv[1:], name=__name__, package=__package__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
