"""The names that a message may contain, under the options ``allowed_modules``, ``allowed_calls`` and ``exported_only``.

There are two lists. Things that may be *rebuilt* are created while a message is unpickled: mostly instances of classes.
Things that may be *called* are the function of a call, or a method of a value on this worker. It is not enough that a
name begins with a module on the list:

- A path leads only through classes: ``module.os.system`` and ``module.function.__globals__`` do not belong to the
  module.
- What a module has imported belongs to the module that defines it.
- A method may be called if it is public, its class may be called, and it does not reach beyond its object
  (:mod:`.unsafe_methods`).
- The package's own functions in messages rebuild tensors and references (:class:`Rebuilder`), or serve the package's own
  calls (:class:`Served`). A message cannot use them as function values.

The lists apply to requests and to answers: values, items of streams, exceptions. Tensors, arrays, references, and the
exceptions of Python and of this package need no entry. :mod:`.restricted_unpickler` reads the messages.

A list is only as narrow as its entries: ``torch`` includes ``torch.load``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from rallypoint.errors import NotAllowed
from rallypoint.rpc.functions import is_exported
from rallypoint.rpc.torch_private import PUBLIC_NAMES

from .own_names import CLASSES, REBUILDERS, SERVED
from .script import builtin_name
from .tensor_reader import rebuild_weights
from .unsafe_methods import is_unsafe_method, is_unsafe_operator, makes_from_memory, name_of


# How deep partials may be nested.
_DEEPEST = 16


class Rebuilder:
    """A function that only the unpickler may call. As a value in a message, it is not callable."""

    __slots__ = ("function", "name")

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function

    def __repr__(self) -> str:
        return f"<{self.name}: rebuilt with, not called>"


class Served(Rebuilder):
    """A function of the package's own calls."""

    __slots__ = ()


