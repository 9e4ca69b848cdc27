"""This machine's sockets and addresses."""

from __future__ import annotations

import errno
import socket

import pytest

from rallypoint._core import addresses
from rallypoint.errors import ConfigError


@pytest.mark.parametrize("host", ["a" * 64, "a..b", f"{'a' * 70}.example"])
def test_a_name_that_cannot_exist_is_refused_like_one_that_does_not(host: str) -> None:
    # Python's codec for international names would raise an error of its own.
    with pytest.raises(ConfigError, match="no such host"):
        addresses.check_host(host)
    assert not addresses.exists(host)
    assert addresses.own_address(host) is None
    assert addresses.listening_address(None, host) is None


@pytest.mark.parametrize(
    ("bind", "told", "expected"),
    [
        ("*", "127.0.0.1", None),
        ("10.1.2.3", "127.0.0.1", "10.1.2.3"),
        (None, "", None),
        (None, "localhost", None),
        (None, "127.3.2.1", None),
        (None, "[::1]", None),
        (None, "192.0.2.1", None),  # RFC 5737: nobody has it
    ],
)
def test_where_to_listen(bind: str | None, told: str, expected: str | None) -> None:
    assert addresses.listening_address(bind, told) == expected


def test_a_kernel_without_ipv6_listens_for_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket

    def without_ipv6(family: int, *more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *more)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with addresses.bind_store(None, 0) as listener:
        assert listener.family == socket.AF_INET
        host = addresses.reached_at(listener)
    monkeypatch.undo()
    assert addresses.is_loopback(host)
    with addresses.bind_store(None, 0) as listener:
        assert listener.family == (
            socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        )
