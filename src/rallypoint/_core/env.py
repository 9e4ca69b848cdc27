"""The only reader of the environment: which variables there are, and what they mean.

Cores never read the environment: they are handed a mapping (:func:`snapshot`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager


# What `rally` itself listens to, beside PET_<FLAG> (each torchrun flag) and what the cluster sets
# (launch/placement/clusters). Shown by `rally env`.
KNOWN: Mapping[str, str] = {
    "PYTHON_EXEC": "the interpreter for workers; a different one from rally's own implies --start-method exec",
    "LOGLEVEL": "level of the log lines of rally run itself (DEBUG, INFO, WARNING, ERROR); default WARNING",
    "RALLY_EVENTS": "a file for the job's events, as JSON lines ({host} and {pid} are replaced), or log",
    "NO_COLOR": "any value: no colour in the failure report, on terminals too",
    "RALLY_SECRET": "the job's secret, the same on all nodes, 16 bytes or more; --secret-file wins",
    "RALLY_SECRET_FILE": "a file with the job's secret (mode 0600); --secret-file and RALLY_SECRET win",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "seconds between SIGTERM and SIGKILL; --shutdown-timeout wins",
    "TORCHELASTIC_ERROR_FILE": "where the root cause is written too, in torchelastic's format",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "prefix of teed lines; knows ${role_name} ${local_rank} ${rank}",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "handed to workers; 1 if unset",
    "TORCH_DISTRIBUTED_BACKEND": "the backend get_distributed_backend() names",
    "OMP_NUM_THREADS": "threads per worker; 1 if unset and there are several workers on this node",
}


def snapshot() -> dict[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """One variable, or ``default``."""
    return os.environ.get(name, default)


def process_environment() -> MutableMapping[str, str]:
    """The live environment of this process; for the two places that must change it (workers)."""
    return os.environ


@contextmanager
def overlay(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or with None unset) variables for the length of a block, then put all of them back."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _apply(values)
        yield
    finally:
        _apply(before)


@contextmanager
def kept(names: Iterable[str]) -> Iterator[None]:
    """Let a block set these variables, then put them back as they were."""
    with overlay({name: os.environ.get(name) for name in names}):
        yield


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
