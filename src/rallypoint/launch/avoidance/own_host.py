"""Whether the host of this node is on the list, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rallypoint._core import addresses
from rallypoint._core.host_name import host_name
from rallypoint.errors import ConfigError
from rallypoint.launch.config import LaunchConfig
from rallypoint.launch.placement.clusters import slurm

from . import avoid_file
from .avoid_list import AvoidList


_FLAG = "--avoid-hosts"


def meeting_place(listed: AvoidList, hosts: Sequence[str]) -> str:
    """The first of an elastic job's hosts that takes part; empty if none does."""
    return next((each for each in hosts if not listed.reason(each)), "")


def is_left_out(config: LaunchConfig, env: Mapping[str, str], say: Callable[[str], None]) -> bool:
    """Whether this node takes no part: its host is to be avoided, and the job can do without it.

    Args:
        config: the job's.
        env: variables.
        say: prints a line for the user.

    Raises:
        ConfigError: the list cannot be used, or leaves too few hosts.
    """
    assert config.avoid_hosts is not None
    listed = avoid_file.read(Path(config.avoid_hosts), _FLAG)
    least = config.min_nodes
    if least is not None and least < config.num_nodes:
        hosts = slurm.hosts_of_step(env)
        left = sum(not listed.reason(each) for each in hosts)
        if hosts and left < least:
            problem = f"leaves {left} of the step's {len(hosts)} hosts, and --nnodes needs {least}"
            hint = "remove the lines of hosts that work again"
            raise ConfigError(_FLAG, config.avoid_hosts, problem, hint)
    name = host_name()
    why = listed.reason(name)
    if not why:
        return False
    if least is None or least == config.num_nodes or _nodes_meet_here(config):
        place = "needs all its hosts"
        if least is not None and least < config.num_nodes:
            place = "meets here (--rdzv-endpoint)"
        say(f"{name} is to be avoided ({why}), but this job {place}")
        return False
    say(f"{name} is left out ({_FLAG} {config.avoid_hosts}): {why}")
    return True


def _nodes_meet_here(config: LaunchConfig) -> bool:
    """Whether the other nodes would wait in vain without this one: the job's store starts here."""
    meeting = config.rendezvous
    if meeting.is_host is not None:
        return meeting.is_host
    one_place = meeting.endpoint is None or len(meeting.endpoint.hosts) == 1
    return bool(meeting.host) and one_place and addresses.is_this_host(meeting.host)
