"""The job's secret: where a process finds it, what is accepted as one, and the keys derived from it.

Every process of a job knows the same secret. In this order a process takes it from

1. an argument (``--secret-file``, ``secret=`` of an option object),
2. ``RALLY_SECRET``,
3. ``RALLY_SECRET_FILE``, the path of a file,
4. its launcher: in memory, if this process is a fork of the launcher's (:func:`hold`), or through the descriptor
   whose number is in ``RALLY_SECRET_FD``.

The secret itself is never a key. Whoever authenticates something derives a key for that one purpose
(:func:`derive`), so that nothing authenticated for one purpose is accepted for another.

A secret appears in no message, log line, report or command line. Errors name where it came from, never its value.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rallypoint.errors import ConfigError

from . import env as environment


# What a secret must have at least: 128 bits, if its bytes are random.
MIN_BYTES = 16
# What `make` makes.
MADE_BYTES = 32
# A file that is longer is not a secret.
MAX_FILE_BYTES = 64 * 1024

VARIABLE = "RALLY_SECRET"
FILE_VARIABLE = "RALLY_SECRET_FILE"
FD_VARIABLE = "RALLY_SECRET_FD"
# In the environment of workers whose job has no secret, on purpose or after a warning.
OPEN_VARIABLE = "RALLY_INSECURE"
# All that a process can find its secret by.
VARIABLES = (VARIABLE, FILE_VARIABLE, FD_VARIABLE, OPEN_VARIABLE)

# Used by default where several nodes meet, if it is there: below the home folder, which nodes often share.
USER_FILE = "rallypoint/secret"

_MEMFD_NAME = "rally-secret"
_SALT = b"rallypoint v1"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_held: bytes | None = None


def make() -> bytes:
    """A new secret."""
    return secrets.token_bytes(MADE_BYTES)


def check(secret: object, field: str) -> bytes:
    """A secret, text or bytes, as bytes.

    Args:
        field: where it came from, for the error.

    Raises:
        ConfigError: it is not text or bytes, or too short.
    """
    data = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(data, bytes):
        kind = type(data).__name__
        raise ConfigError(field, None, f"expected text or bytes for a secret, got {kind}")
    if len(data) < MIN_BYTES:
        raise ConfigError(
            field,
            None,
            f"the secret has {len(data)} bytes, at least {MIN_BYTES} are needed",
            "rally secret FILE makes one",
        )
    return data


def read_file(path: str | os.PathLike[str], field: str) -> bytes:
    """The secret in a file; white space around it does not count.

    Only this user may be able to read or write the file. One that belongs to root may also be readable by its
    group: so an administrator, or Kubernetes, hands a secret to a job.

    Args:
        field: what named the file, for the error: a flag, a variable.

    Raises:
        ConfigError: the file cannot be read, others can read or change it, or it holds no secret.
    """
    shown = os.fspath(path)
    try:
        # A pipe is fine (`--secret-file <(…)`); a fifo that nobody writes to is waited for, as by cat.
        with open(shown, "rb") as file:
            _check_access(os.fstat(file.fileno()), shown, field)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(field, shown, f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(field, shown, f"longer than {MAX_FILE_BYTES} bytes: not a secret")
    text = data.strip()
    if len(text) < MIN_BYTES:
        raise ConfigError(
            field,
            shown,
            f"the secret in this file has {len(text)} bytes, at least {MIN_BYTES} are needed",
            f"rally secret --force {shown}",
        )
    return text


def find(given: str | bytes | None = None, field: str = "secret") -> bytes | None:
    """The secret of this process's job, or None if it has none.

    Args:
        given: what the caller passed, which wins.
        field: what the caller calls it, for the error.

    Raises:
        ConfigError: what was given, or what the environment names, is not usable as a secret.
    """
    if given is not None:
        return check(given, field)
    found = from_environment(environment.snapshot())
    return held() if found is None else found


def from_environment(env: Mapping[str, str]) -> bytes | None:
    """What the user's variables say: ``RALLY_SECRET``, else the content of ``RALLY_SECRET_FILE``.

    Raises:
        ConfigError: it is not usable as a secret. An empty variable is an error, not "none": a job must not
            become an open one because something was not filled in.
    """
    text, path = env.get(VARIABLE), env.get(FILE_VARIABLE)
    if text is not None:
        return check(text, VARIABLE)
    return None if path is None else read_file(path, FILE_VARIABLE)


def shared(env: Mapping[str, str]) -> bytes | None:
    """What the nodes of a job can share without being told on the command line: variables, then the user's file.

    Raises:
        ConfigError: what is named, or is there, is not usable as a secret.
    """
    given = from_environment(env)
    path = user_file(env)
    if given is None and path is not None and path.exists():
        return read_file(path, "rally secret")
    return given


def user_file(env: Mapping[str, str]) -> Path | None:
    """Where ``rally secret`` puts a secret, and several nodes look for one; None for a user without a home folder."""
    base = env.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(env.get("HOME", ""), ".config")
    return Path(base, USER_FILE) if os.path.isabs(base) else None


def is_open() -> bool:
    """Whether the launcher has told this process that its job has no secret."""
    return _held is None and environment.get(OPEN_VARIABLE) == "1"


def fingerprint(secret: bytes) -> str:
    """Tells two secrets apart and may be shown to anybody."""
    return derive(secret, "fingerprint").hex()[:12]


# -- from the launcher to its workers ------------------------------------------------------------


def hold(secret: bytes | None) -> None:
    """Make this the secret of this process and of its forks."""
    global _held  # noqa: PLW0603  # of this process
    _held = secret


def adopt(secret: bytes | None) -> None:
    """In a process that a launcher has just started: hold its secret, and forget what an outer launcher said."""
    hold(secret)
    for name in (FD_VARIABLE, OPEN_VARIABLE):
        environment.process_environment().pop(name, None)


def environment_of_workers(env: Mapping[str, str], secret: bytes | None) -> dict[str, str]:
    """The environment without what would lead workers to another secret than their launcher's."""
    drop = {FD_VARIABLE, OPEN_VARIABLE}
    if VARIABLE in env and env[VARIABLE].encode() != secret:
        drop.add(VARIABLE)
    if FILE_VARIABLE in env:
        try:
            same = from_environment({FILE_VARIABLE: env[FILE_VARIABLE]}) == secret
        except ConfigError:
            same = False
        if not same:
            drop.add(FILE_VARIABLE)
    return {name: value for name, value in env.items() if name not in drop}


