"""What ranks need of torch, for the process that they are forked from: imported once, and left alone by garbage collection."""

from rallypoint._core import collector

from .torch_private import FIRST_STEP


with collector.paused():
    __import__("torch.distributed")
    __import__(FIRST_STEP)
collector.keep()  # the little garbage that torch leaves is not worth a third of a second
collector.settle()
