"""What a worker of an RPC group can be told about how it is to work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rallypoint._core.secret import check
from rallypoint.errors import ConfigError
from rallypoint.wire import transports as known_transports

from . import constants
from .certificates import Tls, check_tls
from .device_map import Device


class RpcBackendOptions:
    """What every backend takes; third parties' options derive from it.

    Args:
        rpc_timeout: seconds that a call waits for its answer; 0: for ever.
        init_method: where the members meet (``env://``, ``tcp://host:port``, ``file:///path``).
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self.rpc_timeout = _seconds("rpc_timeout", rpc_timeout)
        self.init_method = init_method


class NativeRpcBackendOptions(RpcBackendOptions):
    """Options of the native backend.

    Args:
        num_worker_threads: functions that are run at once; those that wait for other workers do not count.
        rpc_timeout: seconds that a call waits for its answer; 0: for ever.
        init_method: where the members meet.
        device_maps: for each worker that is called, own devices to its devices.
        devices: those that are used; None: all that maps name.
        bind: address to listen on for other hosts; ``*``: all of this machine's; None: the one towards the host of the
            group's store, and nothing but Unix sockets where the launcher has started all members on this host.
        advertise: address that others are told; None: the one that the store's host sees us by.
        port: the port, or a range of ports of which the first free one is taken; 0: any.
        transports: ways to other workers, the best first; one that cannot be used is skipped.
        secret: what all workers of the group know, 16 bytes or more; None: RALLY_SECRET, RALLY_SECRET_FILE, or the
            launcher's; else, on one host, a key that only this user can read.
        insecure: whether workers of several hosts may do without a secret, and are not warned.
        tls: whether TCP is encrypted: True, with a certificate that each worker makes for itself; :class:`Tls`, with
            files; None or False, not. The same for all workers.
        heartbeat: seconds after which a peer whose packets vanish is lost.
        pickle_by_value: functions without a name (lambdas, closures) travel, too; needs the same Python.
        allowed_modules: what messages of others may be made of: modules and packages, for what these define, or
            single names (``package.module.Class``). None: anything; with one of the next two, nothing but what needs no entry.
        allowed_calls: the same of what others may call: functions, classes, methods. None: what is on ``allowed_modules``.
        exported_only: others may call what has ``@rpc.export``, and what is on ``allowed_calls``; nothing else.
        in_flight_bytes: of tensors, sent to one peer and not answered yet; more waits. Of a peer that leaves as many
            bytes of its answers unread, no further calls are taken until it reads.
        shared_memory_bytes: that all connections together may use for large tensors.
        cuda_ipc: whether GPU tensors may go from process to process of one host without leaving the GPUs.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        bind: str | None = None,
        advertise: str | None = None,
        port: int | tuple[int, int] = 0,
        transports: Sequence[str] = known_transports.DEFAULT,
        secret: str | bytes | None = None,
        insecure: bool = False,
        tls: bool | Tls | None = None,
        heartbeat: float = 5.0,
        pickle_by_value: bool = False,
        allowed_modules: Sequence[str] | None = None,
        allowed_calls: Sequence[str] | None = None,
        exported_only: bool = False,
        in_flight_bytes: int = 1 << 30,
        shared_memory_bytes: int = 4 << 30,
        cuda_ipc: bool = True,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if isinstance(num_worker_threads, bool) or not isinstance(num_worker_threads, int):
            raise TypeError(
                f"num_worker_threads is {num_worker_threads!r}: expected a whole number"
            )
        if num_worker_threads < 1:
            raise ConfigError("num_worker_threads", num_worker_threads, "expected at least 1")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[Device, Device]] = {}
        for worker, pairs in (device_maps or {}).items():
            self.set_device_map(worker, pairs)
        self.devices: list[Device] = []
        if devices is not None:
            self.set_devices(devices)
        self.bind = bind
        self.advertise = advertise
        self.ports = _ports(port)
        _refuse_text("transports", transports)
        if not transports:
            expected = f"expected some of {', '.join(known_transports.known())}"
            raise ConfigError("transports", list(transports), expected)
        for kind in transports:
            known_transports.find(kind)
        self.transports = tuple(dict.fromkeys(transports))
        self.secret = None if secret is None else check(secret, "secret")
        self.insecure = bool(insecure)
        self.tls = check_tls(tls)
        self.heartbeat = _seconds("heartbeat", heartbeat)
        if not self.heartbeat:
            raise ConfigError("heartbeat", heartbeat, "expected seconds, more than 0")
        self.pickle_by_value = pickle_by_value
        _refuse_text("allowed_modules", allowed_modules)
        self.allowed_modules = None if allowed_modules is None else frozenset(allowed_modules)
        _refuse_text("allowed_calls", allowed_calls)
        self.allowed_calls = None if allowed_calls is None else frozenset(allowed_calls)
        self.exported_only = exported_only
        self.in_flight_bytes = in_flight_bytes
        self.shared_memory_bytes = shared_memory_bytes
        self.cuda_ipc = cuda_ipc

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Tensors on a key's device arrive on its value's device when ``to`` is called; results go back the
        other way.

        Args:
            to: the worker's name.
            device_map: one to one; devices, their texts, or numbers of CUDA devices.

        Raises:
            ValueError: two devices go to one, or one to two.
        """
        pairs = {Device.parse(key): Device.parse(value) for key, value in device_map.items()}
        merged = dict(self.device_maps.get(to, {}))
        for ours, theirs in pairs.items():
            if merged.get(ours, theirs) != theirs:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {ours} to {theirs}"
                )
            merged[ours] = theirs
        if len(set(merged.values())) != len(merged):
            targets = [str(each) for each in merged.values()]
            raise ValueError(
                "`set_device_map` only supports 1-to-1 mapping, trying to map several devices to one of"
                f" {sorted(targets)}"
            )
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Name the accelerators whose streams are waited for.

        Args:
            devices: as torch takes them: ``"cuda:0"``, 0, ``torch.device("cuda", 0)``.

        Raises:
            ConfigError: one of them is no device.
        """
        self.devices = [Device.parse(each) for each in devices]


class TensorPipeRpcBackendOptions(NativeRpcBackendOptions):
    """torch's name for them. What only TensorPipe has (``_transports``, ``_channels``) is taken and has no effect."""

    def __init__(self, *, _transports: Any = None, _channels: Any = None, **options: Any) -> None:
        super().__init__(**options)


def _seconds(name: str, value: object) -> float:
    if isinstance(value, (timedelta, str, bool)) or not hasattr(value, "__float__"):
        raise TypeError(
            f"{name} is {value!r}: incompatible constructor arguments, expected seconds as a number"
        )
    seconds = float(value)
    if not seconds >= 0.0:
        raise ConfigError(name, value, "expected seconds, 0 or more")
    return seconds


def _refuse_text(name: str, value: object) -> None:
    # Its letters would be taken for the names.
    if isinstance(value, str):
        raise ConfigError(name, value, f"expected names in a tuple: ({value!r},)")


def _ports(port: int | tuple[int, int]) -> range:
    try:
        first, last = (port, port) if isinstance(port, int) else map(int, port)
    except (TypeError, ValueError):
        raise ConfigError("port", port, "expected a port, or (first, last) of a range") from None
    if not 0 <= first <= last < 65536:
        raise ConfigError("port", port, "expected a port, or (first, last) of a range")
    return range(first, last + 1)
