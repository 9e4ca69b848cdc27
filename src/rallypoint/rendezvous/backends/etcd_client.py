"""Requests to an etcd cluster: choice of endpoint, TLS, the user's token, retries, and readable errors.

The transport is etcd's HTTP/JSON gateway through etcd3gw, whose ``Etcd3Client`` knows only one endpoint, no
users, and no deadline for a watch. This module adds those three around its ``post`` and ``get_url``:

- A request goes to the endpoint that answered last. If that does not answer, or answers that its
  cluster has no leader, the next one is tried, and so on until ``patience`` is over.
- So a request may reach the cluster twice. The caller must make sure that it takes effect once.
- A watch is one streamed answer. etcd3gw's own watch hands pieces of it to a thread, parses each piece as
  if it were a whole line (a large value is not), and cannot tell an ended stream from a silent one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import ssl
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint._core import addresses, forks
from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousConnectionError


if TYPE_CHECKING:
    import requests
    from etcd3gw import Etcd3Client

# Seconds between two rounds over all endpoints: an election takes etcd about a second.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
# The share of the patience that one endpoint gets to answer one request: two elections of etcd with its defaults.
TRY_SHARE = 1 / 5
# How long a server may take to say what is wrong with our certificate (seconds).
ALERT_TIMEOUT = 0.5
# gRPC's status codes, as the gateway reports them.
INVALID, NOT_FOUND, DENIED, PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED = 3, 5, 7, 9, 11, 12
UNAUTHENTICATED = 16
# The codes that a retry would get again; all others (no leader, overload) may pass.
FINAL = {INVALID, NOT_FOUND, DENIED, PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED}


# The errors of a connection that was made and then cut.
_CUT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError)


class LeaseLost(RendezvousConnectionError):
    """The lease that a key was to be bound to has expired."""


class Interrupted(Exception):
    """A watch ended early; the text says why. The caller must read what it may have missed."""


class _Failed(Exception):
    """One try at one endpoint failed."""

    def __init__(
        self, why: str, code: int | None = None, *, hopeless: bool = False, cut: bool = False
    ) -> None:
        super().__init__(why)
        self.why = why
        self.code = code  # etcd's own answer
        self.hopeless = hopeless  # this endpoint will always answer like this
        self.cut = cut  # the connection was made, and was cut


class Item(NamedTuple):
    """A key as etcd holds it."""

    key: bytes
    value: bytes
    version: int  # how often it was put since it was created
    modified: int  # the revision of the last put


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdAccess:
    """How a cluster is reached.

    Args:
        endpoints: ``host:port`` of any of its members; a leading ``https://`` asks for TLS.
        ca_cert: file with the authority that signed the servers' certificates; implies TLS.
        cert, key: files that identify us to the servers; a certificate implies TLS.
        user, password: for clusters with authentication.
        patience: seconds after which a cluster that does not answer counts as gone.
    """

    endpoints: tuple[str, ...]
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    patience: float = 10.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError(
                "endpoints", None, "expected at least one host:port of the etcd cluster"
            )
        for endpoint in self.endpoints:
            _parse(endpoint)
        if not self.patience > 0:
            raise ConfigError("patience", self.patience, "seconds above 0")
        if (self.user is None) != (self.password is None):
            raise ConfigError("user", self.user, "a user and its password go together")
        if self.key is not None and self.cert is None:
            raise ConfigError("key", self.key, "expected a certificate (cert) beside the key")
        for name in ("ca_cert", "cert", "key"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(name, path, "no such file, or not readable")
        self._check_certificates()

    def _check_certificates(self) -> None:
        """Read the files as the connection will, while the error can still name them."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca_cert is not None:
                context.load_verify_locations(self.ca_cert)
        except OSError as error:
            raise ConfigError(
                "ca_cert", self.ca_cert, f"contains no PEM certificates: {error}"
            ) from None
        try:
            if self.cert is not None:
                # An empty password makes an encrypted key fail instead of asking at the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:
            problem = f"contains no PEM certificate with its key {self.key or self.cert!r}: {error}"
            raise ConfigError("cert", self.cert, problem) from None

    @property
    def tls(self) -> bool:
        return self.ca_cert is not None or self.cert is not None


