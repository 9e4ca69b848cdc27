"""Fabric's loop in a session; with the mode "kill", ranks are killed."""

import os

import torch
from lightning.fabric import Fabric

import wild
from rallypoint import elastic


fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
with fabric.rank_zero_first():
    pass  # as a script that prepares data
optimizer_of = torch.optim.AdamW
model = wild.model()
model, optimizer = fabric.setup(model, optimizer_of(model.parameters(), lr=0.01))
data = torch.utils.data.DataLoader(wild.dataset(), batch_size=8, shuffle=True)
loader = fabric.setup_dataloaders(data)
with elastic.session(model, optimizer) as session:
    for _ in session.epochs(wild.EPOCHS):
        for x, y in session.batches(loader):
            with session.step():
                wild.killed_in(session.position)
                loss = (model(x).squeeze(1) - y).square().mean()
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        session.run(fabric.barrier)
wild.finish(model.module, steps=session.position)
