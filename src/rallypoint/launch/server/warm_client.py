"""Warm servers, as their clients see them: finding or starting the one for a job, listing them, stopping them."""

from __future__ import annotations

import importlib.util
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rallypoint
from rallypoint._core import clock, linux, private, process, unix_listener, user_folder
from rallypoint.launch import torch_private

from . import warm_key
from .channel import Channel, Message
from .warm_lock import READY, STARTING, WarmLock, uid_of_peer


if TYPE_CHECKING:
    from rallypoint.launch.config import Job  # `rally ps` does not wait for it

# What a warm server imports. Modules of --preload are imported for each job: they may be the user's.
MODULES = ("torch", "torch.distributed")
# The most servers per user; each holds about 200 MB.
MOST = 4
# Seconds that a running server may take to answer, and a new one to import torch.
PATIENCE, START_PATIENCE = 5.0, 60.0
# Seconds that a server told to stop may take: it answers once it has ended.
STOP_PATIENCE = 15.0
_TITLE_ROOM = 2048
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


@dataclass(frozen=True, slots=True)
class Warm:
    """A fork server that was forked from a warm server.

    Args:
        channel: the connection to it.
        pid: its pid.
        pidfd: a pidfd of it.
    """

    channel: Channel
    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class Unfit:
    """No warm server serves this job.

    Args:
        why: in words.
        again: another one may serve it; this one has ended.
    """

    why: str
    again: bool = True


def take(
    hello: Message, job: Job, env: Mapping[str, str], secret_fds: list[int], idle: float
) -> Warm | Unfit:
    """Have the warm server for this process become the fork server of a job; start it first if there is none.

    Blocks while a new one imports torch.

    Args:
        hello: the request to a fork server.
        job: the job.
        env: the environment of its fork server.
        secret_fds: a memory file with the job's secret, if it has one.
        idle: seconds after which a new server that has no job exits.
    """
    try:
        folder = _folder()
        name = warm_key.name(facts(job, env))
        request = {**hello, "do": "job", "env": dict(env), "umask": _umask()}
        request["ignored"] = [
            int(each) for each in signal.valid_signals() if signal.getsignal(each) is signal.SIG_IGN
        ]
        why = ""
        for _ in range(
            2
        ):  # the first may have ended a moment ago, or have found that torch has changed
            connection, patience = _connected(folder, name, job, env, idle)
            found = _asked(Channel(connection), request, secret_fds, patience)
            if isinstance(found, Warm):
                return found
            why = found.why
            if not found.again:
                break
        return Unfit(why)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Unfit(f"no warm server: {where}{error.strerror or error}")


def _asked(
    channel: Channel, request: Message, secret_fds: list[int], patience: float
) -> Warm | Unfit:
    # Descriptors in a message that nobody reads stay open: if the server is stopped, a client's pipe would never end.
    channel.send({"do": "call"})
    answer = _answer(channel, patience)
    if answer is not None:
        own = [
            os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
            linux.pidfd_open(os.getpid()),
        ]
        try:
            channel.send(request, [0, 1, 2, *own, *secret_fds])
        finally:
            for fd in own:
                os.close(fd)
        answer = _answer(channel, PATIENCE)
    if answer is None:
        has_ended = channel.closed_by_peer
        channel.close()
        what = "has ended" if has_ended else f"has not answered for {patience:g} s: is it stopped?"
        return Unfit(f"the warm server {what}", again=has_ended)
    message, fds = answer
    if message["is"] == "warm" and len(fds) == 1:
        return Warm(channel, int(message["pid"]), fds[0])
    for fd in fds:
        os.close(fd)
    channel.close()
    return Unfit(str(message.get("why", message["is"])))


def _connected(
    folder: Path, name: str, job: Job, env: Mapping[str, str], idle: float
) -> tuple[socket.socket, float]:
    """A connection to the server of this name, and how long its answer may take."""
    path = folder / f"{name}.sock"
    if not path.exists():
        _make_room(folder, name)  # before the lock, which exiting servers take as well
    with WarmLock(folder):
        connection = _dial(path)
        if connection is not None:
            return connection, START_PATIENCE if _is_new(path) else PATIENCE
        with _listening(path) as listener:
            _start(listener, path, job, env, idle)
        connection = _dial(path)
    if connection is None:
        raise ConnectionRefusedError(0, "a new server has ended at once")
    return connection, START_PATIENCE


def _is_new(path: Path) -> bool:
    """Whether the server may still be importing."""
    return stat.S_IMODE(path.stat().st_mode) != READY


