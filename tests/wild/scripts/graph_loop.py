"""PyG: graphs in mini-batches, a convolution in DDP."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

import wild


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(8, 4)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch):
        hidden = self.conv(batch.x, batch.edge_index).relu()
        return self.out(global_mean_pool(hidden, batch.batch)).squeeze(1)


dist.init_process_group("gloo")
made = torch.Generator().manual_seed(0)
graphs = [
    Data(
        x=torch.randn(6, 8, generator=made),
        edge_index=torch.randint(0, 6, (2, 12), generator=made),
        y=torch.randn(1, generator=made),
    )
    for _ in range(64)
]
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for _ in range(wild.EPOCHS):
    for batch in DataLoader(graphs[wild.RANK :: 2], batch_size=8, num_workers=1):
        optimizer.zero_grad()
        loss = (model(batch) - batch.y).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        wild.after_step(step)
wild.finish(model.module, loss=loss.item())
dist.destroy_process_group()
