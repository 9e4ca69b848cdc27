"""Pickling of messages, with tensors and remote references beside the pickle.

Functions and classes are sent by name (``module.qualname``), as in torch: both ends must have the code. With
``by_value``, cloudpickle also sends lambdas, closures, and definitions in ``__main__`` as code.

Unpickling can execute arbitrary code. Only messages of peers that know the job's secret are unpickled, and an allow-list
can restrict the names in them.
"""

from __future__ import annotations

import io
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch

from rallypoint._core import code_files
from rallypoint.rpc import torch_private
from rallypoint.wire.frames import check

from .allowlist import AllowList
from .cuda_ipc import salvage
from .out_of_band import LEAST_CUT, assemble, has_table, load, reduce_view
from .restricted_unpickler import RestrictedUnpickler
from .script import (
    check_with,
    load_script_function,
    load_torch_function,
    rebuild_script_module,
    saved_script_module,
)
from .tensor_reader import TensorReader, read_with, unpack
from .tensor_writer import Devices, TensorWriter, pack, refuse_stand_in


# How our picklers reduce objects of a type: (pickler, object) -> what __reduce__ would return.
Reducer = Callable[["Writer", Any], Any]
_REDUCERS: dict[type, Reducer] = {}

Payload = bytes | bytearray | memoryview

# Types that need no reducer.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TEXTS = frozenset({str, bytes})
_EMPTY_CALLS: dict[Any, bytes] = {}
_MOST_CACHED = 4096
# A payload or a single buffer of up to this many bytes is always within the limits, and not checked.
_CHECKED = 1 << 16


def register_reducer(kind: type, reducer: Reducer) -> None:
    """Set the reducer for objects of exactly this type."""
    _REDUCERS[kind] = reducer