def held() -> bytes | None:
    """What the launcher handed to this process, or None."""
    if _held is None:
        number = environment.get(FD_VARIABLE, "")
        if number and number.isascii() and number.isdigit():
            hold(from_descriptor(int(number)))
    return _held


def keep() -> None:
    """In an interpreter that a launcher has executed: programs that it starts do not inherit the secret by themselves."""
    if held() is not None and (number := environment.get(FD_VARIABLE, "")):
        with suppress(OSError, ValueError):
            os.set_inheritable(int(number), False)


def descriptor(secret: bytes) -> int:
    """A memory file with the secret, for a process that is told its number in ``RALLY_SECRET_FD``.

    Nobody can change it. It is closed when this process executes another program, unless it is made inheritable.
    """
    fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, secret)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_descriptor(fd: int) -> bytes | None:
    """What :func:`descriptor` has put there; None if this process did not inherit it.

    A program in between may have closed it, and its number may stand for something else by now.
    """
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_MEMFD_NAME}"):
            # At its start: forks share the position.
            data = os.pread(fd, MAX_FILE_BYTES, 0)
            return data if len(data) >= MIN_BYTES else None
    return None


def _check_access(found: os.stat_result, shown: str, field: str) -> None:
    me, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(field, shown, "is a folder, not a file with a secret")
    if found.st_uid not in {me, 0}:
        raise ConfigError(
            field,
            shown,
            f"belongs to uid {found.st_uid}, who can change the secret; this is uid {me}",
            "copy it into a file of yours with mode 0600",
        )
    by_root = found.st_uid == 0 != me
    if mode & (0o037 if by_root else 0o077):
        raise ConfigError(
            field,
            shown,
            f"others can read or change the secret: its mode is {mode:04o}, expected 0600",
            f"chmod 600 {shown}",
        )


# -- keys ----------------------------------------------------------------------------------------


def derive(secret: bytes, purpose: str, *context: str | bytes | int) -> bytes:
    """A key of 32 bytes for one purpose (HKDF with SHA-256, RFC 5869).

    Args:
        secret: the job's, or a key derived from it.
        purpose: what the key is for; no two uses have the same.
        context: what the key is bound to, for example a job's name and a generation. Keys for different
            contexts have nothing to do with one another; ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    parts = [purpose.encode(), *map(_part, context)]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return expand(extract(_SALT, secret), info, 32)


def extract(salt: bytes, material: bytes) -> bytes:
    """HKDF-Extract of RFC 5869, with SHA-256."""
    return hmac.digest(salt or bytes(32), material, hashlib.sha256)


def expand(key: bytes, info: bytes, length: int) -> bytes:
    """HKDF-Expand of RFC 5869, with SHA-256. ``length`` is in bytes, at most 8160."""
    if not 0 <= length <= 255 * 32:
        raise ValueError(f"length: expected 0 to {255 * 32} bytes, got {length}")
    out, block = b"", b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([counter]), hashlib.sha256)
        out += block
    return out[:length]


def _part(value: str | bytes | int) -> bytes:
    match value:
        case str():
            return b"s" + value.encode()
        case int():
            return b"i" + str(value).encode()
        case _:
            return b"b" + value
