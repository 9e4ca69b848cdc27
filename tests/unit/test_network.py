"""Which network interface workers are told to use."""

import socket
from typing import Any

import pytest

from rallypoint._core import addresses
from rallypoint._core.interfaces import Interface, interfaces
from rallypoint.launch.placement.network import choose, most_likely


LO = Interface("lo", "127.0.0.1")
ETH0 = Interface("eth0", "10.0.0.5")
ETH1 = Interface("eth1", "10.1.0.5")
DOCKER = Interface("docker0", "172.17.0.1", is_bridge=True)
VIRBR = Interface("virbr0", "192.168.122.1", is_bridge=True)
IB = Interface("ib0", "10.9.0.5")
GLOO, TP, NCCL = "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("env", "found", "reached_at", "address_of_name", "expected"),
    [
        pytest.param({}, (LO, ETH0), "10.0.0.5", "10.0.0.5", {}, id="the name leads here"),
        pytest.param({}, (LO, ETH0, ETH1), "10.0.0.5", "10.1.0.5", {}, id="another network"),
        pytest.param(
            {}, (LO, ETH0), "10.0.0.5", "127.0.1.1", {GLOO: "eth0", TP: "eth0"}, id="Debian"
        ),
        pytest.param(
            {}, (LO, ETH0), "10.0.0.5", None, {GLOO: "eth0", TP: "eth0"}, id="a name of nothing"
        ),
        pytest.param(
            {GLOO: "eth1"}, (LO, ETH0), "10.0.0.5", None, {TP: "eth0"}, id="the user has chosen"
        ),
        pytest.param({}, (LO, ETH0), None, "127.0.1.1", {}, id="not known how it is reached"),
        pytest.param({}, (LO, ETH0), "203.0.113.9", None, {}, id="reached through a NAT"),
        pytest.param({}, (LO, ETH0), "127.0.0.1", "127.0.1.1", {}, id="all on one machine"),
        pytest.param(
            {}, (LO, ETH0, VIRBR), "10.0.0.5", "10.0.0.5", {NCCL: "eth0"}, id="virtual machines"
        ),
        pytest.param({}, (LO, ETH0, DOCKER), "10.0.0.5", "10.0.0.5", {}, id="NCCL knows Docker"),
        pytest.param({}, (LO, ETH0, VIRBR, IB), "10.0.0.5", "10.0.0.5", {}, id="InfiniBand"),
        pytest.param(
            {NCCL: "eth1"}, (LO, ETH0, VIRBR), "10.0.0.5", "10.0.0.5", {}, id="chosen for NCCL"
        ),
        pytest.param({}, (LO, VIRBR), VIRBR.address, VIRBR.address, {}, id="the way is a bridge"),
    ],
)
def test_workers_are_told_what_they_would_not_find(
    env, found, reached_at, address_of_name, expected
) -> None:
    choice = choose(env, found, reached_at, "host", address_of_name)
    assert choice.variables == expected
    for name in set(expected) - {TP}:
        assert f"{name}=eth0" in choice.remark


def test_what_the_user_chose_for_gloo_needs_no_remark() -> None:
    assert choose({GLOO: "eth0"}, (LO, ETH0), "10.0.0.5", "host", None).remark == ""


def test_where_nothing_tells_the_address_it_is_that_of_the_only_interface_or_the_default_route() -> (
    None
):
    assert most_likely((LO, ETH0, DOCKER, VIRBR), None) == "10.0.0.5"
    assert most_likely((LO, ETH0, ETH1), "10.1.0.5") == "10.1.0.5"
    assert most_likely((LO, ETH0, ETH1), "host") is None


def test_the_interfaces_of_this_machine() -> None:
    found = interfaces()
    assert Interface("lo", "127.0.0.1") in found
    known = {name for _, name in socket.if_nameindex()}
    assert {each.name for each in found} <= known


@pytest.mark.parametrize(
    ("leads_to", "name"),
    [
        (["127.0.0.1"], "localhost"),
        (["192.0.2.1", "127.0.0.1"], "localhost"),
        (["192.0.2.1"], "127.0.0.1"),  # as for ::1 where IPv6 is disabled
        ([], "127.0.0.1"),
    ],
)
def test_how_this_machine_calls_itself(
    leads_to: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: bytes, *args: Any, **kwargs: Any) -> list[Any]:
        if host != b"localhost":
            return real(host, *args, **kwargs)
        if not leads_to:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [found for each in leads_to for found in real(each, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    addresses.own_host.cache_clear()
    try:
        assert addresses.own_host() == name
    finally:
        addresses.own_host.cache_clear()


def test_a_machine_that_cannot_reach_itself_is_told_so_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "is_this_host", lambda host: False)  # lo is down
    addresses.own_host.cache_clear()
    try:
        assert addresses.own_host() == "localhost"
    finally:
        addresses.own_host.cache_clear()
