"""The layering rule of docs/architecture.md, read from the source: nothing is imported."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from private_names import foreign_private_names, names_defined_in


PKG = "rallypoint"
SRC = Path(__file__).resolve().parents[1] / "src" / PKG

# Subpackage -> subpackages it may import (itself, errors and events are always allowed).
MAY_IMPORT: dict[str, set[str]] = {
    "_core": set(),
    "rendezvous": {"_core"},
    "control": {"_core"},
    "tracing": {"_core"},
    "integrations": {"_core"},
    "launch": {"_core", "control", "rendezvous", "parallel", "tracing"},
    "parallel": {"_core"},
    "ray": {"_core", "launch", "rendezvous"},
    "join": {"_core"},
    "elastic": {"_core", "rendezvous", "wire"},
    "wire": {"_core"},
    "rpc": {"_core", "rendezvous", "tracing", "wire"},
    "compat": {"rpc"},
    "testing": {"_core"},
}
# These import torch when they are loaded. Other packages import them only inside functions; they may import each other.
OVER_TORCH = {"parallel", "join", "elastic", "rpc", "compat"}
# Within launch: folder -> folders of launch it may import.
LAUNCH_MAY_IMPORT: dict[str, set[str]] = {
    "avoidance": {"output", "placement"},
    "command_line": {"avoidance", "placement", "server"},
    "coordination": {"output", "placement", "policy", "server"},
    "watching": {"coordination", "policy"},
    "supervision": {
        "avoidance",
        "coordination",
        "output",
        "placement",
        "policy",
        "server",
        "watching",
    },
    "policy": set(),
    "doctor": {"command_line", "coordination", "output"},
    "hosts": {"avoidance", "command_line"},
    "submit": {"avoidance", "command_line", "hosts"},
    "placement": set(),
    "output": {"placement"},
    "worker": set(),
    "server": {"worker"},
}
# Within elastic: folder -> folders of elastic it may import.
ELASTIC_MAY_IMPORT: dict[str, set[str]] = {
    "loops": set(),
    "communication": set(),
    "storage": set(),
    "state": {"communication"},
    "checkpointing": {"communication", "loops", "state"},
    "replication": {"loops", "storage"},
    "worker": {"communication", "replication"},
    "recovery": {"communication", "loops", "replication", "state", "storage", "worker"},
}
# Within rpc, when a module is loaded: folder -> folders of rpc it may import.
RPC_MAY_IMPORT: dict[str, set[str]] = {
    "threads": set(),
    "groups": set(),
    "serialization": {"groups"},
    "autograd": {"connections", "serialization"},
    "references": {"autograd", "connections", "serialization", "threads"},
    "connections": {"groups", "references", "threads"},
    "agent": {"autograd", "connections", "groups", "references", "serialization", "threads"},
}
# torch may be imported here, and only inside functions: `rally --help` must not pay for it.
TORCH_INSIDE_FUNCTIONS = {
    "launch/worker/backends.py",
    "launch/worker/bootstrap.py",
    "launch/server/forkserver.py",
    "launch/functions.py",
    "launch/worker/process_group.py",
    "launch/server/store_host.py",
    "rendezvous/backends/native_store.py",
    "rendezvous/c10d.py",
    "rendezvous/create.py",
    "rendezvous/torchrun.py",
    "testing/ranks.py",
    "launch/doctor/visit.py",
}
# Pure decisions: no clock, no socket, no thread, no environment, no files.
SANS_IO = {
    "_core/half_open.py",
    "_core/rank_words.py",
    "_core/signal_repeats.py",
    "control/messages.py",
    "control/stacks/stack_records.py",
    "control/stacks/stack_groups.py",
    "_core/log_records.py",
    "control/tables/job_table.py",
    "control/web/page_state.py",
    "launch/watching/job_history.py",
    "control/metrics/openmetrics.py",
    "control/logs/log_lines.py",
    "control/tables/quantities.py",
    "control/tables/step_words.py",
    "control/tables/worker_table.py",
    "control/stacks/hang_report.py",
    "control/command_line.py",
    "control/slowness/lateness.py",
    "control/profiling/host_clocks.py",
    "control/profiling/trace_merging.py",
    "control/slowness/slow_ranks.py",
    "control/slowness/differences.py",
    "control/slowness/slow_words.py",
    "control/memory/mappings.py",
    "control/memory/memory_table.py",
    "launch/watching/stillness.py",
    "launch/watching/status.py",
    "launch/coordination/node_answers.py",
    "launch/avoidance/avoid_list.py",
    "launch/avoidance/trouble.py",
    "launch/placement/engine_ids.py",
    "launch/placement/clusters/aws_batch.py",
    "launch/placement/clusters/cluster.py",
    "launch/placement/clusters/flux.py",
    "launch/placement/clusters/kubernetes.py",
    "launch/placement/clusters/mpi.py",
    "launch/placement/clusters/mpich.py",
    "launch/placement/clusters/mvapich2.py",
    "launch/placement/clusters/nodelist.py",
    "launch/placement/clusters/open_mpi.py",
    "launch/placement/clusters/plain.py",
    "launch/placement/clusters/sagemaker.py",
    "launch/placement/clusters/skypilot.py",
    "launch/placement/clusters/slurm.py",
    "launch/placement/clusters/variables.py",
    "launch/placement/clusters/volcano.py",
    "launch/output/cpu_limit.py",
    "launch/output/failure.py",
    "launch/command_line/flag_help.py",
    "launch/command_line/flags.py",
    "launch/command_line/given.py",
    "launch/placement/numa.py",
    "launch/policy/__init__.py",
    "launch/policy/commands.py",
    "launch/policy/decide.py",
    "launch/policy/events.py",
    "launch/policy/generations.py",
    "launch/policy/sessions.py",
    "launch/policy/state.py",
    "launch/coordination/step_tables.py",
    "launch/watching/step_watch.py",
    "launch/supervision/causes.py",
    "launch/doctor/pairs.py",
    "launch/doctor/facts.py",
    "launch/doctor/judgement.py",
    "launch/doctor/finding_table.py",
    "launch/server/learning.py",
    "launch/server/warm_key.py",
    "launch/placement/ranks.py",
    "launch/output/report.py",
    "launch/output/stack_lines.py",
    "launch/placement/worker_env.py",
    "rendezvous/backend.py",
    "rendezvous/defaults.py",
    "rendezvous/endpoint.py",
    "rendezvous/option.py",
    "rendezvous/lease.py",
    "rendezvous/protocol.py",
    "rendezvous/operations.py",
    "rendezvous/plan.py",
    "rendezvous/fields.py",
    "rendezvous/backends/greeting.py",
    "rendezvous/backends/places.py",
    "rendezvous/backends/plan_places.py",
    "rendezvous/backends/store_messages.py",
    "rendezvous/introduction.py",
    "rendezvous/quorum.py",
    "rendezvous/records.py",
    "parallel/layout.py",
    "launch/submit/kubernetes.py",
    "launch/submit/ray.py",
    "launch/submit/request.py",
    "launch/submit/slurm.py",
    "launch/submit/ssh.py",
    "launch/submit/template.py",
    "ray/job_words.py",
    "ray/roster.py",
    "ray/sizes.py",
    "elastic/recovery/agreement.py",
    "elastic/communication/replicas.py",
    "join/schedule.py",
    "wire/auth.py",
    "wire/frames.py",
    "rpc/serialization/unsafe_methods.py",
    "rpc/device_map.py",
    "rpc/leaving.py",
    "rpc/autograd/schedule.py",
    "rpc/autograd/search.py",
    "rpc/groups/membership.py",
    "rpc/references/commands.py",
    "rpc/references/ids.py",
    "rpc/references/refcount.py",
    "rpc/connections/messages.py",
    "parallel/signatures.py",
}
IO_MODULES = {
    "asyncio",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}
MODULES = sorted(SRC.rglob("*.py"))
# In these packages only the module of this name may use private names of torch and Python.
PRIVATE_HERE = "torch_private.py"
# The other packages' private names are still spread over their modules. Entries may be removed, none may be added.
STILL_SPREAD: dict[str, set[str]] = {
    "_core": set(),
    "rendezvous": set(),
    "rpc": set(),
    "wire": set(),
}


def imported_names(path: Path, *, inside_functions: bool, each_name: bool = False) -> set[str]:
    """Absolute dotted names imported in ``path``: in functions too, or only when the module loads.

    Args:
        each_name: for ``from module import name``, only the full name, not its module as well.
    """
    package = (PKG, *path.relative_to(SRC).parent.parts)
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if not inside_functions:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node):
                skipped.update(ast.walk(node))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *([node.module] if node.module else [])))
            if not each_name:
                names.add(prefix)
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


@cache
def module_name(path: Path) -> str:
    """The module's dotted name without the package's own: ``rpc.api``."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_among(modules: Iterable[Path], *, deferred: bool) -> dict[str, set[str]]:
    """Which modules import which. ``deferred``: in functions and for types as well, not only when they load.

    ``from package import name`` counts for the module ``name``, or for the package if it has no such module.
    """
    paths = {module_name(path): path for path in modules}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        full = {
            each.removeprefix(f"{PKG}.")
            for each in imported_names(path, inside_functions=deferred, each_name=True)
            if each.startswith(f"{PKG}.")  # `import ray` is not our folder of that name
        }
        # A name in a module is not a module: look for the module that it is from.
        found = {each if each in paths else each.rpartition(".")[0] for each in full}
        graph[name] = (found & set(paths)) - {name, ""}
    return graph


