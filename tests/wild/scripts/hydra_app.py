"""A Hydra application: errors of the job leave it as SystemExit."""

from dataclasses import dataclass

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torch.nn.parallel import DistributedDataParallel

import wild


@dataclass
class Config:
    lr: float = 0.05


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_name="config", config_path=None)
def main(config):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(wild.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    data = wild.dataset()
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    checkpoint, start = wild.OUT / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        start = saved["epoch"]
    step = 4 * start
    for epoch in range(start, wild.EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x).squeeze(1) - y).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            wild.after_step(step)
        if wild.MODE == "restart":
            if wild.RANK == 0:
                torch.save({"model": model.state_dict(), "epoch": epoch + 1}, checkpoint)
            dist.barrier()
    wild.finish(model.module, loss=loss.item(), lr=config.lr)
    dist.destroy_process_group()


main()