class Records(Protocol):
    def record(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The context of a tensor that is sent, and its number there."""

    def reduce(self, tensor: torch.Tensor) -> Any:
        """As ``__reduce__``."""


class Writer(pickle.Pickler):
    """Pickles one message.

    Attributes:
        to: the receiver's id, or None where that does not matter.
        tensors: its buffers.
        forks: its remote references.
        recorder: reduces the tensors that require a gradient, within a context of distributed autograd.
        in_modules: with a recorder, the parameters of the modules reached so far, by ``id``.
    """

    def __init__(
        self, file: Any, to: int | None, devices: Devices | None, *, apart: bool = True
    ) -> None:
        self.tensors = tensors = TensorWriter(devices)
        super().__init__(file, 5, True, tensors.take if apart else None)
        self.to = to
        self.recorder: Records | None = None
        self.in_modules: dict[int, torch.nn.Parameter] = {}
        self.forks = tensors.forks

    def reducer_override(self, obj: Any) -> Any:
        reducer = _REDUCERS.get(type(obj))
        if reducer is None:
            _look_at(self, obj)
            return NotImplemented
        return reducer(self, obj)


def _look_at(writer: Writer, obj: Any) -> None:
    """Look at an object without a reducer before it is pickled."""
    if isinstance(obj, torch.Tensor):
        refuse_stand_in(obj)
    elif writer.recorder is not None and isinstance(obj, torch.nn.Module):
        # Not the object's own methods: those of a RemoteModule raise an error.
        own = torch.nn.Module.named_parameters(obj, recurse=False)
        writer.in_modules.update((id(each), each) for _, each in own)


_by_value_class: type | None = None


def _by_value() -> type:
    """:class:`Writer` over cloudpickle, which is imported only when needed."""
    global _by_value_class  # noqa: PLW0603
    if _by_value_class is None:
        import cloudpickle

        class ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
            dispatch_table = code_files.keeping(cloudpickle.Pickler.dispatch_table)

            def __init__(self, file: Any, to: int | None, devices: Devices | None) -> None:
                self.tensors = tensors = TensorWriter(devices)
                super().__init__(file, 5, tensors.take)
                self.to = to
                self.recorder: Records | None = None
                self.in_modules: dict[int, torch.nn.Parameter] = {}
                self.forks = tensors.forks

            def reducer_override(self, obj: Any) -> Any:
                reducer = _REDUCERS.get(type(obj))
                if reducer is None:
                    _look_at(self, obj)
                    return super().reducer_override(obj)
                return reducer(self, obj)

        _by_value_class = ByValue
    return _by_value_class


def dumps(
    obj: Any,
    *,
    to: int | None = None,
    devices: Devices | None = None,
    by_value: bool = False,
    until: float | None = None,
    recorder: Records | None = None,
) -> tuple[bytes, TensorWriter]:
    """Pickle a message for a peer.

    Args:
        recorder: reduces tensors that require a gradient.
        until: give up at this time, in monotonic seconds.

    Raises:
        MessageTooLarge: it is larger than a peer accepts.
        TooSlow: it was not done by ``until``.
        Exception: an object cannot be pickled.
    """
    if type(obj) in _PLAIN and not _is_long(obj):
        return _dump_plain(obj), _NO_TENSORS
    file = _Pieces() if until is None else _PiecesInTime(until)
    writer = (_by_value() if by_value else Writer)(file, to, devices)
    writer.recorder = recorder
    try:
        writer.dump(obj)
        buffers = writer.tensors.buffers
        payload = assemble(file, writer.tensors.out_of_band, buffers)
        if len(payload) > _CHECKED or (
            buffers and (len(buffers) > 1 or buffers[0].nbytes > _CHECKED)
        ):
            check(len(payload), buffers)
    except BaseException as error:
        unsent(writer.tensors)
        _explain(error)
        raise
    return payload, writer.tensors


class TooSlow(Exception):
    """A message was not pickled in time."""


_NO_TENSORS = TensorWriter()


class _Pieces(list[Any]):
    """A file that keeps the written pieces, without copies."""

    __slots__ = ()
    write = list.append


class _PiecesInTime(_Pieces):
    """As :class:`_Pieces`, with a time limit."""

    __slots__ = ("_until",)

    def __init__(self, until: float) -> None:
        self._until = until

    def write(self, piece: Any) -> None:
        if time.monotonic() > self._until:
            raise TooSlow
        self.append(piece)


def _is_long(plain: Any) -> bool:
    """Whether a plain value becomes a separate buffer."""
    return type(plain) in _TEXTS and len(plain) >= LEAST_CUT


def dumps_whole(content: object) -> bytes:
    """Pickle builtin types in one piece, whatever the size.

    Raises:
        MessageTooLarge: it is larger than a peer accepts.
    """
    return _dump_plain(content)


def _explain(error: BaseException) -> None:
    """Add advice to a pickling error."""
    if type(error) not in (AttributeError, TypeError, pickle.PicklingError) or len(error.args) != 1:
        return
    text = str(error)
    if "local object" in text or "<lambda>" in text or "not the same object" in text:
        advice = (
            "functions and classes are sent by name; define it at the top level of a module that both workers can"
            " import, or give this worker the option pickle_by_value=True"
        )
    elif "cannot pickle" in text:
        advice = (
            "it exists only in this process; send the data to create it from, or create it on the other worker and use a"
            " reference (rpc.remote)"
        )
    else:
        return
    error.args = (f"{text}: {advice}",)


def _dump_plain(content: object) -> bytes:
    """Pickle an object that needs no reducer."""
    try:
        payload = pickle.dumps(content, 5)
    except BaseException as error:
        _explain(error)
        raise
    if len(payload) > _CHECKED:
        check(len(payload), ())
    return payload


_on_unsent: Callable[[list[Any]], None] = lambda _: None  # noqa: E731


def when_unsent(act: Callable[[list[Any]], None]) -> None:
    """Set the function that takes back the remote references of a message that is not sent."""
    global _on_unsent  # noqa: PLW0603  # set once, by the module that knows such references
    _on_unsent = act


def unsent(tensors: TensorWriter | None) -> None:
    """Release the references and memory of a pickled message that is not sent."""
    if tensors is None:
        return
    if tensors.forks:
        forks, tensors.forks = tensors.forks, []
        _on_unsent(forks)
    if tensors.parcels:
        parcels, tensors.parcels = tensors.parcels, None
        for each in parcels:
            each.take_back()


def known_call(content: tuple[Any, ...]) -> bytes | None:
    """The cached payload of a call without arguments."""
    if content[1] or content[2]:
        return None
    try:
        return _EMPTY_CALLS.get(content[0])
    except TypeError:
        return None


def packed_call(
    content: tuple[Any, ...], recorder: Records | None = None, context_id: int | None = None
) -> tuple[bytes, TensorWriter | None] | None:
    """Payload and buffers of a call whose arguments are plain values or ordinary tensors (``FLAG_PACKED``); else None.

    Args:
        recorder: records the tensors that require a gradient.
        context_id: the call's context, with a recorder.

    Raises:
        MessageTooLarge: it is larger than a peer accepts.
    """
    func, args, kwargs = content
    if kwargs or not args or type(func) is not _FUNCTION:
        return None  # calls without arguments are cached
    large: list[torch.UntypedStorage] = []
    packed = _pack_all(args, large)
    if packed is None:
        return None
    if recorder is not None:
        # Only now is it certain that they are sent.
        for at, each in enumerate(args):
            if type(each) is _TENSOR and each.requires_grad:
                packed[at] = packed[at][:3] + recorder.record(each)
        payload = _dump_plain((context_id, (func, packed, None)))
    else:
        payload = _dump_plain((func, packed, None))
    return payload, _buffers_of(payload, large) if large else None


def packed_result(
    result: Any, recorder: Records | None = None
) -> tuple[bytes, TensorWriter | None] | None:
    """As :func:`packed_call`, for a function's result: a tensor, or a tuple of tensors and plain values."""
    if type(result) is tuple and recorder is None:
        return _packed_tuple(result)
    if type(result) is not _TENSOR:
        return None
    large: list[torch.UntypedStorage] = []
    data: tuple[Any, ...] | None = pack(result, large)
    if data is None:
        return None
    if recorder is not None and result.requires_grad:
        data = data[:3] + recorder.record(result)
    payload = pickle.dumps(data, 5)
    return payload, _buffers_of(payload, large) if large else None


def _packed_tuple(result: tuple[Any, ...]) -> tuple[bytes, TensorWriter | None] | None:
    if not any(type(each) is _TENSOR for each in result):
        return None
    large: list[torch.UntypedStorage] = []
    packed = _pack_all(result, large)
    if packed is None:
        return None
    payload = _dump_plain(packed)
    return payload, _buffers_of(payload, large) if large else None


def _pack_all(values: Sequence[Any], large: list[torch.UntypedStorage]) -> list[Any] | None:
    """Plain values and ordinary tensors as plain data; None if there is anything else."""
    packed: list[Any] = []
    places: list[int] = []
    for each in values:
        kind = type(each)
        if kind is _TENSOR:
            data = pack(each, large)
            if data is None:
                return None
            places.append(each.data_ptr())
            packed.append(data)
        elif kind in _PLAIN:
            if kind in _TEXTS and len(each) >= LEAST_CUT:
                return None
            packed.append(each)
        else:
            return None
    # Tensors that share memory must also share it at the receiver.
    return packed if len(places) < 2 or len(set(places)) == len(places) else None


def _buffers_of(payload: bytes, storages: list[torch.UntypedStorage]) -> TensorWriter:
    tensors = TensorWriter.of(storages)
    check(len(payload), tensors.buffers)
    return tensors


def unpacked(content: Any, buffers: Sequence[Any], sender: int) -> Any:
    """The inverse of :func:`packed_call` and :func:`packed_result`."""
    if type(content) is list:
        return tuple(_unpacked_all(content, buffers, sender))
    if len(content) == 3:
        func, packed, kwargs = content
        return func, tuple(_unpacked_all(packed, buffers, sender)), kwargs
    return _unpacked(content, buffers, sender)


def _unpacked_all(packed: Any, buffers: Sequence[Any], sender: int) -> list[Any]:
    return [_unpacked(each, buffers, sender) if type(each) is tuple else each for each in packed]


def _unpacked(packed: Any, buffers: Sequence[Any], sender: int) -> torch.Tensor:
    if len(packed) == 4:
        return unpack(packed, buffers)
    *plain, context_id, number = packed
    return _receive(context_id, number, unpack((*plain, False), buffers), sender)


_receive: Callable[[int, int, torch.Tensor, int], torch.Tensor]


def receive_with(act: Callable[[int, int, torch.Tensor, int], torch.Tensor]) -> None:
    """Set the function that connects a recorded tensor on arrival. It takes context, number, tensor and sender."""
    global _receive  # noqa: PLW0603  # set once, by the module that knows contexts
    _receive = act


_TENSOR = torch.Tensor


def dumps_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    *,
    to: int | None = None,
    devices: Devices | None = None,
    by_value: bool = False,
    until: float | None = None,
) -> tuple[bytes, TensorWriter | None]:
    """Pickle a call: :func:`dumps` with fast paths for small ones."""
    if not kwargs and not by_value:
        if not args:
            try:
                known = _EMPTY_CALLS.get(func)
            except TypeError:
                known = None
            if known is not None:
                return known, None
            payload, tensors = dumps((func, (), None), to=to, devices=devices)
            if hasattr(func, "__qualname__") and len(_EMPTY_CALLS) < _MOST_CACHED:
                _remember(func, payload, tensors)
            return payload, tensors
        if type(func) is _FUNCTION:
            for each in args:
                if type(each) not in _PLAIN or _is_long(each):
                    break
            else:
                return _dump_plain((func, args, None)), None
    return dumps(
        (func, args, kwargs or None), to=to, devices=devices, by_value=by_value, until=until
    )


