"""torch's interface of joinable objects, so that classes written for either ``Join`` work with both."""

from torch.distributed.algorithms.join import Joinable, JoinHook


__all__ = ["JoinHook", "Joinable"]
