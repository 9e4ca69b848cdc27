"""Inside a worker: make a fork look like ``python script.py``, run the target, tell how it ended.

A user's script must not notice that it runs in a fork. What a fresh interpreter would have set up
is set up here again, and what it would do at its end is done here too (see [Note: Exit]).

[Note: Exit]
A worker of the fork server leaves by ``os._exit`` after everything Python promises at exit: threads
joined, ``atexit`` functions called, globals of ``__main__`` dropped (so that ``__del__`` runs), Python's
and C's streams flushed. Left out are the C++ static destructors, which take longer in 8 forks of
a process with torch (they touch, and so copy, every page) than their training step. ``--start-method
exec`` ends in the ordinary way.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import gc
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from rallypoint._core import clock, env as environment

from . import process
from .config import TargetKind


# What of a traceback travels to the report; the whole of it is on the worker's stderr.
MAX_TRACEBACK = 32_000
MAX_MESSAGE = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a launch runs; travels to the fork server as JSON."""

    kind: TargetKind
    name: str
    args: tuple[str, ...]
    python: str | None = None
    unbuffered: bool = False

    @property
    def title(self) -> str:
        return " ".join(["-m " * (self.kind is TargetKind.MODULE) + self.name, *self.args])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "kind": TargetKind(data["kind"]), "args": tuple(data["args"])})


@dataclass(frozen=True, slots=True)
class WorkerFds:
    """A worker's descriptors: streams, its line to the supervisor, and for functions two memory files."""

    stdout: int
    stderr: int
    line: int
    payload: int | None = None
    result: int | None = None

    @classmethod
    def from_list(cls, fds: Sequence[int]) -> Self:
        return cls(*fds)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """What is one worker's own: variables on top of the fork server's, CPUs to be bound to, descriptors."""

    env: dict[str, str]
    cpus: list[int] | None
    fds: WorkerFds


# -- becoming a worker ----------------------------------------------------------------------------


def exec_worker(job: Job, worker: WorkerStart) -> NoReturn:
    """In a fork: execute an interpreter (or any program) in its place."""
    _take_streams(worker.fds)
    _bind(worker.cpus)
    _default_signals()
    env = {**environment.snapshot(), **worker.env}
    if job.kind is TargetKind.PROGRAM:
        _exec(job.name, [job.name, *job.args], env)
    python = job.python or sys.executable
    unbuffered = ["-u"] if job.unbuffered else []
    if python != sys.executable:
        # Another interpreter may not have this package: start it as anybody would.
        module = ["-m"] if job.kind is TargetKind.MODULE else []
        _exec(python, [python, *unbuffered, *module, job.name, *job.args], env)
    kept = [fd for fd in (worker.fds.line, worker.fds.payload, worker.fds.result) if fd is not None]
    for fd in kept:
        os.set_inheritable(fd, True)
    start = {"job": job.to_json(), "line": worker.fds.line}
    start |= {"payload": worker.fds.payload, "result": worker.fds.result}
    command = python_command("from rallypoint.launch.bootstrap import main; main()", job)
    # The arguments stay in sight for `ps` and `pgrep -f`; the start record goes first.
    _exec(
        python,
        [*command[:1], *unbuffered, *command[1:], json.dumps(start), job.name, *job.args],
        env,
    )


def python_command(code: str, job: Job) -> list[str]:
    """A command that runs ``code`` in this interpreter, with its flags and the target's ``sys.path[0]``."""
    import subprocess

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  as multiprocessing does
    path = import_path(job)
    # With -c the first entry of sys.path is the current folder; set it before any other import.
    prologue = "" if path is None else f"import sys; sys.path[0] = {path!r}; "
    return [sys.executable, *flags, "-c", prologue + code]


def import_path(job: Job) -> str | None:
    """What ``sys.path[0]`` is when the target runs, or None if nothing is put there (``python -P``).

    User modules may shadow others from there, so torch too must be imported with it in place.
    """
    if sys.flags.safe_path:
        return None
    if job.kind is TargetKind.SCRIPT:
        path = Path(job.name)
        return str(path) if _is_container(path) else str(path.resolve().parent)
    return str(Path.cwd())


