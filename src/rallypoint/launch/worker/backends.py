"""The communication backend: chosen by the user, or by the machine's devices.

torch is imported inside the functions: importing :mod:`rallypoint.launch` must not cost its import.
"""

from __future__ import annotations

from rallypoint._core import env as environment
from rallypoint.errors import ConfigError


BACKEND_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"

# The device type of each backend whose collectives do not run on the CPU.
_DEVICES = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}


def num_cuda_devices() -> int:
    """How many CUDA devices this process sees.

    Uses NVML if available, which does not initialise CUDA: forks of a process that has initialised
    CUDA cannot use it.
    """
    import torch

    return torch.cuda.device_count()


def default_backend() -> str:
    """The backend for this machine. Does not initialise CUDA.

    Returns:
        ``"nccl"`` with CUDA devices, else ``"gloo"``.
    """
    import torch.distributed as dist

    return "nccl" if num_cuda_devices() > 0 and dist.is_nccl_available() else "gloo"


def get_distributed_backend() -> str:
    """The backend to use.

    Returns:
        The value of ``TORCH_DISTRIBUTED_BACKEND``, else :func:`default_backend`.
    """
    return environment.get(BACKEND_VARIABLE) or default_backend()


def set_distributed_backend(name: str) -> None:
    """Make :func:`get_distributed_backend` return ``name``, in this process and those it starts.

    Args:
        name: what ``torch.distributed.init_process_group`` takes: ``gloo``, ``nccl``,
            ``cpu:gloo,cuda:nccl``, or a registered backend.

    Raises:
        ConfigError: ``name`` is empty or not a string.
    """
    given: object = name
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(
            "backend", name, "expected the name of a backend, such as 'gloo' or 'nccl'"
        )
    environment.process_environment()[BACKEND_VARIABLE] = name


def device_of(backend: str) -> str:
    """The type of device on which ``backend`` can reduce: ``"cpu"``, ``"cuda"``, …

    Of several backends (``cpu:gloo,cuda:nccl``), the first one's.
    """
    device, colon, _ = backend.partition(",")[0].partition(":")
    return device if colon else _DEVICES.get(backend.lower(), "cpu")
