"""Which modules new workers start with already imported: learned from the workers before them.

Theory of operation
-------------------
Parts of torch are imported at first use, in every worker: constructing an optimizer imports
``torch._dynamo``, 800 modules. A worker reports the first import of each package in :data:`LEARNABLE` or
:data:`OURS`, and which environment variables then differed from the fork server's. A *template*, a fork of the fork
server, imports the same packages and reports what each import did. If that cannot matter to a script, the
next workers are forks of the template.

A script must not notice. So an import is kept only if it would have done the same in each worker:

1. It is part of torch or of this package, and listed in one of the two. Any other package may, when imported, take a
   random number, a date or the host's name, which all workers would then share: that is left to ``--preload``.
2. It has read no environment variable that was different in a worker when that worker imported it. That
   includes ``RANK`` and everything that the script itself has set by then.
3. Everything it loaded is installed: nothing of the user's own, no editable install, and no module whose name also
   exists in a folder that the script has put first on ``sys.path``. Native libraries read the environment
   unseen, so they must be Python's, the system's or from :data:`KNOWN_NATIVE`.
4. It left nothing behind that a fork would lack, or have twice: threads, files, processes, signal handlers, output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeGuard

from rallypoint.launch.torch_private import LEARNABLE
from rallypoint.launch.worker.preloaded import OURS


# Packages whose native libraries may be loaded: torch's own dependencies.
KNOWN_NATIVE = frozenset(
    {"torch", "numpy", "numpy.libs", "gmpy2", "gmpy2.libs", "markupsafe", "triton", "yaml"}
)


# The most reports that one node passes on to another.
MOST_REPORTS = 100


def package_of(module: str) -> str | None:
    """The package in :data:`LEARNABLE` or :data:`OURS` that a module is, or is part of; else None."""
    for package in (*LEARNABLE, *OURS):
        if module == package or module.startswith(f"{package}."):
            return package
    return None


@dataclass(frozen=True, slots=True)
class Report:
    """A worker has imported a package.

    Args:
        package: the package, or a module of it.
        changed: environment variables that then differed from the fork server's.
        paths: folders that the worker had put first on ``sys.path``.
    """

    package: str
    changed: tuple[str, ...]
    paths: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"package": self.package, "changed": [*self.changed], "paths": [*self.paths]}


def reports_in(told: object) -> list[Report]:
    """The reports in what another node has sent. Anything else is left out, as are packages that are not learned."""
    found = []
    for each in told[:MOST_REPORTS] if isinstance(told, list) else ():
        if not isinstance(each, dict) or not isinstance(each.get("package"), str):
            continue
        changed, paths = each.get("changed"), each.get("paths")
        if package_of(each["package"]) and _are_texts(changed) and _are_texts(paths):
            found.append(Report(each["package"], tuple(changed), tuple(paths)))
    return found


def _are_texts(told: object) -> TypeGuard[list[str]]:
    return isinstance(told, list) and all(isinstance(each, str) for each in told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the import of one package did in a template.

    Args:
        error: the exception it raised, in one line; or "".
        reads: environment variables it read.
        reads_all: it listed the environment.
        sets: environment variables it set.
        foreign: modules it loaded that are not part of an installed package.
        hidden: modules it loaded that a script has on its own ``sys.path``, too.
        native: unknown native libraries it loaded.
        left: what it left behind, in words.
    """

    error: str = ""
    reads: frozenset[str] = frozenset()
    reads_all: bool = False
    sets: frozenset[str] = frozenset()
    foreign: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def objection(seen: Observation, changed: Iterable[str]) -> str:
    """Why a script could notice that a package is imported already; "" if it cannot.

    Args:
        seen: what the import did.
        changed: variables that were different in a worker when it imported the package.
    """
    if seen.error:
        return f"the import failed: {seen.error}"
    if seen.foreign:
        return f"it loads {seen.foreign[0]}, which is not part of an installed package"
    if seen.hidden:
        return f"it loads {seen.hidden[0]}, of which sys.path of a worker has another"
    if seen.native:
        return f"it loads {seen.native[0]}"
    if seen.left:
        return f"the import {seen.left[0]}"
    if seen.reads_all:
        return "the import reads the whole environment"
    different = sorted(seen.reads.intersection(changed))
    if different:
        return f"the import reads {different[0]}, which workers set"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What is known so far. All methods return a new value.

    Args:
        changed: package -> variables that were different when a worker imported it, in the order of the reports.
        seen: package -> what its import did in a template.
        broken: package -> how a template ended while importing it.
        paths: folders that workers had put first on ``sys.path``.
    """

    changed: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    seen: Mapping[str, Observation] = field(default_factory=lambda: MappingProxyType({}))
    broken: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    paths: frozenset[str] = frozenset()

    def reported(self, module: str, changed: Iterable[str], paths: Iterable[str] = ()) -> Learned:
        """A worker imports ``module``. Any module that is not learnable is ignored."""
        package = package_of(module)
        if package is None:
            return self
        before = self.changed.get(package, frozenset())
        return dataclasses.replace(
            self,
            changed={**self.changed, package: before.union(changed)},
            paths=self.paths.union(paths),
        )

    def observed(self, package: str, seen: Observation) -> Learned:
        return dataclasses.replace(self, seen={**self.seen, package: seen})

    def broke(self, package: str, how: str) -> Learned:
        """A template crashed or hung while it imported ``package``."""
        return dataclasses.replace(self, broken={**self.broken, package: how})

    def objections(self) -> dict[str, str]:
        """package -> why it cannot be kept."""
        found = dict(self.broken)
        set_by_imports: frozenset[str] = frozenset()
        for package, changed in self.changed.items():
            seen = self.seen.get(package)
            if package in found or seen is None:
                continue
            # What an earlier import set in the workers, it also set in the template.
            if why := objection(seen, changed - set_by_imports):
                found[package] = why
            else:
                set_by_imports |= seen.sets
        return found

    def wanted(self) -> tuple[str, ...]:
        """The packages that new workers should start with, as far as is known, in the order of the reports."""
        against = self.objections()
        return tuple(package for package in self.changed if package not in against)


def is_installed(file: str, folders: Iterable[str]) -> bool:
    """Whether a module's file is in one of these folders."""
    return any(file.startswith(f"{folder}/") for folder in folders)


def unknown_library(path: str, packages: Iterable[str], system: Iterable[str]) -> str:
    """The package or path of a native library that may read the environment; "" if it is known.

    Args:
        path: the library's path.
        packages: folders with installed packages.
        system: folders with Python's own and the system's libraries; they may contain ``packages``.
    """
    for folder in packages:
        if path.startswith(f"{folder}/"):
            name = path[len(folder) + 1 :].partition("/")[0]
            return "" if name in KNOWN_NATIVE else name
    return "" if is_installed(path, system) else path
