"""The options of a worker."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType, NoneType
from typing import Any

from rallypoint._core.secret import check
from rallypoint._core.whole_numbers import is_whole
from rallypoint.errors import ConfigError
from rallypoint.wire import transports as known_transports

from . import constants
from .certificates import Tls, check_tls
from .device_map import Device


class RpcBackendOptions:
    """Options of every backend. Options of third-party backends derive from this class.

    Args:
        rpc_timeout: default timeout of calls in seconds; 0: no limit.
        init_method: where the members meet: ``env://``, ``tcp://host:port`` or ``file:///path``.

    Raises:
        ConfigError: ``rpc_timeout`` is negative.
        TypeError: ``rpc_timeout`` is not a number, or ``init_method`` not a string.
    """

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self.rpc_timeout = _seconds("rpc_timeout", rpc_timeout)
        if not isinstance(init_method, str):
            raise TypeError(f"init_method is {init_method!r}: expected a string, as 'env://'")
        self.init_method = init_method


class NativeRpcBackendOptions(RpcBackendOptions):
    """Options of the native backend.

    Args:
        num_worker_threads: how many functions run at the same time. Functions that wait for other workers do not count.
        rpc_timeout: default timeout of calls in seconds; 0: no limit.
        init_method: where the members meet: ``env://``, ``tcp://host:port`` or ``file:///path``.
        device_maps: for each worker to call, this worker's devices mapped to that worker's.
        devices: the devices to use; None: all that occur in device maps.
        bind: the address to listen on for other hosts; ``*``: all addresses. None: the address that faces the group's
            store; only Unix sockets if the launcher started all members on this host.
        advertise: the address given to other workers; None: the address by which this host reaches the store.
        port: a port, or a range ``(first, last)``, whose first free port is taken; 0: any port.
        transports: transports in order of preference. One that does not work here is skipped.
        secret: the secret of the group, at least 16 bytes. None: RALLY_SECRET, RALLY_SECRET_FILE or the launcher's
            secret; failing those, on one host, a key that only this user can read.
        insecure: whether workers on several hosts may do without a secret.
        tls: whether to encrypt connections between hosts: True uses a new certificate for each worker; :class:`Tls` uses
            files. Must be the same on all workers.
        heartbeat: seconds without an acknowledgement after which a host counts as lost.
        pickle_by_value: whether to send lambdas and nested functions as well. Both workers need the same Python version.
        allowed_modules: what messages from others may contain: modules and packages (all that they define) or single names
            (``package.module.Class``). None: anything; if one of the next two is set, only what needs no entry.
        allowed_calls: what others may call: functions, classes, methods. None: as ``allowed_modules``, unless ``exported_only``.
        exported_only: whether others may call only what has ``@rpc.export`` or is in ``allowed_calls``.
        in_flight_bytes: how many bytes of tensors may be sent to one worker before it replies; further calls wait. A worker
            that leaves this many bytes of replies unread is not served until it reads them.
        shared_memory_bytes: how many bytes of shared memory all connections together may use for large tensors.
        cuda_ipc: whether GPU tensors may be shared between processes of one host without leaving the GPU.

    Raises:
        ConfigError: an option has a value that cannot work; the error names the option.
        TypeError: a number or string has the wrong type.
        ValueError: a device map is not one to one.
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
            raise TypeError(f"num_worker_threads is {num_worker_threads!r}: expected an integer")
        if num_worker_threads < 1:
            raise ConfigError("num_worker_threads", num_worker_threads, "expected at least 1")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[Device, Device]] = {}
        if not isinstance(device_maps, (Mapping, NoneType)):
            raise TypeError(f"device_maps is {device_maps!r}: expected a dict of device maps")
        for worker, pairs in (device_maps or {}).items():
            self.set_device_map(worker, pairs)
        self.devices: list[Device] = []
        if devices is not None:
            self.set_devices(devices)
        self.bind = _address("bind", bind)
        self.advertise = _address("advertise", advertise)
        self.ports = _ports(port)
        kinds = _several("transports", transports)
        if not kinds:
            expected = f"expected some of {', '.join(known_transports.known())}"
            raise ConfigError("transports", [], expected)
        for kind in kinds:
            known_transports.find(kind)
        self.transports = tuple(dict.fromkeys(kinds))
        self.secret = None if secret is None else check(secret, "secret")
        self.insecure = bool(insecure)
        self.tls = check_tls(tls)
        self.heartbeat = _seconds("heartbeat", heartbeat)
        if not self.heartbeat:
            raise ConfigError("heartbeat", heartbeat, "expected seconds, more than 0")
        self.pickle_by_value = pickle_by_value
        self.allowed_modules = _names("allowed_modules", allowed_modules)
        self.allowed_calls = _names("allowed_calls", allowed_calls)
        self.exported_only = exported_only
        self.in_flight_bytes = _bytes("in_flight_bytes", in_flight_bytes)
        self.shared_memory_bytes = _bytes("shared_memory_bytes", shared_memory_bytes)
        self.cuda_ipc = cuda_ipc

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Extend the device map for a worker. In calls to it, a tensor on one of the map's keys arrives on the key's value;
        results follow the map in reverse.

        Args:
            to: the worker's name.
            device_map: this worker's devices mapped one to one to the other's: devices, their names, or CUDA device numbers.

        Raises:
            ValueError: the map would not be one to one.
            ConfigError: one of them is not a device.
            TypeError: the map is not a dict.
        """
        if not isinstance(device_map, Mapping):
            raise TypeError(
                f"the device map for {to} is {device_map!r}: expected a dict, as in {{'cuda:0': 'cuda:1'}}"
            )
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
        """Set the accelerators that calls use.

        Args:
            devices: devices in any of torch's notations: ``"cuda:0"``, 0, ``torch.device("cuda", 0)``.

        Raises:
            ConfigError: one of them is not a device.
            TypeError: they are not in a list.
        """
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise TypeError(f"devices is {devices!r}: expected a list, as in [{devices!r}]")
        self.devices = [Device.parse(each) for each in devices]


class TensorPipeRpcBackendOptions(NativeRpcBackendOptions):
    """torch's name for :class:`NativeRpcBackendOptions`. TensorPipe's ``_transports`` and ``_channels`` have no effect.

    Args:
        **options: as for :class:`NativeRpcBackendOptions`.
    """

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


def _address(name: str, value: object) -> str | None:
    if not isinstance(value, (str, NoneType)):
        raise TypeError(f"{name} is {value!r}: expected an address as a string, or None")
    return value


def _bytes(name: str, value: object) -> int:
    if not is_whole(value):
        raise TypeError(f"{name} is {value!r}: expected a number of bytes, as in {name}=1 << 30")
    size = operator.index(value)  # type: ignore[arg-type]
    if size < 0:
        raise ConfigError(name, value, "expected a number of bytes, 0 or more")
    return size


def _several(option: str, value: Any) -> tuple[Any, ...]:
    # Each character of a string would be taken for a name.
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(option, value, f"expected names in a tuple: ({_name_of(value)!r},)")
    return tuple(value)


def _names(option: str, value: Any) -> frozenset[str] | None:
    if value is None:
        return None
    names = _several(option, value)
    for each in names:
        if not isinstance(each, str):
            raise ConfigError(option, each, f"expected its name: {_name_of(each)!r}")
    return frozenset(names)


def _name_of(value: Any) -> str:
    """The name of a module, class or function, as ``allowed_modules`` and ``allowed_calls`` take it."""
    if isinstance(value, str):
        return value
    if isinstance(value, ModuleType):
        return value.__name__
    home, name = (getattr(value, each, None) for each in ("__module__", "__qualname__"))
    return f"{home}.{name}" if home and name else "package.module.name"


def _ports(port: int | tuple[int, int]) -> range:
    try:
        first, last = (port, port) if isinstance(port, int) else map(int, port)
    except (TypeError, ValueError):
        raise ConfigError("port", port, "expected a port, or (first, last) of a range") from None
    if not 0 <= first <= last < 65536:
        raise ConfigError("port", port, "expected a port, or (first, last) of a range")
    return range(first, last + 1)
