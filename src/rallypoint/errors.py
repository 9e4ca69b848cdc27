"""Every error Rallypoint raises on purpose.

    RallyError
    ├── ConfigError (also ValueError)      what you asked for cannot be: names field, value, what is allowed
    ├── DeadlineExceeded (also TimeoutError)
    ├── RendezvousError (also RuntimeError)  the nodes did not agree on a round
    │   ├── RendezvousTimeout (TimeoutError)  some nodes never came; says which did
    │   ├── RendezvousConnectionError (also ConnectionError)  the store cannot be reached or served
    │   ├── RendezvousClosedError          it was closed: there is no further round
    │   ├── RendezvousStateError           what the store holds cannot be understood
    │   └── RendezvousGracefulExitError    this node is not wanted any more and may leave
    ├── LaunchError (also RuntimeError)    the job's processes could not be run
    │   └── WorkersFailed                  workers ran and failed; carries the report
    ├── JoinError (also RuntimeError)      ranks with uneven inputs do not go together
    │   └── InputsExhausted                a rank has no inputs left, and all were told to stop then
    ├── RpcError (also RuntimeError)       a call to another process did not do what was asked
    │   ├── RemoteError                    the function raised something that cannot be rebuilt here; carries its text
    │   ├── RpcTimeout (DeadlineExceeded)  no answer in time
    │   ├── PeerLost (also ConnectionError)  the other process is gone, or cannot be reached
    │   ├── Expelled                       this process was taken for lost; it can join again
    │   ├── CallCancelled                  the caller has given the call up
    │   ├── MessageTooLarge                more in one message than the other end takes; it was not sent
    │   └── ProtocolError                  what came over the line is none of our messages
    │       ├── AuthenticationError        the other end has not proved that it knows the job's secret
    │       └── FrameChanged               what came is not what the other end has sent
    └── InternalError (also RuntimeError)  our bug, please report it

Errors hold facts as attributes and write the sentence in ``__str__``; all of them pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from rallypoint.launch.output.failure import FailureReport


class RallyError(Exception):
    """The root of the tree: catch this to catch everything Rallypoint raises on purpose."""


class ConfigError(RallyError, ValueError):
    """A setting that cannot work.

    Args:
        field: the flag, variable or field as the user spelled it (``--nproc-per-node``).
        value: what it was set to.
        problem: what is wrong, and what was expected.
        hint: the next step, if there is a better one than reading ``problem``.
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
    """Something did not happen in time; the text says what was being waited for."""


class RendezvousError(RallyError, RuntimeError):
    """The nodes of the job could not agree on a round."""


class RendezvousTimeout(RendezvousError, TimeoutError):
    """Not every node came in time.

    Args:
        waited: seconds.
        wanted: number of nodes the round needs.
        arrived: the nodes that did come, as ``"node 0 (hostA)"``.
        missing: the node ranks that did not, where ranks are fixed beforehand; else empty.
        at_most: number of nodes the round takes, if that is more than it needs.
        reason: why they were not enough, where counting them does not tell.
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
    """The rendezvous endpoint could not be reached, or not be served."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous was closed: no further round will be formed."""


class RendezvousStateError(RendezvousError):
    """The state the nodes share cannot be understood: it is corrupt, or another version's."""


class RendezvousGracefulExitError(RendezvousError):
    """This node is not wanted any more; it may leave, and that is no failure."""


class LaunchError(RallyError, RuntimeError):
    """The job's processes could not be started or watched."""


class WorkersFailed(LaunchError):
    """At least one worker failed; ``str()`` is the report a person reads.

    Args:
        report: every failed worker, the root cause first.
    """

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return self.report.text(width=100, colour=False)


class JoinError(RallyError, RuntimeError):
    """Ranks with uneven inputs do not go together: one does what the others cannot match."""


class InputsExhausted(JoinError):
    """A rank has no inputs left, and the block was told to end then (``throw_on_early_termination``).

    Args:
        message: says which, or that it was another.
        ranks: those that have none left, where that is known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, ranks)
        self.message = message
        self.ranks = ranks

    def __str__(self) -> str:
        return self.message


class RpcError(RallyError, RuntimeError):
    """A call to another process did not do what was asked."""


class RemoteError(RpcError):
    """The function over there raised something that cannot be rebuilt faithfully here.

    Args:
        type_name: the exception's class, as ``module.Class``.
        message: its text.
        traceback: the other process's traceback, as Python prints it.
        worker: who raised it.
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
        # torch's words come first: code and tests look for them.
        return f"Original exception on remote side was{where}: {self.type_name}: {self.message}{traced}"


class RpcTimeout(DeadlineExceeded, RpcError):
    """No answer came in time. What was called may still run over there.

    Args:
        seconds: how long the call was given.
        what: the call, and whom it was sent to.
    """

    def __init__(self, seconds: float, what: str = "") -> None:
        super().__init__(seconds, what)
        self.seconds = seconds
        self.what = what

    def __str__(self) -> str:
        what = f": {self.what}" if self.what else ""
        # torch's words: code and tests look for them.
        return f"RPC ran for more than set timeout ({self.seconds * 1000:.0f} ms){what}"


class PeerLost(RpcError, ConnectionError):
    """The other process is gone, or cannot be reached; what it was asked may or may not have happened.

    Args:
        worker: who, by name.
        reason: what was noticed.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"worker {self.worker!r} is lost: {self.reason}"


class Expelled(RpcError):
    """The group has taken this process for lost and gone on without it. It may join again, under its old name.

    Args:
        worker: this process, by its name.
        reason: what another member had noticed.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the group has taken this worker, {self.worker!r}, for lost ({self.reason}): call init_rpc to join again;"
            " references made before are void"
        )


class CallCancelled(RpcError):
    """The caller gave the call up with ``cancel()``, or its connection ended."""


class MessageTooLarge(RpcError):
    """More in one message than the other end takes. It was not sent.

    Args:
        what: of what there is too much.
        number: how much.
        limit: how much is taken.
        hint: the next step.
    """

    def __init__(self, what: str, number: int, limit: int, hint: str) -> None:
        super().__init__(what, number, limit, hint)
        self.what = what
        self.number = number
        self.limit = limit
        self.hint = hint

    def __str__(self) -> str:
        return (
            f"a message with {self.number} {self.what}: at most {self.limit} are taken; {self.hint}"
        )


class ProtocolError(RpcError):
    """What came over a connection is none of our messages: another version, another program, or damage."""


class AuthenticationError(ProtocolError):
    """The other end of a connection has not proved that it knows the job's secret."""


class FrameChanged(ProtocolError):
    """What came over a connection is not what the other end has sent: somebody, or something, has changed it on the way."""


class InternalError(RallyError, RuntimeError):
    """A state we believed impossible. Please report it, with the text."""
