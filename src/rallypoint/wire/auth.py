"""Both ends of a connection prove that they know the job's secret, before anything is unpickled. Pure.

Theory of operation
-------------------
Four messages; each is a JSON object in a frame of its own: ``RLY1``, its length (u32, little endian), UTF-8.

    connecting                                         accepting
    {version, role, nonce, me, seals}  ------------>
                                <------------   {version, role, nonce, me, seals}
    {proof}                     ------------------->   believes the other from here on
    believes the other from here on  <--------------   {proof}

A proof is an HMAC-SHA256 over its sender's role and both hellos, byte for byte as they were sent. So nothing
that was said can be changed on the way, the version included; a proof of an earlier connection is none for
this one, whose nonces are new; and one's own proof, sent back, is none of the other role. Who connects proves
first: whoever merely connects to a port gets no proof to try secrets on.

Either end may send ``{refused}`` with a reason instead of what is due. It is worth no more than any stranger's
word: it ends the connection and is shown in quotes.

The proofs also cover the *channel*, which is not sent; each end uses what it knows of it. Whoever sits between the two can relay
all four messages, and neither end believes the other, since they know different things:

- over TCP, the address: what the one has connected to, and what the other tells its group to connect to;
- within TLS (``wire.tls``), the SHA-256 of the certificate that the accepting end has shown. It does not help against one
  who has that end's key;
- over Unix sockets, whose ends the kernel vouches for, nothing.

What follows the handshake is TLS's over TLS. Over plain TCP every byte of it is under a MAC (``wire.seal``) with keys of this
very handshake: from the secret, both hellos and the channel. ``seals`` are the kinds that an end knows, the best first; the
first of the connecting end's that both know is taken. Since the proofs cover the hellos, nobody can talk the two into
another. An end that is told to go without (``NONE``) says that, too.

The magic stays as it is in later versions, and
``version`` is looked at before any other field, so that versions can tell each other apart.
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
NONCE_BYTES = 32  # what callers draw; half of it is the least that is taken
_MIN_NONCE = 16

_MAGIC = b"RLY1"
_HEADER_BYTES = 8
_HELLO = {"version", "role", "nonce", "me", "seals"}
# Among seals: what follows the handshake goes without a MAC.
NONE = "none"
# What an end offers that is to protect what follows.
SEALS = bulk.available
_MOST_SEALS = 16
_LABEL = b"rallypoint handshake: proof of the %b process\0"
# How the first record of a TLS connection begins.
_TLS = b"\x16\x03"
_RELAYED = ", and so does a relay between the two, at an address or with a certificate that is not the worker's own"
# Strangers' text in our messages is cut to this.
_MAX_SHOWN = 200


class _Handshake:
    """What both ends have in common.

    Args:
        secret: the job's, at least ``MIN_SECRET`` bytes.
        me: what the other end is told, and can trust; has the text ``job`` and the number ``generation``,
            in which both ends must agree.
        nonce: ``NONCE_BYTES`` random bytes, drawn for this connection alone.
        channel: what tells this connection from one to somebody else: see above; empty without.
        seals: how what follows may be protected, the best first; empty: it is not for this handshake to protect it.

    Attributes:
        done: the other end has proved that it knows the secret, and nothing is left to be waited for.
        peer: what the other end says of itself, once it has proved it. Who wanted one certain peer compares names.
        rest: bytes that came after the handshake's last; they belong to whatever comes next.
        keys: of what follows, to be sent and received, once the handshake is done; None: it is under no MAC.
        refusal: after an error: what to send before closing, so that the other end can say why; may be empty.

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
                f"makes a message of {len(self._own)} bytes, at most {MAX_HANDSHAKE} are sent before the"
                " other end is known; send the rest after the handshake",
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
            "one of them was left behind by an earlier round; it should have ended"
            if job == self._job
            else "two jobs meet at one address; give each its own"
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
            self._malformed("does not list how it protects what follows")
        asks, answers = (self._seals, theirs) if self._begins else (theirs, self._seals)
        common = next((str(each) for each in asks if each in answers), None)
        if common is not None:
            self._seal = common
        elif asks or answers:
            self._fail(
                AuthenticationError,
                f"the {self._other} process protects its connections by {_listed(theirs)}, the {self._role} one by"
                f" {_listed(self._seals)}: give all workers the same secret and the same choice of insecure",
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
        self.keys = self._derive_keys()
        self.done = True
        return b"" if self._begins else self._proof()

    # -- what goes ---------------------------------------------------------------------------------

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


def _listed(seals: Sequence[JSON]) -> str:
    return _printable(" or ".join(map(str, seals))) or "nothing of its own"


def _printable(text: str) -> str:
    cut = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
    return "".join(each if each.isprintable() else "?" for each in cut)
