"""Asking the supervisors of jobs on this host."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rallypoint._core.clock import Deadline
from rallypoint.errors import ControlError

from . import messages, sockets


# A supervisor answers at once unless it is stopped.
ANSWER_PATIENCE = 5.0
# Extra seconds for the answers of other nodes to arrive, beyond the time the nodes are given.
NODES_WAY = 2.0
# Extra seconds for stacks to arrive, beyond the time the supervisors are given to read them.
STACKS_WAY = 8.0
STACKS_PATIENCE = 10.0


class NoSuchJobError(ControlError):
    """No job of this user on this host matches."""


class RunningJob:
    """A job on this host, reached through this node's supervisor.

    Args:
        path: its control socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return sockets.pid(self.path)

    def status(self) -> dict[str, Any]:
        """What the job is doing now.

        Returns:
            A dictionary; docs/operations.md lists its keys.
        Raises:
            ControlError: the job has ended, or does not answer.
        """
        return self.ask({"ask": "status"}, ANSWER_PATIENCE)

    def nodes(
        self, only: Sequence[int] = (), *, patience: float = ANSWER_PATIENCE
    ) -> dict[int, dict[str, Any] | None]:
        """The status of the job on each of its nodes.

        Args:
            only: the ranks of the nodes to ask; empty: all.
            patience: seconds to wait.
        Returns:
            By node rank, what :meth:`status` returns there, or None for a node that does not answer in time. Before the first
            round, this node alone, as rank 0.
        Raises:
            ControlError: the job has ended, does not answer, or its nodes cannot be asked.
        """
        question = {"ask": "nodes", "only": list(only), "patience": patience}
        found: dict[str, dict[str, Any] | None] = self.ask(question, patience + NODES_WAY)["nodes"]
        return {int(node): told for node, told in found.items()}

    def stacks(
        self,
        ranks: Sequence[int] = (),
        *,
        native: bool = False,
        by_signal: bool = False,
        here: bool = False,
        patience: float = STACKS_PATIENCE,
    ) -> list[dict[str, Any]]:
        """The Python stacks of the job's workers on all nodes, and of their children, without their cooperation.

        Args:
            ranks: the ranks to read; empty: all.
            native: include C frames; needs py-spy.
            by_signal: do not use py-spy, even if it is installed.
            here: only this node's workers.
            patience: seconds to wait.
        Returns:
            A record for each process, ordered by rank; docs/operations.md lists its keys. Nodes that do not answer in
            time are missing.
        Raises:
            ControlError: the job has ended, or does not answer.
        """
        question = stacks_question(ranks, native=native, by_signal=by_signal, here=here)
        answer = self.ask({**question, "patience": patience}, patience + STACKS_WAY)
        processes: list[dict[str, Any]] = answer["processes"]
        return processes

    def usage(self, *, patience: float = ANSWER_PATIENCE) -> list[dict[str, Any]]:
        """What the job's workers on all nodes use, each with its children: CPU time, memory, threads, storage.

        Args:
            patience: seconds to wait.
        Returns:
            A record for each worker, ordered by rank; docs/operations.md lists its keys.
        Raises:
            ControlError: the job has ended, or does not answer.
        """
        question = {"ask": "usage", "patience": patience}
        processes: list[dict[str, Any]] = self.ask(question, patience + ANSWER_PATIENCE)[
            "processes"
        ]
        return processes

    def ask(self, question: dict[str, Any], patience: float) -> dict[str, Any]:
        """Send a request, and wait for the answer.

        Args:
            question: its ``ask`` names what is wanted; ``status``, ``stacks`` and ``usage`` have their own methods.
            patience: seconds to wait.
        Returns:
            The answer.
        Raises:
            ControlError: the job has ended, does not answer in time, or refuses.
        """
        who = f"job {sockets.safe_id(self.path)} (pid {self.pid})"
        deadline = Deadline(patience)
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as line:
            try:
                line.settimeout(patience)
                line.connect(os.fspath(self.path))
                line.sendall(messages.pack(question))
                received = bytearray()
                while not received.endswith(b"\n"):
                    line.settimeout(max(0.001, deadline.remaining() or 0.0))
                    data = line.recv(1 << 20)
                    if not data:
                        raise ControlError(f"{who} has ended")
                    received += data
                    if len(received) > messages.MAX_ANSWER:
                        raise ControlError(f"{who} sent more than {messages.MAX_ANSWER} bytes")
            except TimeoutError:
                raise ControlError(
                    f"{who} does not answer within {patience:g} s: is its supervisor stopped?"
                ) from None
            except OSError:
                raise ControlError(f"{who} has ended") from None
        answer = messages.unpack(bytes(received), who)
        if "error" in answer:
            raise ControlError(f"{who}: {answer['error']}")
        return answer