def main() -> None:
    """In an interpreter started by :func:`exec_worker`: run the target and end in the ordinary way."""
    start = json.loads(sys.argv[1])
    for name in ("line", "payload", "result"):
        if start[name] is not None:
            os.set_inheritable(start[name], False)
    fds = WorkerFds(1, 2, start["line"], start["payload"], start["result"])
    job = Job.from_json(start["job"])
    _fresh_main(job)
    outcome = _run(job, fds, None)
    if outcome.error is not None:
        sys.excepthook = lambda *_: None  # it has been shown
        raise outcome.error
    raise SystemExit(outcome.code)


def run_forked(
    job: Job, worker: WorkerStart, call: Callable[[WorkerFds], None] | None = None
) -> NoReturn:
    """In a fork of the fork server: become the worker, run the target, end the process.

    With ``call`` the fork server is itself a fork of the caller's program: its ``__main__`` stays,
    and its exit handlers are the caller's to run.
    """
    _take_streams(worker.fds)
    _bind(worker.cpus)
    _default_signals()
    environment.process_environment().update(worker.env)
    _own_randomness()
    _adapt_streams(job)
    process.set_title(f"{Path(sys.executable).name} {job.title}")
    if call is None:
        _fresh_main(job)
    outcome = _run(job, worker.fds, call)
    _leave(outcome, in_caller=call is not None)


