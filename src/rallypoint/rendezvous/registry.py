"""Rendezvous backends by name: built-in ones, those a program registers, and installed plug-ins.

A name is looked for in that order; the first one that has it wins. Nothing is imported before its
name is asked for: a backend that is broken, or slow to import, costs only those who use it.

A plug-in is a distribution with an entry point of the group ``rallypoint.rendezvous``:

    [project.entry-points."rallypoint.rendezvous"]
    zookeeper = "my_package.rendezvous:create"

``create`` is given the parameters and returns the handler, whose ``get_backend()`` is ``zookeeper``. Each of its rounds
comes with a c10d store whose keys are new; ``rally run`` adds what it needs in that store (:mod:`.plugged`).
"""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from rallypoint.errors import ConfigError, InternalError, RendezvousError

from .api import RendezvousHandler
from .endpoint import BACKEND_ALIASES
from .parameters import RendezvousParameters


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

ENTRY_POINT_GROUP = "rallypoint.rendezvous"
# Name -> "module:attribute" of the creator; the module is imported when the name is asked for.
BUILT_IN: Mapping[str, str] = {
    "tcpstore": "rallypoint.rendezvous.create:tcpstore",
    "etcd": "rallypoint.rendezvous.create:etcd",
    "file": "rallypoint.rendezvous.create:file",
    "static": "rallypoint.rendezvous.create:static",
    "memory": "rallypoint.rendezvous.create:memory",
}

_FLAG = "--rdzv-backend"
_log = logging.getLogger(__name__)


class RendezvousHandlerRegistry:
    """Makes handlers by the name of their backend. Without arguments it is empty.

    Args:
        built_in: name to ``module:attribute`` of a creator; nobody can take these names.
        aliases: other names for ``built_in`` ones.
        group: the entry-point group plug-ins are in, or None for no plug-ins.
    """

    def __init__(
        self,
        built_in: Mapping[str, str] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        group: str | None = None,
    ) -> None:
        self._built_in = dict(built_in or {})
        self._aliases = dict(aliases or {})
        self._group = group
        self._registered: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Make ``backend`` known. The same creator again does nothing.

        Raises:
            ConfigError: no name, or the name is another creator's.
        """
        if not backend:
            raise ConfigError("backend", backend, "expected a name that is not empty")
        name = self._aliases.get(backend, backend)
        if name in self._built_in:
            if creator is not self._imported(name):
                raise ConfigError(
                    "backend",
                    backend,
                    f"{name} is a built-in rendezvous backend and cannot be replaced",
                    "register it under another name",
                )
            return
        there = self._registered.setdefault(name, creator)
        # Equal rather than the same: a method of an object is a new one each time it is looked up.
        if there != creator:
            raise ConfigError(
                "backend",
                backend,
                f"registered already, with {_spelled(there)}; {_spelled(creator)} is another",
                "register it under another name",
            )

    def known(self) -> tuple[str, ...]:
        """Names of all backends, sorted, without aliases. Reads the metadata of what is installed."""
        return tuple(sorted({*self._built_in, *self._registered, *self._plug_ins()}))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler for ``params.backend``.

        Raises:
            ConfigError: no such backend, or two plug-ins have the name.
            RendezvousError: the plug-in is broken, or its handler is another backend's.
            Exception: whatever the creator itself raises.
        """
        handler = self._creator(params.backend)(params)
        asked = self._aliases.get(params.backend, params.backend)
        says = getattr(handler, "get_backend", None)
        if not callable(says):
            raise RendezvousError(
                f"the creator of rendezvous backend {params.backend!r} returned"
                f" {type(handler).__name__}, not a rendezvous handler"
            )
        made = str(says())
        if self._aliases.get(made, made) != asked:
            raise RendezvousError(
                f"asked for rendezvous backend {params.backend!r} and was given a handler of {made!r}:"
                " its get_backend() must return the name it is known by"
            )
        return handler

    def _creator(self, backend: str) -> RendezvousHandlerCreator:
        name = self._aliases.get(backend, backend)
        if name in self._built_in:
            return _load(name, self._built_in[name])
        if name in self._registered:
            return self._registered[name]
        plug_ins = self._plug_ins()
        if name in plug_ins:
            return _load_plug_in(backend, plug_ins[name])
        raise self._unknown(backend)

    def _imported(self, name: str) -> object:
        """The built-in creator if its module is imported; who has it has imported it."""
        module, _, attribute = self._built_in[name].partition(":")
        return getattr(sys.modules.get(module), attribute, None)

    def _plug_ins(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, none of them imported. Asked anew: packages come and go."""
        if self._group is None:
            return {}
        from importlib.metadata import entry_points  # 20 ms that most jobs need not pay

        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self._group):
            if point.name in self._built_in or point.name in self._aliases:
                _log.warning(
                    "%s is ignored: the name is a built-in rendezvous backend's", _where(point)
                )
                continue
            same_name = found.setdefault(point.name, [])
            if all(point.value != other.value for other in same_name):
                same_name.append(point)
        return found

    def _unknown(self, backend: str) -> ConfigError:
        known = self.known()
        shown = []
        for name in known:
            also = sorted(alias for alias, target in self._aliases.items() if target == name)
            shown.append(f"{name} (also {', '.join(also)})" if also else name)
        near = difflib.get_close_matches(backend, [*known, *self._aliases], n=1)
        return ConfigError(
            _FLAG,
            backend,
            f"no such rendezvous backend (known: {', '.join(shown) or 'none'})",
            f"did you mean {near[0]}?" if near else "",
        )


def _load(name: str, target: str) -> RendezvousHandlerCreator:
    module, _, attribute = target.partition(":")
    try:
        creator = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InternalError(
            f"the built-in rendezvous backend {name!r} ({target}) cannot be loaded: {error}"
        ) from error
    return cast("RendezvousHandlerCreator", creator)


def _load_plug_in(backend: str, points: list[EntryPoint]) -> RendezvousHandlerCreator:
    if len(points) > 1:
        raise ConfigError(
            _FLAG,
            backend,
            f"more than one plug-in has this name: {'; '.join(_where(point) for point in points)}",
            "uninstall all but one",
        )
    try:
        creator = points[0].load()
    except Exception as error:
        raise RendezvousError(
            f"the rendezvous backend {backend!r} cannot be loaded: {_where(points[0])}:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not callable(creator):
        raise RendezvousError(
            f"the rendezvous backend {backend!r} cannot be used: {_where(points[0])} is"
            f" {type(creator).__name__}, not a function that makes a handler"
        )
    return cast("RendezvousHandlerCreator", creator)


def _where(point: EntryPoint) -> str:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
    return f"entry point {point.name} = {point.value} of distribution {distribution}"


def _spelled(creator: object) -> str:
    module = getattr(creator, "__module__", "")
    name = getattr(creator, "__qualname__", "")
    return f"{module}.{name}" if module and name else repr(creator)


# The one that `rally run` asks.
rendezvous_handler_registry = RendezvousHandlerRegistry(
    BUILT_IN, aliases=BACKEND_ALIASES, group=ENTRY_POINT_GROUP
)
