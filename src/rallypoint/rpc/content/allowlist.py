"""What a message may name, where a worker keeps a list of it (option ``allowed_modules``).

Unpickling calls whatever a message names, with whatever it says. So a name must lead to something that the list
means, and not only begin in a module that is on it:

- a path goes through classes only: ``module.os.system`` and ``module.function.__globals__`` are no names of the module;
- what a module has imported from elsewhere is elsewhere's;
- ``getattr``, by which methods are pickled, finds public methods of classes and objects on the list, and nothing else.

It holds for what callers send and for what those answer who are called: values, items of streams, exceptions. The
exceptions of Python and of this package need no entry.

A list is as narrow as what is on it: who lists ``torch`` has listed ``torch.load``.
"""

from __future__ import annotations

import builtins
import importlib
import pickle
from collections.abc import Callable, Collection
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from rallypoint import errors

from .tensors import rebuild_weights


class NotAllowed(pickle.UnpicklingError):
    """A peer has named something that is not on this process's allow-list."""


# What messages of the package's own are made of. Nothing here calls what a message names.
_OWN = frozenset(
    f"rallypoint.rpc.{name}"
    for name in (
        "api._broadcast_to_followers",
        "api._gather_to_leader",
        "content.apart.rebuild_view",
        "content.cuda_ipc.arrive_handed",
        "content.cuda_ipc.arrive_shared",
        "content.cuda_ipc.arrive_staged",
        "references.ids.Fork",
        "references.ids.ForkId",
        "references.ids.RRefId",
        "references.rref.rebuild_rref",
        "references.rref_backward._run_backward",
        "rref_proxy.call_method",
        "rref_proxy.rref_type",
        # These two look at the list themselves.
        "content.script.load_script_function",
        "content.script.load_torch_function",
        "content.tensors.rebuild_compressed",
        "content.tensors.rebuild_coo",
        "content.tensors.rebuild_empty",
        "content.tensors.rebuild_empty_there",
        "content.tensors.rebuild_grad",
        "content.tensors.rebuild_meta",
        "content.tensors.rebuild_on_device",
        "content.tensors.rebuild_parameter",
        "content.tensors.rebuild_small",
        "content.tensors.rebuild_small_view",
        "content.tensors.rebuild_spread",
        "content.tensors.rebuild_spread_there",
        "content.tensors.rebuild_strided",
        "content.tensors.rebuild_tensor",
        "content.tensors.rebuild_there",
        "worker_info.WorkerInfo",
    )
)
# Values that Python's pickles have no sign of their own for.
_HARMLESS = frozenset(f"builtins.{name}" for name in ("bytearray", "complex", "range", "slice"))
# So that they are raised as what they are. To make one does nothing; of those that end a program, a caller takes the
# text only.
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
        "rallypoint.rpc.content.allowlist.NotAllowed",
    }
)
_PERMITTED = _OWN | _HARMLESS | _ERRORS


class AllowList:
    """Modules, and single names in modules.

    Args:
        names: ``package.module``, for all that it and what is below it define; ``module.name`` for one thing.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._instead: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", "getattr"): self._method,
            ("rallypoint.rpc.content.tensors", "rebuild_saved"): rebuild_weights,
        }

    def find(self, module: str, name: str) -> Any:
        """What a message names.

        Raises:
            NotAllowed: it may not.
        """
        instead = self._instead.get((module, name))
        if instead is not None:
            return instead
        full = f"{module}.{name}"
        is_listed = full in self._names or full in _PERMITTED
        if not is_listed:
            self.check(module, full)
        found: Any = importlib.import_module(module)
        for depth, part in enumerate(name.split(".")):
            if (depth and not isinstance(found, type)) or part.startswith("__"):
                raise NotAllowed(
                    f"a peer has named {full}: only what classes have is found below them"
                )
            found = getattr(found, part)
        if not is_listed:
            self._check_home(full, found)
        return found

    def check(self, module: str, full: str = "") -> None:
        """Whether a message may name what this module defines.

        Raises:
            NotAllowed: it may not.
        """
        if not self._has(module):
            raise NotAllowed(
                f"a peer has named {full or f'a function of {module}'}, and module {module!r} is not on this worker's"
                " allow-list (option allowed_modules)"
            )

    def _has(self, module: str) -> bool:
        return any(module == each or module.startswith(f"{each}.") for each in self._names)

    def _check_home(self, full: str, found: Any) -> None:
        """A module's own, or only imported there?"""
        if isinstance(found, ModuleType):
            raise NotAllowed(f"a peer has named {full}: a module is nothing to be sent")
        if not isinstance(found, (type, FunctionType, BuiltinFunctionType)):
            return
        home: str | None = found.__module__
        # Functions of C modules do not always tell.
        if home is None or self._has(home) or f"{home}.{found.__qualname__}" in self._names:
            return
        raise NotAllowed(
            f"a peer has named {full}, which is {home}.{found.__qualname__}: not on this worker's allow-list"
            " (option allowed_modules)"
        )

    def _method(self, owner: Any, name: str) -> Any:
        """In the place of ``getattr``."""
        kind = owner if isinstance(owner, type) else type(owner)
        if self._has(kind.__module__) and not name.startswith("_"):
            found = getattr(owner, name)
            if callable(found):
                return found
        raise NotAllowed(
            f"a peer has named {name!r} of {kind.__module__}.{kind.__qualname__}: not a public method of a class on"
            " this worker's allow-list (option allowed_modules)"
        )
