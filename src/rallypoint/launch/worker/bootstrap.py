"""Inside a worker: make a fork look like ``python script.py``, run the target, report how it ended.

A user's script must not notice that it runs in a fork. This module repeats the set-up of a fresh
interpreter; :mod:`rallypoint.launch.worker.ending` does what an interpreter does at exit.
docs/failure-modes.md lists the remaining differences, and
tests/integration/test_script_does_not_notice.py checks them.
"""

from __future__ import annotations

import errno
import faulthandler
import importlib.machinery
import io
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rallypoint._core import (
    env as environment,
    rank_watch,
    scheduling,
    secret,
    stack_line,
    supervisor_line,
)
from rallypoint.launch import piped_script, torch_private
from rallypoint.launch.config import Job, TargetKind

from . import ending, exceptions, import_watch, preloaded, streams, title
from .job import ASK_SIGNAL, WorkerFds, WorkerStart


# The fields of WorkerFds for descriptors that another interpreter is told of.
_OWN_FDS = ("line", "stacks", "questions", "payload", "result")


# -- becoming a worker ----------------------------------------------------------------------------


def exec_worker(job: Job, worker: WorkerStart) -> NoReturn:
    """In a fork: replace it with an interpreter or another program."""
    _take_streams(worker.fds)
    _bind(worker.cpus)
    _default_signals()
    # Python ignores the first two and handles the third, and the fork server ignores the others; a program must start with
    # the defaults.
    ignored = (ASK_SIGNAL, stack_line.STACK_SIGNAL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, *ignored):
        signal.signal(number, signal.SIG_DFL)
    env = {**environment.snapshot(), **worker.env, **_secret_for_program()}
    if job.kind is TargetKind.PROGRAM:
        _exec(job.name, [job.name, *job.args], env)
    python = job.python or sys.executable
    if python != sys.executable:
        # Another interpreter may lack this package, so none of our code runs there to write whole
        # lines. Unbuffered output at least appears at once.
        unbuffered = [] if job.block_buffered else ["-u"]
        module = ["-m"] if job.kind is TargetKind.MODULE else []
        name = piped_script.PLACE if job.name == piped_script.AS_IN_PYTHON else job.name
        _exec(python, [python, *unbuffered, *module, name, *job.args], env)
    fds = worker.fds
    own = {name: getattr(fds, name) for name in _OWN_FDS}
    kept = [fd for fd in own.values() if fd is not None]
    for fd in kept:
        os.set_inheritable(fd, True)
    start = {"job": {**job.to_json(), "args": []}, **own}
    command = python_command("from rallypoint.launch.worker.bootstrap import main; main()", job)
    # Pass the arguments separately, not in the start record: `ps` and `pgrep -f` then show them, and
    # the kernel accepts at most 128 KiB in one argument.
    _exec(python, [*command, json.dumps(start), job.name, *job.args], env)


def _secret_for_program() -> dict[str, str]:
    """The variable that passes the job's secret to another program: the number of an inherited descriptor."""
    held = secret.held()
    if held is None:
        return {}
    fd = secret.descriptor(held)
    os.set_inheritable(fd, True)
    return {secret.FD_VARIABLE: str(fd)}


def python_command(code: str, job: Job) -> list[str]:
    """A command that runs ``code`` in this interpreter, with its flags and the target's ``sys.path[0]``."""
    flags = torch_private.interpreter_flags()
    if job.unbuffered:
        flags.append("-u")
    if job.kind is TargetKind.PROGRAM:
        flags.append("-P")
    path = import_path(job)
    # With -c the first entry of sys.path is the current folder; set it before any other import.
    prologue = "" if path is None else f"import sys; sys.path[0] = {path!r}; "
    if job.path is not None:
        prologue = f"import sys; sys.path[:] = {list(job.path)!r}; "
    return [sys.executable, *flags, "-c", prologue + code]


def import_path(job: Job) -> str | None:
    """``sys.path[0]`` while the target runs, or None if Python adds no entry (``python -P``).

    User modules there may shadow others, so it must be set before even torch is imported.
    """
    # A program that is not Python has no such entry.
    if sys.flags.safe_path or job.path is not None or job.kind is TargetKind.PROGRAM:
        return None
    if job.kind is TargetKind.SCRIPT:
        path = Path(job.name)
        if job.name == piped_script.PLACE and not path.resolve().exists():
            return "/proc/self/fd"  # as for the pipe that the file in memory replaces
        return _full_name(job.name) if _is_container(path) else str(path.resolve().parent)
    return str(Path.cwd())


def main() -> None:
    """In an interpreter started by :func:`exec_worker`: run the target and exit normally."""
    start = json.loads(sys.argv[1])
    for name in _OWN_FDS:
        if start[name] is not None:
            os.set_inheritable(start[name], False)
    secret.keep()
    fds = WorkerFds(1, 2, **{name: start[name] for name in _OWN_FDS})
    fds = fds.out_of_the_way()
    supervisor_line.hold(fds.line)
    job = Job.from_json({**start["job"], "args": sys.argv[3:]})
    streams.make_live(job)
    _fresh_main(job)
    title.show(_title(job))
    outcome = _run(job, fds, None)
    if outcome.interrupted:
        sys.excepthook = lambda *_: (
            None
        )  # already printed; raise it again to die of SIGINT as Python does
        raise KeyboardInterrupt
    raise SystemExit(outcome.code)


