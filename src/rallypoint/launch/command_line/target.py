"""What each worker runs: the script, module or program of a command line, checked before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from rallypoint._core import near_words
from rallypoint.errors import ConfigError
from rallypoint.launch import piped_script
from rallypoint.launch.config import Job, TargetKind

from .values import Values


_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/[1-9]")
_PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*", re.ASCII)


def target_from(values: Values, words: tuple[str, ...]) -> Job:
    """The target that a command line names.

    Raises:
        ConfigError: there is none, or it cannot be run.
    """
    if not words:
        raise ConfigError("run", None, "no script given", _where_it_went(values))
    name, args = words[0], tuple(words[1:])
    if not name:
        problem = "an empty name"
        raise ConfigError("script", name, problem, "is a variable of the shell not set?")
    if values.switch("no_python"):
        if values.switch("module"):
            raise ConfigError("--no-python", None, "cannot be combined with --module")
        if shutil.which(name, path=values.env.get("PATH")) is None:
            if os.path.isfile(name) and "/" in name:
                raise ConfigError("program", name, "not executable", f"chmod +x {name}")
            raise ConfigError("program", name, "not found, or not executable", "check the path")
        return Job(kind=TargetKind.PROGRAM, name=name, args=args)
    if values.switch("module"):
        if name.endswith(".py") and os.path.isfile(name):
            hint = f"leave -m out: rally run … {name}"
            raise ConfigError("--module", name, "a file, not the name of a module", hint)
        return Job(kind=TargetKind.MODULE, name=name, args=args)
    if piped_script.is_named(name):
        piped_script.check(name)
    else:
        _check_not_a_program(name, args, values.env.get("PATH"))
        _check_script(name)
    return Job(kind=TargetKind.SCRIPT, name=name, args=args)


def _where_it_went(values: Values) -> str:
    """`rally run --nproc-per-node train.py`: the flag took the script as its value."""
    for dest in values:
        if values.is_set(dest) and values.text(dest).endswith(".py"):
            return f"{values.text(dest)} is read as the value of {values.shown(dest)}"
    return "rally run [flags] script.py [its arguments]"


def _check_not_a_program(name: str, args: tuple[str, ...], path: str | None) -> None:
    """`rally run python t.py`, `rally run ./a.out`: what is meant, and how to write that."""
    if _PYTHON.fullmatch(os.path.basename(name)) and not os.path.isdir(name):
        rest = " ".join(args)[:60] or "script.py"
        raise ConfigError(
            "script",
            name,
            "workers are Python already",
            f"leave {os.path.basename(name)} out: rally run … {rest}; or add --no-python",
        )
    if "/" not in name and not os.path.exists(name):
        found = shutil.which(name, path=path)
        if found is not None:
            raise ConfigError(
                "script",
                name,
                f"no such file; {found} is a program",
                "add --no-python for that",
            )
    elif _is_machine_code(name):
        raise ConfigError("script", name, "a program, not a Python script", "add --no-python")


def _check_script(name: str) -> None:
    if _DESCRIPTOR.match(name):  # `rally run <(cat train.py)`
        hint = "rally run - < <(command), or name a file"
        raise ConfigError("script", name, "a descriptor that workers do not have", hint)
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in it
        raise ConfigError("script", name, "no such file", _nearest_file(path)) from None
    except OSError as error:
        raise ConfigError(
            "script", name, f"cannot be read: {error.strerror}", "check the path and its folders"
        ) from None
    if not os.access(path, os.R_OK):
        raise ConfigError("script", name, "no permission to read it", f"chmod u+r {name}")
    if stat.S_ISDIR(mode) and not (path / "__main__.py").is_file():
        raise ConfigError(
            "script", name, "a folder without a __main__.py cannot be run", "name a file in it"
        )


def _is_machine_code(name: str) -> bool:
    if not os.path.isfile(name):
        return False  # what is read from a pipe is gone
    try:
        with open(name, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except (OSError, ValueError):
        return False


def _nearest_file(path: Path) -> str:
    kinds = {path.suffix, ".py"}
    try:
        there = sorted(item.name for item in path.parent.iterdir() if item.suffix in kinds)
    except (OSError, ValueError):
        return f"there is no folder {path.parent}"
    near = near_words.nearest(path.name, there)
    if near:
        return f"did you mean {path.parent / near}?"
    return f"looked in {path.parent.absolute()}"
