"""The built-in backends' creators: from parameters (ours, or torch's object) to a handler.

The registry imports this when such a backend is asked for. Options are torchelastic's where it has them;
unknown ones are ignored, as there: torchrun adds some of its own.

``join_timeout`` (600 s), ``last_call_timeout`` (30 s), ``lease`` (5 s; also as ``keep_alive_interval`` times
``keep_alive_max_attempt``), ``read_timeout`` (60 s, of ``RendezvousInfo.store``), ``is_host``, ``label``, ``secret`` or
``secret_file``, ``split_brain_guard`` (true); for etcd, here or behind the endpoint's ``?``: ``ca``, ``cert``, ``key``,
``user``, ``password``, ``prefix``, ``ttl``; for static: ``node_rank``.
"""

from __future__ import annotations

import difflib
import logging
import math
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from rallypoint._core import addresses, env as environment, forks, secret
from rallypoint.errors import ConfigError

from .api import RendezvousHandler
from .backends.memory import MemoryStore
from .dynamic import DynamicRendezvous, Listener, Say
from .end_mark import ENDED_FOR, EndMark
from .endpoint import Endpoint, HostPort, parse_endpoint
from .home import FixedHome, Home, Prepare
from .notes import Moved, age, is_news, to_lead_to, written
from .parameters import RendezvousParameters
from .protocol import Timing
from .quorum import Settings
from .record_store import RecordStore
from .records import Codec
from .store import Store


_log = logging.getLogger(__name__)

# torchelastic's times, and ours for a node that falls silent (seconds).
JOIN_TIMEOUT, LAST_CALL_TIMEOUT, READ_TIMEOUT = 600.0, 30.0, 60.0
LEASE = 5.0
# torchelastic's, if only one of the two is given.
KEEP_ALIVE_INTERVAL, KEEP_ALIVE_MAX_ATTEMPT = 5.0, 3
# A job's keys stay in etcd for so long after its last node was seen (seconds); an outage may last as long.
ETCD_TTL = 60
ETCD_PREFIX = "rally"
# What each of etcd's options may be called; the first is the name in the URL, others are torch's.
ETCD_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ca": ("ca", "ca_cert"),
    "cert": ("cert", "ssl_cert"),
    "key": ("key", "ssl_cert_key"),
    "user": ("user",),
    "password": ("password",),
    "prefix": ("prefix",),
    "ttl": ("ttl",),
}

# A name means the same store to all handlers of this process, for as long as one of them lives.
_memory_stores: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()
_memory_lock = forks.Lock()


# -- the creators: named in registry.BUILT_IN -----------------------------------------------------


def tcpstore(params: RendezvousParameters) -> RendezvousHandler:
    """Nodes meet at a store that one of them serves; another one does when that node is lost."""
    return dynamic(params, "tcpstore")


def etcd(params: RendezvousParameters) -> RendezvousHandler:
    """Nodes meet in an etcd cluster."""
    return dynamic(params, "etcd")


def file(params: RendezvousParameters) -> RendezvousHandler:
    """Nodes meet in a folder they share."""
    return dynamic(params, "file")


def memory(params: RendezvousParameters) -> RendezvousHandler:
    """Threads of one process meet, for tests."""
    return dynamic(params, "memory")


def static(params: RendezvousParameters) -> RendezvousHandler:
    """A fixed number of nodes, with ranks given (``node_rank``) or by order of names."""
    params = _ours(params)
    if params.min_nodes != params.max_nodes:
        raise ConfigError(
            "--nnodes",
            f"{params.min_nodes}:{params.max_nodes}",
            "backend static has a fixed number of nodes",
            "give one number, or another --rdzv-backend",
        )
    rank = params.get_as_int("node_rank", params.get_as_int("rank"))
    if rank is not None and not -1 <= rank < params.max_nodes:
        raise ConfigError("--node-rank", rank, f"expected 0 to {params.max_nodes - 1}")
    rank = None if rank == -1 else rank  # torchrun's way to say "none given"
    is_host = params.get_as_bool("is_host") if rank is None else rank == 0
    return _handler(params, "static", given_rank=rank, is_host=is_host)


def dynamic(
    params: RendezvousParameters,
    backend: str | None = None,
    *,
    name: str | None = None,
    say: Say = _log.info,
    listener: Listener | None = None,
) -> DynamicRendezvous:
    """A handler for members that come and go; ``RendezvousInfo.store`` is c10d's, new in each round.

    Args:
        params: ours or torch's.
        backend: a built-in one; None: the endpoint's URL decides.
        name: what ``get_backend`` returns; None for the backend's.
        say: prints a line for the person at the terminal.
        listener: whom to tell what happens between rounds.

    Raises:
        ConfigError: an option or the endpoint cannot work; says which.
    """
    params = _ours(params)
    is_host = params.get_as_bool("is_host")
    return _handler(params, backend, name=name, is_host=is_host, say=say, listener=listener)


