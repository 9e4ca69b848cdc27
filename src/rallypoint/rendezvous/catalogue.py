"""All rendezvous backends, by name and by scheme: built in, registered, and plugged in.

To add a built-in backend, write its file and list its :class:`~.backend.Backend` in :data:`BUILT_IN`. A package declares
one with an entry point of the group :data:`BACKENDS`:

    [project.entry-points."rallypoint.rendezvous_backends"]
    redis = "my_package.backend:REDIS"

[Note: Two groups] Help, error texts and unknown schemes need the descriptors of all plug-ins, so all are imported. A
creator of the older group (:mod:`.registry`) may import torch, and is imported only when its name is asked for. Hence
the separate group: a package in it promises to be cheap to import.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rallypoint._core import near_words
from rallypoint._core.plug_ins import declared, where
from rallypoint.errors import ConfigError, RendezvousError

from . import endpoint as endpoints
from .backend import Backend, Endpoint


if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


# module:attribute. An endpoint without a scheme belongs to the first backend.
BUILT_IN = (
    "rallypoint.rendezvous.backends.tcp:TCPSTORE",
    "rallypoint.rendezvous.backends.tcp:STATIC",
    "rallypoint.rendezvous.backends.etcd:ETCD",
    "rallypoint.rendezvous.backends.file:FILE",
    "rallypoint.rendezvous.backends.memory:MEMORY",
)
BACKENDS = "rallypoint.rendezvous_backends"

_log = logging.getLogger(__name__)


class Catalogue:
    """Backends by name and scheme.

    Args:
        built_in: ``module:attribute`` of descriptors, which are imported at the first query.
        group: the entry-point group of plug-ins, or None for none.
    """

    def __init__(self, built_in: Sequence[str] = (), *, group: str | None = None) -> None:
        self._targets = built_in
        self._group = group
        self._loaded: tuple[Backend, ...] | None = None
        self._registered: list[Backend] = []

    def built_in(self) -> tuple[Backend, ...]:
        """The descriptors of the built-in backends."""
        if self._loaded is None:
            self._loaded = tuple(_attribute(each) for each in self._targets)
        return self._loaded

    def backends(self) -> tuple[Backend, ...]:
        """All backends. A plug-in that cannot be loaded is logged and left out."""
        return (*self.built_in(), *self._registered, *self._plug_ins())

    def register(self, backend: Backend) -> None:
        """Add a backend; adding the same one again does nothing.

        Raises:
            ConfigError: another backend has its name.
        """
        names = {backend.name, *backend.aliases}
        for other in (*self.built_in(), *self._registered):
            if other is backend:
                return
            if taken := sorted(names & {other.name, *other.aliases}):
                kind = "built-in" if other in self.built_in() else "registered"
                raise ConfigError("backend", taken[0], f"a {kind} backend has this name already")
        self._registered.append(backend)

    def find(self, name: str) -> Backend | None:
        """The backend of this name or alias, or None.

        Raises:
            ConfigError: several plug-ins have the name.
            RendezvousError: the plug-in cannot be loaded.
        """
        for each in (*self.built_in(), *self._registered):
            if name in (each.name, *each.aliases):
                return each
        points = [point for point in self._points() if point.name == name]
        if points:
            return _descriptor(only(name, points))
        return next((each for each in self._plug_ins() if name in each.aliases), None)

    def names(self) -> tuple[str, ...]:
        """All names, sorted, without aliases. No plug-in is imported."""
        here = (each.name for each in (*self.built_in(), *self._registered))
        return tuple(sorted({*here, *(point.name for point in self._points())}))

    def parse(
        self, text: str, backend: Backend | None, default_port: int | None, flag: str
    ) -> Endpoint:
        """See :func:`parse_endpoint`."""
        known = (*self.built_in(), *self._registered)
        scheme = endpoints.scheme_of(text)
        here = {each.name for one in known for each in one.schemes}
        if scheme not in here | {None}:
            known = self.backends()
        if backend is not None and backend not in known:
            known += (backend,)
        return endpoints.parse(text, known, backend, default_port=default_port, flag=flag)

    def _points(self) -> Iterator[EntryPoint]:
        """The entry points, none of them imported. They are read each time, because packages come and go."""
        taken = {name for each in self.built_in() for name in (each.name, *each.aliases)}
        return entry_points(self._group, taken)

    def _plug_ins(self) -> Iterator[Backend]:
        for point in self._points():
            try:
                yield _descriptor(point)
            except RendezvousError as error:
                _log.warning("%s", error)


def entry_points(group: str | None, taken: set[str]) -> Iterator[EntryPoint]:
    """The entry points of a group, except those that have a built-in backend's name."""
    if group is None:
        return
    for point in declared(group):
        if point.name in taken:
            name = "the name is a built-in rendezvous backend's"
            _log.warning("%s is ignored: %s", where(point), name)
        else:
            yield point


