"""ignite: its Parallel finds the group's variables on its own."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

import wild


def training(local_rank):
    model = wild.model()
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    model = idist.auto_model(model)
    loader = idist.auto_dataloader(wild.dataset(), batch_size=8 * idist.get_world_size())

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: wild.after_step(e.state.iteration)
    )
    what = {"model": model, "optimizer": optimizer, "trainer": trainer}
    folder = wild.OUT / "checkpoints"
    if wild.MODE == "restart":
        found = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
        if found:
            Checkpoint.load_objects(what, torch.load(found[-1], weights_only=False))
        saver = DiskSaver(str(folder), require_empty=False)
        handler = Checkpoint(
            what, saver, n_saved=None, global_step_transform=lambda e, _: e.state.epoch
        )
        trainer.add_event_handler(Events.EPOCH_COMPLETED, handler)
    state = trainer.run(loader, max_epochs=wild.EPOCHS)
    bare = getattr(model, "module", model)
    wild.finish(bare, loss=state.output, steps=state.iteration, backend=idist.backend())


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
