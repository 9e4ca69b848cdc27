"""``rally secret``: make a file with a secret for a job of several nodes, and say how to use it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from rallypoint._core import private, secret
from rallypoint.errors import ConfigError


HELP = """\
usage: rally secret [--force] [FILE]

Make a file with a new secret for jobs of several nodes. Only you can read it (mode 0600). Only nodes with
the job's secret can take part in it or call its functions.

  FILE      default: ~/.config/rallypoint/secret, which `rally run` uses for several nodes if no other
            secret is given
  --force   replace the file if it exists; running jobs keep the old secret"""


def command(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Run ``rally secret``; returns the text to print.

    Raises:
        ConfigError: a flag is unknown, or the file cannot be made.
    """
    if {"-h", "--help"} & set(words):
        return HELP
    force = "--force" in words
    names = [word for word in words if word != "--force"]
    for name in names:
        if name.startswith("-"):
            raise ConfigError(
                "secret", name, "no such flag (known: --force)", "rally secret --help"
            )
    if len(names) > 1:
        raise ConfigError("secret", names[1], "expected at most one file", "rally secret --help")
    if names and not names[0]:
        raise ConfigError("secret", "", "expected a file", "is a variable of the shell not set?")
    default = secret.user_file(env)
    if not names and default is None:
        raise ConfigError("secret", None, "this user has no home folder", "give a FILE")
    path = Path(names[0]).absolute() if names else default
    assert path is not None
    if path == default:
        try:
            private.make_folder(path.parent, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError("secret", str(path.parent), why, "give a FILE") from None
    made = make_file(path, force=force)
    return _instructions(path, made, by_default=path == default)


def make_file(path: Path, *, force: bool) -> bytes:
    """Make the file, readable by this user alone; returns the secret in it.

    Raises:
        ConfigError: it already exists (and ``force`` is not given), or cannot be made.
    """
    # Text, so that it survives being pasted.
    made = secrets.token_hex(secret.MADE_BYTES).encode()
    # An old file is replaced as a whole: a concurrent reader gets either the old secret or the new one.
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if force else path
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            try:
                os.fchmod(file.fileno(), private.FILE)  # whatever the umask
                file.write(made + b"\n")
                file.flush()
                os.fsync(file.fileno())
                new.replace(path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise ConfigError(
            "secret", str(path), "this file exists already", "rally secret --force replaces it"
        ) from None
    except OSError as error:
        raise ConfigError("secret", str(path), error.strerror or str(error)) from None
    return made


def _instructions(path: Path, made: bytes, *, by_default: bool) -> str:
    lines = [f"{path}: a new secret, fingerprint {secret.fingerprint(made)}"]
    if by_default:
        lines.append("Nodes that share this home folder now use it.")
    lines.append(f"On other nodes:  scp -p {path} NODE:{path}")
    if by_default:
        lines.append("Start the job:   rally run --nnodes 2 --rdzv-endpoint HOST … train.py")
    else:
        lines.append(
            f"Start the job:   rally run --secret-file {path} --nnodes 2 --rdzv-endpoint HOST … train.py"
        )
    return "\n".join(lines)
