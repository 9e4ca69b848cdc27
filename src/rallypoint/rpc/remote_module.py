"""A module on another worker, used like a local one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.futures import Future

from rallypoint.errors import NotAllowed

from . import constants
from .calling import positional, rpc_async, rpc_sync
from .current_agent import current_agent
from .references.rref import RRef, remote


__all__ = ["RemoteModule"]

# The modules that this worker has made for others.
_made: WeakSet[nn.Module] = WeakSet()


# Methods that would act on a module's parameters and submodules, which are not here.
_OF_LOCAL_MODULES = frozenset(
    {
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "children",
        "cpu",
        "cuda",
        "double",
        "float",
        "half",
        "load_state_dict",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "register_buffer",
        "register_parameter",
        "requires_grad_",
        "share_memory",
        "state_dict",
        "to",
        "type",
        "zero_grad",
    }
)


class RemoteModule(nn.Module):
    """A module that is created and run on another worker. Gradients flow through it in contexts (``rpc.autograd``).

    It can be an argument or a result of calls: other workers then use the same module.

    Args:
        remote_device: where to create it: ``"worker1"``, ``"worker1/cuda:0"``, or ``"rank:1/cpu"`` by the worker's id.
        module_cls: the module's class, or a function that returns a module. The worker must be able to import it. If the
            worker has an allow-list, it must contain it.
        args, kwargs: its arguments.

    Attributes:
        on: the worker: its name, or its id.
        device: the module's device there.

    Raises:
        ValueError: ``remote_device`` cannot be read, or ``module_cls`` does not return a module.
        TypeError: one of the arguments has the wrong type.
        PeerLost: the worker is gone.
        Exception: what creating the module raised.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(remote_device, str):
            raise TypeError(
                f"remote_device is {remote_device!r}: expected a string, as 'rank:1/cpu'"
            )
        if isinstance(module_cls, nn.Module):
            raise TypeError(
                f"module_cls is a module, a {type(module_cls).__name__}: expected its class, since the module is created"
                " on the worker. For one that exists there: RemoteModule.from_module_rref"
            )
        self.on, self.device = _place(remote_device)
        content = (module_cls, positional(args), dict(kwargs or {}), str(self.device))
        self.module_rref: RRef[nn.Module] = remote(self.on, make_module, content)
        # remote() does not wait: an error shows only when the value is used.
        rpc_sync(self.on, is_there, (self.module_rref,))

    @classmethod
    def from_module_rref(cls, module_rref: RRef[nn.Module], device: str = "cpu") -> RemoteModule:
        """Use a module that already exists.

        Args:
            module_rref: a reference to it.
            device: the device of its parameters.

        Returns:
            A ``RemoteModule`` for it.
        """
        return rebuild_remote_module(module_rref, module_rref.owner().name, device, cls)

    # -- use --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module there and wait.

        Args:
            args, kwargs: the module's arguments.

        Returns:
            What the module returned.

        Raises:
            PeerLost: the worker is gone.
            Exception: what the module raised; otherwise as for ``rpc_sync``.
        """
        return rpc_sync(self.on, run_module, (self.module_rref, str(self.device), args, kwargs))

    def forward_async(
        self, *args: Any, timeout: float = constants.UNSET_RPC_TIMEOUT, **kwargs: Any
    ) -> Future[Any]:
        """Run the module there without waiting for it.

        Args:
            args, kwargs: the module's arguments.
            timeout: seconds, as for ``rpc_async``.

        Returns:
            A future of what the module returns, as from ``rpc_async``.

        Raises:
            RpcError: this process is not in a group.
        """
        content = (self.module_rref, str(self.device), args, kwargs)
        return rpc_async(self.on, run_module, content, timeout=timeout)

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Parameters for a ``DistributedOptimizer``. Blocks.

        Args:
            recurse: whether to include those of submodules.

        Returns:
            A reference to each.

        Raises:
            PeerLost: the worker is gone.
        """
        return rpc_sync(self.on, parameters_of, (self.module_rref, recurse))

    def get_module_rref(self) -> RRef[nn.Module]:
        """Get the reference to the module, for calls that need the module itself.

        Returns:
            The reference.
        """
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the mode of the module there. Blocks.

        Args:
            mode: True: training; False: evaluation.

        Returns:
            This object.

        Raises:
            PeerLost: the worker is gone.
        """
        rpc_sync(self.on, set_training, (self.module_rref, mode))
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """For ``repr``.

        Returns:
            Where the module is.
        """
        return f"on={self.on!r}, device={str(self.device)!r}"

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_LOCAL_MODULES:
            return functools.partial(self._refuse, name)
        return super().__getattribute__(name)

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"Method ``{name}`` not supported for RemoteModule: its parameters and submodules are on worker {self.on!r};"
            " use remote_parameters(), or call a function there with get_module_rref()"
        )

    def __reduce__(self) -> Any:
        # The reference raises if it is pickled outside a message.
        return rebuild_remote_module, (self.module_rref, self.on, str(self.device))


def _place(remote_device: str) -> tuple[str | int, torch.device]:
    """The worker and device that a string names."""
    worker, _, device = remote_device.partition("/")
    kind, _, number = worker.partition(":")
    try:
        where = torch.device(device or "cpu")
        if kind == "rank" and number:
            return int(number), where
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"remote_device is {remote_device!r}: expected 'worker', 'worker/device' or 'rank:1/device'"
        ) from error
    if not worker:
        raise ValueError(f"remote_device is {remote_device!r}, which names no worker")
    return worker, where


def rebuild_remote_module(
    module_rref: RRef[nn.Module],
    on: str | int,
    device: str,
    kind: type[RemoteModule] = RemoteModule,
) -> RemoteModule:
    """A module that another worker has sent. Pickles refer to this function by name."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.on, made.device, made.module_rref = on, torch.device(device), module_rref
    return made


# -- on the worker that has the module -------------------------------------------------------------------


def make_module(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    # A class may be on the allow-list only so that its objects can be sent. Here, nothing but modules is made.
    if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
        raise _no_module(module_cls)
    made = module_cls(*args, **kwargs)
    if not isinstance(made, nn.Module):
        raise _no_module(type(made))
    _made.add(made)
    return made.to(device)


def _no_module(kind: type) -> ValueError:
    # torch's words.
    return ValueError(
        "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance of"
        f" {kind}."
    )


def is_there(module: RRef[nn.Module]) -> None:
    """Raises what creating the module raised."""
    _module(module)


def run_module(
    module: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    found = _module(module)
    if device != "cpu":
        args, kwargs = _moved(args, device), _moved(kwargs, device)
    return found(*args, **kwargs)


def parameters_of(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(each) for each in _module(module).parameters(recurse)]


def set_training(module: RRef[nn.Module], mode: bool) -> None:
    _module(module).train(mode)


def _module(reference: RRef[nn.Module]) -> nn.Module:
    found = reference.local_value()
    if not isinstance(found, nn.Module):
        raise TypeError(f"the reference is to a {type(found).__name__}, not to a module")
    if found not in _made and current_agent().allowed is not None:
        raise NotAllowed(
            f"this worker has an allow-list, and the {type(found).__name__} was not made by RemoteModule: call an allowed"
            " function with the reference"
        )
    return found


def _moved(value: Any, device: str) -> Any:
    """A value with its tensors moved to a device, including those in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    if type(value) is dict:
        return {key: _moved(each, device) for key, each in value.items()}
    return value
