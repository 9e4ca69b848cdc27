"""torchrl: a collector in a process of its own, a replay buffer, a value net in DDP."""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.parallel import DistributedDataParallel
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.envs import EnvBase

import wild


class Walk(EnvBase):
    """Eight numbers that walk; the reward is their sum."""

    def __init__(self):
        super().__init__(device="cpu", batch_size=())
        self.observation_spec = Composite(observation=Unbounded((8,)))
        self.action_spec = Bounded(-1, 1, (8,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None, **_):
        return TensorDict({"observation": torch.zeros(8)}, ())

    def _step(self, tensordict):
        place = tensordict["observation"] + tensordict["action"]
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {"observation": place, "reward": place.sum(-1, keepdim=True), "done": done}, ()
        )

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(wild.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    collector = MultiSyncCollector([Walk], frames_per_batch=16, total_frames=16 * 4)
    collector.set_seed(wild.RANK)
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=None)
    for step, frames in enumerate(collector, 1):
        buffer.extend(frames.reshape(-1))
        kept = buffer[:]
        optimizer.zero_grad()
        loss = (model(kept["observation"]) - kept["next", "reward"]).square().mean()
        loss.backward()
        optimizer.step()
        wild.after_step(step)
    collector.shutdown()
    wild.finish(model.module, loss=loss.item(), frames=len(buffer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