def run_forked(
    job: Job,
    worker: WorkerStart,
    call: Callable[[WorkerFds], None] | None = None,
    package_of: Callable[[str], str | None] | None = None,
) -> NoReturn:
    """In a fork of the fork server: become the worker, run the target, end the process.

    With ``call`` the fork server is itself a fork of the caller's program: ``__main__`` stays, and
    the caller's exit handlers do not run here. With ``package_of`` the worker reports what it imports
    (see ``import_watch``).
    """
    _take_streams(worker.fds)
    _bind(worker.cpus)
    _default_signals()
    env_of_server = environment.snapshot()
    environment.process_environment().update(worker.env)
    _own_state()
    fds = worker.fds.out_of_the_way()
    supervisor_line.hold(fds.line)
    _watch_groups(fds.questions)
    streams.make_live(job)
    title.show(_title(job))
    if call is not None:
        outcome = _run(job, fds, call)
        ending.leave_in_caller(outcome.code, interrupted=outcome.interrupted)
    known_modules = frozenset(sys.modules)
    _fresh_main(job)
    if package_of is not None:
        import_watch.start(package_of, env_of_server, lambda told: send_line(fds.line, told))
    for package in preloaded.OURS:
        preloaded.hide(package)
    if job.kind is not TargetKind.FUNCTION:
        preloaded.hide("torch", worker.import_changes)
        preloaded.hide("tqdm", variables="TQDM_")
    else:
        environment.apply(worker.import_changes)
    if rank_watch.SPARE in worker.env:
        rank_watch.begin()
    outcome = _run(job, fds, None)
    ending.leave(outcome.code, interrupted=outcome.interrupted, known_modules=known_modules)


def _title(job: Job) -> str:
    return f"{Path(sys.executable).name} {job.title}"


def _exec(file: str, argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(file, argv, env)
    except OSError as error:
        os.write(2, f"rally: cannot execute {file!r}: {error.strerror}\n".encode())
        # As in a shell: 126 for a file that cannot be executed, 127 for one that does not exist.
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _take_streams(fds: WorkerFds) -> None:
    for fd, place in ((fds.stdout, 1), (fds.stderr, 2)):
        os.dup2(fd, place)
    # An extra copy would keep a pipe open after the script closes it.
    for fd in {fds.stdout, fds.stderr} - {1, 2}:
        os.close(fd)


def _bind(cpus: list[int] | None) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def _default_signals() -> None:
    """Reset signals as in a new interpreter, which ignores SIGPIPE and SIGXFSZ and raises on SIGINT."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _own_state() -> None:
    """Renew random state and keys, as in a new process. (``random``, ``secrets`` and ``tempfile`` do so themselves.)"""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    sympy_random = sys.modules.get("sympy.core.random")
    for each in vars(sympy_random).values() if sympy_random is not None else ():
        if isinstance(each, random.Random):
            each.seed()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        # torch draws this seed on import, so all forks would share it. (A device's generator is
        # created on first use, in the worker.)
        torch.default_generator.seed()
    mp_process = sys.modules.get("multiprocessing.process")
    if mp_process is not None:
        mp_process.current_process().authkey = os.urandom(32)
    torch_private.begin_now()


def _watch_groups(fd: int) -> None:
    """Once there is a process group, report its collectives to the supervisor on request. Gloo's threads wait their turn, and no
    group ends before a model that uses it."""
    own_pid = os.getpid()

    def start() -> None:
        from . import collective_thread

        torch_private.hold_groups()
        if os.getpid() == own_pid:  # not in a child that the script has forked
            collective_thread.start(fd)

    torch_private.around_groups(start, scheduling.batch_threads)


def _fresh_main(job: Job) -> None:
    """``sys.argv``, ``sys.orig_argv`` and an empty ``__main__``. (:func:`python_command` has set ``sys.path``.)"""
    module = ["-m"] if job.kind is TargetKind.MODULE else []
    sys.argv = [*(module or [job.name]), *job.args]
    sys.orig_argv = [sys.executable, *module, job.name, *job.args]
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update({"__annotations__": {}, "__builtins__": sys.modules["builtins"]})
    sys.modules["__main__"] = main_module


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How the target ended. Does not hold the exception, whose frames would keep the script's objects alive."""

    code: int
    interrupted: bool = False


def _run(job: Job, fds: WorkerFds, call: Callable[[WorkerFds], None] | None) -> _Outcome:
    own_pid = os.getpid()
    if call is not None or not faulthandler.is_enabled():
        # Send the stack at a native fault to the report; stderr belongs to the script. (In a fork of
        # the caller, faulthandler may be enabled already, but writes to the caller's file.)
        faulthandler.enable(file=fds.line)
    _answer_what_is_handled(fds.line)
    stack_line.answer(fds.stacks)
    error = _caught(job, fds, call)
    told = os.getpid() == own_pid  # else a fork that the script made has returned here
    if call is None and job.kind is TargetKind.SCRIPT and not _is_container(Path(job.name)):
        ending.flush_quietly()  # output precedes the traceback
    if error is None:
        return _Outcome(0)
    ending.forget_us(error)
    if isinstance(error, SystemExit):
        code = ending.exit_code(error)
        if code != 0 and told:
            _tell(fds.line, error, code)
        return _Outcome(code)
    if told:
        _tell(fds.line, error, 1)
    return _Outcome(ending.show(error), interrupted=type(error) is KeyboardInterrupt)


def _caught(
    job: Job, fds: WorkerFds, call: Callable[[WorkerFds], None] | None
) -> BaseException | None:
    try:
        _execute(job, fds, call)
    except BaseException as error:  # noqa: BLE001  whatever a script raises ends it
        return error
    return None


def _execute(job: Job, fds: WorkerFds, call: Callable[[WorkerFds], None] | None) -> None:
    if call is not None:
        call(fds)
        return
    match job.kind:
        case TargetKind.SCRIPT:
            _run_script(job.name)
        case TargetKind.MODULE:
            torch_private.run_module_as_main(job.name)
        case TargetKind.FUNCTION:
            from . import payload

            payload.run(fds)
        case TargetKind.PROGRAM:
            raise AssertionError("programs are executed, not run")


# What Python calls a script that it reads from stdin.
_STDIN = "<stdin>"


def _run_script(name: str) -> None:
    path = Path(name)
    if _is_container(path):
        torch_private.run_module_as_main("__main__", alters_argv=False)
        return
    full = _STDIN if name == piped_script.AS_IN_PYTHON else _full_name(name)
    loader: importlib.machinery.SourcelessFileLoader | importlib.machinery.SourceFileLoader
    if name.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", full)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", full)
        code = _compiled(full)
    space = sys.modules["__main__"].__dict__
    space.update({"__file__": full, "__cached__": None, "__loader__": loader})
    if code is None:
        _run_file(full, space)
    else:
        exec(code, space)  # noqa: S102  runs the user's script


