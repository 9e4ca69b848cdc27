"""The rendezvous that a launch asks for: makes a handler from a :class:`~rallypoint.launch.config.LaunchConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rallypoint._core.host_name import host_name
from rallypoint.errors import ConfigError
from rallypoint.launch.config import DEFAULT_RUN_ID, LaunchConfig
from rallypoint.rendezvous.backend import Endpoint, HostPort, Meeting
from rallypoint.rendezvous.create import home_for
from rallypoint.rendezvous.dynamic import DynamicRendezvous, Listener
from rallypoint.rendezvous.home import Home, Prepare
from rallypoint.rendezvous.plugged import PluggedRendezvous
from rallypoint.rendezvous.protocol import Timing
from rallypoint.rendezvous.quorum import Settings
from rallypoint.rendezvous.registry import rendezvous_handler_registry


def rendezvous_for(
    config: LaunchConfig, say: Callable[[str], None], listener: Listener, prepare: Prepare
) -> DynamicRendezvous:
    """This node's way into the job's rounds. It does not connect to anything yet.

    Args:
        config: this node's config.
        say: prints a line for the user.
        listener: told what happens between rounds.
        prepare: makes the server of the job's store, if this node serves it.

    Raises:
        ConfigError: an option cannot work, a folder cannot be used, or a library is missing.
    """
    meeting = config.rendezvous
    least = config.num_nodes if config.min_nodes is None else config.min_nodes
    common: dict[str, Any] = {
        "run_id": meeting.run_id,
        "settings": Settings(
            min_nodes=least,
            max_nodes=config.num_nodes,
            last_call=meeting.last_call,
            straggler=meeting.lease,
            by_label=bool(meeting.label),
        ),
        "timing": Timing(join=meeting.join_timeout, lease=meeting.lease),
        "host": host_name(),
        "label": meeting.label,
        "local_addr": config.local_addr,
        "secret": config.secret,
        "say": say,
        "bind": config.bind,
        "listener": listener,
    }
    if meeting.plug_in is not None:
        make = partial(rendezvous_handler_registry.create_handler, meeting.plug_in)
        return PluggedRendezvous(make, backend=meeting.plug_in.backend, **common)
    job = _job(config, say, prepare)
    return DynamicRendezvous(
        home_for(job, meeting.options),
        backend=job.endpoint.backend,
        split_brain_guard=meeting.split_brain_guard,
        given_rank=meeting.node_rank,
        **common,
    )


def home_to_observe(config: LaunchConfig, say: Callable[[str], None]) -> Home:
    """The home of a job's store, for a process that serves none and takes no part. It does not connect to anything yet.

    Raises:
        ConfigError: as :func:`rendezvous_for`; or the nodes meet through a plug-in's own handler.
    """
    if config.rendezvous.plug_in is not None:
        backend = config.rendezvous.plug_in.backend
        problem = "its nodes meet by a plug-in of its own, which cannot be looked at from outside"
        raise ConfigError("--rdzv-backend", backend, problem)
    job = replace(_job(config, say, None), is_host=False, mark_end=False)
    return home_for(job, config.rendezvous.options)


def _job(config: LaunchConfig, say: Callable[[str], None], prepare: Prepare | None) -> Meeting:
    meeting = config.rendezvous
    endpoint = meeting.endpoint or Endpoint(
        scheme="tcp", backend="tcpstore", hosts=(HostPort(meeting.host, meeting.port),)
    )
    # With ranks given beforehand, node 0 serves, whatever its name is on this machine.
    is_host = meeting.is_host if meeting.node_rank is None else meeting.node_rank == 0
    return Meeting(
        endpoint=endpoint,
        run_id=meeting.run_id,
        lease=meeting.lease,
        # Jobs without a name all share the default one.
        mark_end=meeting.run_id != DEFAULT_RUN_ID,
        secret=config.secret,
        is_host=is_host,
        bind=config.bind,
        prepare=prepare,
        say=say,
        flag="--master-port" if meeting.endpoint is None else "--rdzv-endpoint",
    )
