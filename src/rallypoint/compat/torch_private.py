"""Every private name of torch that this package replaces or offers, and its purpose.

No other module in ``compat`` uses one; ``tests/test_architecture.py`` enforces that. ``tests/unit/test_torch_private.py``
checks each name in the installed torch, to show what a new version breaks.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


# torch's test module whose import registers the fault-injecting backend.
TESTING = "_testing"
# The module and the function behind profiling across processes.
PROFILER = "server_process_global_profiler"
PROFILE = "_server_process_global_profile"
# Whether this process has an agent: the name in torch.distributed.rpc and in its C++ module.
IS_AGENT_SET = "_is_current_rpc_agent_set"
# A decorator of torch.distributed.rpc.api's own functions.
REQUIRE_INITIALIZED = "_require_initialized"
# Defaults that programs import from torch.distributed.rpc.
UNSET_TIMEOUT = "_UNSET_RPC_TIMEOUT"
DEFAULT_TIMEOUT = "_DEFAULT_RPC_TIMEOUT_SEC"
DEFAULT_INIT_METHOD = "_DEFAULT_INIT_METHOD"
DEFAULT_THREADS = "_DEFAULT_NUM_WORKER_THREADS"
# Names in torch.distributed.autograd. Its context calls the first two.
NEW_CONTEXT = "_new_context"
RELEASE_CONTEXT = "_release_context"
CURRENT_CONTEXT = "_current_context"
RETRIEVE_CONTEXT = "_retrieve_context"
IS_VALID_CONTEXT = "_is_valid_context"
MAX_ID = "_get_max_id"
AUTOGRAD_DEBUG_INFO = "_get_debug_info"


def native_rpc() -> Any:
    """torch's C++ module of RPC classes, which programs test objects with; None in a torch built without it."""
    return getattr(torch._C, "_distributed_rpc", None)


def native_autograd() -> Any:
    """torch's C++ module of distributed autograd; None in a torch built without it."""
    return getattr(torch._C, "_distributed_autograd", None)


def set_name(module: ModuleType, name: str, value: object) -> None:
    """Set one of these names in a module that stands in for torch's."""
    setattr(module, name, value)