class _Names:
    """Modules, and single names in modules."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, full: str) -> bool:
        return full in self._names

    def has_module(self, module: str) -> bool:
        return any(module == each or module.startswith(f"{each}.") for each in self._names)

    def has(self, found: Any) -> bool:
        """Whether a class or function is listed, by the module that defines it."""
        home: str | None = found.__module__
        full = f"{home}.{found.__qualname__}"
        return full in self._names or (home is not None and self.has_module(home))


class AllowList:
    """The lists of one worker.

    Args:
        rebuilt: ``package.module`` for everything that it and its submodules define; ``module.name`` for one name.
        called: the same for functions, and for classes whose methods may be called; None: as ``rebuilt``. If given,
            functions in ``rebuilt`` run during unpickling only if they are listed by name.
        exported: also allow calls of functions and classes with ``@rpc.export``, but not of what is in ``rebuilt``.
        worker: its name, for errors.
    """

    def __init__(
        self,
        rebuilt: Collection[str],
        called: Collection[str] | None = None,
        *,
        exported: bool = False,
        worker: str = "",
    ) -> None:
        self._is_split = exported or called is not None
        self._rebuilt = _Names(rebuilt)
        self._called = _Names((called or ()) if self._is_split else rebuilt)
        self._exported = exported
        self._whose = f"worker {worker!r}" if worker else "this worker"
        # For errors: how to make something callable.
        self._option = "allowed_calls" if self._is_split else "allowed_modules"
        self._export = "mark it with @rpc.export, or " if exported else ""
        self._instead: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", "getattr"): self.method,
            ("rallypoint.rpc.serialization.tensor_reader", "rebuild_saved"): rebuild_weights,
        }
        # By name: what was found, and what a message gets for it.
        self._known: dict[tuple[str, str], tuple[Any, Any]] = {}
        # Listed things that are defined in another module, or do not say where: allowed by their listed name.
        self._called_as: dict[int, Any] = {}
        self._rebuilt_as: dict[int, Any] = {}

    # -- names in a message --------------------------------------------------------------------------

    def find(self, module: str, name: str) -> Any:
        """Look up a name in a message.

        Raises:
            NotAllowed: it is not allowed.
        """
        key = module, name
        known = self._known.get(key)
        if known is not None and known[0] is _at(sys.modules.get(module), name):
            return known[1]
        full = f"{module}.{name}"
        instead = self._instead.get(key)
        if instead is not None:
            return Rebuilder(full, instead)
        found, given = self._find(module, name, full)
        self._known[key] = found, given
        return given

    def _find(self, module: str, name: str, full: str) -> tuple[Any, Any]:
        """What the name refers to, and what the message gets for it."""
        if full in SERVED:
            found = _look_up(importlib.import_module(module), name, full)
            return found, Served(full, found)
        if full in REBUILDERS:
            found = _look_up(importlib.import_module(module), name, full)
            return found, Rebuilder(full, found)
        if full in CLASSES:
            found = _look_up(importlib.import_module(module), name, full)
            return found, found
        is_called = full in self._called or self._called.has_module(module)
        is_rebuilt = full in self._rebuilt or self._rebuilt.has_module(module)
        if is_called or is_rebuilt:
            found = _look_up(importlib.import_module(module), name, full)
        elif self._exported and module in sys.modules:
            # Exported functions are already loaded: never import a module because a message names it.
            found = _look_up(sys.modules[module], name, full)
        else:
            raise self._not_listed(full, module)
        if isinstance(found, ModuleType):
            raise NotAllowed(f"a message refers to the module {full}: modules cannot be sent")
        tells = isinstance(found, (type, FunctionType)) or (
            isinstance(found, BuiltinFunctionType) and found.__module__ is not None
        )
        if full in self._called or (is_called and not tells):
            self._called_as[id(found)] = found
        if full in self._rebuilt or (is_rebuilt and not tells):
            self._rebuilt_as[id(found)] = found
        return found, self._given(full, found, is_rebuilt=is_rebuilt)

    def _given(self, full: str, found: Any, *, is_rebuilt: bool) -> Any:
        """What the message gets for the name."""
        if self._may_call(found):
            return found
        if isinstance(found, type):
            if self._rebuilds(found):
                return found
        elif isinstance(found, (FunctionType, BuiltinFunctionType)):
            if self._rebuilds_by(found):
                return Rebuilder(full, found)
        elif is_rebuilt and not isinstance(found, torch.jit.ScriptFunction):
            # A value in a module.
            return found
        raise self._refusal(full, found)

    def check_operator(self, name: str) -> None:
        """Check that a message may name one of torch's operators.

        Raises:
            NotAllowed: it may not.
        """
        if self._may_call_operator(name, getattr(torch, name, None)):
            return
        full = f"torch.{name}"
        if is_unsafe_operator(name):
            raise NotAllowed(
                f"{self._whose} does not allow {full}, which reads or writes files:"
                f" add {full!r} to the option {self._option} there"
            )
        raise self._not_listed(full, "torch")

    # -- unpickling ----------------------------------------------------------------------------------

    def rebuilder(self, func: Any) -> Callable[..., Any]:
        """A function or class that the unpickler may call.

        Raises:
            NotAllowed: it may not.
        """
        found: Callable[..., Any]
        if type(func) is Rebuilder:
            return func.function
        if isinstance(func, type):
            found = self.class_to_make(func)
            return found
        if isinstance(func, (FunctionType, BuiltinFunctionType)) and self._rebuilds_by(func):
            found = func
            return found
        raise NotAllowed(
            f"unpickling a message calls {_told(func)}, which {self._whose} does not allow:"
            " add it to the option allowed_modules there"
        )

    def class_to_make(self, kind: Any) -> Any:
        """A class that the unpickler may instantiate.

        Raises:
            NotAllowed: it may not.
        """
        if isinstance(kind, type) and self._rebuilds(kind) and not self._is_raw(kind):
            return kind
        raise self._no_listed_class(f"an object of {_told(kind)}")

    def class_to_fill(self, made: Any) -> type:
        """The class of an object whose attributes or items the unpickler may set.

        Raises:
            NotAllowed: it may not.
        """
        kind = type(made)
        if not isinstance(
            made, (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
        ) and self._rebuilds(kind):
            return kind
        raise self._no_listed_class(f"attributes or items of an object of {name_of(kind)}")

    def _no_listed_class(self, what: str) -> NotAllowed:
        return NotAllowed(
            f"a message contains {what}, a class that {self._whose} does not allow:"
            " add it to the option allowed_modules there"
        )

    def _rebuilds(self, kind: type) -> bool:
        if name_of(kind) in CLASSES or self._rebuilt.has(kind) or _is_in(self._rebuilt_as, kind):
            return True
        # NumPy has a class for each dtype.
        return any(name_of(each) == "numpy.dtype" for each in kind.__mro__)

    def _rebuilds_by(self, func: Any) -> bool:
        """Whether the unpickler may call a function."""
        if _is_in(self._rebuilt_as, func):
            return True
        if self._is_split:
            # Otherwise a listed module's functions could be called here, despite the list of calls.
            return f"{func.__module__}.{func.__qualname__}" in self._rebuilt
        return self._rebuilt.has(func)

    def _is_raw(self, kind: type) -> bool:
        return (
            makes_from_memory(kind, _public_name) and f"{name_of(kind)}.__new__" not in self._called
        )

    # -- calls ---------------------------------------------------------------------------------------

    def callee(self, func: Any) -> Callable[..., Any]:
        """A function that a peer may call.

        Raises:
            NotAllowed: it may not.
        """
        if type(func) is Served:
            return func.function
        if type(func) is not Rebuilder and self._may_call(func):
            called: Callable[..., Any] = func
            return called
        raise self._refusal(_told(func), func)

    def call(self, content: Any) -> tuple[Callable[..., Any], Any, Any]:
        """Check a call from a peer: function, arguments, keyword arguments.

        Raises:
            NotAllowed: the function may not be called.
        """
        if type(content) is not tuple or len(content) != 3:
            raise NotAllowed("a call does not consist of function, arguments and keyword arguments")
        func, args, kwargs = content
        if type(args) not in (tuple, list) or not (kwargs is None or type(kwargs) is dict):
            raise NotAllowed("the arguments of a call are not a tuple and a dict")
        return self.callee(func), args, kwargs

    def method(self, value: Any, name: str) -> Any:
        """A method of a value or class that a peer may call.

        Raises:
            NotAllowed: it may not.
        """
        kind = value if isinstance(value, type) else type(value)
        if type(name) is not str or name.startswith("_") or not self._may_call_method(kind, name):
            raise self._refusal(f"{name_of(kind)}.{name}", kind, method=True)
        found = getattr(value, name)
        static = inspect.getattr_static(kind, name, None)
        if isinstance(static, _METHODS) and name not in getattr(value, "__dict__", {}):
            return found
        if kind is value and isinstance(found, (FunctionType, MethodType)):
            return found
        # A callable attribute, or one returned by a property.
        return self.callee(found)

    def _may_call(self, func: Any, depth: int = 0) -> bool:
        if isinstance(func, Rebuilder) or depth > _DEEPEST:
            return False
        if type(func) is partial:
            return self._may_call(func.func, depth + 1)
        if isinstance(func, BuiltinFunctionType) and (operator := builtin_name(func)) is not None:
            return self._may_call_operator(operator.rpartition("::")[2], func)
        if self._exported and is_exported(func):
            return True
        if isinstance(func, type):
            return not self._is_raw(func) and (
                self._called.has(func) or _is_in(self._called_as, func)
            )
        if isinstance(func, (MethodType, BuiltinFunctionType)):
            owner = func.__self__
            if owner is not None and not isinstance(owner, ModuleType):
                kind = owner if isinstance(owner, type) else type(owner)
                return self._may_call_method(kind, func.__name__)
        if isinstance(func, (FunctionType, BuiltinFunctionType)):
            if self._called.has(func) or _is_in(self._called_as, func):
                return True
            owner = _class_of(func)
            return owner is not None and self._may_call_method(owner, func.__name__)
        if isinstance(func, torch.jit.ScriptFunction):
            return _is_in(self._called_as, func)
        return callable(func) and self._may_call_method(type(func), "__call__")

    def _may_call_operator(self, name: str, found: Any) -> bool:
        full = f"torch.{name}"
        if full in self._called or (self._exported and is_exported(found)):
            return True
        return self._called.has_module("torch") and not is_unsafe_operator(name)

    def _may_call_method(self, kind: type, name: str) -> bool:
        if name.startswith("_") and name != "__call__":
            return False
        if any(f"{name_of(each)}.{name}" in self._called for each in kind.__mro__):
            return True
        if is_unsafe_method(kind, name, _public_name):
            return False
        if self._called.has(kind):
            return True
        if not self._exported:
            return False
        return any(
            (is_exported(each) and hasattr(each, name)) or is_exported(_function(each, name))
            for each in kind.__mro__
        )

    # -- errors --------------------------------------------------------------------------------------

    def _not_listed(self, full: str, module: str) -> NotAllowed:
        where = f"add it, or its module {module!r}, to the option {self._option} there"
        if self._is_split:
            where += ", or to allowed_modules if it is sent and not called"
        return NotAllowed(f"{self._whose} does not allow {full}: {self._export}{where}")

    def _refusal(self, full: str, found: Any, *, method: bool = False) -> NotAllowed:
        home = None if method else getattr(found, "__module__", None)
        name = getattr(found, "__qualname__", "")
        whose = f", which is {home}.{name}" if home and name and f"{home}.{name}" != full else ""
        return NotAllowed(
            f"{self._whose} does not allow calls of {full}{whose}: {self._export}add it to the option {self._option}"
            " there"
        )


def _public_name(kind: type) -> str:
    return PUBLIC_NAMES.get(kind) or name_of(kind)


def _look_up(found: Any, name: str, full: str) -> Any:
    for depth, part in enumerate(name.split(".")):
        if (depth and not isinstance(found, type)) or part.startswith("__"):
            raise NotAllowed(f"a message refers to {full}: only attributes of classes can be named")
        found = getattr(found, part)
    return found


def _at(found: Any, name: str) -> Any:
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_in(table: dict[int, Any], found: Any) -> bool:
    return table.get(id(found)) is found and found is not None


def _class_of(func: Any) -> type | None:
    """The class of a method or static method; None for other functions."""
    *path, name = func.__qualname__.split(".")
    found: Any = sys.modules.get(func.__module__)
    for part in path:
        found = getattr(found, part, None)
    if path and isinstance(found, type) and _function(found, name) is func:
        return found
    return None


# The types of methods as class attributes.
_METHODS = (
    FunctionType,
    classmethod,
    staticmethod,
    type(str.join),
    type(object.__init__),
    type(dict.__dict__["fromkeys"]),
    BuiltinFunctionType,
)


def _function(kind: type, name: str) -> Any:
    """An attribute of the class itself, unwrapped if it is a class or static method."""
    found = vars(kind).get(name)
    return getattr(found, "__func__", found)


def _told(func: Any) -> str:
    if isinstance(func, Rebuilder):
        return func.name
    home = getattr(func, "__module__", None) or type(func).__module__
    return f"{home}.{getattr(func, '__qualname__', type(func).__qualname__)}"
