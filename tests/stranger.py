"""A stranger to a job: a process of another user, perhaps on another host, that knows what is public and tries everything.

    python stranger.py UID

It reads commands as lines of JSON, ``[what, *arguments]``, and answers each with one line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import pkgutil
import re
import resource
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rallypoint._core
import rallypoint.rpc
import rallypoint.wire
from rallypoint import rpc
from rallypoint.rpc.connections.messages import Kind
from rallypoint.wire.frames import encode
from relays import become


# A worker that a stranger managed to call has recorded this number.
FORBIDDEN = 666
_PATIENCE = 5.0
_held: list[socket.socket] = []


def _store(host: str, port: int) -> Any:
    return TCPStore(host, port, None, False, timedelta(seconds=20), wait_for_workers=False)


def spy(folder: str, store: list[Any] | None, output: str) -> int:
    """Write everything that can be read of processes, files and the store to a file; returns how many bytes."""
    seen: list[bytes] = []
    for pid in os.listdir("/proc"):
        for name in ("cmdline", "environ", "stat", "maps", "auxv"):
            with contextlib.suppress(OSError, ValueError):
                seen.append(Path("/proc", pid, name).read_bytes())
        with contextlib.suppress(OSError, ValueError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with open(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
                    seen.append(f.read(1 << 20) or b"")
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and str(path) != output:
                seen.append(path.read_bytes())
    if store is not None:
        found = _store(*store)
        for key in found.list_keys():
            seen.append(key.encode())
            if found.check([key]):
                seen.append(found.get(key))
    data = b"\n".join(seen)
    Path(output).write_bytes(data)
    return len(data)


def reach(places: list[list[Any]]) -> list[bool]:
    """Whether something listens at each place: a host and port, or the name of a Unix socket."""
    found = []
    for place in places:
        try:
            _connect(place).close()
            found.append(True)
        except OSError:
            found.append(False)
    return found


def _connect(place: Any) -> socket.socket:
    if isinstance(place, list):
        return socket.create_connection(tuple(place), _PATIENCE)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_PATIENCE)
    sock.connect("\0" + place)
    return sock


def rewrite(store: list[Any], name: str, address: Any, times: int) -> int:
    """Tamper with a member's record in an rpc group, mainly with its address. Returns how often that was done."""
    found = _store(*store)
    deadline = time.monotonic() + 120
    while not (keys := [key for key in found.list_keys() if key.endswith(f"/rank/{name}")]):
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.01)
    (key,) = keys
    true = found.get(key)
    head, body = true[:18], json.loads(true[18:])
    for kind in body["member"]["addresses"]:
        body["member"]["addresses"][kind] = address
    moved = json.dumps(body, separators=(",", ":")).encode()
    forms = [head + moved, moved, b"junk", true[:-1] + b"]", b"", head + moved]
    for number in range(times):
        found.set(key, forms[number % len(forms)])
    found.set(key, forms[0])
    return times


def join(store: list[Any]) -> list[str]:
    """Try to become a member: without a secret, with a guess, and with everything that the store holds under its names."""
    found = _store(*store)
    held = [found.get(key) for key in found.list_keys() if re.search("/(job|secret)$", key)]
    said = []
    given: list[dict[str, Any]] = [{}, {"secret": b"a guess at the secret"}, {"insecure": True}]
    given += [{"secret": each} for each in held if len(each) >= 16]
    os.environ.update(MASTER_ADDR=store[0], MASTER_PORT=str(store[1]))
    for each in given:
        try:
            options = rpc.NativeRpcBackendOptions(rpc_timeout=_PATIENCE, **each)
            rpc.init_rpc("stranger", rank=2, world_size=3, rpc_backend_options=options)
            rpc.shutdown(graceful=False)
            said.append("it is in")
        except Exception as error:  # whatever it is, report it
            said.append(f"{type(error).__name__}: {error}")
    return said


def knock(place: Any) -> list[str]:
    """Speak to a worker without a proof; returns what comes back."""
    call = b"".join(encode(Kind.CALL, 1, pickle.dumps((_forbidden, (FORBIDDEN,), None))))
    hello = b'{"version":2,"role":"connecting","nonce":"%s","me":{},"seals":[]}' % (b"ab" * 32)
    framed = b"RLY1" + len(hello).to_bytes(4, "little") + hello
    found = []
    for said in (call, framed + call, os.urandom(4096), b"\x16\x03\x01\x02\x00\x01\x00" + call):
        try:
            with _connect(place) as sock:
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                came = b""
                while more := sock.recv(4096):
                    came += more
                found.append(came.decode(errors="replace"))
        except OSError as error:
            found.append(f"{type(error).__name__}")
    return found


def _forbidden(number: int) -> int:
    raise NotImplementedError(number)


_forbidden.__module__, _forbidden.__qualname__ = "__main__", "note"
note = _forbidden  # it is pickled by this name, so the worker finds its own function


def crowd(place: Any, count: int) -> int:
    """Open that many connections and say nothing on them; returns how many were made."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    made = 0
    for _ in range(count):
        sock = socket.socket(socket.AF_INET if isinstance(place, list) else socket.AF_UNIX)
        sock.setblocking(False)
        _held.append(sock)
        try:
            sock.connect(tuple(place) if isinstance(place, list) else "\0" + place)
            made += 1
        except BlockingIOError:
            made += isinstance(place, list)
        except OSError:
            pass
    return made


def _load_all() -> None:
    """Import now what is otherwise imported late: only another user may be able to read the files."""
    for package in (rallypoint.rpc, rallypoint.wire, rallypoint._core):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(each.name)


def main() -> None:
    _load_all()
    become(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write("null\n")
    answers.flush()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answers.write(json.dumps(globals()[what](*arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