def _parse(endpoint: str) -> tuple[str, str, int]:
    """Scheme (or ""), host and port."""
    scheme, separator, rest = endpoint.rpartition("://")
    host, _, port = rest.rpartition(":")
    known = scheme in ({"http", "https"} if separator else {""})
    if not known or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("endpoints", endpoint, "expected host:port, or https://host:port")
    return scheme, host.strip("[]"), int(port)


class EtcdClient:
    """One connection to the cluster. Reads and watches of several threads do not wait for each other.

    Raises:
        ConfigError: etcd3gw is not installed.
    """

    def __init__(self, access: EtcdAccess) -> None:
        try:
            import requests
            from etcd3gw import Etcd3Client
        except ImportError as error:
            raise ConfigError(
                "--rdzv-backend", "etcd", f"needs a library that is missing ({error.name})",
                "pip install 'rallypoint[etcd]'",
            ) from None  # fmt: skip

        self.access = access
        self._token: str | None = None
        self._closed = threading.Event()
        self._watching: set[requests.Response] = set()
        self._lock = forks.Lock()
        self._session: requests.Session = requests.Session()
        # Ignore the environment: its proxies are for the outside world, its REQUESTS_CA_BUNDLE would override
        # ca_cert, and a ~/.netrc would override the token.
        self._session.trust_env = False
        if access.ca_cert is not None:
            self._session.verify = access.ca_cert
        if access.cert is not None:
            self._session.cert = access.cert if access.key is None else (access.cert, access.key)
        self._members: list[Etcd3Client] = []
        for endpoint in access.endpoints:
            scheme, host, port = _parse(endpoint)
            self._members.append(
                Etcd3Client(
                    host,
                    port,
                    protocol=scheme or ("https" if access.tls else "http"),
                    timeout=max(0.5, access.patience * TRY_SHARE),
                    api_path="/v3/",  # etcd 3.4 and later; asking would cost a round trip
                    session=self._session,
                )
            )
        # Start at a random member, so that thousands of nodes with the same list spread over it.
        self._current = uuid.uuid4().int % len(self._members)

    @property
    def name(self) -> str:
        return f"etcd at {', '.join(self.access.endpoints)}"

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request, from whichever endpoint gives one.

        Raises:
            LeaseLost: the request names a lease that has expired.
            RendezvousConnectionError: no endpoint answered within the patience, or the cluster refuses the
                request; the error names the endpoints and the last failure.
        """
        deadline, pause = Deadline(self.access.patience), FIRST_PAUSE
        hopeless = tries = 0
        while True:
            if self._closed.is_set():
                raise RendezvousConnectionError(f"{self.name}: this connection was closed")
            at = self._current
            try:
                return self._post(self._members[at], path, body)
            except _Failed as failed:
                if failed.code in FINAL:
                    raise self._refusal(failed) from None
                hopeless += failed.hopeless
                where = f"{self.access.endpoints[at]}: " if len(self._members) > 1 else ""
                why = f"{where}{failed.why}"
            tries += 1
            self._leave(at)
            if hopeless >= len(self._members) and hopeless == tries:
                raise RendezvousConnectionError(f"{self.name}: {why}")
            if deadline.expired():
                raise RendezvousConnectionError(
                    f"{self.name} has not answered for {self.access.patience:g} s: {why}"
                )
            if tries % len(self._members) == 0:
                self.pause(min(pause, deadline.remaining() or 0.0))
                pause = min(pause * 2, LONGEST_PAUSE)

    def watch(self, start: bytes, end: bytes, revision: int, seconds: float) -> list[Item]:
        """The items that the first change from ``revision`` on put into the keys [start, end).

        Empty if nothing was put within ``seconds``.

        Raises:
            Interrupted: the stream ended; another endpoint is next.
        """
        import requests
        from urllib3.exceptions import ReadTimeoutError

        request: dict[str, Any] = {
            "key": encoded(start),
            "range_end": encoded(end),
            "start_revision": revision,
            "filters": ["NODELETE"],
        }
        at, deadline = self._current, Deadline(seconds)
        member = self._members[at]
        connect = member.timeout or None
        try:
            with (
                self._session.post(
                    member.get_url("/watch"),
                    json={"create_request": request},
                    # A member that is cut off from the others would never answer.
                    headers={**self._authorization(), "Grpc-Metadata-hasleader": "true"},
                    timeout=(connect, max(seconds, 0.001)),
                    stream=True,
                ) as response,
                self._ends_with_us(response),
            ):
                for result in _results(response):
                    if items := parse_items([event["kv"] for event in result.get("events", ())]):
                        return [item for item in items if item.modified == items[0].modified]
                    if result.get("canceled"):
                        # An expired token is reported as a lack of permission here.
                        self._token = None
                        why = result.get("cancel_reason") or "compacted"
                        raise Interrupted(f"{self.access.endpoints[at]}: the watch ended: {why}")
                    if deadline.expired():
                        return []
        except requests.exceptions.ReadTimeout:
            return []
        except (requests.exceptions.RequestException, ValueError) as error:
            if any(isinstance(cause, ReadTimeoutError) for cause in _causes(error)):
                return []
            self._leave(at)
            raise Interrupted(f"{self.access.endpoints[at]}: {_reason(error)}") from None
        self._leave(at)
        raise Interrupted(f"{self.access.endpoints[at]}: the watch ended")

    def pause(self, seconds: float) -> None:
        """Wait, but not past :meth:`close`."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Close all connections; waiting calls end at once."""
        with self._lock:
            self._closed.set()
            watching, self._watching = self._watching, set()
        for response in watching:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # the watch has just ended
                response.raw.shutdown()
        self._session.close()

    @contextlib.contextmanager
    def _ends_with_us(self, response: requests.Response) -> Iterator[None]:
        """Let :meth:`close` end this response, too: closing a session leaves open the connections it has lent out."""
        with self._lock:
            if self._closed.is_set():
                raise Interrupted(f"{self.name}: this connection was closed")
            self._watching.add(response)
        try:
            yield
        finally:
            with self._lock:
                self._watching.discard(response)

    def _leave(self, at: int) -> None:
        if self._current == at:  # otherwise another thread has already moved on
            self._current = (at + 1) % len(self._members)

    def _post(self, member: Etcd3Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One try. Raises ``_Failed``."""
        try:
            if self.access.user is not None and self._token is None:
                self._token = self._new_token(member)
            return _request(member, path, body, self._authorization())
        except _Failed as failed:
            # Unused tokens expire, and all tokens count as old once users or roles have changed.
            if failed.code == UNAUTHENTICATED or "auth store is old" in failed.why:
                self._token = None
                raise _Failed(failed.why, UNAUTHENTICATED) from None
            alert = failed.why if failed.hopeless else ""
            if failed.cut and member.protocol == "https":
                alert = self._alert(member)
            if not alert:
                raise
            if "alert" in alert and ("certificate" in alert or "unknown ca" in alert):
                given = self.access.cert is not None
                what = "it refuses our" if given else "it asks for a client"
                alert = f"{what} certificate ({alert})"
            raise _Failed(f"TLS: {alert}", hopeless=True) from None

    def _new_token(self, member: Etcd3Client) -> str:
        credentials = {"name": self.access.user, "password": self.access.password}
        try:
            return str(_request(member, "/auth/authenticate", credentials, {})["token"])
        except _Failed as failed:
            if failed.code == PRECONDITION:
                return ""  # the cluster has no authentication
            raise

    def _alert(self, member: Etcd3Client) -> str:
        """Why the server cuts our connections, if it says so.

        In TLS 1.3, a server refuses a client's certificate when the client is already writing its request, and the write
        fails before the refusal is read. So connect again and only read.
        """
        context = ssl.create_default_context(cafile=self.access.ca_cert)
        if self.access.cert is not None:
            context.load_cert_chain(self.access.cert, self.access.key)
        try:
            with (
                addresses.connect(member.host, member.port, ALERT_TIMEOUT) as plain,
                context.wrap_socket(plain, server_hostname=member.host) as connection,
            ):
                connection.recv(1)
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT):
                return _reason(error)
        return ""

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _refusal(self, failed: _Failed) -> RendezvousConnectionError:
        if failed.code == NOT_FOUND and "lease" in failed.why:
            return LeaseLost(f"{self.name}: {failed.why}")
        why = failed.why
        if "authentication failed" in why:
            why = f"the user {self.access.user!r} or the password is wrong ({why})"
        elif "user name is empty" in why:
            why = f"it asks for a user and a password ({why})"
        elif failed.code == DENIED:
            user = "" if self.access.user is None else f" to the user {self.access.user!r}"
            why = f"it denies access{user} ({why})"
        return RendezvousConnectionError(f"{self.name}: {why}")


def _request(
    member: Etcd3Client, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    from etcd3gw.exceptions import Etcd3Exception
    from requests.exceptions import RequestException

    try:
        answer = member.post(member.get_url(path), json=body, headers=headers)
    except (Etcd3Exception, RequestException) as error:
        raise _failure(error) from None
    if not isinstance(answer, dict):
        raise _Failed("this is not etcd's gateway")
    return answer


def _failure(error: Exception) -> _Failed:
    """What etcd3gw or requests raised, in one line."""
    try:
        answer = json.loads(getattr(error, "detail_text", None) or "")
        return _Failed(str(answer["error"]), int(answer["code"]))
    except (ValueError, KeyError, TypeError):
        pass  # not an answer from etcd's gateway
    for cause in _causes(error):
        # An authority that we do not know, or a server that wants another certificate than ours.
        if isinstance(cause, _CUT):
            return _Failed(f"{_reason(error)} (TLS on one side only?)", cut=True)
        if isinstance(cause, ssl.SSLError):
            return _Failed(_reason(error), hopeless=True)
    return _Failed(_reason(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first; requests hides them in several places."""
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        one = todo.pop(0)
        if isinstance(one, BaseException) and one not in seen:
            seen.append(one)
            yield one
            todo += [*one.args, getattr(one, "reason", None), one.__cause__, one.__context__]


def _reason(error: BaseException) -> str:
    from requests.exceptions import Timeout

    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError) and cause.reason:
            return str(cause.reason).lower().replace("_", " ")
        if isinstance(cause, Timeout):
            return "no answer in time"
        # requests' own errors are OSErrors too, without a number.
        if isinstance(cause, OSError) and cause.errno is not None and cause.strerror:
            return cause.strerror.lower()
    text = getattr(error, "detail_text", None) or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0][:200]


def _results(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The lines of a streamed answer."""
    if response.status_code != 200:
        raise ValueError(f"HTTP {response.status_code}: {response.text.strip()[:200]}")
    rest = b""
    for piece in response.iter_content(chunk_size=None):
        *lines, rest = (rest + piece).split(b"\n")
        for line in filter(None, lines):
            message = json.loads(line)
            if "result" not in message:
                raise ValueError(str(message.get("error", message))[:200])
            yield message["result"]


def encoded(data: bytes) -> str:
    """Bytes as the gateway's JSON carries them."""
    return base64.b64encode(data).decode()


def parse_items(found: list[dict[str, Any]]) -> list[Item]:
    """Keys from the gateway's JSON, which omits empty values and writes numbers as text."""
    return [
        Item(
            base64.b64decode(one["key"]),
            base64.b64decode(one.get("value", "")),
            int(one.get("version", 0)),
            int(one.get("mod_revision", 0)),
        )
        for one in found
    ]
