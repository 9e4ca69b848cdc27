"""The loop of accelerate's own first page."""

import torch
from accelerate import Accelerator

import wild


accelerator = Accelerator(cpu=True)
model = wild.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(wild.dataset(), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
checkpoint, start = wild.OUT / "checkpoint", 0
if (checkpoint / "epoch").exists():
    accelerator.load_state(str(checkpoint))
    start = int((checkpoint / "epoch").read_text())
step, loss = start * len(loader), None
for epoch in range(start, wild.EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        wild.after_step(step)
    if wild.MODE == "restart":
        accelerator.save_state(str(checkpoint))
        if accelerator.is_main_process:
            (checkpoint / "epoch").write_text(str(epoch + 1))
        accelerator.wait_for_everyone()
losses = accelerator.gather(loss.detach().reshape(1)).tolist()
kind = str(accelerator.distributed_type)
wild.finish(accelerator.unwrap_model(model), losses=losses, kind=kind)
accelerator.end_training()
