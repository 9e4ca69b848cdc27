"""A session that trains until it is told to stop; it notes that it has started, where, and as which rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rallypoint import elastic


NOTES = Path(os.environ["WORKER_NOTES"])

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(100_000, 4), batch_size=1, num_workers=1)
with elastic.session(model, optimizer, checkpoint=NOTES / "checkpoints") as session:
    (NOTES / f"began.{dist.get_rank()}").write_text(str(session.position))
    for x in session.batches(loader):
        with session.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        time.sleep(0.05)
