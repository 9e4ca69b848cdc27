"""Process groups that outlive their members: an outer group that everybody holds, around an inner one that is replaced.

DDP, DeviceMesh, compiled graphs and variables of the script hold the outer group; after a loss, only the inner one is formed
again. The outer one is a Python subclass of torch's ``ProcessGroup``, so C++ code calls it too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from rallypoint._core import rank_watch
from rallypoint.elastic import torch_private
from rallypoint.errors import ElasticError

from . import reduce_scatter
from .communicators import Communicator
from .connections import Wiring
from .replicas import Span
from .stream_works import Stream, StreamWork
from .works import (
    GIVEN_UP,
    Explain,
    KeptMessage,
    KeptWork,
    Lives,
    attended,
    dispose,
    done,
    flat,
)


T = TypeVar("T")
_CPU = torch.device("cpu")


class Answerer(Protocol):
    """Takes over the operations of a group that has no connections."""

    def run(self, group: KeptGroup, operation: str, args: tuple[Any, ...]) -> dist.Work:
        """Run one operation, and return its (finished) work. ``args`` are those of ``ProcessGroup``'s methods."""


# Called with an operation, its arguments and its work.
Observer = Callable[["KeptGroup", str, tuple[Any, ...], "dist.Work | None"], None]


class KeptGroup(dist.ProcessGroup):
    """A group whose connections can be replaced.

    Args:
        name: torch's name for it.
        rank: of this process in it.
        ranks: its members' global ranks, in the order of their group ranks.
        timeout: of its collectives.
        backends: ``gloo`` or ``nccl``, by the type of device.
        is_for_session: the session itself sends tensors in host memory over it.
        options: torch's for NCCL, or None.
        device: the GPU that the script has named; None: the current one.

    Attributes:
        awaits: the script must not use a result of NCCL before it is known to be right.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        backends: Mapping[str, str],
        *,
        is_for_session: bool,
        options: Any = None,
        device: torch.device | None = None,
    ) -> None:
        # torch's stubs know only the form with a store, which this class does not need.
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.kept_name = name
        self._names = [name, ""]
        self.members = tuple(ranks)
        self.setup_rank = rank  # the one with which this process runs the script's set-up
        self.span: Span | None = None  # over the replicas, if their number may change
        self._rank, self._timeout = rank, timeout
        self._asked, self._options, self._device = dict(backends), options, device
        self._backends = {"cpu": "gloo", **backends} if is_for_session else self._asked
        self._lives: Lives | None = None  # of the inner group's connections
        self.inner: Any = None  # Any: dist.ProcessGroup lacks half its methods in torch's stubs
        self._gloo: Any = None  # the one of its backends that sends tensors in host memory
        self._nccl: Communicator | None = None
        self._wiring: Wiring | None = None
        self.awaits = False
        self._stream = Stream()
        self.answerer: Answerer | None = None
        self.observer: Observer | None = None
        self.before: Callable[[KeptGroup, str], None] | None = None
        # Returns other arguments for a collective, or its work.
        self.amend: Callable[[KeptGroup, str, tuple[Any, ...]], Any] | None = None
        self.explain: Explain | None = None  # in a session

    @property
    def label(self) -> str:
        """A name unique in the job. Groups of two replicas may share torch's name, as one has replayed the other's set-up."""
        return f"{self.kept_name}@{self.members[0]}"

    def connect(self, wiring: Wiring, *, have_met: bool = False) -> None:
        """Form the inner group.

        Collective: all members.   Blocks: until they are connected.
        Args:
            wiring: the connections of this generation.
            have_met: all members are about to call this.
        Raises:
            RuntimeError, RendezvousConnectionError: see :meth:`.Wiring.group`.
        """
        self._drop()
        # Once all groups are destroyed, torch restarts its count, and may give the same name to a group of other members.
        members = zlib.crc32(repr(self.members).encode())
        name = f"{self.label}/{members}"
        made = wiring.group(
            *(name, self._rank, len(self.members), self._timeout, self._backends, self._options),
            have_met=have_met,
        )
        torch_private.name_group(made.group, self.kept_name)
        self.inner, self._gloo, self._nccl = made.group, made.gloo, made.nccl
        self.answerer, self._lives, self._wiring = None, wiring.lives, wiring

    @property
    def has_nccl(self) -> bool:
        return "nccl" in self._backends.values()

    def connect_gpus(self) -> None:
        """Connect the members' current GPUs, if the group is over NCCL.

        Collective: all members.   Blocks: until they are connected.
        Raises:
            RuntimeError: a member is lost.
        """
        if self._nccl is not None and self._lives is not None:
            device = self._device or torch.device("cuda", torch.cuda.current_device())
            self._nccl.connect(device, self._lives)

    def disconnect(self, answerer: Answerer) -> None:
        """Drop the inner group; ``answerer`` takes its place."""
        self.answerer = answerer
        self._drop()

    def _drop(self) -> None:
        if self.inner is None:
            return
        self._timeout = self.timeout
        dropped, self.inner = [self.inner, self._gloo], None
        if self._nccl is not None:
            assert self._wiring is not None
            self._wiring.forget(self._nccl)
            dropped += self._nccl.hand_over()
        self._gloo = self._nccl = self._wiring = None
        dispose(dropped)

    @property
    def timeout(self) -> timedelta:
        """The collectives' time-out. Scripts change it by torch's ``_set_pg_timeout``, which sets it on the group's backends."""
        backend = self._gloo if self._nccl is None else self._nccl.present
        return self._timeout if backend is None else torch_private.timeout_of(backend)

    def barrier_now(self) -> None:
        """Wait for all members, over the connections even if there is an answerer.

        Raises:
            RuntimeError: a member is lost.
        """
        assert self._lives is not None
        KeptWork(self._gloo.barrier(), self._lives).wait()

    def send_now(self, tensor: torch.Tensor, *to: int) -> None:
        """Send a contiguous tensor, on any device, to members.   Blocks: until it is sent. Called in :meth:`transfer`."""
        held = [tensor.cpu()]
        for work in [self._gloo.send(held, each, 0) for each in to]:
            work.wait(self._timeout)

    def receive_now(self, tensor: torch.Tensor, source: int) -> None:
        """Receive into a contiguous tensor, on any device.   Blocks: until it has arrived. Called in :meth:`transfer`."""
        place = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
        self._gloo.recv([place], source, 0).wait(self._timeout)
        if place is not tensor:
            tensor.copy_(place)

    def transfer(self, function: Callable[[], T]) -> T:
        """Call a function that sends or receives point to point.

        Raises:
            RuntimeError: a member is lost.
            Exception: whatever the function raises.
        """
        assert self._lives is not None
        if not torch_private.cuda_is_in_use():
            return attended(function, self._lives)

        device = torch.cuda.current_device()

        def run() -> T:
            # This thread has its own current device and streams: earlier work of other threads must be done before it starts, and
            # its work must be done before they continue.
            with torch.cuda.device(device):
                torch.cuda.synchronize()
                result = function()
                torch.cuda.synchronize()
            return result

        return attended(run, self._lives)

    def run(
        self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dist.Work | None:
        """Run one of torch's operations. Returns its work, or None if it is in the current stream (NCCL without ``async_op``)."""
        if self.amend is not None:
            amended = self.amend(self, operation, (*args, *kwargs.values()))
            if isinstance(amended, dist.Work):
                return amended
            args, kwargs = amended, {}
        answerer = self.answerer
        if answerer is not None:
            return answerer.run(self, operation, (*args, *kwargs.values()))
        if self.explain is not None and (changed := self.explain(None)) is not None:
            raise changed
        if self.before is not None:
            self.before(self, operation)
        try:
            work: dist.Work | None = self._begun(operation, args, kwargs)
        except RuntimeError as error:
            changed = None if self.explain is None else self.explain(error)
            if changed is None:
                raise
            raise changed from error
        if self._is_on_gpu(operation, (*args, *kwargs.values())):
            work = self._on_stream(work, brings=operation != torch_private.SEND)
        elif (
            work is not None
            and self._lives is not None
            and (operation != torch_private.MONITORED_BARRIER)
        ):
            if operation in torch_private.POINT_TO_POINT:
                work = KeptMessage(work, self._lives, self.timeout, self._explained)
            else:
                work = KeptWork(work, self._lives, self._explained)
        if self.observer is not None:
            self.observer(self, operation, (*args, *kwargs.values()), work)
        return work

    def _is_on_gpu(self, operation: str, args: tuple[Any, ...]) -> bool:
        if not self.has_nccl:
            return False
        if operation == "barrier":
            device = args[0].device if args else None
            return device is None or device.type == "cuda"
        return any(tensor.is_cuda for tensor in flat(args))

    def _on_stream(self, work: dist.Work | None, *, brings: bool = True) -> dist.Work | None:
        """What to return for NCCL's work. Without a work, the operation is already in the current stream.

        Args:
            brings: whether it brings anything to this rank.
        """
        if not (self.awaits and brings):
            return None if work is None else StreamWork(work, self._refuse_after_loss)
        if torch.cuda.is_current_stream_capturing():
            raise ElasticError(
                f"elastic.session: a collective of group {self.kept_name!r} is captured in a CUDA graph: the graph would go on using"
                " connections that a loss closes. Keep collectives out of CUDA graphs"
            )
        is_later = self._stream.call_behind_backward(lambda: self._settle(None))
        if work is not None:
            return StreamWork(work, None if is_later else self._settle)
        if not is_later:
            self._settle(None)
        return None

    def _settle(self, timeout: timedelta | None) -> None:
        """Wait until all work queued on the GPU so far is done, and check that its results are right.

        Raises:
            MembershipChanged: a member is lost, in a session.
            RuntimeError: it takes longer than ``timeout``, or than the group's time-out.
        """
        seconds = (timeout or self.timeout).total_seconds()
        is_in_time = self._stream.wait(seconds, self._abort)
        self._check()
        if not is_in_time:
            raise RuntimeError(
                f"NCCL: timed out after {seconds:g} s, waiting for a collective of group {self.kept_name!r} to end;"
                " to wait longer, set init_process_group(timeout=…)"
            )

    def _refuse_after_loss(self, timeout: timedelta | None) -> None:
        self._check()

    def _check(self) -> None:
        """Check that what has arrived over the connections so far is right.

        Raises:
            MembershipChanged: a member is lost, in a session.
            RuntimeError: a member is lost.
        """
        if self.explain is not None and (changed := self.explain(None)) is not None:
            raise changed
        if self._wiring is not None and self._wiring.is_cut:
            raise RuntimeError(GIVEN_UP)

    def _abort(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()

    def end_coalescing(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        """The work of the operations since coalescing began."""
        if self.inner is None:
            return None
        work: dist.Work | None = torch_private.end_coalescing(self.inner, *args, **kwargs)
        return self._on_stream(work) if self.has_nccl else work

    def _explained(self, error: BaseException | None) -> Exception | None:
        """Ask the current session to explain. A work that never ends must not keep a finished session and its model alive."""
        return None if self.explain is None else self.explain(error)

    def _begun(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.Work:
        values = (*args, *kwargs.values())
        if operation in torch_private.REDUCE_SCATTERS and not self._is_on_gpu(operation, values):
            begun = reduce_scatter.begun(self.inner.allreduce, self._rank, self.size(), values)
            if begun is not None:
                return begun
        function = getattr(self.inner, operation)
        if operation != torch_private.MONITORED_BARRIER:
            work: dist.Work = function(*args, **kwargs)
            return work
        self.transfer(lambda: function(*args, **kwargs))
        return done(None)

    def rank(self) -> int:
        """This process's rank in the group. The script may store it."""
        rank_watch.note()
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    # C++ asks for these two.
    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return len(self.members)

    def become(self, rank: int) -> None:
        """Become another rank, as if this process had run the set-up as that rank."""
        self._rank = self.setup_rank = rank

    def resize(self, rank: int, members: Sequence[int]) -> None:
        """Have this rank and these members from now on. The group must have no connections.

        Args:
            rank: of this process, in the group.
            members: their global ranks.
        """
        self._rank, self.members = rank, tuple(members)
        torch_private.set_members(self, self.members)

    # -- other than collectives --------------------------------------------------------------------

    # torch keeps a group's name in its backend, which this group lacks. C++ looks for these four names.
    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names[0] = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._names[0]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names[1] = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names[1]

    def getBackendName(self) -> str:  # noqa: N802  C++ looks for this name
        # Not "gloo": DDP's logger would take the group's backend for torch's own class.
        return "rallypoint"

    def name(self) -> str:
        return "nccl" if self.has_nccl else "gloo"

    @property
    def _device_types(self) -> list[torch.device]:
        # Where torch puts objects that it sends. The backend that only the session uses is left out.
        return [torch.device(each) for each in self._asked] if self.has_nccl else [_CPU]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        if self.inner is not None:
            self.inner.shutdown()

    def abort(self) -> None:
        if self.inner is not None:
            self.inner.abort()


def _operation(name: str) -> Callable[..., dist.Work | None]:
    def run(self: KeptGroup, *args: Any, **kwargs: Any) -> dist.Work | None:
        return self.run(name, args, kwargs)

    run.__name__ = name
    return run


def _passed_on(name: str, otherwise: Any) -> Callable[..., Any]:
    def call(self: KeptGroup, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner
        return otherwise if inner is None else getattr(inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


# Under the names by which Python and C++ call them.
for _name in (*torch_private.COLLECTIVES, *torch_private.POINT_TO_POINT):
    setattr(KeptGroup, _name, _operation(_name))
for _name, _otherwise in torch_private.PASSED_ON.items():
    setattr(KeptGroup, _name, _passed_on(_name, _otherwise))
setattr(KeptGroup, torch_private.END_COALESCING, KeptGroup.end_coalescing)
for _function in vars(KeptGroup).values():
    if isinstance(_function, FunctionType):
        torch_private.run_uncompiled(_function)