_FUNCTION = type(dumps)


def _remember(func: Any, payload: bytes, tensors: TensorWriter) -> None:
    # The pickle of a plain function is always the same; that of a bound method contains its object's state.
    if type(func) is _FUNCTION and not tensors.buffers:
        _EMPTY_CALLS[func] = payload


# -- unpickling ------------------------------------------------------------------------------------


class _Reading(threading.local):
    reader: TensorReader | None = None
    sender: int | None = None
    forks: list[Any] | None = None
    allowed: AllowList | None = None


_current = _Reading()


def _current_reader() -> TensorReader:
    reader = _current.reader
    if reader is None:
        raise pickle.UnpicklingError("this pickle is part of a message, and cannot be read alone")
    return reader


read_with(_current_reader, lambda: _current.allowed is not None)


# Received calls without arguments: by payload, the call, and the namespace and name of its function.
_KNOWN_CALLS: dict[bytes, tuple[tuple[Any, tuple[()], None], dict[str, Any], str]] = {}
_MOST_KNOWN = 256  # bytes of a payload that is remembered


def loads_call(payload: Payload, sender: int) -> Any:
    """Unpickle a call without buffers: :func:`loads` with a fast path for calls without arguments."""
    if len(payload) > _MOST_KNOWN:
        return loads(payload, sender=sender)
    payload = bytes(payload)
    known = _KNOWN_CALLS.get(payload)
    if known is not None:
        content, namespace, name = known
        # The name may mean another function by now.
        if namespace.get(name) is content[0]:
            return content
    content = loads(payload, sender=sender)
    if type(content) is tuple and len(content) == 3:
        func: object = content[0]
        _, args, kwargs = content
        if isinstance(func, FunctionType) and args == () and kwargs is None:
            name = func.__qualname__
            namespace = func.__globals__
            if namespace.get(name) is func and len(_KNOWN_CALLS) < _MOST_CACHED:
                _KNOWN_CALLS[payload] = content, namespace, name
    return content


