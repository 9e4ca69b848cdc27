"""Both ends of a connection prove that they know the job's secret, before anything is unpickled. Pure.

Theory of operation
-------------------
Four messages; each is a JSON object in a frame of its own: ``RLY1``, its length (u32, little endian), UTF-8.

    connecting                                         accepting
    {version, role, nonce, me}  ------------------->
                                <-------------------   {version, role, nonce, me}
    {proof}                     ------------------->   believes the other from here on
    believes the other from here on  <--------------   {proof}

A proof is an HMAC-SHA256 over its sender's role and both hellos, byte for byte as they were sent. So nothing
that was said can be changed on the way, the version included; a proof of an earlier connection is none for
this one, whose nonces are new; and one's own proof, sent back, is none of the other role. Who connects proves
first: whoever merely connects to a port gets no proof to try secrets on.

Either end may send ``{refused}`` with a reason instead of what is due. It is worth no more than any stranger's
word: it ends the connection and is shown in quotes.

What this does not do: later bytes are neither signed nor encrypted, so who can change the packets of a
connection that is open can do so; and who listens reads them.

Within TLS (``wire.tls``), which does both, the proofs cover the *channel*, too: the SHA-256 of the certificate that
the accepting end has shown. It is not sent; each end uses what it has seen. So whoever sits between the two
with a certificate of his own can relay all four messages, and neither end believes the other. It does not help against
one who has the accepting end's key. Without a channel proofs are what they are without TLS.

The magic stays as it is in later versions, and
``version`` is looked at before any other field, so that versions can tell each other apart.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import ClassVar, NoReturn, TypeAlias

from rallypoint.errors import AuthenticationError, ConfigError, ProtocolError


JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

VERSION = 1
MAX_HANDSHAKE = 8192  # bytes of one message
MIN_SECRET = 16  # bytes
NONCE_BYTES = 32  # what callers draw; half of it is the least that is taken
_MIN_NONCE = 16

_MAGIC = b"RLY1"
_HEADER_BYTES = 8
_HELLO = {"version", "role", "nonce", "me"}
_LABEL = b"rallypoint handshake: proof of the %b process\0"
# How the first record of a TLS connection begins.
_TLS = b"\x16\x03"
_RELAYED = ", and so does somebody between the two who shows another certificate"
# Strangers' text in our messages is cut to this.
_MAX_SHOWN = 200


class _Handshake:
    """What both ends have in common.

    Args:
        secret: the job's, at least ``MIN_SECRET`` bytes.
        me: what the other end is told, and can trust; has the text ``job`` and the number ``generation``,
            in which both ends must agree.
        nonce: ``NONCE_BYTES`` random bytes, drawn for this connection alone.
        channel: what tells the encrypted connection around this handshake from one to somebody else; empty without.

    Attributes:
        done: the other end has proved that it knows the secret, and nothing is left to be waited for.
        peer: what the other end says of itself, once it has proved it. Who wanted one certain peer compares names.
        rest: bytes that came after the handshake's last; they belong to whatever comes next.
        refusal: after an error: what to send before closing, so that the other end can say why; may be empty.

    Raises:
        ConfigError: the secret or the nonce is too short, or ``me`` does not fit into a message.
    """

    _role: ClassVar[str]
    _other: ClassVar[str]
    _begins: ClassVar[bool]

    def __init__(
        self, secret: bytes, me: Mapping[str, JSON], nonce: bytes, channel: bytes = b""
    ) -> None:
        _check_own(secret, me, nonce)
        self._secret = bytes(secret)
        self._channel = bytes(channel)
        self._job, self._generation = me["job"], me["generation"]
        hello: dict[str, JSON] = {
            "version": VERSION,
            "role": self._role,
            "nonce": nonce.hex(),
            "me": dict(me),
        }
        self._own = _encode(hello)
        if len(self._own) > MAX_HANDSHAKE:
            raise ConfigError(
                "me",
                None,
                f"makes a message of {len(self._own)} bytes, at most {MAX_HANDSHAKE} are sent before the"
                " other end is known; send the rest after the handshake",
            )
        self._theirs = b""
        self._claimed: dict[str, JSON] = {}
        self._buffer = bytearray()
        self._hear: Callable[[dict[str, JSON], bytes], bytes] = self._hear_hello
        self._failure: ProtocolError | None = None
        self.done = False
        self.peer: dict[str, JSON] | None = None
        self.refusal = b""

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer) if self.done else b""

    def start(self) -> bytes:
        """What to send first; empty for the end that was connected to."""
        return _frame(self._own) if self._begins else b""

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take what came, in pieces of any size; returns what to send now, possibly nothing.

        Raises:
            AuthenticationError: the other end does not know the secret, belongs to another job, or has refused us.
            ProtocolError: what came is no message of this handshake. Both stay: no later call gets further.
        """
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        self._buffer += data
        reply = b""
        while not self.done:
            payload = self._next_payload()
            if payload is None:
                break
            reply += self._hear(self._parse(payload), payload)
        return reply

    def ended(self) -> ProtocolError:
        """What to raise when the connection ends before the handshake does."""
        if self._failure is not None:
            return self._failure
        return ProtocolError(
            f"the {self._other} process closed the connection before the handshake was over: it has ended,"
            " or its log says why it refused"
        )

    # -- what comes --------------------------------------------------------------------------------

    def _next_payload(self) -> bytes | None:
        buffer = self._buffer
        if buffer[:2] == _TLS:
            self._fail(
                ProtocolError,
                f"the {self._other} process uses TLS and this worker does not: give all workers the same tls=...",
                answer=False,
            )
        if not _MAGIC.startswith(buffer[: len(_MAGIC)]):
            self._fail(
                ProtocolError,
                f"the {self._other} process began a message with {bytes(buffer[:8])!r}, not with {_MAGIC!r}:"
                " it is another program; compare the address with the one that was meant",
                answer=False,
            )
        if len(buffer) < _HEADER_BYTES:
            return None
        length = int.from_bytes(buffer[len(_MAGIC) : _HEADER_BYTES], "little")
        if length > MAX_HANDSHAKE:
            self._fail(
                ProtocolError,
                f"the {self._other} process announced a message of {length} bytes, at most {MAX_HANDSHAKE} are"
                " taken before it has proved who it is",
            )
        if len(buffer) < _HEADER_BYTES + length:
            return None
        payload = bytes(buffer[_HEADER_BYTES : _HEADER_BYTES + length])
        del buffer[: _HEADER_BYTES + length]
        return payload

    def _parse(self, payload: bytes) -> dict[str, JSON]:
        try:
            message = json.loads(payload.decode("utf-8"))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._malformed("is no JSON object")
        if "refused" in message:
            self._fail(
                AuthenticationError,
                f"the {self._other} process refused the connection: {_shown(message['refused'])}",
                answer=False,
            )
        return message

    def _hear_hello(self, message: dict[str, JSON], payload: bytes) -> bytes:
        version = message.get("version")
        if type(version) is not int:
            self._malformed("names no version")
        if version != VERSION:
            self._fail(
                ProtocolError,
                f"the {self._other} process speaks version {_shown(version)} of the handshake, the {self._role}"
                f" one version {VERSION}: install the same release of rallypoint on both sides",
            )
        if message.keys() != _HELLO:
            self._malformed("has other fields than a hello of its version")
        if message["role"] != self._other:
            self._malformed(f"is not one of the {self._other} end: it may be our own, sent back")
        nonce, me = message["nonce"], message["me"]
        if not isinstance(nonce, str) or len(nonce) < 2 * _MIN_NONCE:
            self._malformed(f"has no nonce of at least {_MIN_NONCE} bytes")
        if not isinstance(me, dict):
            self._malformed("does not say who sent it")
        self._check_job(me)
        self._claimed, self._theirs = me, payload
        self._hear = self._hear_proof
        return self._proof() if self._begins else _frame(self._own)

    def _check_job(self, me: Mapping[str, JSON]) -> None:
        job, generation = me.get("job"), me.get("generation")
        same_generation = type(generation) is int and generation == self._generation
        if job == self._job and same_generation:
            return
        why = (
            "one of them was left behind by an earlier round; it should have ended"
            if job == self._job
            else "two jobs meet at one address; give each its own"
        )
        self._fail(
            AuthenticationError,
            f"the {self._other} process belongs to job {_shown(job)} generation {_shown(generation)}, not to job"
            f" {_shown(self._job)} generation {_shown(self._generation)}: {why}",
        )

    def _hear_proof(self, message: dict[str, JSON], _payload: bytes) -> bytes:
        proof = message.get("proof")
        if message.keys() != {"proof"} or not isinstance(proof, str):
            self._malformed("is no proof")
        given = proof.encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(given, self._proof_of(self._other).encode()):
            self._fail(
                AuthenticationError,
                "the two do not share a secret: start both within one job, or give both the same secret"
                f" (the proof of the {self._other} process is wrong; a hello changed on the way looks the same"
                f"{_RELAYED if self._channel else ''})",
            )
        self.peer = self._claimed
        self.done = True
        return b"" if self._begins else self._proof()

    # -- what goes ---------------------------------------------------------------------------------

    def _proof(self) -> bytes:
        return _frame(_encode({"proof": self._proof_of(self._role)}))

    def _proof_of(self, role: str) -> str:
        hellos = (self._own, self._theirs) if self._begins else (self._theirs, self._own)
        said = hmac.new(self._secret, _LABEL % role.encode(), hashlib.sha256)
        for each in (*hellos, self._channel) if self._channel else hellos:
            said.update(len(each).to_bytes(4, "little"))
            said.update(each)
        return said.hexdigest()

    def _malformed(self, fault: str) -> NoReturn:
        self._fail(
            ProtocolError,
            f"a message of the {self._other} process {fault}: it is another program, or the line damages bytes",
        )

    def _fail(self, kind: type[ProtocolError], text: str, *, answer: bool = True) -> NoReturn:
        # No answer to a refusal: two ends would go on refusing each other.
        self.refusal = _frame(_encode({"refused": _printable(text)})) if answer else b""
        self._failure = kind(text)
        self._buffer.clear()
        raise self._failure


