"""Where nodes meet: what ``--rdzv-endpoint`` may say, and what it means.

An endpoint is a URL, or short for one where the backend is known:

    tcp://node0:29400          tcp://a:29400,b:29400      tcp://[fd00::1]:29400
    etcd://a:2379,b:2379       etcds://user:pa%40ss@a?ca=/etc/ca.pem
    file:///shared/jobs        memory://name
    node0    node0:29400    [fd00::1]:29400    /shared/jobs (backend file)

Nothing is looked up here: whether there is such a host or file is found out by who goes there.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from rallypoint.errors import ConfigError


# Other names of built-in backends: those torchrun knows, and the scheme of the URL. torch's "etcd-v2" and
# "etcd" are two clients of etcd's v2 API; servers have dropped that, so both mean our one client (v3).
BACKEND_ALIASES: Mapping[str, str] = {"c10d": "tcpstore", "tcp": "tcpstore", "etcd-v2": "etcd"}

# Scheme -> the backends that meet at such an endpoint; the first one if nobody said.
_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "tcp": ("tcpstore", "static"),
    "etcd": ("etcd",),
    "etcds": ("etcd",),
    "file": ("file",),
    "memory": ("memory",),
}
# Backend -> the scheme of an endpoint that is written without one.
_SCHEME_OF: Mapping[str, str] = {
    "tcpstore": "tcp",
    "static": "tcp",
    "etcd": "etcd",
    "file": "file",
    "memory": "memory",
}
# What people write for a scheme, too far from it for difflib.
_MEANT: Mapping[str, str] = {
    "http": "etcd",
    "https": "etcds",
    "c10d": "tcp",
    "tcpstore": "tcp",
    "static": "tcp",
    "etcd-v2": "etcd",
}
_EXAMPLES: Mapping[str, str] = {
    "tcp": "tcp://node0:29400",
    "etcd": "etcd://node0:2379",
    "etcds": "etcds://node0:2379",
    "file": "file:///shared/jobs",
    "memory": "memory://name",
}
# torchrun's port for rendezvous, and the one IANA has given to etcd's clients.
_DEFAULT_PORTS: Mapping[str, int] = {"tcp": 29400, "etcd": 2379, "etcds": 2379}
# Given where nothing is encrypted, they would be a promise nobody keeps.
_TLS_OPTIONS = ("ca", "cert", "key")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# Possessive (?+): a scheme is never taken for a user name with a password behind it.
_PASSWORD = re.compile(r"^((?:[^:@]*://)?+[^:@]*):.+@", re.DOTALL)
_HOST = re.compile(r"\w[\w.-]*")
_ZONE = re.compile(r"[\w.-]+")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-f]{2})", re.IGNORECASE)
# Control characters, and halves of characters that stand for no byte of a file name either.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udc7f\udd00-\udfff]")
_LONGEST_HOST = 253  # DNS


@dataclass(frozen=True, slots=True)
class HostPort:
    """One host of an endpoint.

    Args:
        host: a name or an address; IPv6 without brackets.
        port: 0 to 65535; 0 means any free one, which only the host itself can choose.
    """

    host: str
    port: int

    def __str__(self) -> str:
        if ":" not in self.host:
            return f"{self.host}:{self.port}"
        return f"[{self.host.replace('%', '%25')}]:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where nodes meet, taken apart. ``str()`` is the URL, without the password.

    Args:
        scheme: ``tcp``, ``etcd``, ``etcds`` (etcd over TLS), ``file`` or ``memory``.
        backend: the backend for it: ``tcpstore``, ``static``, ``etcd``, ``file`` or ``memory``.
        hosts: one or more for ``tcp`` and ``etcd``, in the order given; else none.
        path: the absolute path for ``file``, the name for ``memory``; else empty.
        user: for etcd, or None.
        password: never shown by ``repr`` and ``str``.
        options: what stands behind the ``?``; the backend knows what they mean.
    """

    scheme: str
    backend: str
    hosts: tuple[HostPort, ...] = ()
    path: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def tls(self) -> bool:
        """Whether the connection is to be encrypted."""
        return self.scheme == "etcds"

    def __str__(self) -> str:
        user = "" if self.user is None else f"{_encode(self.user)}@"
        hosts = ",".join(str(host) for host in self.hosts)
        options = "&".join(f"{_encode(k)}={_encode(v, '/')}" for k, v in self.options.items())
        query = f"?{options}" if options else ""
        return f"{self.scheme}://{user}{hosts}{_encode(self.path, '/')}{query}"


