"""How the nodes of a job meet: makes a rendezvous from a command line and the cluster."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from rallypoint.errors import ConfigError
from rallypoint.launch.config import DEFAULT_RUN_ID, RendezvousConfig
from rallypoint.launch.placement.clusters import Placement
from rallypoint.rendezvous.backend import Backend, Endpoint
from rallypoint.rendezvous.catalogue import catalogue, did_you_mean, parse_endpoint
from rallypoint.rendezvous.defaults import COMMON_OPTIONS, MASTER_PORT, RENDEZVOUS_PORT
from rallypoint.rendezvous.parameters import RendezvousParameters
from rallypoint.rendezvous.registry import rendezvous_handler_registry

from .values import Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The nodes of a job, as fields of :class:`~.config.LaunchConfig`.

    Args:
        num_nodes: the most nodes that there are.
        rendezvous: how they meet.
        min_nodes: the fewest nodes; None: all of them.
        master_addr: the host of the workers' store, if it is given.
        master_port: its port, if it is given.
    """

    num_nodes: int
    rendezvous: RendezvousConfig
    min_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def nodes_from(values: Values, placement: Placement | None) -> Nodes:
    """The nodes that a command line or the cluster asks for.

    Raises:
        ConfigError: a setting cannot work; named as the user spelled it.
    """
    least, most = fewest_and_most(values.text("nnodes"), values.shown("nnodes"))
    if placement is not None:
        least, most = _of_tasks(values, placement, least, most)
    backend = _backend(values, a_range=least != most)
    if values.switch("standalone"):
        return _one_node(values, placement, _found("tcpstore"))
    if isinstance(backend, str):
        return _of_creator(values, backend, least, most)
    if backend.one_process:
        raise ConfigError(
            values.shown("rdzv_endpoint" if values.text("rdzv_endpoint") else "rdzv_backend"),
            values.text("rdzv_endpoint") or backend.name,
            f"backend {backend.name} is for {backend.help}",
        )
    if most == 1:
        return _one_node(values, placement, backend)
    if placement is not None:
        if least != most:
            return _elastic_in_cluster(values, placement, backend, least, most)
        return _of_cluster(values, placement, backend)
    if backend.given_ranks:
        return _with_given_ranks(values, backend, least, most)
    return _with_assigned_ranks(values, backend, least, most)


# -- which rendezvous -----------------------------------------------------------------------------


def fewest_and_most(text: str, shown: str) -> tuple[int, int]:
    """What ``--nnodes`` says.

    Args:
        text: ``N`` or ``MIN:MAX``.
        shown: the flag or variable that has it, for errors.

    Raises:
        ConfigError: it is neither.
    """
    low, colon, high = text.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError(shown, text, "expected a number of nodes") from None
    if not 0 < least <= most:
        raise ConfigError(shown, text, "expected at least 1 node, and MIN no larger than MAX")
    return least, most


def is_range(text: str) -> bool:
    """Whether ``--nnodes`` is ``MIN:MAX`` with two different numbers."""
    least, colon, most = text.partition(":")
    return bool(colon) and least.strip() != most.strip()


def _of_tasks(values: Values, placement: Placement, least: int, most: int) -> tuple[int, int]:
    """How many nodes a job has if a cluster has started its tasks: one for each task, or the range that was given."""
    if not values.is_set("nnodes"):
        return placement.num_nodes, placement.num_nodes
    shown, text = values.shown("nnodes"), values.text("nnodes")
    if placement.one_worker_per_task:
        raise ConfigError(
            shown,
            text,
            f"{placement.source} has started {placement.tasks_per_machine} tasks on this machine;"
            " an elastic job needs one task per machine",
            "srun --ntasks-per-node=1, and --nproc-per-node for the workers",
        )
    if least > placement.num_nodes:
        problem = f"{placement.source} has started {placement.num_nodes} tasks"
        raise ConfigError(shown, text, problem, f"--nnodes {placement.num_nodes}, or more nodes")
    # More nodes than tasks cannot come: the job does not wait for them.
    return least, min(most, placement.num_nodes)


def _backend(values: Values, *, a_range: bool) -> Backend | str:
    """The backend, or the name of a plug-in that makes handlers of its own.

    The flag decides. Without it, the endpoint's URL, a range of nodes or given ranks do.
    """
    if values.is_set("rdzv_backend"):
        name = values.text("rdzv_backend")
        if name == "rallypoint":  # what it is called under torchrun
            return _found("tcpstore")
        if (backend := catalogue.find(name)) is not None:
            return backend
        if name in rendezvous_handler_registry.known():
            return name
        raise rendezvous_handler_registry.unknown(name, values.shown("rdzv_backend"))
    text = values.text("rdzv_endpoint")
    if "://" in text:
        endpoint = parse_endpoint(text, flag=values.shown("rdzv_endpoint"))
        if endpoint.backend != "tcpstore" or len(endpoint.hosts) > 1:
            return _found(endpoint.backend)
    # With the same line on every node, nothing tells the nodes apart. As soon as something does, ranks are given.
    given = values.is_set("node_rank") or values.is_set("master_addr")
    several = fewest_and_most(values.text("nnodes"), values.shown("nnodes"))[1] > 1
    return _found("tcpstore" if a_range or (text and several and not given) else "static")