def _dial(path: Path) -> socket.socket | None:
    """Connect; None if no process listens. Removes the socket that a dead one has left."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(os.fspath(path))
        if uid_of_peer(connection) == os.geteuid():
            return connection
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        connection.close()
        raise
    connection.close()
    return None


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        unix_listener.listen(listener, path, 64, STARTING)
        yield listener


def _start(
    listener: socket.socket, path: Path, job: Job, env: Mapping[str, str], idle: float
) -> None:
    """Start a server in a new interpreter. It outlives this process."""
    fd = listener.fileno()
    prologue = "" if sys.flags.safe_path else "import sys; del sys.path[0]; "
    call = f"main({fd}, {os.fspath(path)!r}, {idle!r}, {MODULES!r})"
    code = f"{prologue}from rallypoint.launch.server.warm_server import main; {call}"
    child = subprocess.Popen(
        [sys.executable, *_flags(job), "-c", code, " " * _TITLE_ROOM],
        env=warm_key.variables(env),
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child.returncode = 0  # nobody waits for it


def _make_room(folder: Path, name: str) -> None:
    """Stop servers of other versions of this installation and, if there are too many others, the one idle longest."""
    others = [each for each in folder.glob("*.sock") if each.stem != name]
    for path in [each for each in others if warm_key.is_outdated(each.stem, name)]:
        _asked_if_it_answers(path, {"do": "stop"})
        others.remove(path)
    idle = []
    for path in others if len(others) >= MOST else []:
        told = _asked_if_it_answers(path, {"do": "status"})
        if told is not None and told["idle"] is not None:
            idle.append((told["idle"], path))
    if idle:
        _asked_if_it_answers(max(idle)[1], {"do": "stop"})


def running() -> list[Message]:
    """What each warm server of this user says of itself. Those that do not answer are left out."""
    found = (_asked_if_it_answers(path, {"do": "status"}) for path in _sockets())
    return [each for each in found if each is not None]


def stop(pids: Sequence[int] = ()) -> tuple[list[int], list[Path]]:
    """Stop the warm servers of this user, or those with these pids. Running jobs continue.

    Blocks until they have ended.

    Returns:
        The pids of those that have ended, and the sockets of those that have not answered.
    """
    stopped, silent = [], []
    for path in _sockets():
        try:
            told = _ask(path, {"do": "status"})
            if told is None or (pids and told["pid"] not in pids):
                continue
            # One that is gone by now has ended as well.
            _ask(path, {"do": "stop"}, STOP_PATIENCE)
            stopped.append(int(told["pid"]))
        except TimeoutError:
            silent.append(path)
    return stopped, silent


def _sockets() -> list[Path]:
    try:
        return sorted(_folder().glob("*.sock"))
    except OSError:
        return []


def _asked_if_it_answers(path: Path, question: Message) -> Message | None:
    try:
        return _ask(path, question)
    except TimeoutError:
        return None


def _ask(path: Path, question: Message, patience: float = PATIENCE) -> Message | None:
    """Ask a server; None if it is gone.

    Raises:
        TimeoutError: it has not answered.
    """
    try:
        connection = _dial(path)
    except OSError:
        return None
    if connection is None:
        return None
    channel = Channel(connection)
    try:
        channel.send(question)
        answer = _answer(channel, START_PATIENCE if _is_new(path) else patience)
        has_ended = channel.closed_by_peer
    except OSError:
        return None
    finally:
        channel.close()
    if answer is None and not has_ended:
        raise TimeoutError(f"{path} has not answered")
    return None if answer is None else answer[0]


def _answer(channel: Channel, patience: float) -> tuple[Message, list[int]] | None:
    deadline = clock.Deadline(patience)
    while not channel.closed_by_peer and not deadline.expired():
        poller = select.poll()
        poller.register(
            channel.fileno(), select.POLLIN | (select.POLLOUT if channel.wants_write() else 0)
        )
        poller.poll((deadline.remaining() or 0.0) * 1000)
        channel.flush()
        if received := channel.receive(1):
            return received[0]
    return None


def _folder() -> Path:
    problem: OSError | None = None
    for parent in user_folder.candidates():
        try:
            user_folder.check(parent)
            folder = parent / "warm"
            private.make_folder(folder, exist_ok=True)
            user_folder.check(folder)
            return folder
        except OSError as error:
            problem = problem or error
    assert problem is not None
    raise problem


# -- what a new interpreter would be like -------------------------------------------------------------


def facts(job: Job, env: Mapping[str, str]) -> warm_key.Facts:
    return warm_key.Facts(
        install=[sys.executable, sys.prefix, sys.base_prefix],
        versions=[sys.version, *_version_of("torch"), rallypoint.__version__, *_sources()],
        flags=_flags(job),
        env=env,
        folder=os.getcwd(),
        state=_state(),
    )


def _flags(job: Job) -> list[str]:
    return [*torch_private.interpreter_flags(), *(["-u"] if job.unbuffered else [])]


def _version_of(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    return [spec.origin, _changed(spec.origin), _changed(Path(spec.origin).with_name("version.py"))]


def _sources() -> list[str]:
    """The times of this package's files, and of the folders of installed packages."""
    import site

    own = Path(rallypoint.__file__).parent
    newest = max(os.stat(each).st_mtime_ns for each in own.rglob("*.py"))
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return [os.fspath(own), str(newest), *(_changed(each) for each in folders)]


def _changed(path: str | Path) -> str:
    try:
        return str(os.stat(path).st_mtime_ns)
    except OSError:
        return ""


def _state() -> dict[str, str]:
    """What a process inherits and a fork of another process cannot take over."""
    state = warm_key.inherited(_text("/proc/self/status"))
    for each in _NAMESPACES:
        try:
            state[each] = os.readlink(f"/proc/self/ns/{each}")
        except OSError:
            continue
    for each in ("cgroup", "oom_score_adj", "attr/current", "personality", "coredump_filter"):
        state[each] = _text(f"/proc/self/{each}")
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            state[name] = str(resource.getrlimit(getattr(resource, name)))
    state["nice"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    state["scheduling"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}"
    state["io"] = str(process.io_priority())
    state["root"] = os.readlink("/proc/self/root")
    return state


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
