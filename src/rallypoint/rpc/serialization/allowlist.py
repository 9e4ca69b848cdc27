"""What a message may name where a worker keeps a list (options ``allowed_modules``, ``allowed_calls``, ``exported_only``).

There are two lists. What may be *rebuilt* is made while a message is read: instances of classes, mostly. What may be *called* is
the function of a call, or a method of a value that lives here. A name must lead to something that the list means, and not
only begin in a module that is on it:

- a path goes through classes only: ``module.os.system`` and ``module.function.__globals__`` are no names of the module;
- what a module has imported from elsewhere is elsewhere's;
- a method is called if it is public, of a class that may be called, and not one of those that reach beyond their
  object (:mod:`.unsafe_methods`);
- our own functions, of which messages are made, put tensors and references together (:class:`Rebuilder`) or do what the
  package's own calls ask (:class:`Served`). They are no functions to whoever reads the message, and cannot be passed on.

It holds for what callers send and for what those answer who are called: values, items of streams, exceptions. Tensors, arrays,
references and the exceptions of Python and of this package need no entry. How a message is read is in :mod:`.restricted_unpickler`.

A list is as narrow as what is on it: who lists ``torch`` has listed ``torch.load``.
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


# How much a chain of partials may hold.
_DEEPEST = 16


class Rebuilder:
    """A function that only the reading of a message calls. To everybody else it is nothing that can be called."""

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
        """A class or a function, by where it is at home."""
        home: str | None = found.__module__
        full = f"{home}.{found.__qualname__}"
        return full in self._names or (home is not None and self.has_module(home))


class AllowList:
    """What one worker allows.

    Args:
        rebuilt: ``package.module``, for all that it and what is below it define; ``module.name`` for one thing.
        called: the same of functions and of classes whose methods are called; None: what may be rebuilt. With it, functions
            in ``rebuilt`` run while a message is read only if they are named one by one.
        exported: functions and classes with ``@rpc.export`` may be called, too, and what may be rebuilt is not called.
        worker: whose list it is, for errors.
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
        # For errors: what makes something callable.
        self._option = "allowed_calls" if self._is_split else "allowed_modules"
        self._export = "mark it with @rpc.export, or " if exported else ""
        self._instead: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", "getattr"): self.method,
            ("rallypoint.rpc.serialization.tensor_reader", "rebuild_saved"): rebuild_weights,
        }
        # What was found under a name, and what a message got of it.
        self._known: dict[tuple[str, str], tuple[Any, Any]] = {}
        # What was named, and is at home elsewhere or does not tell: by whose name it may be called, or rebuilt.
        self._called_as: dict[int, Any] = {}
        self._rebuilt_as: dict[int, Any] = {}

    # -- what a message names ------------------------------------------------------------------------

    def find(self, module: str, name: str) -> Any:
        """What a message names.

        Raises:
            NotAllowed: it may not.
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
        """What is there, and what the message gets of it."""
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
            # What is exported is there already: no module is imported for a name, and none makes things up for one.
            found = _look_up(sys.modules[module], name, full)
        else:
            raise self._not_listed(full, module)
        if isinstance(found, ModuleType):
            raise NotAllowed(f"a message names the module {full}: modules cannot be sent")
        tells = isinstance(found, (type, FunctionType)) or (
            isinstance(found, BuiltinFunctionType) and found.__module__ is not None
        )
        if full in self._called or (is_called and not tells):
            self._called_as[id(found)] = found
        if full in self._rebuilt or (is_rebuilt and not tells):
            self._rebuilt_as[id(found)] = found
        return found, self._given(full, found, is_rebuilt=is_rebuilt)

    def _given(self, full: str, found: Any, *, is_rebuilt: bool) -> Any:
        """As what the message gets it."""
        if self._may_call(found):
            return found
        if isinstance(found, type):
            if self._rebuilds(found):
                return found
        elif isinstance(found, (FunctionType, BuiltinFunctionType)):
            if self._rebuilds_by(found):
                return Rebuilder(full, found)
        elif is_rebuilt and not isinstance(found, torch.jit.ScriptFunction):
            # A value that its module holds.
            return found
        raise self._refusal(full, found)

    def check_operator(self, name: str) -> None:
        """Whether a message may name one of torch's operators.

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

    # -- while a message is read -----------------------------------------------------------------------

    def rebuilder(self, func: Any) -> Callable[..., Any]:
        """A function or a class, to be called with what a message says.

        Raises:
            NotAllowed: it is none for that.
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
        """A class, of which a message makes an instance.

        Raises:
            NotAllowed: it may not.
        """
        if isinstance(kind, type) and self._rebuilds(kind) and not self._is_raw(kind):
            return kind
        raise self._no_listed_class(f"an object of {_told(kind)}")

    def class_to_fill(self, made: Any) -> type:
        """The class of an object whose attributes or items a message sets.

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
        # Each type of element has a class of its own.
        return any(name_of(each) == "numpy.dtype" for each in kind.__mro__)

    def _rebuilds_by(self, func: Any) -> bool:
        """Whether a function may run while a message is read."""
        if _is_in(self._rebuilt_as, func):
            return True
        if self._is_split:
            # A list of calls would be worth nothing if a module's functions were called here.
            return f"{func.__module__}.{func.__qualname__}" in self._rebuilt
        return self._rebuilt.has(func)

    def _is_raw(self, kind: type) -> bool:
        return (
            makes_from_memory(kind, _public_name) and f"{name_of(kind)}.__new__" not in self._called
        )

    # -- calls ---------------------------------------------------------------------------------------

    def callee(self, func: Any) -> Callable[..., Any]:
        """What a peer wants to have called.

        Raises:
            NotAllowed: it may not be.
        """
        if type(func) is Served:
            return func.function
        if type(func) is not Rebuilder and self._may_call(func):
            called: Callable[..., Any] = func
            return called
        raise self._refusal(_told(func), func)

    def call(self, content: Any) -> tuple[Callable[..., Any], Any, Any]:
        """A call as a peer has sent it: the function, its arguments, those by name.

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
        """A method of a value, or of a class, to be called.

        Raises:
            NotAllowed: it may not be.
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
        # A callable that it holds, or that a property returns.
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

    # -- in words ------------------------------------------------------------------------------------

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
            raise NotAllowed(f"a message names {full}: only attributes of classes can be named")
        found = getattr(found, part)
    return found


def _at(found: Any, name: str) -> Any:
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_in(table: dict[int, Any], found: Any) -> bool:
    return table.get(id(found)) is found and found is not None


def _class_of(func: Any) -> type | None:
    """The class whose method or static method a function is; None if it is none's."""
    *path, name = func.__qualname__.split(".")
    found: Any = sys.modules.get(func.__module__)
    for part in path:
        found = getattr(found, part, None)
    if path and isinstance(found, type) and _function(found, name) is func:
        return found
    return None


# What is found in a class under the name of one of its methods.
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
    """What a class itself has under a name, without what methods are wrapped in."""
    found = vars(kind).get(name)
    return getattr(found, "__func__", found)


def _told(func: Any) -> str:
    if isinstance(func, Rebuilder):
        return func.name
    home = getattr(func, "__module__", None) or type(func).__module__
    return f"{home}.{getattr(func, '__qualname__', type(func).__qualname__)}"
