"""A function launch as frozen data: sizes, places, backends.

Construction validates and touches nothing; :meth:`MultiprocessConfig.resolve` asks the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from rallypoint._core import addresses, near_words
from rallypoint.errors import ConfigError

from .config import StartMethod
from .worker import backends


LAUNCH_METHODS: Mapping[str, StartMethod] = {
    "forkserver": StartMethod.FORKSERVER,
    "spawn": StartMethod.EXEC,
    "fork": StartMethod.FORK,
}

# Variables of a worker and the fields they fill.
_VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}


@dataclass(frozen=True, slots=True)
class MultiprocessConfig:
    """Sizes, addresses and backends of a function launch.

    Every field may be left unset; :meth:`resolve` fills in the defaults.

    Args:
        rank: this process's rank in the job; None or -1 leaves it unset. A launch gives each worker its own.
        local_rank: its rank among the workers of its machine, and the CUDA device it uses. None or -1 leaves it unset.
        world_size: number of workers of the job. Default: one for each CUDA device, else 1.
        local_world_size: number of workers on this machine. Default: ``world_size``.
        master_addr: the host at which workers find their store. Default: ``localhost``.
        master_port: its port. Default, and 0: a free one, chosen when it is bound, so no other process can take it first.
        init_method: ``env://`` (a store at ``master_addr:master_port``), ``tcp://HOST:PORT`` (the same,
            in one word) or ``file:///PATH`` (a file that all workers can write and that does not exist yet).
        model_parallelism: workers that share one model (neighbouring ranks); 1 for none.
        pipeline_parallelism: pipeline stages (ranks furthest apart); 1 for none. The rest of
            ``world_size`` is data parallel.
        backend: the default group's backend. Default: ``get_distributed_backend()``.
        model_parallel_backend: the backend of the groups along the mesh axis ``mp``. Default: ``backend``.
        pipeline_parallel_backend: the backend of those along ``pp``. Default: ``backend``.
        data_parallel_backend: the backend of those along ``dp``. Default: ``backend``.
        launch_method: ``forkserver`` (forks of a fresh process that has imported torch), ``spawn`` (fresh interpreters)
            or ``fork`` (forks of the calling process: only results are pickled; locks held by other threads and an
            initialized CUDA do not survive).

    Raises:
        ConfigError: a value is not possible, or two contradict each other.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    init_method: str = "env://"
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "forkserver"

    def __post_init__(self) -> None:
        for name in ("rank", "local_rank"):
            if type(getattr(self, name)) is int and getattr(self, name) == -1:
                object.__setattr__(self, name, None)
        for name, least, most in (
            ("world_size", 1, None),
            ("local_world_size", 1, None),
            ("rank", 0, None),
            ("local_rank", 0, None),
            ("master_port", 0, 65535),
            ("model_parallelism", 1, None),
            ("pipeline_parallelism", 1, None),
        ):
            value: object = getattr(self, name)
            if value is not None or name.endswith("parallelism"):
                _check_number(name, value, least, most)
        _check_below("rank", self.rank, "world_size", self.world_size)
        _check_below("local_rank", self.local_rank, "local_world_size", self.local_world_size)
        if (self.local_world_size or 0) > (self.world_size or self.local_world_size or 0):
            raise ConfigError(
                "local_world_size",
                self.local_world_size,
                f"expected at most world_size, which is {self.world_size}",
            )
        for name in ("master_addr", *_BACKENDS):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ConfigError(name, value, "expected a name, or None for the default")
        self._check_init_method()
        self._check_degrees()
        if self.launch_method not in LAUNCH_METHODS:
            near = near_words.nearest(str(self.launch_method), LAUNCH_METHODS)
            raise ConfigError(
                "launch_method",
                self.launch_method,
                f"expected one of {', '.join(LAUNCH_METHODS)}",
                f"did you mean {near}?" if near else "",
            )

    def _check_init_method(self) -> None:
        method = str(self.init_method)
        scheme, colon, rest = method.partition("://")
        expected = "expected env://, tcp://HOST:PORT or file:///PATH"
        if not colon or scheme not in {"env", "tcp", "file"} or (scheme == "env" and rest):
            raise ConfigError("init_method", method, expected)
        if scheme == "file" and not rest.startswith("/"):
            raise ConfigError(
                "init_method",
                method,
                "the path of the file is not absolute",
                "write three slashes: file:///tmp/store",
            )
        if scheme == "tcp":
            host, port = _host_and_port(method)
            if self.master_addr not in {None, host}:
                raise ConfigError("master_addr", self.master_addr, f"init_method says {host!r}")
            if self.master_port not in {None, port}:
                raise ConfigError("master_port", self.master_port, f"init_method says {port}")

    def _check_degrees(self) -> None:
        degrees = self.model_parallelism * self.pipeline_parallelism
        if self.world_size is not None and self.world_size % degrees:
            raise ConfigError(
                "world_size",
                self.world_size,
                f"expected a multiple of model_parallelism ({self.model_parallelism})"
                f" times pipeline_parallelism ({self.pipeline_parallelism}) = {degrees}",
            )

    @property
    def data_parallelism(self) -> int | None:
        """Workers that train the same part of the model on different data; None without ``world_size``."""
        if self.world_size is None:
            return None
        return self.world_size // (self.model_parallelism * self.pipeline_parallelism)

    def resolve(self) -> MultiprocessConfig:
        """Fill in unset fields from this machine's devices.

        ``master_port`` stays unset: the port is chosen when it is bound. Imports torch if devices must be counted, but
        does not initialize CUDA.

        Returns:
            A copy with every other field set.
        Raises:
            ConfigError: the machine's devices contradict a field.
        """
        sized = self.with_sizes()
        assert sized.local_world_size is not None
        rank = 0 if self.rank is None else self.rank
        backend = self.backend or backends.get_distributed_backend()
        return replace(
            sized,
            rank=rank,
            local_rank=rank % sized.local_world_size
            if self.local_rank is None
            else self.local_rank,
            backend=backend,
            model_parallel_backend=self.model_parallel_backend or backend,
            pipeline_parallel_backend=self.pipeline_parallel_backend or backend,
            data_parallel_backend=self.data_parallel_backend or backend,
        )

    def with_sizes(self) -> MultiprocessConfig:
        """Fill in sizes and address only; imports torch only if ``world_size`` is unset.

        Returns:
            A copy with them set.
        """
        world_size = self.world_size or self.local_world_size or max(1, backends.num_cuda_devices())
        addr, port = self.master_addr or addresses.own_host(), self.master_port or None
        if self.init_method.startswith("tcp://"):
            addr, port = _host_and_port(self.init_method)
        return replace(
            self,
            world_size=world_size,
            local_world_size=self.local_world_size or world_size,
            master_addr=addr,
            master_port=port,
        )

    def with_environment(self, env: Mapping[str, str]) -> MultiprocessConfig:
        """Fill in unset fields from a worker's variables (``RANK``, ``WORLD_SIZE``, …).

        Args:
            env: the variables.
        Returns:
            A copy with those fields set.
        Raises:
            ConfigError: a variable is not a number, or contradicts a field.
        """
        found: dict[str, int] = {}
        for name, variable in _VARIABLES.items():
            text = env.get(variable)
            if getattr(self, name) is None and text:
                if not text.strip().isdecimal():
                    raise ConfigError(variable, text, "expected a number")
                found[name] = int(text)
        addr = self.master_addr or env.get("MASTER_ADDR") or None
        if self.init_method.startswith("tcp://"):
            addr, found["master_port"] = _host_and_port(self.init_method)
        return replace(self, master_addr=addr, **found)  # type: ignore[arg-type]  # the numbers are ints


def check(cfg: object) -> None:
    """Raise ConfigError unless ``cfg`` is a config: users forget it, and the arguments after it may be anything."""
    if not isinstance(cfg, MultiprocessConfig):
        raise ConfigError(
            "cfg",
            cfg,
            "expected a MultiprocessConfig",
            "pass func, cfg, then the arguments of func",
        )


_BACKENDS = (
    "backend",
    "model_parallel_backend",
    "pipeline_parallel_backend",
    "data_parallel_backend",
)


def _check_number(name: str, value: object, least: int, most: int | None) -> None:
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    # True is an int in Python, and a mistake here.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(name, value, f"expected a whole number, {allowed}")
    if value < least or (most is not None and value > most):
        raise ConfigError(name, value, f"expected {allowed}")


def _check_below(name: str, value: int | None, size_name: str, size: int | None) -> None:
    if value is not None and size is not None and value >= size:
        raise ConfigError(name, value, f"expected 0 to {size - 1} ({size_name} is {size})")


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path not in {"", "/"} or parts.query:
        raise ConfigError("init_method", url, "expected tcp://HOST:PORT, such as tcp://node0:29500")
    return host, port