class Connecting(_Handshake):
    """The end that opened the connection: it speaks first, and proves first."""

    _role, _other, _begins = "connecting", "accepting", True


class Accepting(_Handshake):
    """The end that was connected to: it says nothing before it has heard a hello, and proves nothing to strangers."""

    _role, _other, _begins = "accepting", "connecting", False


def _check_own(secret: bytes, me: Mapping[str, JSON], nonce: bytes) -> None:
    if len(secret) < MIN_SECRET:  # the secret itself is shown nowhere
        raise ConfigError(
            "secret",
            None,
            f"has {len(secret)} bytes, at least {MIN_SECRET} are needed",
            "secrets.token_bytes(32) makes one",
        )
    if len(nonce) < _MIN_NONCE:
        raise ConfigError(
            "nonce", None, f"has {len(nonce)} bytes, draw {NONCE_BYTES} for each connection"
        )
    if not isinstance(me.get("job"), str) or type(me.get("generation")) is not int:
        raise ConfigError(
            "me", dict(me), "expected the job's name as 'job', and the number of its 'generation'"
        )


def _frame(payload: bytes) -> bytes:
    return _MAGIC + len(payload).to_bytes(4, "little") + payload


def _encode(message: dict[str, JSON]) -> bytes:
    try:
        return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("me", None, f"cannot be written as JSON: {error}") from None


def _shown(value: JSON) -> str:
    """A stranger's value, safe to print."""
    if isinstance(value, str):
        return repr(_printable(value))
    # Deep lists are not shown: their repr may go deeper than the stack.
    return _printable(repr(value)) if isinstance(value, int | None) else "of no such type"


def _printable(text: str) -> str:
    cut = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return "".join(each if each.isprintable() else "?" for each in cut)
