"""Methods of tensors, storages and arrays that reach beyond their values. Pure.

They write or read files, share memory, hand out addresses, take addresses, or call what they are given. A worker with a
list of what may be called has none of them called, unless the list names that very method
(``numpy.ndarray.tofile``). Private methods are not called in any case.
"""

from __future__ import annotations

from collections.abc import Callable


_TENSOR = frozenset(
    {
        # Files, and memory of other processes.
        "share_memory_",
        # Addresses: told, and believed. ``new`` takes one as ``cdata``.
        "const_data_ptr",
        "data_ptr",
        "mutable_data_ptr",
        "new",
        # These call what they are given, or have it called later.
        "apply_",
        "map2_",
        "map_",
        "module_load",
        "register_hook",
        "register_post_accumulate_grad_hook",
    }
)
_STORAGE = frozenset(
    {
        "data_ptr",
        "from_buffer",
        "from_file",
        "new",
        "pickle_storage_type",
        "share_memory_",
    }
)
_ARRAY = frozenset(
    {
        # Files; a pickle of objects.
        "dump",
        "dumps",
        "tofile",
        # A memory-mapped file's.
        "flush",
        # Bytes read as something else, memory given back that others see, marks taken away.
        "getfield",
        "resize",
        "setfield",
        "setflags",
    }
)
_UNSAFE: dict[str, frozenset[str]] = {
    "torch.Tensor": _TENSOR,
    "torch.storage.TypedStorage": _STORAGE,
    "torch.storage.UntypedStorage": _STORAGE,
    "numpy.ndarray": _ARRAY,
    "numpy.generic": _ARRAY,
}
# Modules have methods that load, compile and call.
_UNSAFE["torch.nn.modules.module.Module"] = frozenset(
    {
        "apply",
        "compile",
        "register_backward_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "share_memory",
    }
)
# Operators of torch that read or write files.
_OPERATORS = frozenset({"from_file", "save"})


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_unsafe_method(kind: type, method: str, named: Callable[[type], str]) -> bool:
    """Whether a class has this method from one of those above.

    Args:
        named: the name of a class, for a base class of torch's that of the public one.
    """
    return any(method in _UNSAFE.get(named(each), ()) for each in kind.__mro__)


def makes_from_memory(kind: type, named: Callable[[type], str]) -> bool:
    """Whether a class is made by a constructor that takes addresses, or memory of any shape."""
    for each in kind.__mro__:
        if "__new__" in vars(each):
            return named(each) in _UNSAFE
    return False


def is_unsafe_operator(name: str) -> bool:
    """The same of one of torch's operators (``add``)."""
    return name in _OPERATORS
