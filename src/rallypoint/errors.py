"""Every error Rallypoint raises on purpose::

    RallyError
    ├── ConfigError (also ValueError)      a setting cannot work: names field, value and what is allowed
    ├── DeadlineExceeded (also TimeoutError)
    ├── RendezvousError (also RuntimeError)  the nodes could not agree on a round
    │   ├── RendezvousTimeout (TimeoutError)  some nodes did not arrive in time; lists those that did
    │   ├── RendezvousConnectionError (also ConnectionError)  the store cannot be reached or started
    │   ├── RendezvousClosedError          the rendezvous is closed; no further round will form
    │   ├── RendezvousStateError           the store holds corrupt state, or another version's
    │   └── RendezvousGracefulExitError    the job no longer needs this node; it may leave
    ├── LaunchError (also RuntimeError)    the job's processes could not be started or watched
    │   └── WorkersFailed                  workers ran and failed; carries the report
    ├── JoinError (also RuntimeError)      the ranks' training loops do not match
    │   └── InputsExhausted                a rank ran out of inputs, and the block was told to stop there
    ├── ElasticError (also RuntimeError)   a session cannot continue in place
    │   └── MembershipChanged              a member of the session's groups is lost
    ├── RpcError (also RuntimeError)       a remote call failed
    │   ├── RemoteError                    the remote function raised an exception that cannot be rebuilt here
    │   ├── RpcTimeout (DeadlineExceeded)  no reply in time
    │   ├── PeerLost (also ConnectionError)  the other process is gone or unreachable
    │   ├── Expelled                       the group removed this process as lost; it may rejoin
    │   ├── CallCancelled                  the caller cancelled the call
    │   ├── NotAllowed                     a worker's options do not allow what a message asks for
    │   ├── MessageTooLarge                a message over the receiver's limits; it was not sent
    │   └── ProtocolError                  received data that is not a valid message
    │       ├── AuthenticationError        the peer did not prove that it knows the job's secret
    │       └── FrameChanged               a message was altered in transit
    ├── ControlError (also RuntimeError)   a job could not be asked, or did not answer as expected
    └── InternalError (also RuntimeError)  a bug in Rallypoint; please report it

Errors hold facts as attributes and build the message in ``__str__``. All of them pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class RallyError(Exception):
    """Base class of every error that Rallypoint raises on purpose."""


class ConfigError(RallyError, ValueError):
    """A setting that cannot work.

    Args:
        field: the flag, variable or argument, spelled as the user spells it (``--nproc-per-node``).
        value: its value. None: the message shows no value.
        problem: what is wrong, and what was expected.
        hint: the next step, if ``problem`` does not make it obvious.
    """

    def __init__(self, field: str, value: object, problem: str, hint: str = "") -> None:
        super().__init__(field, value, problem, hint)
        self.field = field
        self.value = value
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        shown = "" if self.value is None else f" {self.value!r}"
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.field}{shown}: {self.problem}{hint}"


class DeadlineExceeded(RallyError, TimeoutError):
    """A wait exceeded its deadline; the message says what it was waiting for."""


class RendezvousError(RallyError, RuntimeError):
    """The job's nodes could not agree on a round: which of them take part, with which ranks."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Too few nodes arrived in time.

    Args:
        waited: how long this node waited, in seconds.
        wanted: number of nodes the round needs.
        arrived: the nodes that arrived, each as ``"node 0 (hostA)"``.
        missing: node ranks that did not arrive. Empty unless ranks are fixed in advance.
        at_most: the most nodes the round accepts, if more than it needs.
        reason: why the arrived nodes were not enough, if their number does not explain it.
    """

    def __init__(
        self,
        waited: float,
        wanted: int,
        arrived: tuple[str, ...],
        missing: tuple[int, ...] = (),
        at_most: int | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(waited, wanted, arrived, missing, at_most, reason)
        self.waited = waited
        self.wanted = wanted
        self.arrived = arrived
        self.missing = missing
        self.at_most = at_most
        self.reason = reason

    def __str__(self) -> str:
        there = ", ".join(self.arrived) or "none"
        lacking = (
            f"; missing: node {', '.join(str(rank) for rank in self.missing)}"
            if self.missing
            else ""
        )
        is_range = self.at_most is not None and self.at_most > self.wanted
        wanted = f"{self.wanted} to {self.at_most}" if is_range else f"{self.wanted}"
        return (
            f"{len(self.arrived)} of {wanted} nodes arrived within {self.waited:.0f} s"
            f" ({there}){lacking}{f': {self.reason}' if self.reason else ''}; start the missing ones, or"
            " raise join_timeout in --rdzv-conf"
        )


class RendezvousConnectionError(RendezvousError, ConnectionError):
    """The rendezvous endpoint could not be reached, or this node could not start its store there."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed; no further round will form."""


class RendezvousStateError(RendezvousError):
    """The shared state is corrupt, or another version wrote it."""


class RendezvousGracefulExitError(RendezvousError):
    """The job no longer needs this node. It may leave; this is not a failure."""


class LaunchError(RallyError, RuntimeError):
    """The job's processes could not be started or watched."""


class Failure(Protocol):
    """A worker that failed, or was stopped because another one failed."""

    @property
    def host(self) -> str:
        """The name of its host."""

    @property
    def node_rank(self) -> int:
        """The rank of its node."""

    @property
    def rank(self) -> int:
        """Its rank in the job."""

    @property
    def local_rank(self) -> int:
        """Its rank on its node."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def generation(self) -> int:
        """The generation it was part of."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None if a signal ended it."""

    @property
    def signal(self) -> int | None:
        """The number of the signal that ended it, or None."""

    @property
    def stderr(self) -> tuple[str, ...]:
        """The last lines of its stderr."""

    @property
    def stopped_by_us(self) -> bool:
        """Whether it was stopped because of another failure."""

    def headline(self) -> str:
        """What happened to it, in a few words: ``raised ValueError``."""
        ...


