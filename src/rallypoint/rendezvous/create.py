"""Makes a handler from parameters (ours, or torch's object), and the home of a store from an endpoint.

Options have torchelastic's names where it has them. Unknown ones are ignored, as they are there: torchrun adds some of its own.

The options are ``join_timeout`` (600 s), ``last_call_timeout`` (30 s), ``lease`` (5 s; also as ``keep_alive_interval``
times ``keep_alive_max_attempt``), ``read_timeout`` (60 s, for ``RendezvousInfo.store``), ``is_host``, ``label``, ``secret``
or ``secret_file``, ``split_brain_guard`` (true), ``bind``, the backend's own, and ``node_rank`` for static.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rallypoint._core import addresses, env as environment, secret
from rallypoint.errors import ConfigError

from .backend import Backend, Endpoint, Meeting
from .catalogue import catalogue, did_you_mean, parse_endpoint
from .defaults import (
    JOIN_TIMEOUT,
    KEEP_ALIVE_INTERVAL,
    KEEP_ALIVE_MAX_ATTEMPT,
    LAST_CALL_TIMEOUT,
    LEASE,
    READ_TIMEOUT,
)
from .dynamic import DynamicRendezvous, Listener, Say
from .home import Home
from .parameters import RendezvousParameters
from .protocol import Timing
from .quorum import Settings
from .record_store import RecordStore


_log = logging.getLogger(__name__)


def handler_for(
    params: Any,
    backend: str | None = None,
    *,
    name: str | None = None,
    say: Say = _log.info,
    listener: Listener | None = None,
) -> DynamicRendezvous:
    """This node's handler; ``RendezvousInfo.store`` is a c10d store, new in each round.

    Args:
        params: ours or torch's.
        backend: name of a backend with a descriptor; None: the endpoint's URL decides.
        name: what ``get_backend`` returns; None: the backend's own name.
        say: prints a line to the user.
        listener: told what happens between rounds.

    Raises:
        ConfigError: an option or the endpoint cannot work; the error says which.
    """
    params = _ours(params)
    text = params.endpoint
    if not text.strip() and params.max_nodes == 1 and backend in (None, "tcpstore"):
        text = f"{addresses.own_host()}:0"  # no other node has to find it
    endpoint = parse_endpoint(text, backend=backend)
    given = _given_rank(params) if _backend_of(endpoint).given_ranks else None
    is_host = params.get_as_bool("is_host") if given is None else given == 0
    timing = Timing(join=params.get_as_seconds("join_timeout", JOIN_TIMEOUT), lease=_lease(params))
    found, label = _secret(params), str(params.get("label", ""))
    meeting = Meeting(
        endpoint=endpoint,
        run_id=params.run_id,
        lease=timing.lease,
        secret=found,
        is_host=is_host,
        say=say,
        bind=_bind(params),
    )
    guard = params.get_as_bool("split_brain_guard", True)
    return DynamicRendezvous(
        home_for(meeting, params.config),
        backend=name or endpoint.backend,
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
        given_rank=given,
        say=say,
        listener=listener,
        bind=_bind(params),
        store_for=GenerationStores(params.get_as_seconds("read_timeout", READ_TIMEOUT)),
        clears=True,
    )


def home_for(meeting: Meeting, conf: Mapping[str, Any] | None = None) -> Home:
    """The home of a job's store. Nothing is connected to yet.

    Args:
        meeting: the job, without options.
        conf: options from ``--rdzv-conf``. The backend's own override the endpoint's; all others are ignored.

    Raises:
        ConfigError: an option cannot work, a file or folder cannot be used, or a library is missing.
    """
    backend = _backend_of(meeting.endpoint)
    options = _options(backend, meeting.endpoint, conf or {}, meeting.flag)
    return backend.home(replace(meeting, options=options))


def _backend_of(endpoint: Endpoint) -> Backend:
    backend = catalogue.find(endpoint.backend)
    assert backend is not None, f"an endpoint of {endpoint.backend!r} was parsed with it"
    return backend


def _options(
    backend: Backend, endpoint: Endpoint, conf: Mapping[str, Any], flag: str
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in endpoint.options.items():
        option = backend.option(name, in_url=True)
        if option is None:
            known = [each.name for each in backend.options]
            raise ConfigError(
                flag,
                str(endpoint),
                f"{endpoint.scheme}:// has no option {name!r} (known: {', '.join(known) or 'none'})",
                did_you_mean(name, known),
            )
        found[option.name] = option.read(text, f"{flag} {name}")
    # A name takes precedence over its aliases.
    given = {name: value for name, value in conf.items() if value is not None}
    for option in backend.options:
        if names := [each for each in (option.name, *option.aliases) if each in given]:
            found[option.name] = option.read(given[names[0]], f"--rdzv-conf {names[0]}")
    return found


# -- c10d's stores for users of a round -----------------------------------------------------------


class GenerationStores:
    """c10d stores whose keys are new in each generation. The first one imports torch.

    Args:
        timeout: seconds that a ``get`` or ``wait`` waits for its key.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._held: Any = None

    def __call__(self, records: RecordStore, generation: int) -> Any:
        """The store of a round, over a connection of its own. Closes the previous round's store."""
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
        # c10d's own client closes when its last reference goes; ours must be closed explicitly.
        held, self._held = self._held, None
        if held is not None:
            held.close()


# -- options --------------------------------------------------------------------------------------


def _ours(params: Any) -> RendezvousParameters:
    """The parameters as our object; torch's has the same attributes but fewer methods."""
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


def _given_rank(params: RendezvousParameters) -> int | None:
    """This node's rank, or None if the order of host names decides."""
    if params.min_nodes != params.max_nodes:
        raise ConfigError(
            "--nnodes",
            f"{params.min_nodes}:{params.max_nodes}",
            f"backend {params.backend} has a fixed number of nodes",
            "give one number, or another --rdzv-backend",
        )
    rank = params.get_as_int("node_rank", params.get_as_int("rank"))
    if rank is not None and not -1 <= rank < params.max_nodes:
        raise ConfigError("--node-rank", rank, f"expected 0 to {params.max_nodes - 1}")
    return None if rank == -1 else rank  # torchrun's way to say "none given"


def _lease(params: RendezvousParameters) -> float:
    if params.get("lease") is None and (
        params.get("keep_alive_interval") is not None
        or params.get("keep_alive_max_attempt") is not None
    ):
        interval = params.get_as_seconds("keep_alive_interval", KEEP_ALIVE_INTERVAL)
        return interval * params.get_as_seconds("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT)
    return params.get_as_seconds("lease", LEASE)


def _last_call(params: RendezvousParameters) -> float:
    """The last call in seconds. It may be 0: close as soon as ``min_nodes`` are there."""
    value = params.get("last_call_timeout")
    try:
        if value is not None and not isinstance(value, bool) and float(value) == 0:
            return 0.0
    except (TypeError, ValueError):
        pass  # the error is raised below
    return params.get_as_seconds("last_call_timeout", LAST_CALL_TIMEOUT)


def _bind(params: RendezvousParameters) -> str | None:
    given = params.get("bind")
    return None if given is None else str(given)


def _secret(params: RendezvousParameters) -> bytes | None:
    """The secret that all nodes know: from the options, otherwise as `rally run` finds it."""
    given, path = params.get("secret"), params.get("secret_file")
    if path is not None and given is not None:
        raise ConfigError("--rdzv-conf secret_file", path, "there is a secret already; give one")
    if path is not None:
        return secret.read_file(str(path), "--rdzv-conf secret_file")
    if given is not None:
        return secret.check(given, "--rdzv-conf secret")
    return secret.shared(environment.snapshot())
