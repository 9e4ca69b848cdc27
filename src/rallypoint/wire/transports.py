"""Transports by name: built-in ones, those a program registers, and installed plug-ins."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from rallypoint.errors import ConfigError

from . import memory, tcp, uds
from .transport import Transport


# A plug-in is an entry point of this group: its name is the transport's, its object a Transport.
GROUP = "rallypoint.transports"
_transports = {each.kind: each for each in (memory.TRANSPORT, uds.TRANSPORT, tcp.TRANSPORT)}
# What a worker uses unless it is told otherwise, best first.
DEFAULT = tuple(_transports)


def register_transport(transport: Transport) -> None:
    """Make a transport known, for ``NativeRpcBackendOptions(transports=...)``. Registering it again does nothing.

    Every worker of the group that should use it must register it. Plug-ins need not: see
    :doc:`/plugins`.

    Args:
        transport: what to add.

    Raises:
        ConfigError: another transport has this kind.
    """
    if _transports.setdefault(transport.kind, transport) != transport:
        raise ConfigError(
            "transport", transport.kind, "another transport has this kind", "give it another kind"
        )


def known() -> list[str]:
    """The kinds of all transports."""
    return [
        *_transports,
        *sorted({each.name for each in entry_points(group=GROUP)} - {*_transports}),
    ]


def find(kind: str) -> Transport:
    """A transport by its kind. Imports a plug-in when it is first asked for.

    Raises:
        ConfigError: there is no such transport, or its plug-in cannot be used.
    """
    if kind not in _transports:
        for point in entry_points(group=GROUP, name=kind):
            _transports[kind] = _load(kind, point)
            break
        else:
            raise ConfigError("transports", kind, f"expected some of {', '.join(known())}")
    return _transports[kind]


def _load(kind: str, point: EntryPoint) -> Transport:
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(
            "transports",
            kind,
            f"its plug-in {point.value} cannot be loaded: {type(error).__name__}: {error}",
            "update or uninstall the plug-in",
        ) from error
    if not isinstance(found, Transport) or found.kind != kind:
        raise ConfigError(
            "transports",
            kind,
            f"its plug-in {point.value} is {found!r}, expected a Transport of this kind",
        )
    return found
