"""Parsing ``--rdzv-endpoint``: where nodes meet. Pure.

An endpoint is a URL, or a short form of one if the backend is known:

    tcp://node0:29400          tcp://a:29400,b:29400      tcp://[fd00::1]:29400
    etcd://a:2379,b:2379       etcds://user:pa%40ss@a?ca=/etc/ca.pem
    file:///shared/jobs        memory://name
    node0    node0:29400    [fd00::1]:29400    /shared/jobs (backend file)

The schemes are the backends'; no host or file is looked up here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import unquote

from rallypoint._core import near_words
from rallypoint.errors import ConfigError

from .backend import Backend, Endpoint, HostPort, Scheme, encode


_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# Possessive (?+): a scheme is never taken for a user name followed by a password.
_PASSWORD = re.compile(r"^((?:[^:@]*://)?+[^:@]*):.+@", re.DOTALL)
_HOST = re.compile(r"\w[\w.-]*")
_ZONE = re.compile(r"[\w.-]+")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-f]{2})", re.IGNORECASE)
# Control characters, and lone surrogates except those that stand for a byte of a file name.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udc7f\udd00-\udfff]")
_LONGEST_HOST = 253  # DNS


class _Problem(Exception):
    """What is wrong with the endpoint, and an example of what would be right."""

    def __init__(self, problem: str, example: str) -> None:
        super().__init__(problem, example)
        self.problem = problem
        self.example = example


def scheme_of(text: str) -> str | None:
    """The scheme that an endpoint begins with, in lower case; None if it has none."""
    found = _SCHEME.match(text.strip())
    return None if found is None else found[1].lower()


def parse(
    text: str,
    backends: Sequence[Backend],
    backend: Backend | None = None,
    *,
    default_port: int | None = None,
    flag: str = "--rdzv-endpoint",
) -> Endpoint:
    """Parse an endpoint.

    Args:
        text: a URL, or a short form of one; surrounding blanks are ignored.
        backends: the known backends. A scheme means the first backend that has it; no scheme means the first
            backend of all.
        backend: the backend that was asked for; None: the URL decides.
        default_port: the port of hosts that are given without one; None: the scheme's.
        flag: the flag that the user set it with, for the error.
    Returns:
        The endpoint.
    Raises:
        ConfigError: the text cannot be understood, or contradicts ``backend``. A password is not shown.
    """
    try:
        return _parse(text.strip(), backends, backend, default_port)
    except _Problem as found:
        shown = _PASSWORD.sub(r"\1:***@", text)
        hint = f"for example {found.example}"
        raise ConfigError(flag, shown, found.problem, hint) from None


def _parse(
    text: str, backends: Sequence[Backend], backend: Backend | None, default_port: int | None
) -> Endpoint:
    schemes = {each.name: each for one in reversed(backends) for each in one.schemes}
    scheme = (backend or backends[0]).schemes[0]
    if not text:
        raise _Problem("empty; expected the place where the nodes meet", scheme.example)
    if _UNPRINTABLE.search(text):
        raise _Problem("contains a control character or half a character", scheme.example)
    found = _SCHEME.match(text)
    if found is None and backend is not None and scheme.takes != "hosts" and "://" not in text:
        return _literal(text, scheme, backend)
    if found is None:
        _check_bare(text, scheme, schemes)
        rest = text
    else:
        scheme, rest = _known_scheme(found[1].lower(), backends, schemes), text[found.end() :]
    meant = [one for one in backends if scheme in one.schemes]
    if backend is not None and backend not in meant:
        raise _Problem(
            f"{scheme.name}:// is for backend {' or '.join(one.name for one in meant)}, and the backend"
            f" is {backend.name}; change one of the two",
            backend.schemes[0].example,
        )
    backend = backend or meant[0]
    if scheme.takes != "hosts":
        return _with_path(rest, scheme, backend)
    return _with_hosts(rest, scheme, backend, default_port, url=found is not None)


def _known_scheme(word: str, backends: Sequence[Backend], schemes: dict[str, Scheme]) -> Scheme:
    if word in schemes:
        return schemes[word]
    meant = None
    for one in backends:
        if word in (one.name, *one.aliases):
            meant = one.schemes[0]
        for each in one.schemes:
            if word in each.mistaken:
                meant = each
    if meant is None and (near := near_words.nearest(word, schemes)):
        meant = schemes[near]
    ask = f"; did you mean {meant.name}://?" if meant else ""
    raise _Problem(
        f"no scheme {word}:// (known: {', '.join(sorted(schemes))}){ask}",
        (meant or backends[0].schemes[0]).example,
    )


def _literal(text: str, scheme: Scheme, backend: Backend) -> Endpoint:
    """A path or name without a scheme: every character is literal."""
    if scheme.takes == "path" and not text.startswith("/"):
        raise _Problem(
            "expected an absolute path: nodes may start in different folders", scheme.example
        )
    return Endpoint(scheme=scheme.name, backend=backend.name, path=text)


def _check_bare(text: str, scheme: Scheme, schemes: dict[str, Scheme]) -> None:
    """Raise if the text looks like a URL or a path but is neither a valid one nor ``host:port``."""
    if text.startswith("/"):
        path = next((each.name for each in schemes.values() if each.takes == "path"), "file")
        example = f"{path}://{encode(text.rstrip('/'), '/')}"
        raise _Problem(f"only backend {path} takes a path", example)
    if "://" in text:
        known = ", ".join(sorted(schemes))
        raise _Problem(f"no scheme before the '://' (known: {known})", scheme.example)
    start, colon, rest = text.partition(":")
    if colon and rest.startswith("/") and (meant := schemes.get(start.lower())):
        raise _Problem(f"expected two slashes after '{meant.name}:'", meant.example)


def _with_path(rest: str, scheme: Scheme, backend: Backend) -> Endpoint:
    _check_url(rest, scheme.example)
    written, _, query = rest.partition("?")
    if scheme.takes == "path" and not written.startswith("/"):
        raise _Problem(
            f"expected three slashes and an absolute path: {scheme.name}:// has no host",
            scheme.example,
        )
    path = _decode(written, "the path", scheme.example)
    if not path:
        raise _Problem("expected a name after the '://'", scheme.example)
    options = _options(query, scheme, backend)
    return Endpoint(
        scheme=scheme.name, backend=backend.name, path=path, options=options, tls=scheme.tls
    )


def _with_hosts(
    rest: str, scheme: Scheme, backend: Backend, default_port: int | None, *, url: bool
) -> Endpoint:
    example = scheme.example
    written, _, query = rest.partition("?")
    authority, _, path = written.partition("/")
    # Check these first: until it is clear where the password ends, no error may repeat any part of the text.
    if rest.count("@") > 1:
        raise _Problem("more than one @; inside a user name or password write %40", example)
    if "@" in rest and "@" not in authority:
        raise _Problem(
            "an @ after a /, ? or #; inside a user name or password write %2F, %3F, %23 for these,"
            " and %40 for an @ in an option",
            example,
        )
    _check_url(rest, example)
    if path:
        raise _Problem(f"expected nothing after the hosts: {scheme.name}:// has no path", example)
    user, password = None, None
    if "@" in authority:
        written_user, _, authority = authority.partition("@")
        user, password = _user(written_user, scheme)
    port = scheme.default_port if default_port is None else default_port
    assert port is not None
    lowest = 0 if backend.served else 1
    hosts = tuple(_host_port(each, scheme, port, lowest, url=url) for each in authority.split(","))
    if backend.given_ranks and len(hosts) > 1:
        raise _Problem(f"expected one host for backend {backend.name}, found {len(hosts)}", example)
    return Endpoint(
        scheme=scheme.name,
        backend=backend.name,
        hosts=hosts,
        user=user,
        password=password,
        options=_options(query, scheme, backend),
        tls=scheme.tls,
    )


def _check_url(rest: str, example: str) -> None:
    if any(letter.isspace() for letter in rest):
        raise _Problem("contains a blank; in paths and options write %20", example)
    if "#" in rest:
        raise _Problem("contains a '#'; write %23 if it is meant", example)


def _user(written: str, scheme: Scheme) -> tuple[str, str | None]:
    example = scheme.example.replace("://", "://user:password@")
    if not scheme.users:
        raise _Problem(f"{scheme.name}:// has no users and passwords", scheme.example)
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


def _host_port(
    written: str, scheme: Scheme, default_port: int, lowest: int, *, url: bool
) -> HostPort:
    example = scheme.example
    if written.startswith("["):
        address, bracket, after = written[1:].partition("]")
        if not bracket:
            raise _Problem(f"expected a ']' after '{written}'", _v6_example(scheme))
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
    return HostPort(host, _port(port, scheme, lowest))


def _v6_example(scheme: Scheme, address: str = "fd00::1") -> str:
    return f"{scheme.name}://[{address}]:{scheme.default_port}"


def _many_colons(written: str, scheme: Scheme) -> _Problem:
    try:
        ipaddress.IPv6Address(written)
    except ValueError:
        return _Problem(f"more than one colon in '{written}'; expected HOST:PORT", scheme.example)
    return _Problem(
        f"the IPv6 address '{written}' needs brackets, to separate it from a port",
        _v6_example(scheme, written.replace("%", "%25")),
    )


def _ipv6(address: str, scheme: Scheme, *, url: bool) -> str:
    host, percent, zone = address.partition("%")
    if url and zone.startswith("25"):
        zone = zone[2:]  # in a URL the percent sign itself is escaped (RFC 6874)
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise _Problem(
            f"expected an IPv6 address in the brackets, not '{address}'",
            _v6_example(scheme),
        ) from None
    if percent and not _ZONE.fullmatch(zone):
        raise _Problem(
            f"expected an interface after the '%', not '{zone}'",
            _v6_example(scheme, "fe80::1%25eth0"),
        )
    return f"{host}{percent}{zone}"


def _name(host: str, scheme: Scheme) -> str:
    example = scheme.example
    if not host:
        raise _Problem("a host is empty", example)
    if host.isascii() and host.isdigit():
        raise _Problem(f"'{host}' is a port without a host", f"{scheme.name}://node0:{host}")
    if not re.search(r"[^0-9.]", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            # The system would take "10.0.1" for 10.0.0.1, and ask DNS for the rest.
            raise _Problem(f"'{host}' is not an IPv4 address", example) from None
        return host
    try:
        well_formed = bool(_HOST.fullmatch(host)) and len(host) <= _LONGEST_HOST
        # The system encodes the name this way; the encoding fails for empty and overlong parts.
        host.encode("idna")
    except UnicodeError:
        well_formed = False
    if not well_formed:
        raise _Problem(
            f"'{host}' is not a host name; expected letters, digits, '-' and '_', separated by dots",
            example,
        )
    return host


def _port(text: str, scheme: Scheme, lowest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not lowest <= int(text) <= 65535:
        raise _Problem(
            f"expected a port from {lowest} to 65535 after the colon, not '{text}'",
            scheme.example,
        )
    return int(text)


def _options(query: str, scheme: Scheme, backend: Backend) -> dict[str, str]:
    options: dict[str, str] = {}
    example = f"{scheme.example}?name=value"
    for written in query.split("&") if query else ():
        key, _, value = written.partition("=")
        name = _decode(key, "the name of an option", example)
        if not key or not value:
            raise _Problem(f"expected NAME=VALUE after the '?', not '{written}'", example)
        if name in options:
            raise _Problem(f"the option {name!r} is given twice", example)
        known = backend.option(name, in_url=True)
        if known is not None and known.tls and not scheme.tls:
            # The option would promise encryption that does not exist.
            secure = next(each for each in backend.schemes if each.tls)
            raise _Problem(
                f"the option {name!r} is for {secure.name}:// only: {scheme.name}:// is not encrypted",
                f"{secure.example}?{name}=/etc/{name}.pem",
            )
        options[name] = _decode(value, f"the option {name!r}", example)
    return options


def _decode(text: str, what: str, example: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise _Problem(f"a '%' in {what} is not followed by two hex digits; write %25", example)
    decoded = unquote(text, errors="surrogateescape")
    if _UNPRINTABLE.search(decoded):
        raise _Problem(f"a control character in {what}", example)
    return decoded