def _handler(
    params: RendezvousParameters,
    backend: str | None,
    *,
    is_host: bool | None,
    name: str | None = None,
    given_rank: int | None = None,
    say: Say = _log.info,
    listener: Listener | None = None,
) -> DynamicRendezvous:
    text = params.endpoint
    if not text.strip() and params.max_nodes == 1 and backend in (None, "tcpstore"):
        text = "localhost:0"  # one node need not be found by anybody
    endpoint = parse_endpoint(text, backend=backend)
    timing = Timing(join=params.get_as_seconds("join_timeout", JOIN_TIMEOUT), lease=_lease(params))
    found, label = _secret(params), str(params.get("label", ""))
    home = home_for(
        endpoint,
        run_id=params.run_id,
        lease=timing.lease,
        secret=found,
        is_host=is_host,
        options=params.config,
        say=say,
        bind=_bind(params),
    )
    guard = params.get_as_bool("split_brain_guard", True)
    return DynamicRendezvous(
        home,
        backend=name or backend or endpoint.backend,
        run_id=params.run_id,
        settings=Settings(
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            last_call=_last_call(params),
            by_label=bool(label),
        ),
        timing=timing,
        host=params.local_addr or addresses.hostname(),
        label=label,
        local_addr=params.local_addr,
        secret=found,
        split_brain_guard=guard is not False,
        given_rank=given_rank,
        say=say,
        listener=listener,
        bind=_bind(params),
        store_for=GenerationStores(params.get_as_seconds("read_timeout", READ_TIMEOUT)),
    )


# -- where the store is ---------------------------------------------------------------------------


def home_for(
    endpoint: Endpoint,
    *,
    run_id: str,
    lease: float,
    secret: bytes | None = None,
    is_host: bool | None = None,
    options: Mapping[str, Any] | None = None,
    mark_end: bool = False,
    say: Say = _log.info,
    bind: str | None = None,
    prepare: Prepare | None = None,
    option: str = "--rdzv-endpoint",
) -> Home:
    """The home of a job's store at an endpoint. Nothing is connected to yet.

    Args:
        endpoint: from :func:`.parse_endpoint`.
        run_id: the job's name.
        lease: seconds of silence after which a node, or a connection, is lost.
        secret: what all nodes of the job know.
        is_host: whether this node serves the store, where a node does; None finds out.
        options: of the backend (``--rdzv-conf``); they win over the endpoint's own.
        mark_end: a store that outlives the job keeps a mark that it has ended well, for a while.
        say: prints a line for the person at the terminal.
        bind: address to listen on where this node serves the store; ``*``: all; None: the endpoint's.
        prepare: who serves it, where this node is to; None: this process.
        option: what the endpoint was given by, for errors.

    Raises:
        ConfigError: an option cannot work, a file or folder cannot be used, or a library is missing.
    """
    known = ETCD_OPTIONS if endpoint.backend == "etcd" else {}
    for name in endpoint.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                "--rdzv-endpoint",
                str(endpoint),
                f"{endpoint.scheme} has no option {name!r} (known: {', '.join(known) or 'none'})",
                f"did you mean {near[0]}?" if near else "",
            )
    match endpoint.backend:
        case "etcd":
            return _etcd_home(endpoint, run_id, lease, options or {}, mark_end=mark_end)
        case "file":
            from .backends.file import FileStore

            # A folder for each job: the last one to leave removes it.
            folder = f"{endpoint.path.rstrip('/')}/rally-{quote(run_id, safe='')}"
            FileStore(folder).close()  # an unusable one is told now
            mark = None
            if mark_end:
                beside = f"{endpoint.path.rstrip('/')}/ended-{quote(run_id, safe='')}"
                mark = EndMark(
                    partial(FileStore, beside),
                    FileStore.remove,
                    addresses.hostname(),
                    FileStore.age,
                )
            return FixedHome(partial(FileStore, folder), clear=FileStore.remove, mark=mark)
        case "memory":
            with _memory_lock:
                store = _memory_stores.setdefault(endpoint.path, MemoryStore())
            return FixedHome(lambda: store)
        case _:
            served_by = {} if prepare is None else {"prepare": prepare}
            return _tcp_home(
                endpoint.hosts,
                Codec(run_id, secret),
                silence=lease,
                is_host=is_host,
                say=say,
                bind=bind,
                option=option,
                **served_by,
            )


def _tcp_home(hosts: tuple[HostPort, ...], codec: Codec, **settings: Any) -> Home:
    """A home whose stores lead to one another; ``settings`` as of :class:`.TcpHome`."""
    from .backends.tcp_home import TcpHome

    home = TcpHome([(each.host, each.port) for each in hosts], **settings)

    def leave_note(
        one: Store, other: Store, place: tuple[str, int], others: tuple[str, int] | None
    ) -> None:
        stores = [RecordStore(each, codec) for each in (one, other)]
        here, there = (age(*each.look(["head", "store"])) for each in stores)
        newer = to_lead_to(here, there)
        wrong, right = (stores[1], place) if newer == here else (stores[0], others)
        if newer is None or right is None:
            return
        note = Moved(*right, newer)
        wrong.improve("moved", lambda held: written(note) if is_news(note, held) else None)

    home.forward_with(leave_note)
    return home


