"""How a rendezvous backend describes itself, and what it is told about a job. Pure.

A backend is one file with a :class:`Backend`, listed in a table (:mod:`.catalogue`) or in an entry point. The command
line, ``--help``, error texts, endpoints and torchrun's plug-in all read it; no other code knows a backend's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from rallypoint.errors import ConfigError

from .home import Home, Prepare
from .option import Option


@dataclass(frozen=True, slots=True)
class HostPort:
    """One host of an endpoint.

    Args:
        host: a name or an address; IPv6 without brackets.
        port: 0 to 65535; 0 means any free port, which only the host itself can choose.
    """

    host: str
    port: int

    def __str__(self) -> str:
        if ":" not in self.host:
            return f"{self.host}:{self.port}"
        return f"[{self.host.replace('%', '%25')}]:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where nodes meet, parsed. ``str()`` is the URL, without the password.

    Args:
        scheme: the URL's scheme, such as ``tcp``, ``etcds`` or ``file``.
        backend: name of the backend that serves such endpoints, such as ``tcpstore``.
        hosts: the hosts in the order given; empty for schemes that take a path or a name.
        path: the absolute path or the name, for schemes that take one; otherwise empty.
        user: the user name before the ``@``, or None.
        password: the password, or None; never shown by ``repr`` and ``str``.
        options: what follows the ``?``, unchecked: only the backend knows what it means.
        tls: whether the scheme means an encrypted connection.
    """

    scheme: str
    backend: str
    hosts: tuple[HostPort, ...] = ()
    path: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    tls: bool = field(default=False, compare=False)  # the scheme says as much

    def __str__(self) -> str:
        user = "" if self.user is None else f"{encode(self.user)}@"
        hosts = ",".join(str(host) for host in self.hosts)
        options = "&".join(f"{encode(k)}={encode(v, '/')}" for k, v in self.options.items())
        query = f"?{options}" if options else ""
        return f"{self.scheme}://{user}{hosts}{encode(self.path, '/')}{query}"


def encode(text: str, safe: str = "") -> str:
    """Percent-encode a part of a URL; file names that are not UTF-8 keep their bytes."""
    return quote(text, safe=safe, errors="surrogateescape")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A kind of endpoint: the part of the URL before ``://``, and what may follow it.

    Args:
        name: ``etcds`` in ``etcds://node0:2379``.
        example: a whole endpoint, for help and errors.
        takes: what follows: ``hosts`` (``HOST[:PORT],…``), an absolute ``path``, or a ``name``.
        default_port: the port of hosts that are given without one; required with ``hosts``.
        tls: whether connections are encrypted.
        users: whether ``USER:PASSWORD@`` may precede the hosts.
        mistaken: schemes that users write when they mean this one, for the error message.

    Raises:
        ConfigError: a field cannot work.
    """

    name: str
    example: str
    takes: Literal["hosts", "path", "name"] = "hosts"
    default_port: int | None = None
    tls: bool = False
    users: bool = False
    mistaken: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*", self.name):
            problem = "expected lower-case letters, digits, '+', '-' and '.'"
            raise ConfigError("Scheme.name", self.name, problem)
        if (self.takes == "hosts") != (self.default_port is not None):
            problem = "expected a port for schemes with hosts, and none for others"
            raise ConfigError("Scheme.default_port", self.default_port, problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """One job's request for a store.

    Args:
        endpoint: where the nodes meet.
        run_id: the job's name, any text.
        options: those of the backend's own options that were given, by name, in their declared types.
        lease: seconds of silence after which a connection counts as lost.
        mark_end: whether a lasting store should record the end of the job for late nodes.
        secret: the secret that all nodes of the job share, or None.
        is_host: whether this node serves the store; None: the backend finds out.
        bind: address that a store served here listens on; ``*``: all; None: the endpoint's.
        prepare: makes the server of a store served here; None: this process serves it.
        say: prints a line to the user; None: it is logged.
        flag: the flag that the endpoint was given with, for errors.

    Raises:
        ConfigError: the job's name cannot be part of a key.
    """

    endpoint: Endpoint
    run_id: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # with passwords
    lease: float
    mark_end: bool = False
    secret: bytes | None = field(default=None, repr=False)
    is_host: bool | None = None
    bind: str | None = None
    prepare: Prepare | None = None
    say: Callable[[str], None] | None = None
    flag: str = "--rdzv-endpoint"

    def __post_init__(self) -> None:
        try:
            self.run_id.encode()
        except UnicodeEncodeError:
            problem = "the job's name is not UTF-8"
            raise ConfigError("--rdzv-id", self.run_id, problem, "give another one") from None

    @property
    def name(self) -> str:
        """The job's name as one level of a key or a path: unique, and without slashes."""
        return quote(self.run_id, safe="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A rendezvous backend, as the rest of Rallypoint sees it.

    Args:
        name: its name in ``--rdzv-backend``.
        help: what it is, in one phrase for ``--help``.
        schemes: its endpoints' schemes; the first applies to an endpoint written without one.
        home: returns the home of a job's store. It connects to nothing yet, but raises ConfigError for what cannot work.
            It should do its own imports when called: descriptors are loaded for ``--help`` as well.
        aliases: other names in ``--rdzv-backend``.
        options: what the endpoint's ``?NAME=VALUE`` and ``--rdzv-conf`` may set.
        served: one of the job's nodes serves the store.
        given_ranks: each node knows its rank beforehand, and node 0 serves the store.
        one_process: all nodes are threads of one process, for tests.

    Raises:
        ConfigError: a field cannot work.
    """

    name: str
    help: str
    schemes: Sequence[Scheme]
    home: Callable[[Meeting], Home]
    aliases: tuple[str, ...] = ()
    options: Sequence[Option] = ()
    served: bool = False
    given_ranks: bool = False
    one_process: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("Backend.name", self.name, "expected a name")
        if not self.schemes:
            raise ConfigError("Backend.schemes", self.schemes, "expected at least one scheme")
        names = [name for each in self.options for name in (each.name, *each.aliases)]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("Backend.options", double[0], "the name is used twice")

    def option(self, name: str, *, in_url: bool = False) -> Option | None:
        """The option of this name, which in ``--rdzv-conf`` may be an alias.

        Args:
            name: the name as written.
            in_url: it was part of the endpoint, where aliases do not count.
        Returns:
            The option; None if there is none.
        """
        for each in self.options:
            if name == each.name or (name in each.aliases and not in_url):
                return each
        return None