def _found(name: str) -> Backend:
    backend = catalogue.find(name)
    assert backend is not None
    return backend


# -- each way to meet -----------------------------------------------------------------------------


def _one_node(values: Values, placement: Placement | None, backend: Backend) -> Nodes:
    """As with torchrun: if no meeting point is given, the job gets a name and a port of its own."""
    standalone, text = values.switch("standalone"), values.text("rdzv_endpoint")
    given = values.is_set("node_rank") and not standalone
    if given and (rank := values.integer("node_rank", least=0)):  # torchrun runs this as well
        values.remarks.append(
            f"{values.shown('node_rank')} {rank} has no effect: the job has one node"
            " (--nnodes says how many there are)"
        )
    port, run_id = values.port("master_port"), values.text("rdzv_id")
    _rendezvous_options(values, backend)
    alone = standalone or (backend.given_ranks and not text and port is None)
    if standalone or (alone and run_id == DEFAULT_RUN_ID):
        run_id = (placement.run_id if placement else None) or str(uuid.uuid4())
    # Checked even if it has no effect here: the same line should work with more nodes.
    endpoint = _endpoint(values, backend) if text else None
    rendezvous = RendezvousConfig(run_id=run_id)
    if not backend.given_ranks or (endpoint is None and port is None):
        return Nodes(num_nodes=1, rendezvous=rendezvous)
    if endpoint is not None:
        addr, port = endpoint.hosts[0].host, endpoint.hosts[0].port
    else:
        addr = values.text("master_addr")
    return Nodes(num_nodes=1, rendezvous=rendezvous, master_addr=addr, master_port=port)


def _of_cluster(values: Values, placement: Placement, backend: Backend) -> Nodes:
    host, rank = placement.master_addr or "127.0.0.1", placement.node_rank
    port = values.port("master_port") or placement.master_port or MASTER_PORT
    run_id = values.text("rdzv_id")
    if run_id == DEFAULT_RUN_ID:
        run_id = placement.run_id or run_id
    return Nodes(
        num_nodes=placement.num_nodes,
        rendezvous=RendezvousConfig(
            run_id=run_id,
            node_rank=rank,
            host=host,
            port=port,
            **_rendezvous_options(values, backend),
        ),
        master_addr=host if rank == 0 else None,
        master_port=port,
    )


def _elastic_in_cluster(
    values: Values, placement: Placement, backend: Backend, least: int, most: int
) -> Nodes:
    """The tasks meet where the cluster's first one is; ranks are assigned, as any of them may be lost."""
    found = _of_cluster(values, placement, backend)
    return replace(
        found,
        num_nodes=most,
        min_nodes=least,
        rendezvous=replace(found.rendezvous, node_rank=None),
        master_addr=None,
    )


def _with_given_ranks(values: Values, backend: Backend, least: int, most: int) -> Nodes:
    """Node 0 serves the store, and workers meet at its host and port, too."""
    if least != most:
        raise ConfigError(
            values.shown("nnodes"),
            values.text("nnodes"),
            f"with --rdzv-backend {backend.name} the number of nodes is fixed",
            "leave --rdzv-backend out, or give c10d, etcd or file",
        )
    rank = values.integer("node_rank", least=0)
    if not values.text("rdzv_endpoint"):
        # If either of the others is given, an empty endpoint is as good as none, as under torchrun.
        given = values.is_set("node_rank") or values.is_set("master_addr")
        if values.is_set("rdzv_endpoint") and not given:
            _refuse_empty(values, "rdzv_endpoint", f"expected HOST:{RENDEZVOUS_PORT}")
        if not values.text("master_addr"):
            _refuse_empty(values, "master_addr", "expected the host of node 0")
    if not values.is_set("node_rank"):
        values.remarks.append("--node-rank is not given: this is node 0")
    options = _rendezvous_options(values, backend)
    if values.text("rdzv_endpoint"):
        endpoint: Endpoint | None = _endpoint(values, backend, several=True)
        assert endpoint is not None
        host, port = endpoint.hosts[0].host, endpoint.hosts[0].port
    else:
        endpoint = None
        host, port = values.text("master_addr"), values.port("master_port") or MASTER_PORT
    addr = values.text("master_addr") if values.is_set("master_addr") else host
    run_id = values.text("rdzv_id")
    return Nodes(
        num_nodes=most,
        rendezvous=RendezvousConfig(
            run_id=run_id, node_rank=rank, host=host, port=port, endpoint=endpoint, **options
        ),
        master_addr=addr,
        master_port=port,
    )


