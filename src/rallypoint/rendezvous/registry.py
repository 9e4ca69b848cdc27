"""Rendezvous handlers by the name of their backend.

Backends with a descriptor come first (:mod:`.catalogue`), then creators that the program has registered, then creators
from installed packages: entry points of the group ``rallypoint.rendezvous``.

    [project.entry-points."rallypoint.rendezvous"]
    zookeeper = "my_package.rendezvous:create"

``create`` is given the parameters and returns the handler, whose ``get_backend()`` is ``zookeeper``. Each of its rounds
comes with a c10d store whose keys are new; ``rally run`` adds what it needs in that store (:mod:`.plugged`). A creator is
imported only when its name is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from rallypoint.errors import ConfigError, RendezvousError

from .api import RendezvousHandler
from .catalogue import Catalogue, catalogue, did_you_mean, entry_points, load, only
from .parameters import RendezvousParameters


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

CREATORS = "rallypoint.rendezvous"


class RendezvousHandlerRegistry:
    """Makes handlers by the name of their backend. Without arguments, the registry is empty.

    Args:
        backends: backends with a descriptor; their names cannot be registered again.
        group: the entry-point group of plug-ins, or None for none.
    """

    def __init__(self, backends: Catalogue | None = None, *, group: str | None = None) -> None:
        self._backends = backends or Catalogue()
        self._group = group
        self._registered: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Make a backend known. Registering the same creator again does nothing.

        Args:
            backend: the backend's name.
            creator: makes a handler from parameters.
        Raises:
            ConfigError: the name is empty or taken.
        """
        if not backend:
            raise ConfigError("backend", backend, "expected a name")
        for each in self._backends.built_in():
            if backend in (each.name, *each.aliases):
                raise ConfigError(
                    "backend",
                    backend,
                    f"{each.name} is a built-in rendezvous backend and cannot be replaced",
                    "register it under another name",
                )
        there = self._registered.setdefault(backend, creator)
        # Compare with !=, not by identity: a bound method is a new object each time it is looked up.
        if there != creator:
            raise ConfigError(
                "backend",
                backend,
                f"registered already, with {_spelled(there)}; {_spelled(creator)} is another",
                "register it under another name",
            )

    def known(self) -> tuple[str, ...]:
        """The names of all backends. Reads the metadata of installed packages but imports none of them.

        Returns:
            The names, sorted, without aliases.
        """
        points = (point.name for point in self._points())
        return tuple(sorted({*self._backends.names(), *self._registered, *points}))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make the handler for ``params.backend``. Does not block, unless the creator does.

        Args:
            params: the settings of the rendezvous.
        Returns:
            The handler.
        Raises:
            ConfigError: there is no such backend, or several plug-ins have the name.
            RendezvousError: the plug-in is broken, or its handler belongs to another backend.
            Exception: whatever the creator itself raises.
        """
        asked = params.backend
        backend = None if asked in self._registered else self._backends.find(asked)
        if backend is not None:
            from .create import handler_for

            return handler_for(params, backend.name)
        handler = self._creator(asked)(params)
        says = getattr(handler, "get_backend", None)
        if not callable(says):
            raise RendezvousError(
                f"the creator of rendezvous backend {asked!r} returned {type(handler).__name__},"
                " not a rendezvous handler"
            )
        if (made := str(says())) != asked:
            raise RendezvousError(
                f"the creator of rendezvous backend {asked!r} returned a handler of {made!r}:"
                " its get_backend() must return the name of the backend"
            )
        return handler

    def _creator(self, name: str) -> RendezvousHandlerCreator:
        if name in self._registered:
            return self._registered[name]
        points = [point for point in self._points() if point.name == name]
        if not points:
            raise self.unknown(name)
        found = load(only(name, points), callable, "a function that makes a handler")
        return cast("RendezvousHandlerCreator", found)

    def _points(self) -> list[EntryPoint]:
        taken = {name for each in self._backends.built_in() for name in (each.name, *each.aliases)}
        return list(entry_points(self._group, taken))

    def unknown(self, name: str, flag: str = "--rdzv-backend") -> ConfigError:
        """The error for a name that no backend has.

        Args:
            name: as the user wrote it.
            flag: the flag that the user gave it with.
        Returns:
            The error, which lists the known names and suggests the nearest one.
        """
        aliases = {each.name: each.aliases for each in self._backends.backends()}
        names = list(self.known())
        shown = [
            f"{each} (also {', '.join(also)})" if (also := aliases.get(each)) else each
            for each in names
        ]
        near = did_you_mean(name, [*names, *(one for also in aliases.values() for one in also)])
        known = ", ".join(shown) or "none"
        return ConfigError(flag, name, f"no such rendezvous backend (known: {known})", near)


def _spelled(creator: object) -> str:
    module = getattr(creator, "__module__", "")
    name = getattr(creator, "__qualname__", "")
    return f"{module}.{name}" if module and name else repr(creator)


# The registry that `rally run` uses.
rendezvous_handler_registry = RendezvousHandlerRegistry(catalogue, group=CREATORS)
