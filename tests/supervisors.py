"""Programs as forks of a process that has imported torch and rallypoint: none waits for an interpreter or an import.

Everything else is as usual: a supervisor, its fork server and its workers are processes of their own, each a child
of its usual parent.

    done = run([sys.executable, "-m", "rallypoint", "run", *words], cwd=folder, env=env)
    node = Popen([RALLY, "run", *words], cwd=folder, env=env)

    agent = Popen([TORCHRUN, *words], cwd=folder, env=env, imports=(*TORCH[:2], "torch.distributed.run"))

Both work as in :mod:`subprocess`, and start what cannot be forked: another program, this one with flags, one on a
terminal, or the first one with some set of variables that Python or torch reads when it is loaded.

[Note: Fork servers]
A supervisor starts its fork server with :class:`subprocess.Popen`. A forked supervisor forks it instead, and the
fork runs the same code, with modules of rallypoint that were loaded only for it. When it imports torch, torch is loaded
already. (A forked torchrun starts its workers as usual: it has C++ threads, which a fork would not.) /proc shows the
environments of the fork server and the supervisor as if programs had been started with them,
since tests look for processes by marks in their environment.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint._core import process


_BIN = Path(sys.executable).parent
RALLY = str(_BIN / "rally")
TORCHRUN = str(_BIN / "torchrun")
_MODULES = {RALLY: "rallypoint"}
_ZYGOTE = Path(__file__).with_name("supervisor_zygote.py")
# Bytes for a forked process's environment and its command line in /proc.
ENVIRONMENT_ROOM = 1 << 15
TITLE_ROOM = 1 << 11
# What most scripts use. The third is what torch imports when an optimizer first steps, the next two what sessions need of it for
# some models. A script imports the last one anew, but finds its parts loaded, as in a worker that takes a lost one's place.
TORCH = (
    *("torch", "torch.distributed", "torch._dynamo"),
    *("torch.distributed.optim", "torch.distributed.checkpoint", "rallypoint.elastic"),
)
# Variables that Python, torch and the libraries below it read when they are loaded.
_READ_WHEN_LOADED = (
    "PYTHON",
    "TORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "CUDA_",
    "LD_",
)
# How many processes to fork from are kept, one for each set of such variables; beyond that, the least recently used one goes.
_MOST = 3


class Zygote:
    """A process to fork others from.

    Args:
        imports: what it imports for supervisors and fork servers, in addition to what `rally run` does.
        env: its environment.
    """

    def __init__(self, *imports: str, env: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = max(
            0, ENVIRONMENT_ROOM - sum(len(name) + len(value) + 2 for name, value in env.items())
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_ZYGOTE), str(theirs.fileno()), *imports, " " * TITLE_ROOM],
                pass_fds=[theirs.fileno()],
                env={**env, "ROOM": " " * room},
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a process as a child of the calling one. Returns its pid.

        Args:
            files: its stdin, stdout and stderr.
        """
        with _one_at_a_time:
            return self._fork(order, files)

    def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        was_subreaper = process.is_subreaper()
        process.set_subreaper(True)
        try:
            # In a file, since a command line may be too long for a message.
            with open(os.memfd_create("order"), "w+b") as file:
                file.write(json.dumps(order).encode())
                file.flush()
                socket.send_fds(self._line, [b"."], [file.fileno(), *files])
            answer = self._line.recv(1 << 10)
            self._line.recv(1)  # it is our child now
        finally:
            process.set_subreaper(was_subreaper)
        assert answer, "the process to fork from has ended"
        return int(answer)

    def close(self) -> None:
        self._line.close()
        self._process.wait(60)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Like :class:`subprocess.Popen`, but forks if the program to start is this Python.

    Args:
        net: path of the network namespace to run in, with the host name ``host``. Only for what can be forked.
        imports: modules that are already imported in it and its fork server, if it can be forked. With none, the fork server
            is started as usual.
        forked: if False, it is an interpreter of its own, and waits for all imports.
    """

    def __init__(
        self,
        words: Sequence[object],
        *,
        net: str = "",
        host: str = "",
        imports: Sequence[str] = TORCH,
        forked: bool = True,
        **options: Any,
    ) -> None:
        self._place = {"net": net, "host": host}
        self._imports = tuple(imports)
        self._forked = forked
        super().__init__([str(word) for word in words], **options)

    def _execute_child(self, args: list[str], *more: Any) -> None:
        (_, preexec, _, pass_fds, cwd, env, _, _, _, stdin, to, out, stdout, err, stderr, *rest) = (
            more
        )
        zygote = None
        task = _task(args)
        if self._forked and task is not None and not (preexec or pass_fds):
            given = dict(os.environ if env is None else env)
            # A test file chooses its imports for all of its tests, and most jobs have the tests' own variables.
            first = self._imports != TORCH or _read_when_loaded(given) == _read_when_loaded(
                dict(os.environ)
            )
            with _choosing:
                zygote = _zygote(given, self._imports, first=first or bool(self._place["net"]))
        files = [
            own if theirs == -1 else theirs for own, theirs in enumerate((stdin, stdout, stderr))
        ]
        if zygote is None or any(os.isatty(each) for each in files):
            assert not self._place["net"], "it has to be forked"
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        order = {
            **self._place,
            **task,
            "command": args,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": rest[5],
            "path": _added_path(dict(os.environ if env is None else env)),
            "fork_server": "forked" if self._imports else "started",
        }
        try:
            self.pid = zygote.fork(order, files)
        finally:
            self._child_created = True
            self._close_pipe_fds(stdin, to, out, stdout, err, stderr)  # type: ignore[attr-defined]


def run(
    words: Sequence[object],
    *,
    input: Any = None,  # noqa: A002
    timeout: float | None = 240.0,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Like :func:`subprocess.run`, but forks if the program to start is this Python."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(words, **options) as started:
        try:
            out, err = started.communicate(input, timeout)
        except BaseException:
            started.kill()
            raise
    done = subprocess.CompletedProcess(words, started.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class ForkServers:
    """Replaces :mod:`subprocess` where fork servers are started: they become forks, with torch imported.

        monkeypatch.setattr("rallypoint.launch.server.server_process.subprocess", ForkServers())

    For launches from the tests' own process; the fork servers of a forked supervisor are forks anyway.
    """

    def __init__(self) -> None:
        self._zygote = _zygote(dict(os.environ), TORCH, first=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, words: Sequence[str], **options: Any) -> Any:  # noqa: N802
        code = words.index("-c")
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        if self._zygote is None or words[1:code] != flags:
            return subprocess.Popen(words, **options)
        assert options.keys() == {"env", "pass_fds", "start_new_session"}
        passed = list(options["pass_fds"])
        order = {"run": "fork server", "name": words[code + 1], "words": [], "command": [*words]}
        order |= {
            "path": [],
            "net": "",
            "host": "",
            "cwd": os.getcwd(),
            "env": dict(options["env"]),
        }
        order |= {"new_session": False, "pass_fds": passed}
        pid = self._zygote.fork(order, [0, 1, 2, *passed])
        return types.SimpleNamespace(pid=pid, returncode=None)


def _task(command: Sequence[str]) -> dict[str, Any] | None:
    """What a command line has Python do; None if a fork cannot do it."""
    match command:
        case [program, *words] if program in _MODULES:
            return {"run": "module", "name": _MODULES[program], "words": words}
        case [program, *words] if program == TORCHRUN:
            code = "from torch.distributed.run import main; main()"
            return {"run": "code", "name": code, "words": words}
        case [program, *_] if program != sys.executable:
            return None
        case [_, "-m", name, *words]:
            return {"run": "module", "name": name, "words": words}
        case [_, "-c", code, *words]:
            return {"run": "code", "name": code, "words": words}
        case [_, "-", *words]:
            return {"run": "stdin", "name": "-", "words": words}
        case [_, name, *words] if not name.startswith("-"):
            return {"run": "script", "name": name, "words": words}
    return None


# Tests start programs in several threads.
_one_at_a_time = threading.Lock()
_choosing = threading.Lock()
_zygotes: dict[tuple[Any, ...], Zygote | None] = {}


def _zygote(env: dict[str, str], imports: tuple[str, ...], *, first: bool) -> Zygote | None:
    """One that has read the same variables, if it pays off: the first to ask for a set gets none unless ``first``."""
    read = _read_when_loaded(env)
    if "PYTHONSAFEPATH" in read:
        return None
    key = (imports, *sorted(read.items()))
    if key not in _zygotes and not first:
        _zygotes[key] = None
        return None
    zygote = _zygotes.pop(key, None) or Zygote(*imports, env={**_plain(os.environ), **read})
    _zygotes[key] = zygote  # ordered by last use
    while sum(each is not None for each in _zygotes.values()) > _MOST:
        oldest = next(key for key, each in _zygotes.items() if each is not None)
        _zygotes.pop(oldest).close()  # type: ignore[union-attr]
    return zygote


def _read_when_loaded(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python and torch read when they are loaded, except those that a fork heeds itself."""
    read = {k: v for k, v in env.items() if k.startswith(_READ_WHEN_LOADED)}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_CPP_LOG_LEVEL"):
        read.pop(name, None)
    if _added_path(env):
        read.pop("PYTHONPATH")
        read |= {k: v for k, v in os.environ.items() if k == "PYTHONPATH"}
    return read


def _added_path(env: Mapping[str, str]) -> list[str]:
    """What PYTHONPATH has before the tests' own; nothing if a directory has modules that are loaded before a fork."""
    own, given = os.environ.get("PYTHONPATH", ""), env.get("PYTHONPATH", "")
    added = given.removesuffix(own).split(os.pathsep)
    added = [each for each in added if each]
    loaded = ("torch", "rallypoint", "sitecustomize.py", "usercustomize.py")
    if not given.endswith(own) or any(Path(a, b).exists() for a in added for b in loaded):
        return []
    return added


def _plain(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if not k.startswith(_READ_WHEN_LOADED)}


def kept() -> set[int]:
    """Pids of the processes that stay for other tests."""
    return {each.pid for each in _zygotes.values() if each is not None}


@atexit.register
def _close_all() -> None:
    for each in _zygotes.values():
        if each is not None:
            each.close()
