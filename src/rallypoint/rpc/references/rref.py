"""References to values on other workers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import torch
from torch.futures import Future

from rallypoint.errors import PeerLost, RpcError, RpcTimeout
from rallypoint.rpc import constants
from rallypoint.rpc.calling import prepare, rpc_async, rpc_sync
from rallypoint.rpc.connections.calls import Call
from rallypoint.rpc.connections.messages import Kind
from rallypoint.rpc.connections.outgoing import Outgoing
from rallypoint.rpc.current_agent import current_agent, required_agent, without_agent
from rallypoint.rpc.future import RpcFuture
from rallypoint.rpc.ports import Calls, Peers
from rallypoint.rpc.rref_proxy import RRefProxy, rref_type
from rallypoint.rpc.serialization.payload import (
    Writer,
    current_forks,
    register_reducer,
    when_unsent,
)
from rallypoint.rpc.serialization.script import is_builtin
from rallypoint.rpc.threads.thread_pool import waiting
from rallypoint.rpc.worker_info import WorkerInfo

from .ids import Fork, ForkId, RRefId
from .rref_backward import backward
from .rref_table import RRefTable


T = TypeVar("T")

# torch's words: code and tests look for them.
_NO_AGENT = (
    "Current RPC agent is not set! Did you initialize the RPC framework"
    " (e.g. by calling `rpc.init_rpc`)?"
)
_TIMED_OUT = "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist."


class Holder(Calls, Peers, Protocol):
    """The worker that holds a reference, as the reference sees it."""

    me: WorkerInfo
    rrefs: RRefTable
    # Whether this process is a forked child of the worker.
    is_inherited: bool

    @property
    def is_closed(self) -> bool: ...


class RRef(Generic[T]):
    """A reference to a value that lives on one worker, its *owner*. The value exists as long as any reference to it.

    Args:
        value: the value. This worker becomes its owner.
        type_hint: the type of the value, as in torch; has no effect.

    Raises:
        RpcError: this process is not in a group.
    """

    _made_by: Holder
    _rref_id: RRefId
    _fork_id: ForkId | None

    def __init__(self, value: T, type_hint: type | None = None) -> None:
        agent = current_agent()
        if agent is None:
            raise RpcError(without_agent(_NO_AGENT))
        self._own(agent, agent.rrefs.own(value))
        self._type_future: Future[type] | None = None
        self._hint = type_hint

    # -- the two kinds ------------------------------------------------------------------------------

    def _own(self, agent: Holder, rref_id: RRefId) -> None:
        self._made_by = agent
        self._rref_id = rref_id
        self._fork_id = None
        self._owner = agent.me
        self._creation: Future[Any] | None = None
        self._is_script = False
        weakref.finalize(self, agent.rrefs.drop, rref_id).atexit = False

    @classmethod
    def _of_own(cls, agent: Holder, rref_id: RRefId) -> RRef[Any]:
        """A reference to a value of this worker. It takes over one hold on the value."""
        made: RRef[Any] = cls.__new__(cls)
        made._own(agent, rref_id)
        made._type_future = None
        made._hint = None
        return made

    @classmethod
    def _of_user(
        cls,
        agent: Holder,
        rref_id: RRefId,
        fork_id: ForkId,
        owner: WorkerInfo,
        creation: Future[Any] | None = None,
    ) -> RRef[Any]:
        """A user reference. The object takes over one hold on it."""
        made: RRef[Any] = cls.__new__(cls)
        made._made_by = agent
        made._rref_id = rref_id
        made._fork_id = fork_id
        made._owner = owner
        made._creation = creation
        made._type_future = None
        made._hint = None
        made._is_script = False
        weakref.finalize(made, agent.rrefs.drop, fork_id).atexit = False
        return made

    @property
    def _agent(self) -> Holder:
        self._check_process()
        return self._made_by

    def _check_process(self) -> None:
        """Raise in a forked child, whose copy of the object is not a reference."""
        if self._made_by.is_inherited:
            raise RpcError(
                f"{self} cannot be used in a process forked from worker {self._made_by.me.name!r}: use it in that worker"
            )

    # -- the owner ----------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """The worker that has the value.

        Returns:
            Its name and id.
        """
        self._check_process()
        return self._owner

    def owner_name(self) -> str:
        """The name of the worker that has the value.

        Returns:
            Its name.
        """
        self._check_process()
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker has the value.

        Returns:
            True on the owner.
        """
        self._check_process()
        return self._fork_id is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has acknowledged this reference. Does not block.

        Returns:
            True on the owner, and on other workers once the acknowledgement has arrived.
        """
        agent = self._agent
        return self._fork_id is None or agent.rrefs.is_confirmed(self._fork_id)

    # -- the value ----------------------------------------------------------------------------------

    def to_here(self, timeout: float = constants.UNSET_RPC_TIMEOUT) -> T:
        """Fetch the value. Blocks until the owner has computed it.

        Args:
            timeout: seconds; 0: no limit. The default is the ``rpc_timeout`` of the options.

        Returns:
            A copy of the value; on the owner, the value itself.

        Raises:
            RpcTimeout: the value did not arrive in time.
            PeerLost: the owner is gone.
            Exception: what the function that computes the value raised.
        """
        if self._fork_id is None:
            return self._wait_here(timeout)
        self._check_usable("to_here()")
        kind = Kind.SCRIPT_FETCH if self._is_script else Kind.FETCH
        return cast(
            "T",
            self._agent.call_sync(
                self._owner, kind, f"to_here() of {self._rref_id}", (self._rref_id,), timeout
            ),
        )

    def _wait_here(self, timeout: float) -> T:
        future = self._agent.rrefs.value(self._rref_id)
        deadline, seconds = self._agent.deadline(timeout)
        with waiting():
            if not future.done() and deadline is not None:
                done = threading.Event()
                future.add_done_callback(lambda _: done.set())
                if not done.wait(max(0.0, deadline - time.monotonic())):
                    raise RpcTimeout(seconds, f"to_here() of {self._rref_id}")
            return cast("T", future.wait())

    def local_value(self) -> T:
        """The value itself; only on its owner. Blocks until it has been computed.

        Returns:
            The value, not a copy.

        Raises:
            RpcError: this worker is not the owner.
            RpcTimeout: this code serves a call, and that call has timed out.
            Exception: what the function that computes the value raised.
        """
        if self._fork_id is not None:
            raise RpcError(
                f"For UserRRef(rref_id={self._rref_id}, fork_id={self._fork_id}), can't call localValue()"
                f" on user {self._agent.me}. Call it on owner {self._owner}"
            )
        return self._wait_here(0.0)

    def _check_usable(self, what: str) -> None:
        if self._agent.rrefs.is_deleted or self._agent.is_closed:
            raise RpcError(
                f"{self}: Cannot call {what} on it after deletion. This worker has shut RPC down."
            )
        assert self._fork_id is not None
        reason = self._agent.rrefs.why_dead(self._fork_id)
        if reason:
            raise self._dead(reason, self._fork_id)

    def _dead(self, reason: str, fork_id: ForkId) -> RpcError:
        """The error for a reference that cannot be used."""
        if self._agent.is_gone(self._owner.id) or self._was_lost(fork_id):
            return PeerLost(self._owner.name, reason)
        return RpcError(reason)

    def _was_lost(self, fork_id: ForkId) -> bool:
        """Whether the owner was lost, or creating the value failed with PeerLost, which may be known earlier."""
        if self._agent.rrefs.is_lost(fork_id):
            return True  # though another worker may have its id now
        if self._creation is not None and self._creation.done():
            try:
                self._creation.value()
            except PeerLost:
                return True
            except Exception:  # noqa: BLE001  # another reason
                return False
        return False

    def _get_future(self) -> Future[Any]:
        """A future that is done when the owner has created the value, or could not be asked to."""
        self._check_process()
        if self._creation is None:
            self._creation = Future()
            if self._fork_id is None:
                return self._agent.rrefs.value(self._rref_id)
            self._creation.set_result(None)
        return self._creation

    # -- calls on the value -------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = constants.UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value on its owner: ``rref.rpc_sync().method(…)`` blocks and returns the result.

        Args:
            timeout: seconds for the call, as for :func:`rpc_sync`.

        Returns:
            A proxy with the methods of the value.
        """
        self._check_process()
        return RRefProxy(self, rpc_sync, timeout)

    def rpc_async(self, timeout: float = constants.UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value without waiting: ``rref.rpc_async().method(…)`` returns a future of the result.

        Args:
            timeout: seconds for the call, as for :func:`rpc_sync`.

        Returns:
            A proxy with the methods of the value.
        """
        self._check_process()
        return RRefProxy(self, rpc_async, timeout)

    def remote(self, timeout: float = constants.UNSET_RPC_TIMEOUT) -> RRefProxy:
        """Call a method of the value and keep the result on its owner: ``rref.remote().method(…)`` returns a reference.

        Args:
            timeout: seconds for the call, as for :func:`rpc_sync`.

        Returns:
            A proxy with the methods of the value.
        """
        self._check_process()
        return RRefProxy(self, remote, timeout, checks=True)

    def _get_type(self, timeout: float = constants.UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The value's type, which is fetched once; with ``blocking=False`` as a future."""
        known = self._type_future
        if known is None:
            if self.is_owner():
                known = Future()
                known.set_result(type(self.local_value()))
            else:
                # The name of this call in torch's profiler.
                label = (
                    f"rpc_async#_rref_typeof_on_owner({self._agent.me.name} -> {self.owner_name()})"
                )
                with torch.autograd.profiler.record_function(label):
                    known = rpc_async(self._owner, rref_type, (self,), timeout=timeout)
            self._type_future = known
        if not blocking:
            return known
        try:
            return known.wait()
        except BaseException:
            self._type_future = None
            raise

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run autograd from the value, which must be a scalar tensor. Blocks.

        Args:
            dist_autograd_ctx_id: the context (:func:`rpc.autograd.context`) whose gradients this adds to, on all its
                workers. With -1, the value must be on this worker, and its local gradients go to ``.grad``.
            retain_graph: whether to keep the graph for another backward pass.

        Raises:
            RpcError: the value is on another worker and there is no context, or this worker does not know the context.
            Exception: as :func:`rpc.autograd.backward`.
        """
        backward(self, dist_autograd_ctx_id, retain_graph)

    # -- pickling -----------------------------------------------------------------------------------

    def _fork(self, to: int) -> Fork:
        table = self._agent.rrefs
        if self._fork_id is None:
            reason = table.why_not_made(self._rref_id)
            if reason:
                raise RpcError(reason)
            return table.fork_owned(self._rref_id, to, "")
        if table.is_deleted or self._agent.is_closed:
            raise RpcError(f"{self._fork_id}: Cannot call fork an UserRRef after deletion.")
        reason = table.why_dead(self._fork_id)
        if reason:
            raise self._dead(reason, self._fork_id)
        return table.fork_user(self._fork_id, to, "")

    def _serialize(self) -> RRef[T]:
        """For reducers written for torch's references: the object to put into a message, which is the reference itself.

        Raises:
            RpcError: it cannot be sent.
        """
        self._agent.rrefs.unsent([self._fork(-1)])
        return self

    @staticmethod
    def _deserialize(sent: RRef[T]) -> RRef[T]:
        """The inverse of :meth:`_serialize`, in the receiver."""
        return sent

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __str__(self) -> str:
        if self._fork_id is None:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork_id})"

    __repr__ = __str__


def rebuild_rref(fork: Fork, owner: WorkerInfo) -> RRef[Any]:
    """A reference that has arrived in a message."""
    agent = current_agent()
    if agent is None:
        raise RpcError(without_agent(_NO_AGENT))
    received = agent.rrefs.receive(fork)
    if received.fork_id is None:
        if received.gone:
            raise RpcError(received.gone)
        made = RRef._of_own(agent, fork.rref_id)
    else:
        made = RRef._of_user(agent, fork.rref_id, received.fork_id, owner)
        forks = current_forks()
        if forks is not None:
            forks.append(received.fork_id)
    return made


def _reduce_rref(writer: Writer, rref: RRef[Any]) -> Any:
    if writer.to is None:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )
    fork = rref._fork(writer.to)
    writer.forks.append(fork)
    return rebuild_rref, (fork, rref.owner())


def _take_back(forks: list[Fork]) -> None:
    agent = current_agent()
    if agent is not None:
        agent.rrefs.unsent(forks)


register_reducer(RRef, _reduce_rref)
when_unsent(_take_back)


def call_remote(
    agent: Holder,
    to: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> RRef[Any]:
    """Have a value created on a worker. Returns a reference to it at once."""
    owner = agent.info(to)
    scripted = is_builtin(func)
    kind = Kind.SCRIPT_REMOTE if scripted else Kind.REMOTE
    rref_id, fork_id = agent.rrefs.create_remote(owner.id)
    creation: RpcFuture[Any] = RpcFuture()
    if owner.id == agent.me.id:
        rref = RRef._of_own(agent, rref_id)
    else:
        rref = RRef._of_user(agent, rref_id, fork_id, owner, creation)
    rref._creation = creation
    rref._is_script = scripted

    def give_up(reason: str) -> None:
        agent.rrefs.failed(fork_id, reason)
        if owner.id == agent.me.id:
            agent.rrefs.fail_value(rref_id, reason)

    def finish(call: Call, outgoing: Outgoing) -> None:
        try:
            agent.decode(call, outgoing)
        except RpcTimeout:
            give_up(_TIMED_OUT)
            raise
        except BaseException as error:
            give_up(f"RRef creation via rpc.remote() failed: {error}")
            raise
        else:
            agent.rrefs.confirmed(fork_id)

    try:
        agent.call_async(
            owner,
            kind,
            func,
            (rref_id, fork_id, func, args, kwargs),
            timeout,
            finish=finish,
            future=creation,
            lost=lambda error: give_up(f"RRef creation via rpc.remote() failed: {error}"),
        )
    except BaseException as error:
        give_up(f"RRef creation via rpc.remote() failed: {error}")
        raise
    creation.is_watched = True
    return rref


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Run a function on a worker and keep the result there. Does not wait for it.

    Args:
        to: name, rank or info of the worker, which may be this one.
        func: a function that both workers can import under the same module and name.
        args, kwargs: its arguments. Tensors must be on the CPU, or on a device of a device map.
        timeout: seconds until the function must have returned; as for :func:`rpc_sync`.

    Returns:
        A reference to the result. The worker keeps the value as long as any worker has a reference. If the function
        raised, using the value raises the same error.

    Raises:
        RpcError: there is no such worker, or this process is not in a group.
    """
    agent = required_agent()
    _, _, (func, arguments, keywords) = prepare(func, args, kwargs)
    made: RRef[T] = agent.remote(to, func, arguments, keywords, timeout)
    return made
