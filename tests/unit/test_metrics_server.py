"""The addresses at which metrics are served."""

from __future__ import annotations

import socket

import pytest

from rallypoint.control.metrics.metrics_server import MetricsServer


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_without_a_host_both_families_are_served(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = MetricsServer("", 0, lambda: "x")
    try:
        socket.create_connection((address, server.port), 10).close()
    finally:
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_host_is_served_at_its_own_address(host: str) -> None:
    server = MetricsServer(host, 0, lambda: "x")
    try:
        socket.create_connection((host, server.port), 10).close()
    finally:
        server.close()