class Report(Protocol):
    """Why a job failed."""

    @property
    def failures(self) -> Sequence[Failure]:
        """Every worker that failed or was stopped, the root cause first."""

    @property
    def root_cause(self) -> Failure | None:
        """The worker to blame, or None."""

    @property
    def world_size(self) -> int:
        """The number of workers of the job."""

    @property
    def exit_code(self) -> int:
        """The root cause's exit code, as a shell would see it."""

    @property
    def reason(self) -> str:
        """Why the job failed if no worker is to blame; otherwise empty."""

    @property
    def log_folder(self) -> str | None:
        """The folder with the logs of the last generation, or None."""

    @property
    def report_file(self) -> str | None:
        """The file with the same report as JSON, or None."""

    def text(self, width: int = 100, *, colour: bool = False) -> str:
        """The report as shown at the end of a job, in lines of at most ``width`` characters."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The report as written to ``report.json``."""
        ...


class WorkersFailed(LaunchError):
    """At least one worker failed; ``str()`` gives the failure report.

    Args:
        report: all failed workers, the root cause first.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return self.report.text(width=100, colour=False)


class JoinError(RallyError, RuntimeError):
    """The ranks' training loops do not match: one rank does something the others cannot."""


class ElasticError(RallyError, RuntimeError):
    """A session cannot continue in place: its processes, or what they hold, do not match."""


class MembershipChanged(ElasticError):
    """A member of the session's groups is lost. All pending and further collectives raise this until all ranks have met again.

    ``Session.step`` recovers from it; outside a step, enter the next one.

    Args:
        ranks: the lost ranks.
        why: how they were lost, in words.
    """

    def __init__(self, ranks: tuple[int, ...], why: str = "") -> None:
        super().__init__(ranks, why)
        self.ranks = ranks
        self.why = why

    def __str__(self) -> str:
        lost = ", ".join(map(str, self.ranks)) or "unknown"
        return f"lost rank {lost}" + (f": {self.why}" if self.why else "")


class InputsExhausted(JoinError):
    """A rank ran out of inputs, and ``throw_on_early_termination`` is set.

    Args:
        message: the text, starting with the sentence that torch's Join raises.
        ranks: the ranks that ran out. Empty if unknown.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)
        self.message = message
        self.ranks = ranks

    def __str__(self) -> str:
        return self.message


class RpcError(RallyError, RuntimeError):
    """A remote call failed."""


class RemoteError(RpcError):
    """The remote function raised an exception that cannot be rebuilt faithfully in this process.

    Args:
        type_name: the exception's class, as ``module.Class``.
        message: the exception's text.
        traceback: the remote traceback, as Python prints it.
        worker: the name of the worker that raised it.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "", worker: str = "") -> None:
        super().__init__(type_name, message, traceback, worker)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.worker = worker

    def __str__(self) -> str:
        where = f" on {self.worker}" if self.worker else ""
        traced = f"\n\n{self.traceback}" if self.traceback else ""
        # Starts with torch's words, which programs and tests search for.
        return f"Original exception on remote side was{where}: {self.type_name}: {self.message}{traced}"


class RpcTimeout(DeadlineExceeded, RpcError):
    """No reply came in time. The remote function may still be running.

    Args:
        seconds: the call's time limit.
        what: the function, and the worker it was called on.
    """

    def __init__(self, seconds: float, what: str = "") -> None:
        super().__init__(seconds, what)
        self.seconds = seconds
        self.what = what

    def __str__(self) -> str:
        what = f": {self.what}" if self.what else ""
        # torch's words, which programs and tests search for.
        return f"RPC ran for more than set timeout ({self.seconds * 1000:.0f} ms){what}"


class PeerLost(RpcError, ConnectionError):
    """The other process is gone or unreachable. It may or may not have executed the call.

    Args:
        worker: the lost worker's name.
        reason: how the loss was detected.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"worker {self.worker!r} is lost: {self.reason}"


class Expelled(RpcError):
    """The group declared this process lost and went on without it. It may rejoin under its old name.

    Args:
        worker: this worker's name.
        reason: how another member detected the loss.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the group removed this worker, {self.worker!r}, as lost ({self.reason}); call init_rpc to rejoin."
            " References made before are void"
        )


class CallCancelled(RpcError):
    """The caller cancelled the call, or its connection closed."""


class NotAllowed(RpcError):
    """A message asks for something that the receiver's options do not allow (``exported_only``, ``allowed_calls``,
    ``allowed_modules``). Nothing was called.
    """


class MessageTooLarge(RpcError):
    """A message exceeds one of the receiver's limits. It was not sent.

    Args:
        what: the quantity that is limited, such as ``"bytes"``.
        number: the message's amount of it.
        limit: how much the receiver accepts.
        hint: the next step.
    """

    def __init__(self, what: str, number: int, limit: int, hint: str) -> None:
        super().__init__(what, number, limit, hint)
        self.what = what
        self.number = number
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        return f"a message with {self.number} {self.what} exceeds the limit of {self.limit}; {self.hint}"


class ProtocolError(RpcError):
    """Received data that is not a valid message: from another version, another program, or corrupted."""


class AuthenticationError(ProtocolError):
    """The peer did not prove that it knows the job's secret."""


class FrameChanged(ProtocolError):
    """A message was altered in transit: what arrived is not what the peer sent."""


class ControlError(RallyError, RuntimeError):
    """A running job could not be asked, or did not answer as expected."""


class InternalError(RallyError, RuntimeError):
    """A bug in Rallypoint. Please report it, with this message."""