class _Problem(Exception):
    """What is wrong with the endpoint, and an example of what would be right."""

    def __init__(self, problem: str, example: str) -> None:
        super().__init__(problem, example)
        self.problem = problem
        self.example = example


def canonical_backend(name: str) -> str:
    """The name of a backend behind one of its other names; any other name as it is."""
    return BACKEND_ALIASES.get(name, name)


def parse_endpoint(
    text: str,
    *,
    backend: str | None = None,
    default_port: int | None = None,
    flag: str = "--rdzv-endpoint",
) -> Endpoint:
    """Take an endpoint apart.

    Args:
        text: a URL, or what is short for one; blanks around it do not count.
        backend: a built-in backend by any of its names, or None to go by the URL (``tcpstore`` if it has no scheme).
        default_port: of hosts that are given without; None for 29400 (tcp) or 2379 (etcd).
        flag: what the user set it with, for the error.

    Raises:
        ConfigError: it cannot be understood, or contradicts ``backend``. A password is not shown.
    """
    wanted = None if backend is None else _built_in(backend)
    try:
        return _parse(text.strip(), wanted, default_port)
    except _Problem as found:
        shown = _PASSWORD.sub(r"\1:***@", text)
        hint = f"for example {found.example}"
        raise ConfigError(flag, shown, found.problem, hint) from None


def _built_in(backend: str) -> str:
    name = canonical_backend(backend)
    if name not in _SCHEME_OF:
        raise ConfigError(
            "--rdzv-backend",
            backend,
            f"no built-in rendezvous backend (known: {', '.join(sorted(_SCHEME_OF))})",
            _did_you_mean(backend, [*_SCHEME_OF, *BACKEND_ALIASES]),
        )
    return name


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _parse(text: str, backend: str | None, default_port: int | None) -> Endpoint:
    scheme = _SCHEME_OF[backend or "tcpstore"]
    if not text:
        raise _Problem("empty; expected where the nodes meet", _EXAMPLES[scheme])
    if _UNPRINTABLE.search(text):
        raise _Problem("holds a control character or half a character", _EXAMPLES[scheme])
    found = _SCHEME.match(text)
    if found is None and backend in ("file", "memory") and "://" not in text:
        return _literal(text, scheme)
    if found is None:
        _check_bare(text, scheme)
        rest = text
    else:
        scheme, rest = _known_scheme(found[1].lower()), text[found.end() :]
    backends = _SCHEMES[scheme]
    if backend is not None and backend not in backends:
        raise _Problem(
            f"{scheme}:// is for backend {' or '.join(backends)}, and the backend is {backend};"
            " change one of the two",
            _EXAMPLES[_SCHEME_OF[backend]],
        )
    backend = backend or backends[0]
    if scheme in _DEFAULT_PORTS:
        port = _DEFAULT_PORTS[scheme] if default_port is None else default_port
        return _with_hosts(rest, scheme, backend, port, url=found is not None)
    return _with_path(rest, scheme, backend)


def _known_scheme(scheme: str) -> str:
    if scheme in _SCHEMES:
        return scheme
    near = difflib.get_close_matches(scheme, _SCHEMES, n=1)
    meant = _MEANT.get(scheme) or (near[0] if near else "")
    ask = f"; did you mean {meant}://?" if meant else ""
    raise _Problem(
        f"no scheme {scheme}:// (known: {', '.join(sorted(_SCHEMES))}){ask}",
        _EXAMPLES[meant or "tcp"],
    )


def _literal(text: str, scheme: str) -> Endpoint:
    """A path or name without a scheme: every character is meant as it stands."""
    if scheme == "file" and not text.startswith("/"):
        raise _Problem(
            "expected an absolute path: nodes may start in different folders",
            _EXAMPLES[scheme],
        )
    return Endpoint(scheme=scheme, backend=scheme, path=text)