def only(name: str, points: Sequence[EntryPoint]) -> EntryPoint:
    """The only entry point of this name.

    Raises:
        ConfigError: there are several.
    """
    if len({each.value for each in points}) > 1:
        raise ConfigError(
            "--rdzv-backend",
            name,
            f"several plug-ins have this name: {'; '.join(where(each) for each in points)}",
            "uninstall all but one",
        )
    return points[0]


def load(point: EntryPoint, is_right: Callable[[Any], bool], expected: str) -> Any:
    """The object that an entry point refers to.

    Raises:
        RendezvousError: it cannot be loaded, or is not what was ``expected``.
    """
    try:
        found = point.load()
    except Exception as error:
        raise RendezvousError(
            f"rendezvous backend {point.name!r} cannot be loaded: {where(point)}:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not is_right(found):
        raise RendezvousError(
            f"rendezvous backend {point.name!r} cannot be used: {where(point)} is"
            f" {type(found).__name__}, not {expected}"
        )
    return found


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A hint that names the nearest of the known words, if one is near."""
    near = near_words.nearest(word, known)
    return f"did you mean {near}?" if near else ""


def _descriptor(point: EntryPoint) -> Backend:
    found: Backend = load(point, lambda each: isinstance(each, Backend), "a Backend")
    if found.name != point.name:
        raise RendezvousError(
            f"rendezvous backend {point.name!r} cannot be used: {where(point)} calls itself"
            f" {found.name!r}"
        )
    return found


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


# The catalogue that `rally run` uses.
catalogue = Catalogue(BUILT_IN, group=BACKENDS)


def register_backend(backend: Backend) -> None:
    """Make a backend known in this process; packages declare theirs with an entry point instead.

    Args:
        backend: its descriptor; registering the same one again does nothing.
    Raises:
        ConfigError: another backend has its name.
    """
    catalogue.register(backend)


def parse_endpoint(
    text: str,
    *,
    backend: str | None = None,
    default_port: int | None = None,
    flag: str = "--rdzv-endpoint",
) -> Endpoint:
    """Parse where nodes meet. Looks nothing up: neither hosts nor files.

    Args:
        text: a URL such as ``tcp://node0:29400``, or a short form of one; surrounding blanks are ignored.
        backend: the name of a backend; None: the URL decides (``tcpstore`` if it has no scheme).
        default_port: the port of hosts that are given without one; None: the scheme's (29400 for tcp, 2379 for etcd).
        flag: the flag that the user set it with, for the error.
    Returns:
        The endpoint.
    Raises:
        ConfigError: the text cannot be understood, or contradicts ``backend``. A password is not shown.
        RendezvousError: the plug-in ``backend`` cannot be loaded.
    """
    wanted = None
    if backend is not None:
        wanted = catalogue.find(backend)
        if wanted is None:
            known = catalogue.names()
            problem = f"no such rendezvous backend (known: {', '.join(known)})"
            hint = did_you_mean(backend, known)
            raise ConfigError("--rdzv-backend", backend, problem, hint)
    return catalogue.parse(text, wanted, default_port, flag)