def _refuse_empty(values: Values, dest: str, expected: str) -> NoReturn:
    problem = f"several nodes need a place to meet, {expected}"
    raise ConfigError(values.shown(dest), "", problem, "is a variable of the shell not set?")


def _with_assigned_ranks(values: Values, backend: Backend, least: int, most: int) -> Nodes:
    """Nodes may come and go, and any may be node 0: it tells the others its own address."""
    if values.is_set("node_rank") and values.text("node_rank") != "0":
        rank = values.integer("node_rank", least=0)
        why = f"with {values.shown('nnodes')} {values.text('nnodes')}"
        if backend.name != "tcpstore" or values.is_set("rdzv_backend"):
            why = f"with rendezvous backend {backend.name}"
        values.remarks.append(
            f"{values.shown('node_rank')} {rank} has no effect: {why} ranks are assigned"
        )
    if not values.text("rdzv_endpoint"):
        example = backend.schemes[0].example
        raise ConfigError(
            "--rdzv-endpoint",
            None,
            "several nodes need a place to meet that all can reach",
            f"--rdzv-endpoint {f'HOST:{RENDEZVOUS_PORT}' if backend.served else example}",
        )
    endpoint = _endpoint(values, backend, several=True)
    rendezvous: dict[str, Any] = {"host": ""}
    port = values.port("master_port")
    if backend.served:
        host, port = endpoint.hosts[0].host, endpoint.hosts[0].port
        rendezvous = {"host": host, "port": port}
    return Nodes(
        num_nodes=most,
        min_nodes=least,
        rendezvous=RendezvousConfig(
            run_id=values.text("rdzv_id"),
            node_rank=None,
            endpoint=endpoint,
            **rendezvous,
            **_rendezvous_options(values, backend),
        ),
        master_port=port,
    )


def _of_creator(values: Values, backend: str, least: int, most: int) -> Nodes:
    """A plug-in's own handler decides which nodes meet. It gets all options; we read ours from among them."""
    conf = dict(_conf_items(values))
    if values.is_set("node_rank"):
        conf.setdefault("rank", values.text("node_rank"))
    run_id, local_addr = values.text("rdzv_id"), values["local_addr"] or None
    endpoint = values.text("rdzv_endpoint")
    return Nodes(
        num_nodes=most,
        min_nodes=least,
        rendezvous=RendezvousConfig(
            run_id=run_id,
            node_rank=None,
            host="",
            plug_in=RendezvousParameters(
                backend, endpoint, run_id, least, most, local_addr, **conf
            ),
            **_rendezvous_options(values, None),
        ),
    )


# -- reading --------------------------------------------------------------------------------------


def _endpoint(values: Values, backend: Backend, *, several: bool = False) -> Endpoint:
    text, shown = values.text("rdzv_endpoint"), values.shown("rdzv_endpoint")
    # Nodes with given and with assigned ranks meet at the same port by default, so nodes that differ in that notice it.
    port = MASTER_PORT if backend.given_ranks and not several else None
    endpoint = parse_endpoint(text, backend=backend.name, default_port=port, flag=shown)
    if several and any(each.port == 0 for each in endpoint.hosts):
        raise ConfigError(
            shown,
            text,
            "several nodes need a port that all of them know; 0 means any free one",
            f"--rdzv-endpoint {endpoint.hosts[0].host}:{backend.schemes[0].default_port}",
        )
    return endpoint


def _conf_items(values: Values) -> list[tuple[str, str]]:
    """``--rdzv-conf`` as names and values."""
    found = []
    for item in filter(None, (part.strip() for part in values.text("rdzv_conf").split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(values.shown("rdzv_conf"), item, "expected NAME=VALUE,…")
        found.append((name, value))
    return found


def _rendezvous_options(values: Values, backend: Backend | None) -> dict[str, Any]:
    """``--rdzv-conf`` as fields of :class:`RendezvousConfig`; without a backend, unknown ones are for a plug-in's handler."""
    shown = values.shown("rdzv_conf")
    common = {name: each for each in COMMON_OPTIONS for name in (each.name, *each.aliases)}
    found: dict[str, Any] = {}
    own: dict[str, str] = {}
    unknown = []
    items = _conf_items(values)
    names = [name for name, _ in items]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        values.remarks.append(f"{shown} names {twice} more than once: the last one counts")
    for name, text in items:
        if (option := common.get(name)) is not None:
            field = "last_call" if option.name == "last_call_timeout" else option.name
            found[field] = option.read(text, f"{shown} {name}")
        elif backend is not None and (theirs := backend.option(name)) is not None:
            theirs.read(text, f"{shown} {name}")
            own[name] = text
        else:
            unknown.append(name)
    if unknown and backend is not None:
        known = [each.name for each in (*COMMON_OPTIONS, *backend.options)]
        near = did_you_mean(unknown[0], known)
        values.remarks.append(
            f"{shown}: {', '.join(unknown)} has no effect (known: {', '.join(known)})"
            f"{f'; {near}' if near else ''}"
        )
    if own:
        found["options"] = own
    return found
