"""Processes within workers: DataLoader's by fork and by spawn, torch's own spawn, compiled models."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wild


def child(index, folder, rank):
    (folder / f"child-{rank}-{index}").write_text(str(torch.tensor([rank, index]).sum().item()))


def main():
    dist.init_process_group("gloo")
    data = wild.dataset()
    sums = {}
    for method in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=8,
            num_workers=2,
            multiprocessing_context=method,
            persistent_workers=True,
            sampler=torch.utils.data.DistributedSampler(data, shuffle=False),
        )
        total = torch.zeros(())
        for _ in range(2):
            for x, _y in loader:
                total += x.sum()
        dist.all_reduce(total)
        sums[method] = total.item()
    torch.multiprocessing.spawn(child, (wild.OUT, wild.RANK), nprocs=2)
    model = DistributedDataParallel(wild.model())
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, 4):
        optimizer.zero_grad()
        x, y = data.tensors
        loss = (compiled(x[wild.RANK :: 2]).squeeze(1) - y[wild.RANK :: 2]).square().mean()
        loss.backward()
        optimizer.step()
        wild.after_step(step)
    wild.finish(model.module, loss=loss.item(), sums=sums)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
