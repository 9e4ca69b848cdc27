"""Where templates are: the file that the user names, the user's, the site's, ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rallypoint.errors import ConfigError

from .template import FILES


SITE = Path("/etc/rallypoint/submit")
OURS = Path(__file__).with_name("templates")


def search_path(env: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders to search for templates, in this order."""
    config = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    users = [Path(config, "rallypoint", "submit")] if config else []
    return (*users, SITE, OURS)


def read(engine: str, named: str, env: Mapping[str, str]) -> tuple[str, str]:
    """The template of an engine, and the name of its file.

    Args:
        engine: which one.
        named: the file that the user names; empty: search for it.
        env: this process's environment.

    Raises:
        ConfigError: it cannot be read.
    """
    paths = [each / FILES[engine] for each in search_path(env)]
    path = Path(named) if named else next(each for each in paths if each.exists())
    try:
        return path.read_text(), str(path)
    except OSError as error:
        hint = f"check the path; rally submit {engine} --print-template shows what can be changed"
        if not named:
            hint = "check its permissions, or name another one with --template"
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(_shown(named), str(path), problem, hint) from None
    except UnicodeDecodeError:
        hint = f"rally submit {engine} --print-template shows one"
        raise ConfigError(_shown(named), str(path), "not a text file", hint) from None


def _shown(named: str) -> str:
    return "--template" if named else "template"