def reached_from(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that ``start`` leads to; includes ``start`` only if a circle leads back."""
    seen: set[str] = set()
    left = [start]
    while left:
        for each in graph[left.pop()] - seen:
            seen.add(each)
            left.append(each)
    return seen


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules in which each leads to every other."""
    reached = {each: reached_from(each, graph) for each in graph}
    return {
        frozenset(other for other in reached[each] if each in reached[other])
        for each in graph
        if each in reached[each]
    }


def test_no_modules_import_one_another_in_a_circle() -> None:
    found = circles(imports_among(MODULES, deferred=True))
    circles_found = [sorted(each) for each in found]
    assert not found, (
        f"imported in a circle, counting those in functions and for types: {circles_found}"
    )


def test_decisions_load_without_torch() -> None:
    graph = imports_among(MODULES, deferred=False)
    paths = {module_name(path): path for path in MODULES}
    heavy = {
        each
        for each, path in paths.items()
        if {n.split(".")[0] for n in imported_names(path, inside_functions=False)}
        & {"torch", "numpy"}
    }

    for rel in sorted(SANS_IO):
        start = module_name(SRC / rel)
        loaded = {start} | reached_from(start, graph)
        assert not loaded & heavy, f"{rel} loads torch by way of {sorted(loaded & heavy)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(SRC).as_posix())
def test_imports_point_down(path: Path) -> None:
    rel = path.relative_to(SRC).as_posix()
    names = imported_names(path, inside_functions=True)
    if "/" in rel:  # not the facade, the error tree or __main__
        layer = rel.split("/")[0]
        ours = {n.split(".")[1] for n in names if n.startswith(PKG + ".")}
        allowed = MAY_IMPORT[layer] | {layer, "errors", "events"}
        assert ours <= allowed, f"{rel} imports {sorted(ours - allowed)}"
    parts = rel.split("/")
    for package, may_import in (("launch", LAUNCH_MAY_IMPORT), ("elastic", ELASTIC_MAY_IMPORT)):
        if parts[0] == package and parts[1] in may_import:
            inner = {n.split(".")[2] for n in names if n.startswith(f"{PKG}.{package}.")}
            outside = inner & set(may_import) - may_import[parts[1]] - {parts[1]}
            assert not outside, f"{rel} imports {package}/{sorted(outside)}"
    if parts[0] == "rpc" and parts[1] in RPC_MAY_IMPORT:
        loaded = imported_names(path, inside_functions=False)
        inner = {n.split(".")[2] for n in loaded if n.startswith(f"{PKG}.rpc.")}
        outside = inner & set(RPC_MAY_IMPORT) - RPC_MAY_IMPORT[parts[1]] - {parts[1]}
        assert not outside, f"{rel} imports rpc/{sorted(outside)} when loaded"
    everywhere = {n.split(".")[0] for n in names}
    if parts[0] not in OVER_TORCH:
        loaded = imported_names(path, inside_functions=False)
        assert "torch" not in {n.split(".")[0] for n in loaded}, f"{rel} imports torch when loaded"
        heavy = {n.split(".")[1] for n in loaded if n.startswith(f"{PKG}.")} & OVER_TORCH
        assert not heavy, f"{rel} imports {sorted(heavy)}, and with it torch, when loaded"
        if rel not in TORCH_INSIDE_FUNCTIONS:
            assert "torch" not in everywhere, f"{rel} imports torch"
    if rel in SANS_IO:
        assert not everywhere & IO_MODULES, f"{rel} decides, it must not do I/O"


def test_what_some_pythons_lack_is_asked_of_one_module() -> None:
    """The Pythons of conda and uv are built on old systems."""
    lacking = re.compile(
        r"\b(os\.(pidfd_open|memfd_create|MFD_|P_PIDFD|PIDFD_|copy_file_range|getrandom)"
        r"|signal\.pidfd_send_signal|fcntl\.F_(ADD_SEALS|GET_SEALS|SEAL_))"
    )
    used = [
        f"{path.relative_to(SRC)}: {found[0]}"
        for path in MODULES
        if path != SRC / "_core" / "linux.py"
        for found in lacking.finditer(path.read_text())
    ]
    assert not used, f"use _core/linux.py: {used}"


def test_declared_modules_exist() -> None:
    missing = [m for m in SANS_IO | TORCH_INSIDE_FUNCTIONS if not (SRC / m).exists()]
    assert not missing, f"stale entries: {missing}"


def test_importing_the_package_imports_neither_torch_nor_starts_anything() -> None:
    program = (
        "import os, sys, threading; before = set(os.listdir('/proc/self/fd'));"
        "import rallypoint, rallypoint.launch, rallypoint.launch.cli, rallypoint.rendezvous;"
        "import rallypoint.launch.supervisor, rallypoint.launch.command_line.settings;"
        # Each of these would cost every supervisor memory, and time to start.
        "heavy = ['torch', 'numpy', 'importlib.metadata', 'datetime', 'difflib', 'email', 'asyncio'];"
        "assert not (there := [each for each in heavy if each in sys.modules]), there;"
        "assert threading.active_count() == 1;"
        "assert set(os.listdir('/proc/self/fd')) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_the_tree_in_the_docs_names_every_module() -> None:
    text = (SRC.parents[1] / "docs" / "architecture.md").read_text()
    missing = [
        path.name for path in MODULES if path.name != "__init__.py" and path.name not in text
    ]
    assert not missing, f"docs/architecture.md does not show {missing}"


DEFINED = names_defined_in(MODULES)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_private_names_of_torch_stand_in_one_module_per_package(package: str) -> None:
    found: dict[str, list[str]] = {}
    friends = package in STILL_SPREAD
    for path in (SRC / package).rglob("*.py"):
        if path.name == PRIVATE_HERE:
            continue
        for line, name in foreign_private_names(path, PKG, DEFINED, friends=friends):
            found.setdefault(name, []).append(f"{path.relative_to(SRC)}:{line}")
    spread = STILL_SPREAD.get(package, set())
    new = {name: where for name, where in found.items() if name not in spread}
    assert not new, (
        f"put these into {package}/{PRIVATE_HERE}, and into test_torch_private.py: {new}"
    )
    gone = sorted(spread - found.keys())
    assert not gone, f"{package} no longer uses {gone}: take them out of STILL_SPREAD"


def test_benches_examples_and_scripts_of_tests_import_what_is_there() -> None:
    """They run in their own processes, some only on request: otherwise nobody would notice that a module was moved."""
    missing = []
    for folder in ("bench", "examples", "tests"):
        for path in sorted((SRC.parents[1] / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != PKG:
                    continue
                place = SRC.joinpath(*(node.module or "").split(".")[1:])
                module = place.with_suffix(".py")
                if not place.is_dir() and not module.exists():
                    missing.append(f"{path.name}:{node.lineno}: {node.module}")
    assert not missing
