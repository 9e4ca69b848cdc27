"""Both ends of a connection prove that they know the job's secret, before anything is unpickled. Pure.

Theory of operation
-------------------
There are four messages. Each is a JSON object in a frame: ``RLY1``, its length (u32, little endian), UTF-8.

    connecting                                         accepting
    {version, role, nonce, me, seals}  ------------>
                                <------------   {version, role, nonce, me, seals}
    {proof}                     ------------------->   the connecting end is authenticated
    the accepting end is authenticated  <-----------   {proof}

A proof is an HMAC-SHA256 over its sender's role and both hellos, byte for byte. So nothing in them, the version
included, can be changed in transit. A proof from an earlier connection is invalid, since the nonces are new, and so is
one's own proof sent back, since the role is different. The connecting end proves first: merely connecting to a port
yields no proof against which secrets could be tried offline.

Either end may send ``{refused}`` with a reason instead of the next message. It is not authenticated: it ends the
connection, and the reason is shown in quotes.

The proofs also cover the *channel*, which is not sent: each end uses its own knowledge of it. A relay between the two can
forward all four messages, but then the ends know different channels, and reject each other's proofs. The channel is

- over TCP, the address: the one dialed, and the one that the accepting end advertises to its group;
- within TLS (``wire.tls``), the SHA-256 of the accepting end's certificate, which does not help against a relay that
  has that end's key;
- over Unix sockets, whose ends the kernel identifies, empty.

After the handshake, TLS protects its connections itself. Over plain TCP, every byte is under a MAC (``wire.seal``), with
keys derived from the secret, both hellos and the channel. ``seals`` are the MACs that an end supports, best first; the
connecting end's first one that both support is used. The proofs cover the hellos, so this choice cannot be manipulated.
An end without a secret offers ``NONE``.

The magic never changes, and ``version`` is checked before any other field, so that different versions recognize each
other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NoReturn, TypeAlias

from rallypoint._core.secret import derive
from rallypoint.errors import AuthenticationError, ConfigError, ProtocolError

from . import bulk
from .seal import Keys


JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

VERSION = 2
MAX_HANDSHAKE = 8192  # bytes of one message
MIN_SECRET = 16  # bytes
NONCE_BYTES = 32  # to draw for each connection; at least half of it is accepted
_MIN_NONCE = 16

_MAGIC = b"RLY1"
_HEADER_BYTES = 8
_HELLO = {"version", "role", "nonce", "me", "seals"}
# Among seals: no MAC after the handshake.
NONE = "none"
# The MACs that an end with a secret offers.
SEALS = bulk.available
_MOST_SEALS = 16
_LABEL = b"rallypoint handshake: proof of the %b process\0"
# The first bytes of a TLS connection.
_TLS = b"\x16\x03"
_RELAYED = ", and so does a relay between the two, at an address or with a certificate that is not the worker's own"
# The most characters of the peer's text in our errors.
_MAX_SHOWN = 200


class _Handshake:
    """The part that both ends have in common.

    Args:
        secret: the job's, at least ``MIN_SECRET`` bytes.
        me: the introduction for the other end, with a string ``job`` and a number ``generation`` that must be the same on
            both ends.
        nonce: ``NONCE_BYTES`` random bytes, for this connection alone.
        channel: see above.
        seals: the allowed MACs for what follows, best first; empty: it is protected in another way.

    Attributes:
        done: whether the handshake is complete, and the other end authenticated.
        peer: the introduction of the other end, once it is authenticated. The caller checks that it is the intended peer.
        rest: bytes that followed the last message of the handshake.
        keys: for sending and receiving after the handshake; None: no MAC.
        refusal: after an error, what to send before closing, to tell the other end the reason; may be empty.

    Raises:
        ConfigError: the secret or the nonce is too short, or ``me`` does not fit into a message.
    """

    _role: ClassVar[str]
    _other: ClassVar[str]
    _begins: ClassVar[bool]

    def __init__(
        self,
        secret: bytes,
        me: Mapping[str, JSON],
        nonce: bytes,
        channel: bytes = b"",
        seals: Sequence[str] = (),
    ) -> None:
        _check_own(secret, me, nonce)
        self._secret = bytes(secret)
        self._key = derive(self._secret, "rpc handshake")
        self._channel = bytes(channel)
        self._job, self._generation = me["job"], me["generation"]
        hello: dict[str, JSON] = {
            "version": VERSION,
            "role": self._role,
            "nonce": nonce.hex(),
            "me": dict(me),
            "seals": list(seals),
        }
        self._own = _encode(hello)
        if len(self._own) > MAX_HANDSHAKE:
            raise ConfigError(
                "me",
                None,
                f"makes a message of {len(self._own)} bytes, but the limit before authentication is {MAX_HANDSHAKE}; send"
                " the rest after the handshake",
            )
        self._theirs = b""
        self._seals = tuple(seals)
        self._seal = NONE
        self._claimed: dict[str, JSON] = {}
        self._buffer = bytearray()
        self._hear: Callable[[dict[str, JSON], bytes], bytes] = self._hear_hello
        self._failure: ProtocolError | None = None
        self.done = False
        self.peer: dict[str, JSON] | None = None
        self.refusal = b""
        self.keys: tuple[Keys, Keys] | None = None

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer) if self.done else b""

    def start(self) -> bytes:
        """What to send first; empty for the accepting end."""
        return _frame(self._own) if self._begins else b""

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take received bytes, in pieces of any size. Returns what to send now, perhaps nothing.

        Raises:
            AuthenticationError: the other end does not know the secret, belongs to another job, or has refused us.
            ProtocolError: this is not a valid message of the handshake. After either error, each further call raises it.
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
        """The error for a connection that ends before the handshake is complete."""
        if self._failure is not None:
            return self._failure
        return ProtocolError(
            f"the {self._other} process closed the connection during the handshake: it has ended, or its log says why it"
            " refused"
        )

    # -- receiving ---------------------------------------------------------------------------------

    def _next_payload(self) -> bytes | None:
        buffer = self._buffer
        if buffer[:2] == _TLS:
            self._fail(
                ProtocolError,
                f"the {self._other} process uses TLS, but this worker does not: give all workers the same tls=...",
                answer=False,
            )
        if not _MAGIC.startswith(buffer[: len(_MAGIC)]):
            self._fail(
                ProtocolError,
                f"the {self._other} process began a message with {bytes(buffer[:8])!r} instead of {_MAGIC!r}:"
                " it is another program; check the address",
                answer=False,
            )
        if len(buffer) < _HEADER_BYTES:
            return None
        length = int.from_bytes(buffer[len(_MAGIC) : _HEADER_BYTES], "little")
        if length > MAX_HANDSHAKE:
            self._fail(
                ProtocolError,
                f"the {self._other} process announced a message of {length} bytes, but the limit before authentication is"
                f" {MAX_HANDSHAKE}",
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
            self._malformed("is not a JSON object")
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
            self._malformed("has no version")
        if version != VERSION:
            self._fail(
                ProtocolError,
                f"the {self._other} process speaks version {_shown(version)} of the handshake, the {self._role}"
                f" one version {VERSION}: install the same release of rallypoint on both sides",
            )
        if message.keys() != _HELLO:
            self._malformed("does not have the fields of its version")
        if message["role"] != self._other:
            self._malformed(f"is not from the {self._other} end: it may be our own, sent back")
        nonce, me = message["nonce"], message["me"]
        if not isinstance(nonce, str) or len(nonce) < 2 * _MIN_NONCE:
            self._malformed(f"has no nonce of at least {_MIN_NONCE} bytes")
        if not isinstance(me, dict):
            self._malformed("does not introduce its sender")
        self._check_job(me)
        self._agree_on_seal(message["seals"])
        self._claimed, self._theirs = me, payload
        self._hear = self._hear_proof
        return self._proof() if self._begins else _frame(self._own)

    def _check_job(self, me: Mapping[str, JSON]) -> None:
        job, generation = me.get("job"), me.get("generation")
        same_generation = type(generation) is int and generation == self._generation
        if job == self._job and same_generation:
            return
        why = (
            "one of them is left over from an earlier round and should have ended"
            if job == self._job
            else "two jobs use the same address; give each its own"
        )
        self._fail(
            AuthenticationError,
            f"the {self._other} process belongs to job {_shown(job)} generation {_shown(generation)}, not to job"
            f" {_shown(self._job)} generation {_shown(self._generation)}: {why}",
        )

    def _agree_on_seal(self, theirs: JSON) -> None:
        if (
            not isinstance(theirs, list)
            or len(theirs) > _MOST_SEALS
            or not all(isinstance(each, str) for each in theirs)
        ):
            self._malformed("has no valid list of seals")
        asks, answers = (self._seals, theirs) if self._begins else (theirs, self._seals)
        common = next((str(each) for each in asks if each in answers), None)
        if common is not None:
            self._seal = common
        elif asks or answers:
            self._fail(
                AuthenticationError,
                f"the {self._other} process protects its connections by {_listed(theirs)}, the {self._role} one by"
                f" {_listed(self._seals)}: give all workers the same secret and the same option insecure",
            )

    def _hear_proof(self, message: dict[str, JSON], _payload: bytes) -> bytes:
        proof = message.get("proof")
        if message.keys() != {"proof"} or not isinstance(proof, str):
            self._malformed("is not a proof")
        given = proof.encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(given, self._proof_of(self._other).encode()):
            self._fail(
                AuthenticationError,
                "the two processes do not share a secret: start both in one job, or give both the same secret"
                f" (wrong proof by the {self._other} process; a hello altered in transit looks the same"
                f"{_RELAYED if self._channel else ''})",
            )
        self.peer = self._claimed
        self.keys = self._derive_keys()
        self.done = True
        return b"" if self._begins else self._proof()

    # -- sending -----------------------------------------------------------------------------------

    def _proof(self) -> bytes:
        return _frame(_encode({"proof": self._proof_of(self._role)}))

    def _proof_of(self, role: str) -> str:
        said = hmac.new(self._key, _LABEL % role.encode(), hashlib.sha256)
        for each in (*self._hellos(), self._channel):
            said.update(len(each).to_bytes(4, "little"))
            said.update(each)
        return said.hexdigest()

    def _hellos(self) -> tuple[bytes, bytes]:
        return (self._own, self._theirs) if self._begins else (self._theirs, self._own)

    def _derive_keys(self) -> tuple[Keys, Keys] | None:
        if self._seal == NONE or not self._seals:
            return None
        said = (*self._hellos(), self._channel)
        return (
            Keys.of(self._secret, self._seal, self._role, said),
            Keys.of(self._secret, self._seal, self._other, said),
        )

    def _malformed(self, fault: str) -> NoReturn:
        self._fail(
            ProtocolError,
            f"a message of the {self._other} process {fault}: it is another program, or the network damages data",
        )

    def _fail(self, kind: type[ProtocolError], text: str, *, answer: bool = True) -> NoReturn:
        # No answer to a refusal: the two ends would refuse each other forever.
        self.refusal = _frame(_encode({"refused": _printable(text)})) if answer else b""
        self._failure = kind(text)
        self._buffer.clear()
        raise self._failure


class Connecting(_Handshake):
    """The end that opened the connection. It sends its hello and its proof first."""

    _role, _other, _begins = "connecting", "accepting", True


class Accepting(_Handshake):
    """The end that accepted the connection. It sends nothing before a hello, and its proof only after a valid one."""

    _role, _other, _begins = "accepting", "connecting", False


def _check_own(secret: bytes, me: Mapping[str, JSON], nonce: bytes) -> None:
    if len(secret) < MIN_SECRET:  # the secret itself must not appear in the error
        raise ConfigError(
            "secret",
            None,
            f"has {len(secret)} bytes, expected at least {MIN_SECRET}",
            "secrets.token_bytes(32) creates one",
        )
    if len(nonce) < _MIN_NONCE:
        raise ConfigError(
            "nonce", None, f"has {len(nonce)} bytes, expected {NONCE_BYTES} for each connection"
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
    """A peer's value, safe to print."""
    if isinstance(value, str):
        return repr(_printable(value))
    # Lists are not shown: the repr of deep ones overflows the stack.
    return _printable(repr(value)) if isinstance(value, int | None) else "of the wrong type"


def _listed(seals: Sequence[JSON]) -> str:
    return _printable(" or ".join(map(str, seals))) or "nothing"


def _printable(text: str) -> str:
    cut = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return "".join(each if each.isprintable() else "?" for each in cut)