def _compiled(full: str) -> types.CodeType | None:
    with io.open_code(piped_script.PLACE if full == _STDIN else full) as file:
        source = file.read()
    try:
        return compile(source, full, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        if not Path(full).is_file():
            raise  # a pipe: it cannot be read twice
        return None


def _run_file(full: str, space: dict[str, Any]) -> None:
    """Let the interpreter read a script that does not compile, so that Python words the error itself.

    Messages for files differ from those of ``compile`` (invalid UTF-8, a null byte). None of the script's code has run yet.
    """
    import ctypes

    libc, run = ctypes.CDLL(None), ctypes.pythonapi.PyRun_FileExFlags
    libc.fopen.restype = ctypes.c_void_p
    stream, globals_ = ctypes.c_void_p, ctypes.py_object
    run.argtypes = [stream, ctypes.c_char_p, ctypes.c_int, globals_, globals_, ctypes.c_int, stream]
    run.restype = ctypes.py_object
    name = os.fsencode(full)
    file_input, close_it = 257, 1  # Py_file_input
    run(libc.fopen(name, b"rb"), name, file_input, space, space, close_it, None)


def _full_name(name: str) -> str:
    """An absolute path as ``python script.py`` builds it: joined, not normalised (_Py_abspath)."""
    return name if os.path.isabs(name) else f"{Path.cwd()}/{name}"


def _is_container(path: Path) -> bool:
    """Whether Python would run ``path`` as a folder or archive with a ``__main__.py``."""
    if path.is_dir():
        return True
    import zipfile

    return path.suffix != ".py" and path.is_file() and zipfile.is_zipfile(path)


def _tell(line: int, error: BaseException, code: int) -> None:
    """Send the exception to the supervisor as data: one line of JSON."""
    record = {"kind": "exception", **exceptions.describe(error, code)}
    if (loaded := sys.modules.get("rallypoint.launch.worker.collective_thread")) is not None:
        # This worker has process groups. It may have ended by the time the supervisor asks for its collectives.
        record["collectives"] = loaded.records_of(error)
    send_line(line, record)


def _answer_what_is_handled(line: int) -> None:
    """Report the exception being handled when the supervisor asks with a signal.

    The supervisor asks before it stops a worker, if the failed peers report only a lost peer. Python runs the handler
    between bytecodes of the main thread: a thread inside C code does not answer, and nobody waits for it.
    """
    own_pid = os.getpid()

    def answer(_number: int, _frame: types.FrameType | None) -> None:
        error = sys.exc_info()[1]
        if error is not None and os.getpid() == own_pid:
            send_line(line, {"kind": "handled", **exceptions.describe(error, 1)})

    signal.signal(ASK_SIGNAL, answer)


def send_line(line: int, record: dict[str, Any]) -> None:
    """Send one JSON record to the supervisor. Ignores a dead supervisor or a closed descriptor."""
    if not supervisor_line.leads_there(line):
        return
    data = memoryview(json.dumps(record).encode() + b"\n")
    try:
        while data:
            data = data[os.write(line, data) :]
    except OSError:
        pass
