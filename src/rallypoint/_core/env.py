"""The only module that reads the environment, and the list of known variables.

Pure code takes a mapping instead (:func:`snapshot`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager


# The variables that `rally` reads, besides PET_<FLAG> (each torchrun flag) and those of the cluster
# (launch/placement/clusters). Shown by `rally env`.
KNOWN: Mapping[str, str] = {
    "PYTHON_EXEC": "the workers' interpreter; any other than rally's own implies --start-method exec",
    "LOGLEVEL": "log level of rally run itself (DEBUG, INFO, WARNING, ERROR); default WARNING",
    "RALLY_EVENTS": "a file for the job's events, as JSON lines ({host} and {pid} are replaced), or log",
    "RALLY_TRACES": "an exporter of OpenTelemetry (otlp, console), by which spans are sent; --traces wins",
    "TRACEPARENT": "the span of OpenTelemetry (W3C Trace Context) below which those of a traced job are",
    "NO_COLOR": "any value: no colour on terminals either",
    "RALLY_SECRET": "the job's secret, the same on all nodes, 16 bytes or more; --secret-file wins",
    "RALLY_SECRET_FILE": "a file with the job's secret (mode 0600); --secret-file and RALLY_SECRET win",
    "RALLY_HOST_NAME": "what this host is called in reports and lists of hosts; default: Slurm's name of the node, or the host name",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "seconds between SIGTERM and SIGKILL; --shutdown-timeout wins",
    "TORCHELASTIC_ERROR_FILE": "also write the root cause here, in torchelastic's format",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "prefix of teed lines; knows ${role_name} ${local_rank} ${rank}",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "passed to workers; 1 if unset",
    "TORCH_FR_BUFFER_SIZE": "calls that torch records in a worker; over Gloo 200 if unset",
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


class Reads:  # importing dataclasses would take longer than the rest of `rally --help`
    """What a block has read and changed in the environment, through ``os.environ`` and ``os.getenv``.

    Args:
        before: the environment at its start.

    Attributes:
        names: the variables it read.
        everything: it listed all of them.
    """

    def __init__(self, before: dict[str, str]) -> None:
        self.names: set[str] = set()
        self.everything = False
        self.before = before

    def changes(self) -> dict[str, str | None]:
        """The variables that are different now; None for those it unset."""
        now = snapshot()
        names = (name for name in {*self.before, *now} if self.before.get(name) != now.get(name))
        return {name: now.get(name) for name in names}


@contextmanager
def watched() -> Iterator[Reads]:
    """Note what a block reads from the environment. Reads by native code are not seen."""
    reads = Reads(before=snapshot())
    plain = type(os.environ)

    # items(), copy() and the like ask for each value in turn, which shows no interest in any one variable: tqdm, for one,
    # which torch imports, looks through all of them for names of its own. Kept here: the name that an iteration has reached,
    # and the names of an iteration that is over, since dict() asks for the values once it has all names.
    listed: set[str] = set()
    behind: deque[str] = deque()

    class Watched(plain):  # type: ignore[misc, valid-type]  # os._Environ, whose name is private
        def __getitem__(self, name: str) -> str:
            read = os.fsdecode(name)  # subprocess looks for bytes, too
            if behind and behind[0] == read:
                behind.popleft()
            else:
                behind.clear()
                if read not in listed:
                    reads.names.add(read)
            return str(super().__getitem__(name))

        def __iter__(self) -> Iterator[str]:
            reads.everything = True
            names = list(super().__iter__())
            for name in names:
                listed.add(name)
                try:
                    yield name
                finally:
                    listed.discard(name)
            behind.clear()
            behind.extend(names)

        def __len__(self) -> int:
            reads.everything = True
            return int(super().__len__())

    os.environ.__class__ = Watched  # modules keep references to the object itself
    try:
        yield reads
    finally:
        os.environ.__class__ = plain


def apply(changes: Mapping[str, str | None]) -> None:
    """Set variables; None: unset."""
    _apply(changes)


def replace(values: Mapping[str, str]) -> None:
    """Make this the whole environment of the process."""
    os.environ.clear()
    os.environ.update(values)
