"""Methods of tensors, storages and arrays that reach beyond their values. Pure.

They access files, share memory, return or accept addresses, or call functions. With a list of allowed calls, such a
method may be called only if the list names it (``numpy.ndarray.tofile``). Private methods may never be called.
"""

from __future__ import annotations

from collections.abc import Callable


_TENSOR = frozenset(
    {
        # Files, and memory of other processes.
        "share_memory_",
        # Return or accept addresses. ``new`` accepts one as ``cdata``.
        "const_data_ptr",
        "data_ptr",
        "mutable_data_ptr",
        "new",
        # Call a function, now or later.
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
        # Writes memory-mapped files.
        "flush",
        # Reinterpret bytes, free memory that others see, or change flags.
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
# Methods of modules that load, compile, or call functions.
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
# torch's operators that access files.
_OPERATORS = frozenset({"from_file", "save"})


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_unsafe_method(kind: type, method: str, named: Callable[[type], str]) -> bool:
    """Whether a class gets this method from one of the classes above.

    Args:
        named: returns the name of a class; for private base classes in torch, the name of the public one.
    """
    return any(method in _UNSAFE.get(named(each), ()) for each in kind.__mro__)


def makes_from_memory(kind: type, named: Callable[[type], str]) -> bool:
    """Whether a class's constructor accepts addresses, or memory of any shape."""
    for each in kind.__mro__:
        if "__new__" in vars(each):
            return named(each) in _UNSAFE
    return False


def is_unsafe_operator(name: str) -> bool:
    """Whether one of torch's operators (``add``) accesses files."""
    return name in _OPERATORS