def stacks_question(
    ranks: Sequence[int], *, native: bool, by_signal: bool, here: bool
) -> dict[str, Any]:
    """The request that :meth:`RunningJob.stacks` sends, without its time limit."""
    how = {"native": native, "by_signal": by_signal, "here": here}
    return {"ask": "stacks", "ranks": list(ranks), **how}


def running() -> Iterator[tuple[RunningJob, dict[str, Any] | ControlError]]:
    """This user's jobs on this host, each with its status, or the error if it gave none.

    The sockets of supervisors that were killed are removed.
    """
    for path in sockets.present():
        if sockets.is_dead(path):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        job = RunningJob(path)
        try:
            yield job, job.status()
        except ControlError as error:
            yield job, error


def connect(job: str = "") -> RunningJob:
    """Find a job that runs on this host.

    Args:
        job: its run id, a prefix of that, or its supervisor's pid; empty: the only job.
    Returns:
        The job.
    Raises:
        ControlError: no job matches, or several do, or the job does not answer.
    """
    every = list(running())
    found = [(each, told) for each, told in every if isinstance(told, dict)]
    silent = [(each, told) for each, told in every if isinstance(told, ControlError)]
    exact = [each for each, told in found if job and job in {told["id"], str(each.pid)}]
    near = [each for each, told in found if str(told["id"]).startswith(job)]
    matching = exact or near
    if len(matching) == 1:
        return matching[0]
    if not matching and (mute := _named(job, silent)):
        raise mute[0]
    names = ", ".join(f"{told['id']} (pid {each.pid})" for each, told in found)
    if not matching and (owner := _other_owner(job)):
        raise ControlError(
            f"process {job} belongs to user {owner}, and only {owner} may ask about its job: sudo -u {owner} rally ps"
        )
    if not found:
        raise NoSuchJobError(sockets.none_found())
    if not matching:
        raise NoSuchJobError(f"no job {job!r} of this user runs on this host; there are: {names}")
    what = f"several jobs match {job!r}" if job else "several jobs run on this host"
    raise ControlError(f"{what}; name one by its id or pid: {names}")


def _named(job: str, silent: Sequence[tuple[RunningJob, ControlError]]) -> list[ControlError]:
    """The errors of the silent jobs that the name may refer to."""
    exact = [told for each, told in silent if job == str(each.pid)]
    return exact or [
        told for each, told in silent if sockets.safe_id(each.path).startswith(sockets.safe(job))
    ]


def _other_owner(job: str) -> str | None:
    """The owner of the process, if ``job`` is the pid of another user's process."""
    if not job.isdecimal():
        return None
    try:
        uid = os.stat(f"/proc/{int(job)}").st_uid
    except OSError:
        return None
    if uid == os.geteuid():
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def is_id(name: str) -> bool:
    """Whether this is the id of a job that runs on this host. Asks only jobs whose sockets have that name."""
    for path in sockets.present():
        if sockets.safe_id(path) != sockets.safe(name) or sockets.is_dead(path):
            continue
        with contextlib.suppress(ControlError):
            if RunningJob(path).status()["id"] == name:
                return True
    return False


def is_running(job: RunningJob) -> bool:
    """Whether the job's supervisor is still running."""
    return job.path.exists() and not sockets.is_dead(job.path)
