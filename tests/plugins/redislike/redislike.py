"""A third party's rendezvous backend: a store in a server of its own. It uses only rallypoint's public names."""

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from rallypoint.rendezvous import (
    Backend,
    Meeting,
    Option,
    RendezvousConnectionError,
    Scheme,
    fixed_home,
)


class RedisLikeStore:
    """Implements ``rallypoint.rendezvous.Store``; connects on its first operation."""

    def __init__(
        self, hosts: Sequence[tuple[str, int]], prefix: str, password: str, patience: float
    ) -> None:
        self._settings = hosts, prefix, password, patience
        self._hosts, self._prefix, self._password, self._patience = self._settings
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value=_text(value))

    def get(self, key: str, timeout: float) -> bytes:
        value = self._ask("wait", key, wait=timeout, timeout=timeout)
        if value is None:
            raise TimeoutError(f"no key {key!r} within {timeout:g} s")
        return _bytes(value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self._ask("get", keys=[self._prefix + key for key in keys])
        return [None if each is None else _bytes(each) for each in found]

    def peek(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount=amount))

    def put_new(self, key: str, value: bytes) -> bytes:
        return _bytes(self._ask("new", key, value=_text(value)))

    def exists(self, key: str) -> bool:
        return self.peek(key) is not None

    def delete(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def clear(self) -> None:
        self._ask("clear")

    def age(self, key: str) -> float:
        return float(self._ask("age", key))

    def clone(self) -> Self:
        return type(self)(*self._settings)

    def close(self) -> None:
        self._closed = True
        there = self._socket
        if there is not None:
            with contextlib.suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)  # ends a wait in another thread
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._file.close()
            self._socket.close()
            self._socket = None

    def _ask(self, do: str, key: str = "", wait: float = 0.0, **more: Any) -> Any:
        request = {"do": do, "key": self._prefix + key, **more}
        with self._lock:
            if self._closed:
                raise RendezvousConnectionError("this connection is closed")
            try:
                if self._socket is None:
                    self._connect()
                assert self._socket is not None
                self._socket.settimeout(self._patience + wait)
                return self._exchange(request)
            except (OSError, ValueError) as error:
                self._disconnect()
                host, port = self._hosts[0]
                raise RendezvousConnectionError(f"{host}:{port}: {error}") from error

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._hosts[0], timeout=self._patience)
        self._file = self._socket.makefile("rb")
        if (answer := self._exchange(self._password)) != "welcome":
            raise OSError(answer)

    def _exchange(self, message: Any) -> Any:
        assert self._socket is not None
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        line = self._file.readline()
        if not line:
            raise OSError("the server has closed the connection")
        return json.loads(line)


def _text(value: bytes) -> str:
    # A counter is plain text, so that others can read it.
    return value.decode() if value.isdigit() else "b" + base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text[1:]) if text.startswith("b") else text.encode()


def home(meeting: Meeting) -> Any:
    prefix = meeting.options.get("prefix", "rally")
    opened = partial(
        RedisLikeStore,
        [(each.host, each.port) for each in meeting.endpoint.hosts],
        password=meeting.endpoint.password or "",
        patience=meeting.options.get("patience", 10.0),
    )
    return fixed_home(
        meeting,
        partial(opened, f"{prefix}/job/{meeting.name}/"),
        clear=RedisLikeStore.clear,
        open_ended=partial(opened, f"{prefix}/ended/{meeting.name}/"),
        age=RedisLikeStore.age,
    )


REDISLIKE = Backend(
    name="redislike",
    help="a server that is like Redis",
    aliases=("rl",),
    schemes=(
        Scheme(
            name="redislike",
            example="redislike://node0:6379",
            default_port=6379,
            users=True,
            mistaken=("redis",),
        ),
    ),
    options=(
        Option(name="patience", kind=float, help="seconds to wait for an answer [10]"),
        Option(name="prefix", help="what all keys begin with [rally]"),
    ),
    home=home,
)
