"""Which warm server fits a job: one that equals a new interpreter started here and now. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


# Variables that the interpreter, the dynamic linker, torch and the libraries below it read when they are loaded. A
# server gets these and no others, so that it holds none of the user's secrets; a job applies all of its own.
_PREFIXES = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "TCMALLOC_", "LC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH", "ATEN_", "CAFFE2_", "C10_", "KINETO_", "FX_", "COMPILE_STROBELIGHT"),
    *("CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "HIP_", "ROC", "HSA_", "MIOPEN_", "NPY_", "NUMPY_", "TRITON_"),
)  # fmt: skip
_NAMES = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "PATH", "VIRTUAL_ENV"),
        *("CONDA_PREFIX", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
    }
)
# None of these has an effect on what is imported, and scripts may well change them between runs.
_LATER = frozenset({"PATH", "VIRTUAL_ENV", "CONDA_PREFIX"})
# The lines of /proc/self/status that a process inherits and cannot change back.
_INHERITED = (
    *("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed_list", "Mems_allowed_list"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a warm server is started with."""
    return {
        name: value
        for name, value in env.items()
        if name in _NAMES or (name.startswith(_PREFIXES) and not _may_be_secret(name))
    }


def _may_be_secret(name: str) -> bool:
    return any(word in name for word in ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY"))


def inherited(status: str) -> dict[str, str]:
    """What a process inherits, from the text of ``/proc/self/status``."""
    pairs = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in pairs if name in _INHERITED}


def depends_on_folder(env: Mapping[str, str]) -> bool:
    """Whether the module path of a new interpreter depends on its working directory."""
    path = env.get("PYTHONPATH", "")
    return bool(path) and any(not part.startswith("/") for part in path.split(":"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a new interpreter would be like.

    Args:
        install: the interpreter and its prefix.
        versions: of Python, torch and this package, with the times of their files.
        flags: the interpreter's flags.
        env: all variables.
        folder: the working directory.
        state: what else a process inherits: limits, namespaces, control group, CPUs …
    """

    install: Sequence[str]
    versions: Sequence[str]
    flags: Sequence[str]
    env: Mapping[str, str]
    folder: str
    state: Mapping[str, str]


def name(facts: Facts) -> str:
    """The name of the server for a job: the installation, its versions, and all else, as hashes."""
    env = {key: value for key, value in variables(facts.env).items() if key not in _LATER}
    rest = [list(facts.flags), sorted(env.items()), sorted(facts.state.items())]
    rest.append([facts.folder] if depends_on_folder(facts.env) else [])
    return ".".join(_hash(part) for part in (facts.install, facts.versions, rest))


def is_outdated(other: str, current: str) -> bool:
    """Whether a server belongs to the same installation as the current one, but to other versions."""
    ours, theirs = current.split("."), other.split(".")
    return theirs[0] == ours[0] and theirs[1:2] != ours[1:2]


def why_other(reads: Iterable[str], then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Why imports under ``now`` may differ from those made under ``then``; empty: they do not.

    Args:
        reads: the variables that the imports have read.
    """
    for each in sorted(set(reads)):
        if then.get(each) != now.get(each):
            return f"importing torch reads {each}, which is different"
    return ""


def shadowed(names: Iterable[str], loaded: Iterable[str]) -> str:
    """The first file in a user's folder that an import would find in place of a loaded module; "" if there is none.

    Args:
        names: the folder's entries.
        loaded: the names of the top-level modules loaded from elsewhere.
    """
    known = set(loaded)
    return next((each for each in sorted(names) if _module(each) in known), "")


def _module(entry: str) -> str:
    if entry.endswith((".py", ".pyc", ".so")):
        return entry.split(".", 1)[0]
    return entry if "." not in entry else ""


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