def checked(allowed: AllowList) -> Callable[[bytes], Any]:
    """A function that unpickles nested payloads under the allow-list."""
    return lambda payload: loads(payload, allowed=allowed)


check_with(lambda: _current.allowed)


def current_forks() -> list[Any] | None:
    """The list that collects the remote references of the message that this thread is unpickling."""
    return _current.forks


def current_sender() -> int | None:
    """The sender of the message that this thread is unpickling."""
    return _current.sender


def loads(
    payload: bytes | bytearray | memoryview,
    buffers: Sequence[Any] = (),
    *,
    sender: int | None = None,
    allowed: AllowList | None = None,
    forks: list[Any] | None = None,
) -> Any:
    """Unpickle a message.

    Args:
        buffers: the memory of its tensors.
        sender: the sender's id.
        allowed: the names that it may contain; None: any.
        forks: its remote references are appended.

    Raises:
        NotAllowed: it contains another name.
        Exception: whatever unpickling raises.
    """
    current = _current
    before = current.reader, current.sender, current.forks
    current.reader, current.sender, current.forks = TensorReader(buffers), sender, forks
    try:
        if allowed is not None:
            outer, current.allowed = current.allowed, allowed
            try:
                if has_table(payload):

                    def careful(file: Any, *, buffers: Sequence[Any]) -> RestrictedUnpickler:
                        return RestrictedUnpickler(file, allowed, buffers)

                    return load(payload, buffers, careful)
                return RestrictedUnpickler(io.BytesIO(payload), allowed).load()
            finally:
                current.allowed = outer
        if has_table(payload):
            return load(payload, buffers)
        return pickle.loads(payload)  # noqa: S301  # the sender has proved the job's secret
    except BaseException:
        salvage(payload, buffers)
        raise
    finally:
        current.reader, current.sender, current.forks = before


