"""Which communication backend: by the machine's devices, or as the user said.

torch is imported inside the functions: importing :mod:`rallypoint.launch` must not cost its import.
"""

from __future__ import annotations

from rallypoint._core import env as environment
from rallypoint.errors import ConfigError


BACKEND_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"

# The device a backend's collectives work on, for those that do not work on the CPU.
_DEVICES = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}


def num_cuda_devices() -> int:
    """How many CUDA devices this process sees.

    Asks NVML where it is there, so that CUDA is not initialised in this process: a process that
    has done so can no longer be forked and use CUDA in the fork.
    """
    import torch

    return torch.cuda.device_count()


def default_backend() -> str:
    """The backend that suits this machine: ``"nccl"`` with CUDA devices, else ``"gloo"``.

    Does not initialise CUDA.
    """
    import torch.distributed as dist

    return "nccl" if num_cuda_devices() > 0 and dist.is_nccl_available() else "gloo"


def get_distributed_backend() -> str:
    """The backend to use: what ``TORCH_DISTRIBUTED_BACKEND`` says, else :func:`default_backend`."""
    return environment.get(BACKEND_VARIABLE) or default_backend()


def set_distributed_backend(name: str) -> None:
    """Have :func:`get_distributed_backend` answer ``name``, here and in processes started from here.

    Args:
        name: what ``torch.distributed.init_process_group`` takes: ``gloo``, ``nccl``,
            ``cpu:gloo,cuda:nccl``, or a registered backend.

    Raises:
        ConfigError: ``name`` is empty or not a text.
    """
    given: object = name
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            "backend", name, "expected the name of a backend, such as 'gloo' or 'nccl'"
        )
    environment.process_environment()[BACKEND_VARIABLE] = name


def device_of(backend: str) -> str:
    """The type of device on which ``backend`` can reduce: ``"cpu"``, ``"cuda"``, …

    Of a backend per device (``cpu:gloo,cuda:nccl``) the first one.
    """
    device, colon, _ = backend.partition(",")[0].partition(":")
    return device if colon else _DEVICES.get(backend.lower(), "cpu")