def _check_bare(text: str, scheme: str) -> None:
    """Raise for what looks like a URL or a path and is neither that nor ``host:port``."""
    if text.startswith("/"):
        raise _Problem(
            "a path is an endpoint of backend file only", f"file://{_encode(text.rstrip('/'), '/')}"
        )
    if "://" in text:
        raise _Problem(
            f"no scheme before the '://' (known: {', '.join(sorted(_SCHEMES))})", _EXAMPLES[scheme]
        )
    start, colon, rest = text.partition(":")
    if colon and rest.startswith("/") and start.lower() in _SCHEMES:
        scheme = start.lower()
        raise _Problem(f"expected two slashes after '{scheme}:'", _EXAMPLES[scheme])


def _with_path(rest: str, scheme: str, backend: str) -> Endpoint:
    example = _EXAMPLES[scheme]
    _check_url(rest, example)
    written, _, query = rest.partition("?")
    if scheme == "file" and not written.startswith("/"):
        raise _Problem(
            "expected three slashes and an absolute path: a file endpoint has no host", example
        )
    path = _decode(written, "the path", example)
    if not path:
        raise _Problem("expected a name behind the '://'", example)
    return Endpoint(scheme=scheme, backend=backend, path=path, options=_options(query, scheme))


def _with_hosts(rest: str, scheme: str, backend: str, default_port: int, *, url: bool) -> Endpoint:
    example = _EXAMPLES[scheme]
    written, _, query = rest.partition("?")
    authority, _, path = written.partition("/")
    # These first: until it is clear where the password ends, no part of the text may be repeated.
    if rest.count("@") > 1:
        raise _Problem("more than one @; inside a user name or password write %40", example)
    if "@" in rest and "@" not in authority:
        raise _Problem(
            "an @ behind a /, ? or #; inside a user name or password write %2F, %3F, %23 for these,"
            " and %40 for an @ in an option",
            example,
        )
    _check_url(rest, example)
    if path:
        raise _Problem(f"expected nothing behind the hosts: {scheme} has no path", example)
    user, password = None, None
    if "@" in authority:
        written_user, _, authority = authority.partition("@")
        user, password = _user(written_user, scheme)
    hosts = tuple(_host_port(each, scheme, default_port, url=url) for each in authority.split(","))
    if backend == "static" and len(hosts) > 1:
        raise _Problem(f"expected one host for backend static, found {len(hosts)}", example)
    return Endpoint(
        scheme=scheme,
        backend=backend,
        hosts=hosts,
        user=user,
        password=password,
        options=_options(query, scheme),
    )


def _check_url(rest: str, example: str) -> None:
    if any(letter.isspace() for letter in rest):
        raise _Problem("holds a blank; expected none (in paths and options write %20)", example)
    if "#" in rest:
        raise _Problem("holds a '#'; write %23 if it is meant", example)


def _user(written: str, scheme: str) -> tuple[str, str | None]:
    example = f"{scheme}://user:password@node0:2379"
    if scheme not in ("etcd", "etcds"):
        raise _Problem(f"{scheme} has no users and passwords", _EXAMPLES[scheme])
    name, colon, secret = written.partition(":")
    user = _decode(name, "the user name", example)
    if not user:
        raise _Problem("the user name before the @ is empty", example)
    if not colon:
        return user, None
    password = _decode(secret, "the password", example)
    if not password:
        raise _Problem("the password before the @ is empty (a variable that is not set?)", example)
    return user, password


def _host_port(written: str, scheme: str, default_port: int, *, url: bool) -> HostPort:
    example = _EXAMPLES[scheme]
    if written.startswith("["):
        address, bracket, after = written[1:].partition("]")
        if not bracket:
            raise _Problem(f"expected a ']' after '{written}'", f"{scheme}://[fd00::1]:29400")
        host = _ipv6(address, scheme, url=url)
        if after and not after.startswith(":"):
            raise _Problem(f"expected nothing or ':PORT' after the ']', not '{after}'", example)
        colon, port = after[:1], after[1:]
    else:
        if written.count(":") > 1:
            raise _many_colons(written, scheme)
        name, colon, port = written.partition(":")
        host = _name(name, scheme)
    if not colon:
        return HostPort(host, default_port)
    return HostPort(host, _port(port, scheme))


