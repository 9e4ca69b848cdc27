"""The only module that reads the environment, and the list of known variables.

Pure code takes a mapping instead (:func:`snapshot`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager


# The variables that `rally` reads, besides PET_<FLAG> (each torchrun flag) and those of the cluster
# (launch/placement/clusters). Shown by `rally env`.
KNOWN: Mapping[str, str] = {
    "PYTHON_EXEC": "the workers' interpreter; any other than rally's own implies --start-method exec",
    "LOGLEVEL": "log level of rally run itself (DEBUG, INFO, WARNING, ERROR); default WARNING",
    "RALLY_EVENTS": "a file for the job's events, as JSON lines ({host} and {pid} are replaced), or log",
    "NO_COLOR": "any value: no colour in the failure report, on terminals too",
    "RALLY_SECRET": "the job's secret, the same on all nodes, 16 bytes or more; --secret-file wins",
    "RALLY_SECRET_FILE": "a file with the job's secret (mode 0600); --secret-file and RALLY_SECRET win",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "seconds between SIGTERM and SIGKILL; --shutdown-timeout wins",
    "TORCHELASTIC_ERROR_FILE": "also write the root cause here, in torchelastic's format",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "prefix of teed lines; knows ${role_name} ${local_rank} ${rank}",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "passed to workers; 1 if unset",
    "TORCH_DISTRIBUTED_BACKEND": "the backend that get_distributed_backend() returns",
    "OMP_NUM_THREADS": "threads per worker; 1 if unset and this node has several workers",
}


def snapshot() -> dict[str, str]:
    """A copy of the current environment."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """One variable, or ``default``."""
    return os.environ.get(name, default)


def process_environment() -> MutableMapping[str, str]:
    """The live environment of this process, for code that must change it (in workers)."""
    return os.environ


@contextmanager
def overlay(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) within a block, then restore them."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _apply(values)
        yield
    finally:
        _apply(before)


@contextmanager
def kept(names: Iterable[str]) -> Iterator[None]:
    """Restore these variables after a block that may change them."""
    with overlay({name: os.environ.get(name) for name in names}):
        yield


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
