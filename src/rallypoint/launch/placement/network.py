"""Which interface the workers of several nodes use: pure.

Gloo and TensorPipe listen at the address of the machine's name. Debian's installer, and many sites, give that name a
loopback address (127.0.1.1) in /etc/hosts, which leads other machines to themselves; where the name has no address,
both take 127.0.0.1. The supervisors have reached each other, so the interface that leads to the others is known.

NCCL does not use the name. It takes the interfaces whose names start with ``ib`` if there are any, otherwise all but
``docker…`` and the loopback one (``ncclFindInterfaces``), including bridges to containers and virtual machines here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint._core.addresses import is_loopback
from rallypoint._core.interfaces import Interface


# What uses the address of the machine's name, and the variable that tells it which interface to use.
_BY_NAME = {"Gloo": "GLOO_SOCKET_IFNAME", "TensorPipe": "TP_SOCKET_IFNAME"}
_NCCL = "NCCL_SOCKET_IFNAME"
_NOT_FOR_NCCL = ("lo", "docker")


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """What workers are told about the network.

    Args:
        variables: for their environment.
        remark: for the person at the terminal; may be empty.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


def choose(
    env: Mapping[str, str],
    found: Sequence[Interface],
    reached_at: str | None,
    name: str,
    address_of_name: str | None,
) -> NetworkChoice:
    """The variables that make the workers use the interface through which the nodes reach each other.

    Variables that the user has set stay as they are, and a library that finds the way on its own is told nothing.

    Args:
        env: the supervisor's environment.
        found: this machine's interfaces.
        reached_at: the address at which other nodes reach this one, or None if it is not known.
        name: this machine's name.
        address_of_name: the address of this machine that its name resolves to; None if it has none.
    """
    ours = next((each for each in found if each.address == reached_at), None)
    if ours is None or is_loopback(ours.address):
        return NetworkChoice()
    variables = {}
    remarks = []
    if address_of_name is None or is_loopback(address_of_name):
        by_name = {what: each for what, each in _BY_NAME.items() if each not in env}
        variables = dict.fromkeys(by_name.values(), ours.name)
        if "Gloo" in by_name:
            leads = f"resolves to {address_of_name}" if address_of_name else "has no address"
            remarks.append(f"the name {name} {leads}, where other nodes cannot reach Gloo")
    if _NCCL not in env and (bridges := _bridges_for_nccl(found, ours)):
        variables[_NCCL] = ours.name
        remarks.append(f"NCCL would also use {', '.join(bridges)}")
    if not remarks:
        return NetworkChoice(variables)
    told = " ".join(f"{name}={value}" for name, value in variables.items())
    return NetworkChoice(variables, f"workers get {told}: {'; '.join(remarks)}")


def _bridges_for_nccl(found: Sequence[Interface], ours: Interface) -> list[str]:
    """Bridges that NCCL takes for ways to other nodes."""
    if any(each.name.startswith("ib") for each in found):
        return []
    return sorted(
        {
            each.name
            for each in found
            if each.is_bridge and each.name != ours.name and not each.name.startswith(_NOT_FOR_NCCL)
        }
    )


def most_likely(found: Sequence[Interface], default_source: str | None) -> str | None:
    """This machine's address for others, if nothing says which it is: that of the only interface, or of the default route."""
    outside = [
        each
        for each in found
        if not is_loopback(each.address) and not each.is_bridge and ":" not in each.address
    ]
    if len({each.name for each in outside}) == 1:
        return outside[0].address
    return next((each.address for each in found if each.address == default_source), None)
