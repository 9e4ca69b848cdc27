"""Names in the package's own messages, which need no entry on a worker's list."""

from __future__ import annotations

import builtins

from rallypoint import errors
from rallypoint.rpc.torch_private import NUMPY_REBUILDERS


# Functions that rebuild parts of a message. None of them calls a function that a message names.
REBUILDERS = (
    frozenset(
        f"rallypoint.rpc.{name}"
        for name in (
            "serialization.out_of_band.rebuild_view",
            "serialization.cuda_ipc.arrive_handed",
            "serialization.cuda_ipc.arrive_shared",
            "serialization.cuda_ipc.arrive_staged",
            "autograd.transfer.rebuild_received",
            "references.rref.rebuild_rref",
            "remote_module.rebuild_remote_module",
            # These two check the list themselves.
            "serialization.script.load_script_function",
            "serialization.script.load_torch_function",
            "serialization.tensor_reader.rebuild_compressed",
            "serialization.tensor_reader.rebuild_coo",
            "serialization.tensor_reader.rebuild_empty",
            "serialization.tensor_reader.rebuild_empty_there",
            "serialization.tensor_reader.rebuild_grad",
            "serialization.tensor_reader.rebuild_meta",
            "serialization.tensor_reader.rebuild_mkldnn",
            "serialization.tensor_reader.rebuild_on_device",
            "serialization.tensor_reader.rebuild_parameter",
            "serialization.tensor_reader.rebuild_small",
            "serialization.tensor_reader.rebuild_small_view",
            "serialization.tensor_reader.rebuild_spread",
            "serialization.tensor_reader.rebuild_spread_there",
            "serialization.tensor_reader.rebuild_strided",
            "serialization.tensor_reader.rebuild_tensor",
            "serialization.tensor_reader.rebuild_there",
            "serialization.tensor_reader.restore_attributes",
        )
    )
    | NUMPY_REBUILDERS
)
# Functions of the package's own calls. Each checks its arguments itself.
SERVED = frozenset(
    f"rallypoint.rpc.{name}"
    for name in (
        "autograd.served.enrol",
        "autograd.served.explore",
        "autograd.served.give_up",
        "autograd.served.receive_gradients",
        "autograd.served.release",
        "autograd.served.settle",
        "gather._broadcast_to_followers",
        "gather._gather_to_leader",
        "optim.make_local",
        "optim.number_of",
        "optim.step_local",
        "references.rref_backward.backward_here",
        "remote_module.is_there",
        "remote_module.make_module",
        "remote_module.parameters_of",
        "remote_module.run_module",
        "remote_module.set_training",
        "rref_proxy.call_method",
        "rref_proxy.rref_type",
    )
)
# Builtin values for which pickle has no opcode, and classes in this package's messages.
_HARMLESS = frozenset(f"builtins.{name}" for name in ("bytearray", "complex", "range", "slice")) | {
    "rallypoint.rpc.references.ids.Fork",
    "rallypoint.rpc.references.ids.ForkId",
    "rallypoint.rpc.references.ids.RRefId",
    "rallypoint.rpc.worker_info.WorkerInfo",
    "numpy.dtype",
    "numpy.ndarray",
}
# Exceptions, so that they keep their types. Creating one has no effect; those that would end a program become RemoteError.
_ERRORS = frozenset(
    {
        f"builtins.{name}"
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    | {f"rallypoint.errors.{name}" for name, kind in vars(errors).items() if isinstance(kind, type)}
    | {
        "_pickle.PicklingError",
        "_pickle.UnpicklingError",
    }
)
CLASSES = _HARMLESS | _ERRORS