def _etcd_home(
    endpoint: Endpoint, run_id: str, lease: float, options: Mapping[str, Any], *, mark_end: bool
) -> Home:
    from .backends.etcd import EtcdStore

    given: dict[str, str] = {}
    for name, spellings in ETCD_OPTIONS.items():
        values = [options[each] for each in spellings if options.get(each) is not None]
        values += [endpoint.options[name]] if name in endpoint.options else []
        if values:
            given[name] = str(values[0])
    tls = endpoint.tls or options.get("protocol") == "https"
    try:
        ttl = int(given.get("ttl", max(ETCD_TTL, math.ceil(3 * lease))))
    except ValueError:
        raise ConfigError("--rdzv-conf ttl", given["ttl"], "expected whole seconds") from None
    # One name, whatever is in it: the keys of "a" must not hold those of "a/b".
    above, name = given.get("prefix", ETCD_PREFIX).strip("/"), quote(run_id, safe="")
    store = partial(
        EtcdStore,
        endpoints=[f"https://{each}" if tls else str(each) for each in endpoint.hosts],
        prefix=f"{above}/{name}",
        ca_cert=given.get("ca"),
        cert=given.get("cert"),
        key=given.get("key"),
        user=given.get("user", endpoint.user),
        password=given.get("password", endpoint.password),
        ttl=ttl,
    )
    store().close()  # connects to nothing; settings that cannot work are told now
    first = endpoint.hosts[0]
    mark = None
    if mark_end:
        # Within what a user may be confined to; no job's name has a slash.
        beside = partial(store, prefix=f"{above}/ended/{name}", ttl=ENDED_FOR)
        mark = EndMark(beside, lambda store: store.delete_prefix(), addresses.hostname())
    return FixedHome(
        store,
        mark=mark,
        towards=(first.host, first.port),
        clear=lambda store: store.delete_prefix(),
    )


# -- c10d's stores for users of a round -----------------------------------------------------------


class GenerationStores:
    """c10d stores whose keys are new in each generation; torch is imported with the first.

    Args:
        timeout: seconds that a ``get`` or ``wait`` waits for its key.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._held: Any = None

    def __call__(self, records: RecordStore, generation: int) -> Any:
        """The store of a round, over a connection of its own; the one before is given back."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported by *

        from .backends import native_store
        from .backends.tcpstore import TcpStore
        from .c10d import c10d_store

        self.close()
        store = records.store
        if isinstance(store, TcpStore):
            client = native_store.client(store, self._timeout)
        else:
            client = self._held = c10d_store(store.clone(), self._timeout)
        return PrefixStore(records.full(f"{generation}/user"), client)

    def close(self) -> None:
        # c10d's own client goes when nobody refers to it any more; ours holds a connection until told.
        held, self._held = self._held, None
        if held is not None:
            held.close()


# -- options --------------------------------------------------------------------------------------


def _ours(params: Any) -> RendezvousParameters:
    """torch's object has the same attributes, and fewer methods."""
    if isinstance(params, RendezvousParameters):
        return params
    return RendezvousParameters(
        params.backend,
        params.endpoint or "",
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        **params.config,
    )


def _lease(params: RendezvousParameters) -> float:
    if params.get("lease") is None and (
        params.get("keep_alive_interval") is not None
        or params.get("keep_alive_max_attempt") is not None
    ):
        interval = params.get_as_seconds("keep_alive_interval", KEEP_ALIVE_INTERVAL)
        return interval * params.get_as_seconds("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT)
    return params.get_as_seconds("lease", LEASE)


def _last_call(params: RendezvousParameters) -> float:
    """May be 0: close as soon as the fewest nodes are there."""
    value = params.get("last_call_timeout")
    try:
        if value is not None and not isinstance(value, bool) and float(value) == 0:
            return 0.0
    except (TypeError, ValueError):
        pass  # told below
    return params.get_as_seconds("last_call_timeout", LAST_CALL_TIMEOUT)


def _bind(params: RendezvousParameters) -> str | None:
    given = params.get("bind")
    return None if given is None else str(given)


def _secret(params: RendezvousParameters) -> bytes | None:
    """What all nodes know: of the options, else as `rally run` finds it."""
    given, path = params.get("secret"), params.get("secret_file")
    if path is not None and given is not None:
        raise ConfigError("--rdzv-conf secret_file", path, "there is a secret already; give one")
    if path is not None:
        return secret.read_file(str(path), "--rdzv-conf secret_file")
    if given is not None:
        return secret.check(given, "--rdzv-conf secret")
    return secret.shared(environment.snapshot())
