"""What `rally ps` shows of a training run by Lightning, midway."""

import os
import sys

import lightning
import shown
import torch

from rallypoint.integrations.lightning import ProgressCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        self.log("step", 17.0)  # a name of progress()'s own
        if self.trainer.global_step == 6:
            shown.write(sys.argv[1])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    callbacks=[ProgressCallback()],
)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=8))