def _many_colons(written: str, scheme: str) -> _Problem:
    try:
        ipaddress.IPv6Address(written)
    except ValueError:
        return _Problem(
            f"more than one colon in '{written}'; expected HOST:PORT", _EXAMPLES[scheme]
        )
    port = _DEFAULT_PORTS[scheme]
    return _Problem(
        f"the IPv6 address '{written}' must stand in brackets, so that its end and the port are"
        " told apart",
        f"{scheme}://[{written.replace('%', '%25')}]:{port}",
    )


def _ipv6(address: str, scheme: str, *, url: bool) -> str:
    host, percent, zone = address.partition("%")
    if url and zone.startswith("25"):
        zone = zone[2:]  # in a URL the percent sign itself is escaped (RFC 6874)
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise _Problem(
            f"expected an IPv6 address in the brackets, not '{address}'",
            f"{scheme}://[fd00::1]:{_DEFAULT_PORTS[scheme]}",
        ) from None
    if percent and not _ZONE.fullmatch(zone):
        raise _Problem(
            f"expected an interface after the '%', not '{zone}'",
            f"{scheme}://[fe80::1%25eth0]:{_DEFAULT_PORTS[scheme]}",
        )
    return f"{host}{percent}{zone}"


def _name(host: str, scheme: str) -> str:
    example = _EXAMPLES[scheme]
    if not host:
        raise _Problem("a host is empty", example)
    if host.isascii() and host.isdigit():
        raise _Problem(f"'{host}' is a port without a host", f"{scheme}://node0:{host}")
    if not re.search(r"[^0-9.]", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            # The system would take "10.0.1" for 10.0.0.1, and ask DNS for the rest.
            raise _Problem(f"'{host}' is no IPv4 address", example) from None
        return host
    try:
        well_formed = bool(_HOST.fullmatch(host)) and len(host) <= _LONGEST_HOST
        # What the system does with the name; it raises for empty and overlong parts.
        host.encode("idna")
    except UnicodeError:
        well_formed = False
    if not well_formed:
        raise _Problem(
            f"'{host}' is no host name; expected letters, digits, '-', '_', parted by dots", example
        )
    return host


def _port(text: str, scheme: str) -> int:
    lowest = 0 if scheme == "tcp" else 1
    if not re.fullmatch(r"[0-9]{1,5}", text) or not lowest <= int(text) <= 65535:
        raise _Problem(
            f"expected a port from {lowest} to 65535 after the colon, not '{text}'",
            _EXAMPLES[scheme],
        )
    return int(text)


def _options(query: str, scheme: str) -> dict[str, str]:
    options: dict[str, str] = {}
    example = f"{_EXAMPLES[scheme]}?name=value"
    for written in query.split("&") if query else ():
        key, _, value = written.partition("=")
        name = _decode(key, "the name of an option", example)
        if not key or not value:
            raise _Problem(f"expected NAME=VALUE behind the '?', not '{written}'", example)
        if name in options:
            raise _Problem(f"the option {name!r} is given twice", example)
        options[name] = _decode(value, f"the option {name!r}", example)
    encrypting = [name for name in _TLS_OPTIONS if name in options]
    if encrypting and scheme != "etcds":
        raise _Problem(
            f"the option {encrypting[0]!r} is for etcds:// only: {scheme}:// is not encrypted",
            "etcds://node0:2379?ca=/etc/ca.pem",
        )
    return options


def _encode(text: str, safe: str = "") -> str:
    # File names need not be UTF-8; what is not comes back as the same bytes.
    return quote(text, safe=safe, errors="surrogateescape")


def _decode(text: str, what: str, example: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise _Problem(f"a '%' in {what} is not followed by two hex digits; write %25", example)
    decoded = unquote(text, errors="surrogateescape")
    if _UNPRINTABLE.search(decoded):
        raise _Problem(f"a control character in {what}", example)
    return decoded