def _exec(file: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(file, argv, env)
    except OSError as error:
        os.write(2, f"rally: cannot execute {file!r}: {error.strerror}\n".encode())
        # The shell's exit codes: 126 is there but cannot be run, 127 is not there.
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _take_streams(fds: WorkerFds) -> None:
    os.dup2(fds.stdout, 1)
    os.dup2(fds.stderr, 2)


def _bind(cpus: list[int] | None) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def _default_signals() -> None:
    """As a new interpreter has them: Python ignores SIGPIPE and SIGXFSZ and turns SIGINT into an exception."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _own_randomness() -> None:
    """Seeds that a new process would have drawn for itself. (``random`` and ``secrets`` see to themselves.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    mp_process = sys.modules.get("multiprocessing.process")
    if mp_process is not None:
        mp_process.current_process().authkey = os.urandom(32)


def _adapt_streams(job: Job) -> None:
    """Buffer as a new interpreter would for where the streams lead now."""
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        if job.unbuffered:
            stdout.reconfigure(line_buffering=False, write_through=True)
        else:
            stdout.reconfigure(line_buffering=stdout.isatty())


def _fresh_main(job: Job) -> None:
    """``sys.argv``, ``sys.orig_argv``, ``sys.path[0]`` and an empty ``__main__``."""
    module = ["-m"] if job.kind is TargetKind.MODULE else []
    sys.argv = [*(module or [job.name]), *job.args]
    sys.orig_argv = [sys.executable, *module, job.name, *job.args]
    path = import_path(job)
    if path is not None:
        sys.path[0] = path
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        {"__builtins__": sys.modules["builtins"], "__annotations__": {}, "__spec__": None}
    )
    sys.modules["__main__"] = main_module


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How the target ended: an exit code, and the exception if it was one other than SystemExit."""

    code: int
    error: BaseException | None = None


def _run(job: Job, fds: WorkerFds, call: Callable[[WorkerFds], None] | None) -> _Outcome:
    own_pid = os.getpid()
    if not faulthandler.is_enabled():
        # Where Python stood at a native fault goes to the report; stderr stays the script's own.
        faulthandler.enable(file=fds.line)
    try:
        _execute(job, fds, call)
    except SystemExit as error:
        code = _exit_code(error)
        if code != 0 and os.getpid() == own_pid:
            _tell(fds.line, error, code)
        return _Outcome(code)
    except BaseException as error:  # noqa: BLE001  whatever a script raises ends it here
        error.__traceback__ = _without_us(error.__traceback__)
        if os.getpid() == own_pid:  # else a fork that the script made ran out of its own code
            _tell(fds.line, error, 1)
        _show(error)
        return _Outcome(1, error)
    return _Outcome(0)


def _execute(job: Job, fds: WorkerFds, call: Callable[[WorkerFds], None] | None) -> None:
    if call is not None:
        call(fds)
        return
    match job.kind:
        case TargetKind.SCRIPT:
            _run_script(job.name)
        case TargetKind.MODULE:
            runpy._run_module_as_main(job.name)  # type: ignore[attr-defined]  # noqa: SLF001  what `python -m` itself calls
        case TargetKind.FUNCTION:
            from . import payload

            payload.run(fds)
        case TargetKind.PROGRAM:
            raise AssertionError("programs are executed, not run")


def _run_script(name: str) -> None:
    path = Path(name)
    if _is_container(path):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # noqa: SLF001  what `python FOLDER` itself calls
        return
    full = os.path.abspath(name)
    loader: importlib.machinery.SourcelessFileLoader | importlib.machinery.SourceFileLoader
    if name.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", full)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", full)
        with io.open_code(full) as file:
            code = compile(file.read(), full, "exec", dont_inherit=True)
    assert code is not None
    space = sys.modules["__main__"].__dict__
    space.update({"__file__": full, "__cached__": None, "__loader__": loader})
    exec(code, space)  # noqa: S102  running the user's script is what we are for


def _is_container(path: Path) -> bool:
    """A folder or an archive with a ``__main__.py``, which Python can run too."""
    if path.is_dir():
        return True
    import zipfile

    return path.suffix != ".py" and path.is_file() and zipfile.is_zipfile(path)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201  as the interpreter does
    return 1


def _without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _show(error: BaseException) -> None:
    """What the interpreter does with an exception nobody caught."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # noqa: BLE001  a user's hook may do anything
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        traceback.print_exception(second)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        traceback.print_exception(error)


def _tell(line: int, error: BaseException, code: int) -> None:
    """Send the exception to the supervisor as data: one line of JSON."""
    if isinstance(error, SystemExit):
        text = "".join(traceback.format_tb(_without_us(error.__traceback__)))
        text = f"Traceback (most recent call last):\n{text}SystemExit: {error.code}\n"
    else:
        text = "".join(traceback.format_exception(error))
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in {"builtins", "__main__"}
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the failure
        message = "(its message could not be made)"
    record = {
        "kind": "exception",
        "type": name,
        "message": message[:MAX_MESSAGE],
        "traceback": text if len(text) <= MAX_TRACEBACK else "…" + text[-MAX_TRACEBACK:],
        "exit_code": code,
        "at": clock.MONOTONIC.now(),
        "timestamp": clock.timestamp(),
    }
    send_line(line, record)


def send_line(line: int, record: dict[str, Any]) -> None:
    """One JSON record to the supervisor. A supervisor that is gone, or a closed descriptor, is no error."""
    data = memoryview(json.dumps(record).encode() + b"\n")
    try:
        while data:
            data = data[os.write(line, data) :]
    except OSError:
        pass


# -- leaving: see [Note: Exit] ----------------------------------------------------------------------


def _leave(outcome: _Outcome, *, in_caller: bool) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  waits for threads, as Py_FinalizeEx does first
        if in_caller:
            # The caller's exit handlers are the caller's. As multiprocessing's own forks do:
            from multiprocessing import util

            util._exit_function()  # type: ignore[attr-defined]  # noqa: SLF001
        else:
            atexit._run_exitfuncs()  # noqa: SLF001
            _drop_main()
    except BaseException as error:  # noqa: BLE001  shown and passed over, as the interpreter does
        traceback.print_exception(error)
    code = outcome.code
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001
            code = 120 if code == 0 else code  # what Python exits with when it cannot flush
    import ctypes

    ctypes.CDLL(None).fflush(None)
    if isinstance(outcome.error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _drop_main() -> None:
    """Let go of the script's globals, as the interpreter does at its end, so that ``__del__`` runs.

    Not while other threads run: they are daemons, and the interpreter would have frozen them.
    """
    if threading.active_count() > 1:
        return
    space = sys.modules["__main__"].__dict__
    hidden = [name for name in space if name.startswith("_") and not name.startswith("__")]
    visible = [name for name in space if not name.startswith("_")]
    for name in (*hidden, *visible):
        space[name] = None
    gc.collect()
