"""accelerate's loop in a session; with the mode "kill", ranks are killed."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration

import wild
from rallypoint import elastic


config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
model = wild.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
loader = torch.utils.data.DataLoader(wild.dataset(), batch_size=8, shuffle=True)
with accelerator.main_process_first():
    pass  # as a script that prepares data
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.wait_for_everyone()
with elastic.session(model, optimizer, scheduler) as session:
    for _ in session.epochs(wild.EPOCHS):
        for x, y in session.batches(loader):
            with session.step():
                wild.killed_in(session.position)
                loss = (model(x).squeeze(1) - y).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
wild.finish(accelerator.unwrap_model(model), steps=session.position)
accelerator.end_training()
