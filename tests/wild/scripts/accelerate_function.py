"""accelerate in a function launch: it uses the process group that exists."""

import sys
from pathlib import Path

from rallypoint.launch import MultiprocessConfig, launch_subprocesses


def train(folder):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.arange(8.0).repeat(4, 1) + accelerator.process_index
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    accelerator.wait_for_everyone()
    weights = accelerator.unwrap_model(model).weight.sum().item()
    return accelerator.num_processes, accelerator.process_index, weights


one, two = launch_subprocesses(train, MultiprocessConfig(world_size=2, backend="gloo"), sys.argv[1])
assert (one[0], two[0], one[1], two[1]) == (2, 2, 0, 1)
assert one[2] == two[2]
Path(sys.argv[1], "done").write_text("")
