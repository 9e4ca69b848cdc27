"""Unpickling under an allow-list: every instruction that can run code is checked.

Python's unpickler only lets a subclass check names; a pickle may then call what it has named and set its attributes.
Here a message can only create instances of listed classes, have this package's functions rebuild tensors and references,
and set attributes of the objects it has created. This unpickler is written in Python and takes about 0.5 µs per
instruction, so large lists of numbers are better sent as tensors.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rallypoint.errors import NotAllowed
from rallypoint.rpc.torch_private import PythonUnpickler

from . import numpy_dtypes


if TYPE_CHECKING:
    from .allowlist import AllowList

# Containers that a message may fill, besides instances of listed classes.
_CONTAINERS = (list, dict, set)


class RestrictedUnpickler(PythonUnpickler):  # type: ignore[misc]  # it has no types
    """Reads one message.

    Args:
        file, buffers: as for ``pickle.Unpickler``.
        allowed: checks what the message names, creates and calls.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(PythonUnpickler.dispatch)
    # Attributes of the untyped base class.
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: Any, allowed: AllowList, buffers: Sequence[Any] = ()) -> None:
        super().__init__(file, buffers=buffers)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        return self._allowed.find(module, name)

    def get_extension(self, code: int) -> None:
        raise NotAllowed(f"a message refers to an object by the number {code} instead of its name")

    def _instantiate(self, kind: Any, args: Any) -> None:
        self.stack.append(self._allowed.class_to_make(kind)(*args))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._allowed.rebuilder(self.stack[-1])(*_tuple(args))

    def new(self) -> None:
        args = self.stack.pop()
        kind = self._allowed.class_to_make(self.stack[-1])
        self.stack[-1] = kind.__new__(kind, *_tuple(args))

    def new_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        kind = self._allowed.class_to_make(self.stack[-1])
        if type(kwargs) is not dict:
            raise NotAllowed("the keyword arguments of a class are not a dict")
        self.stack[-1] = kind.__new__(kind, *_tuple(args), **kwargs)

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        kind = self._allowed.class_to_fill(made)
        if numpy_dtypes.is_dtype(made):
            self._replace(made, state)
            return
        setstate = getattr(kind, "__setstate__", None)
        if setstate is not None:
            if isinstance(made, BaseException):
                # BaseException.__setstate__ sets any attribute.
                _check_attributes(state or {})
            setstate(made, state)
            return
        slots: Any = None
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        if state:
            _check_attributes(state)
            vars(made).update({sys.intern(name): value for name, value in state.items()})
        if slots:
            _check_attributes(slots)
            for name, value in slots.items():
                setattr(made, name, value)

    def _replace(self, made: Any, state: Any) -> None:
        """A dtype is not filled: another one takes its place, including in later references."""
        try:
            found = numpy_dtypes.rebuilt(made, state)
        except numpy_dtypes.BadDtype as error:
            raise NotAllowed(f"a message has a dtype that NumPy would not make: {error}") from None
        self.stack[-1] = found
        for key in [key for key, value in self.memo.items() if value is made]:
            self.memo[key] = found

    def check_container(self, container: Any) -> None:
        if type(container) not in _CONTAINERS:
            self._allowed.class_to_fill(container)


def _filling(name: str, depth: int = 0) -> Callable[[Any], None]:
    """A checked instruction that fills the container at this depth of the stack; 0: below the last mark."""
    fill: Callable[[Any], None] = getattr(PythonUnpickler, name)

    def checked(reader: RestrictedUnpickler) -> None:
        reader.check_container(reader.stack[depth] if depth else reader.metastack[-1][-1])
        fill(reader)

    return checked


_instructions = RestrictedUnpickler.dispatch
_instructions[pickle.REDUCE[0]] = RestrictedUnpickler.reduce
_instructions[pickle.NEWOBJ[0]] = RestrictedUnpickler.new
_instructions[pickle.NEWOBJ_EX[0]] = RestrictedUnpickler.new_ex
_instructions[pickle.BUILD[0]] = RestrictedUnpickler.build
_instructions[pickle.APPEND[0]] = _filling("load_append", -2)
_instructions[pickle.APPENDS[0]] = _filling("load_appends")
_instructions[pickle.SETITEM[0]] = _filling("load_setitem", -3)
_instructions[pickle.SETITEMS[0]] = _filling("load_setitems")
_instructions[pickle.ADDITEMS[0]] = _filling("load_additems")


def _tuple(args: Any) -> tuple[Any, ...]:
    if type(args) is not tuple:
        raise NotAllowed("the arguments of a function or class are not a tuple")
    return args


def _check_attributes(state: Any) -> None:
    """Refuse attributes that are reserved for Python, such as ``__class__``."""
    if not isinstance(state, Mapping):
        raise NotAllowed("the attributes of an object are not a dict")
    for name in state:
        if type(name) is not str or (name.startswith("__") and name not in _HARMLESS):
            raise NotAllowed(f"a message sets the attribute {name!r}, which is reserved for Python")


_HARMLESS = ("__notes__",)