def _reduce_tensor(writer: Writer, tensor: torch.Tensor) -> Any:
    if writer.recorder is not None and tensor.requires_grad:
        return writer.recorder.reduce(tensor)
    return writer.tensors.reduce(tensor)


def _reduce_parameter(writer: Writer, parameter: torch.nn.Parameter) -> Any:
    if (
        writer.recorder is not None
        and parameter.requires_grad
        # A module arrives with parameters of its own, as a copy that can be trained.
        and id(parameter) not in writer.in_modules
    ):
        return writer.recorder.reduce(parameter)
    return writer.tensors.reduce_parameter(parameter)


def refuse_future(_: Writer, __: Any) -> Any:
    raise RuntimeError(
        "Can not pickle torch.futures.Future: a future belongs to its process; wait for it, or return it from"
        " a function with @async_execution"
    )


def _reduce_script(writer: Writer, function: Any) -> Any:
    del writer
    return load_script_function, torch_private.script_name(function)


def _reduce_script_module(writer: Writer, module: Any) -> Any:
    del writer
    return rebuild_script_module, (saved_script_module(module),)


def _reduce_builtin(writer: Writer, function: Any) -> Any:
    del writer
    name = function.__name__
    if getattr(torch, name, None) is function:
        return load_torch_function, (name,)
    return NotImplemented


def _reduce_view(_: Writer, view: memoryview) -> Any:
    return reduce_view(view)


register_reducer(memoryview, _reduce_view)
register_reducer(type(torch.add), _reduce_builtin)
register_reducer(torch.jit.ScriptFunction, _reduce_script)
# The types that torch.jit.script and torch.jit.load return, and the one that torch.jit.trace returns.
register_reducer(torch.jit.RecursiveScriptModule, _reduce_script_module)  # type: ignore[attr-defined]
register_reducer(torch.jit.TopLevelTracedModule, _reduce_script_module)  # type: ignore[attr-defined]
register_reducer(torch.Tensor, _reduce_tensor)
register_reducer(torch.nn.Parameter, _reduce_parameter)
# ``then`` returns the native class.
register_reducer(torch.futures.Future, refuse_future)
register_reducer(torch_private.NativeFuture, refuse_future)
