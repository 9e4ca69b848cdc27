"""RPC backends by name: built-in, torch's TensorPipe, registered, and plug-ins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, ClassVar, NamedTuple

from . import constants
from .options import RpcBackendOptions


# Entry points for third-party backends: name = "module:object", with the two handlers as attributes.
GROUP = "rallypoint.rpc_backends"


class BackendValue(NamedTuple):
    """How a backend creates its options and its agent.

    Args:
        construct_rpc_backend_options_handler: called with ``rpc_timeout``, ``init_method`` and the user's other
            arguments; returns the options.
        init_backend_handler: called with ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``; returns the agent.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _Backends(type):
    """Backends are attributes and items of ``BackendType``, like the members of an enum that can grow.

    torch creates a new enum for each registration, to which existing members no longer belong.
    """

    _members: ClassVar[dict[str, BackendType]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __getattr__(cls, name: str) -> BackendType:
        if not name.startswith("_"):
            member = cls._find(name)
            if member is not None:
                return member
        raise AttributeError(f"there is no RPC backend {name!r} (known: {', '.join(cls.names())})")

    def __getitem__(cls, name: str) -> BackendType:
        member = cls._find(name)
        if member is None:
            raise KeyError(f"there is no RPC backend {name!r} (known: {', '.join(cls.names())})")
        return member

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, member: object) -> bool:
        return isinstance(member, BackendType)

    @property
    def __members__(cls) -> dict[str, BackendType]:
        return dict(cls._members)

    def names(cls) -> list[str]:
        """The names of all available backends."""
        return sorted({*cls._members, *(each.name for each in entry_points(group=GROUP))})

    def _find(cls, name: str) -> BackendType | None:
        with cls._lock:
            member = cls._members.get(name)
            if member is None:
                for entry in entry_points(group=GROUP, name=name):
                    loaded = entry.load()
                    return cls._add(
                        name,
                        loaded.construct_rpc_backend_options_handler,
                        loaded.init_backend_handler,
                    )
            return member

    def _add(
        cls, name: str, construct: Callable[..., Any], init: Callable[..., Any]
    ) -> BackendType:
        member = object.__new__(BackendType)
        member.name = name
        member.value = BackendValue(construct, init)
        cls._members[name] = member
        return member


class BackendType(metaclass=_Backends):
    """A backend. ``BackendType.RALLYPOINT``, ``BackendType["TENSORPIPE"]``.

    Attributes:
        name: the registered name.
        value: its two handlers.
    """

    name: str
    value: BackendValue

    def __new__(cls, name: str) -> BackendType:  # noqa: PYI034  # there is no other class of them
        return cls[name]

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return BackendType, (self.name,)


def backend_registered(backend_name: str) -> bool:
    """Whether a backend exists: built-in, registered or installed as a plug-in.

    Args:
        backend_name: its name in ``BackendType``.

    Returns:
        True if it exists.
    """
    return BackendType._find(backend_name) is not None


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Add a backend. Existing members of ``BackendType`` stay valid.

    Args:
        backend_name: its name in ``BackendType``.
        construct_rpc_backend_options_handler, init_backend_handler: as in :class:`BackendValue`.

    Returns:
        The new member, for ``init_rpc(backend=…)``.

    Raises:
        RuntimeError: a backend of this name exists.
    """
    with BackendType._lock:
        if backend_registered(backend_name):
            raise RuntimeError(f"RPC backend {backend_name}: already registered")
        return BackendType._add(
            backend_name, construct_rpc_backend_options_handler, init_backend_handler
        )


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Create the options of a backend.

    Args:
        backend: the backend.
        rpc_timeout: default timeout of calls in seconds; 0: no limit.
        init_method: where the members meet, as in ``torch.distributed.init_process_group``.
        **kwargs: further options of this backend.

    Returns:
        Options for ``init_rpc(rpc_backend_options=…)``.
    """
    made: RpcBackendOptions = backend.value.construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **kwargs
    )
    return made


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Create the agent of a backend. Blocks until the group is complete. ``init_rpc`` calls this.

    Args:
        backend: the backend.
        args, kwargs: what its ``init_backend_handler`` takes: ``store``, ``name``, ``rank``, ``world_size``,
            ``rpc_backend_options``.

    Returns:
        The agent, which does not serve calls yet.
    """
    return backend.value.init_backend_handler(*args, **kwargs)
