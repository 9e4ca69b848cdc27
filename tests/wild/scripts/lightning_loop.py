"""Lightning: the processes already exist, and it has to notice."""

import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import wild


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = wild.model()

    def training_step(self, batch, _):
        x, y = batch
        return (self.net(x).squeeze(1) - y).square().mean()

    def on_train_batch_end(self, outputs, *_):
        self.last_loss = float(outputs["loss"])
        wild.after_step(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


folder = wild.OUT / "checkpoints"
restarts = wild.MODE == "restart"
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=wild.EPOCHS,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=restarts,
    callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)] if restarts else [],
)
module = Module()
last = folder / "last.ckpt"
loader = torch.utils.data.DataLoader(wild.dataset(), batch_size=8)
trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None)
environment = type(trainer.strategy.cluster_environment).__name__
wild.finish(module.net, loss=module.last_loss, steps=trainer.global_step, environment=environment)
