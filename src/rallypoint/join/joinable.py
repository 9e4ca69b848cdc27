"""The interface of what can join: torch's own, so that classes written for either ``Join`` work in both."""

from torch.distributed.algorithms.join import Joinable, JoinHook


__all__ = ["JoinHook", "Joinable"]
