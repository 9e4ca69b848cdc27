"""The job's secret: where a process finds it, what is valid, and the keys derived from it.

All processes of a job share one secret. A process takes it from the first of

1. an argument (``--secret-file``, ``secret=`` of an option object),
2. ``RALLY_SECRET``,
3. ``RALLY_SECRET_FILE``, the path of a file,
4. its launcher: in memory, if this process is a fork of the launcher's (:func:`hold`), through the inherited
   descriptor whose number is in ``RALLY_SECRET_FD``, or at the path in ``RALLY_SECRET_PROC``: a descriptor of the
   launcher, which only processes of the same user can open, and only while the launcher lives. So a worker may
   re-execute itself, and start programs, without passing anything on.

The secret itself is never used as a key. Each purpose has its own derived key (:func:`derive`), so that what is
authenticated for one purpose is not accepted for another.

The secret never appears in messages, logs, reports or command lines. Errors name its source, never its value.
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

from rallypoint._core import linux
from rallypoint.errors import ConfigError

from . import env as environment


# The minimum length: 128 bits, if the bytes are random.
MIN_BYTES = 16
# The length of generated secrets.
MADE_BYTES = 32
# Longer files are not secrets.
MAX_FILE_BYTES = 64 * 1024

VARIABLE = "RALLY_SECRET"
FILE_VARIABLE = "RALLY_SECRET_FILE"
FD_VARIABLE = "RALLY_SECRET_FD"
PROC_VARIABLE = "RALLY_SECRET_PROC"
# Variables of a launcher, which another launcher below it does not pass on.
_OF_LAUNCHER = (FD_VARIABLE, PROC_VARIABLE)
# In the environment of workers whose job has no secret, on purpose or after a warning.
OPEN_VARIABLE = "RALLY_INSECURE"
# All variables by which a process finds its secret.
VARIABLES = (VARIABLE, FILE_VARIABLE, FD_VARIABLE, PROC_VARIABLE, OPEN_VARIABLE)

# The default for several nodes, if it exists: below the home folder, which nodes often share.
USER_FILE = "rallypoint/secret"

_MEMFD_NAME = "rally-secret"
_SALT = b"rallypoint v1"
_SEALS = linux.F_SEAL_SEAL | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_WRITE

_held: bytes | None = None


def make() -> bytes:
    """Generate a secret."""
    return secrets.token_bytes(MADE_BYTES)


def check(secret: object, field: str) -> bytes:
    """Validate a secret and return it as bytes.

    Args:
        secret: text or bytes.
        field: its source, for the error.

    Raises:
        ConfigError: it is not text or bytes, or is too short.
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
    """Read the secret from a file, without surrounding white space.

    Only this user may have access to the file. A file of root may also be readable by its group, which is how an
    administrator or Kubernetes passes a secret to a job.

    Args:
        field: the flag or variable that named the file, for the error.

    Raises:
        ConfigError: the file cannot be read, others can read or change it, or it holds no secret.
    """
    shown = os.fspath(path)
    try:
        # A pipe works (`--secret-file <(…)`); a FIFO without a writer blocks, as with cat.
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
        given: the caller's argument, which wins.
        field: the argument's name, for the error.

    Raises:
        ConfigError: the argument, or what the environment names, is not a valid secret; or the launcher has passed one on
            that cannot be read. That is never "none", which would turn authentication off.
    """
    if given is not None:
        return check(given, field)
    env = environment.snapshot()
    found = from_environment(env) or held()
    if found is None:
        for name in _OF_LAUNCHER:
            if env.get(name):
                raise ConfigError(
                    name,
                    env[name],
                    "the secret of this process's job cannot be read there: the job's launcher has ended, or this process"
                    " belongs to another user or container",
                    f"pass {field}=..., or set {VARIABLE} or {FILE_VARIABLE} for the whole job",
                )
    return found


def from_environment(env: Mapping[str, str]) -> bytes | None:
    """The secret in ``RALLY_SECRET``, else in the file ``RALLY_SECRET_FILE``; None if neither is set.

    Raises:
        ConfigError: it is not a valid secret. An empty variable is an error, not "none", so that a variable
            left blank by mistake does not turn authentication off.
    """
    text, path = env.get(VARIABLE), env.get(FILE_VARIABLE)
    if text is not None:
        return check(text, VARIABLE)
    return None if path is None else read_file(path, FILE_VARIABLE)


def shared(env: Mapping[str, str]) -> bytes | None:
    """The secret that nodes share without a flag: from the variables, else from the user's file.

    Raises:
        ConfigError: the one found is not a valid secret.
    """
    given = from_environment(env)
    path = user_file(env)
    if given is None and path is not None and path.exists():
        return read_file(path, "rally secret")
    return given


def user_file(env: Mapping[str, str]) -> Path | None:
    """The file that ``rally secret`` writes and several nodes read; None for a user without a home folder."""
    base = env.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(env.get("HOME", ""), ".config")
    return Path(base, USER_FILE) if os.path.isabs(base) else None


def is_open() -> bool:
    """Whether the launcher has told this process that its job has no secret."""
    return _held is None and environment.get(OPEN_VARIABLE) == "1"


def fingerprint(secret: bytes) -> str:
    """Distinguishes secrets, and is safe to show."""
    return derive(secret, "fingerprint").hex()[:12]


# -- from the launcher to its workers ------------------------------------------------------------


def hold(secret: bytes | None) -> None:
    """Make this the secret of this process and of its forks."""
    global _held  # noqa: PLW0603  # of this process
    _held = secret


def adopt(secret: bytes | None) -> None:
    """In a process that a launcher has started: hold its secret, and drop the variables of an outer launcher."""
    hold(secret)
    for name in (*_OF_LAUNCHER, OPEN_VARIABLE):
        environment.process_environment().pop(name, None)


def environment_of_workers(env: Mapping[str, str], secret: bytes | None) -> dict[str, str]:
    """The environment without variables that would give workers a different secret from their launcher's."""
    drop = {*_OF_LAUNCHER, OPEN_VARIABLE}
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
    """The secret that the launcher passed to this process, or None."""
    if _held is None:
        number = environment.get(FD_VARIABLE, "")
        if number and number.isascii() and number.isdigit():
            hold(from_descriptor(int(number)))
    if _held is None and (path := environment.get(PROC_VARIABLE, "")):
        with suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                hold(from_descriptor(fd))
            finally:
                os.close(fd)
    return _held


def offer(fd: int) -> None:
    """Let this process's descendants find the secret in a memory file that this process keeps open."""
    path = f"/proc/{os.getpid()}/fd/{fd}"
    environment.process_environment()[PROC_VARIABLE] = path


def keep() -> None:
    """In an interpreter that a launcher has executed: do not pass the secret on to programs that it starts."""
    if held() is not None and (number := environment.get(FD_VARIABLE, "")):
        with suppress(OSError, ValueError):
            os.set_inheritable(int(number), False)


def descriptor(secret: bytes) -> int:
    """A memory file with the secret, for a process that finds its number in ``RALLY_SECRET_FD``.

    It is sealed against changes, and closed on exec unless made inheritable.
    """
    fd = linux.memfd_create(_MEMFD_NAME, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    try:
        os.write(fd, secret)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_descriptor(fd: int) -> bytes | None:
    """The secret from a memory file of :func:`descriptor`; None if this process did not inherit it.

    A program in between may have closed it and reused its number.
    """
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_MEMFD_NAME}"):
            # pread, because forks share the file position.
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
        purpose: what the key is for; unique to each use.
        context: what the key is bound to, for example a job's name and a generation. Different contexts
            give independent keys; ``("ab", "c")`` and ``("a", "bc")`` differ.
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
