"""As torchtitan has it: a mesh, FSDP2, checkpoints of shards."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wild


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = wild.model()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
folder, start = wild.OUT / "shards", 0
if (wild.OUT / "epoch").exists():
    start = int((wild.OUT / "epoch").read_text())
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder / str(start))
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
data = wild.dataset()
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
step = 4 * start
for epoch in range(start, wild.EPOCHS):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        wild.after_step(step)
    if wild.MODE == "restart":
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(parts, checkpoint_id=folder / str(epoch + 1))
        if wild.RANK == 0:
            (wild.OUT / "epoch").write_text(str(epoch + 1))
        dist.barrier()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
plain = wild.model()
if wild.RANK == 0:
    plain.load_state_dict(whole)
wild.finish(plain, loss=loss.item())
dist.destroy_process_group()
