"""Hides modules that the fork server has imported until the script imports them.

Theory of operation
-------------------
``import torch`` reads the environment, and scripts rely on that::

    os.environ["OMP_NUM_THREADS"] = "4"
    import torch

In a worker torch has been imported already. So torch and its submodules are removed from
``sys.modules`` before the script runs, and a finder restores them when the script first imports torch.
The finder then compares the variables that ``import torch`` reads with their values in the fork
server, and applies changes through torch's own functions. For variables that torch has no function for, one line says so.
tqdm, which torch imports, reads settings (``TQDM_DISABLE``) when it is loaded. If a script has set one, tqdm is loaded again.
``"torch" in sys.modules``, by which libraries check whether a program uses torch, is also as in a plain interpreter.

Some libraries read settings when they are *loaded* and offer no way to change them later: OpenMP's
thread binding (``OMP_PROC_BIND``, ``KMP_AFFINITY``), OpenBLAS's number of threads. Set these in the
environment of ``rally run``, or use ``--start-method exec``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rallypoint._core import env as environment
from rallypoint.launch import torch_private


_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first one set wins
_LOGS = (
    *("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT", "TORCH_LOGS_TRACE_ID_FILTER"),
    *("TORCH_TRACE", "TORCH_DTRACE", "TORCH_COMPILE_DEBUG"),
)
_DEBUG = ("TORCH_DISTRIBUTED_DEBUG",)
_JIT = ("PYTORCH_JIT",)
_APPLIED = frozenset((*_THREADS, *_LOGS, *_DEBUG, *_JIT))

# Parts of this package that do something when a script imports them: they are then executed once more.
OURS = ("rallypoint.elastic",)

# The variables that Python code read while torch was imported, in the process that workers are forked from.
_reads: set[str] = set()
# The environment in which it was imported there.
_imported_in: dict[str, str] = {}


def note_reads(names: Iterable[str]) -> None:
    """Note that these variables were read while torch was imported."""
    _reads.update(names)
    if not _imported_in:
        _imported_in.update(environment.snapshot())


def hide(
    package: str, changes: Mapping[str, str | None] | None = None, *, variables: str = ""
) -> None:
    """Remove a package from ``sys.modules`` until it is imported again. No effect if it is not imported.

    Args:
        package: its name.
        changes: what its import changed in the environment (None: unset), to be applied when it is imported again.
        variables: a prefix; if a variable with it has changed since torch was imported, the package is loaded again.
    """
    within = f"{package}."
    names = [name for name in sys.modules if name == package or name.startswith(within)]
    if package in names:
        hidden = {name: sys.modules.pop(name) for name in names}
        parent, _, name = package.rpartition(".")
        if parent:
            vars(sys.modules[parent]).pop(
                name, None
            )  # `from parent import name` would find it there
        finder = _Finder(package, hidden, environment.snapshot(), changes or {}, variables)
        sys.meta_path.insert(0, finder)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Restores one hidden package, once."""

    def __init__(
        self,
        package: str,
        hidden: dict[str, types.ModuleType],
        env: Mapping[str, str],
        changes: Mapping[str, str | None],
        variables: str,
    ) -> None:
        self.package = package
        self._hidden = hidden
        self._env = env
        self._changes = changes
        self._variables = variables
        self._module = hidden[package]
        self._spec = self._module.__spec__

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
        /,
    ) -> importlib.machinery.ModuleSpec | None:
        # importlib.util.find_spec("torch") must not restore it: only exec_module does.
        if fullname != self.package:
            return None
        if self._is_outdated():
            return None
        if self._spec is None or self._spec.origin is None:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return importlib.util.spec_from_file_location(
            fullname,
            self._spec.origin,
            loader=self,
            submodule_search_locations=self._spec.submodule_search_locations,
        )

    def _is_outdated(self) -> bool:
        """Whether the package must be loaded again."""
        return bool(self._variables) and self._own(_imported_in) != self._own(
            environment.snapshot()
        )

    def _own(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: env[name] for name in env if name.startswith(self._variables)}

    def restore(self) -> None:
        """Put the package back, unless it is outdated."""
        if not self._is_outdated():
            for name, hidden in self._hidden.items():
                sys.modules.setdefault(name, hidden)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it with ours
        if self.package in OURS:
            importlib.import_module("torch")  # as it does on its own
        self.restore()
        if self.package in OURS and self._spec is not None and self._spec.loader is not None:
            self._spec.loader.exec_module(module)
        if self.package == "torch":
            for finder in [each for each in sys.meta_path if isinstance(each, _Finder)]:
                if finder.package not in OURS:  # torch has imported the others
                    finder.restore()
        now = environment.snapshot()
        if self.package == "torch":
            _catch_up(module, self._env, now)
        # What the script has set stays: the import would have found it.
        changes = self._changes.items()
        environment.apply(
            {name: value for name, value in changes if self._env.get(name) == now.get(name)}
        )


def _catch_up(torch: Any, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Apply variables that have changed since torch was imported."""

    def changed(names: Sequence[str]) -> bool:
        return any(then.get(name) != now.get(name) for name in names)

    if changed(_THREADS):
        threads = num_threads(now)
        if threads is not None:
            # MKL uses at most one thread per processor.
            most = len(os.sched_getaffinity(0)) if torch.backends.mkl.is_available() else threads
            torch.set_num_threads(min(threads, most))
    if changed(_LOGS):
        torch_private.read_log_settings()
    if changed(_DEBUG) and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()
    if changed(_JIT):
        torch_private.read_jit_setting()
    late = [name for name in sorted(_reads - _APPLIED) if changed((name,))]
    if late and now.get("LOCAL_RANK", "0") == "0":
        them = "it" if len(late) == 1 else "them"
        print(  # noqa: T201  in a worker
            f"rally: {', '.join(late)}: read when torch was imported, before this script set {them}, and may have no"
            f" effect; set {them} before rally run, or use --start-method exec",
            file=sys.stderr,
        )


def num_threads(env: Mapping[str, str]) -> int | None:
    """The number of threads that OpenMP and MKL read from the environment, or None if no valid one is set."""
    for name in _THREADS:
        value = env.get(name, "").split(",")[0].strip()
        if value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return None
