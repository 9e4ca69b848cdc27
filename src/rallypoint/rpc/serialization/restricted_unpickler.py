"""Reads a pickle with a list of what it may name, and what may become of that: every instruction that runs code is checked.

Python's own unpickler asks only when something is named, and then calls it, and sets attributes of it, as the message says.
Here a message makes instances of classes on the list, has our own functions put tensors and references together, and
sets attributes of what it has made; nothing else. It is written in Python: some 0.5 µs for each instruction, so
large lists of numbers are better sent as tensors.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rallypoint.errors import NotAllowed
from rallypoint.rpc.torch_private import PythonUnpickler


if TYPE_CHECKING:
    from .allowlist import AllowList

# What a message fills, beside instances of classes on the list.
_CONTAINERS = (list, dict, set)


class RestrictedUnpickler(PythonUnpickler):  # type: ignore[misc]  # it has no types
    """One message.

    Args:
        file: as for pickle's.
        allowed: what it may name, make and call.
        buffers: those that are out of band.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(PythonUnpickler.dispatch)
    # Of the base class, which has no types.
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: Any, allowed: AllowList, buffers: Sequence[Any] = ()) -> None:
        super().__init__(file, buffers=buffers)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        return self._allowed.find(module, name)

    def get_extension(self, code: int) -> None:
        raise NotAllowed(f"a message names something by the number {code} instead of its name")

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
        setstate = getattr(kind, "__setstate__", None)
        if setstate is not None:
            if isinstance(made, BaseException):
                # Python's own sets whatever attributes it is told.
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

    def check_container(self, container: Any) -> None:
        if type(container) not in _CONTAINERS:
            self._allowed.class_to_fill(container)


def _filling(name: str, depth: int = 0) -> Callable[[Any], None]:
    """An instruction that fills a container, which lies so deep in the stack; 0: below the last mark."""
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
    """Whether a message may set these: no names of Python's own, which change what an object is."""
    if not isinstance(state, Mapping):
        raise NotAllowed("the attributes of an object are not a dict")
    for name in state:
        if type(name) is not str or (name.startswith("__") and name not in _HARMLESS):
            raise NotAllowed(f"a message sets the attribute {name!r}, which is reserved for Python")


# Notes of an exception.
_HARMLESS = ("__notes__",)
