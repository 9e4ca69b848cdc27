"""The process that ``supervisors.py`` forks supervisors from. Run as a program: ``LINE IMPORT…``.

It reads orders from the descriptor LINE, forks, and answers with pids.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from huge_pages import use_huge_pages
from rallypoint._core import collector, process, supervisor_line
from rallypoint.launch import torch_private
from rallypoint.launch.worker import bootstrap, ending, preloaded


CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
# Programs started before it is worth half a second to make forks cheaper.
_FEW = 5
# What every fork server or its workers, and every supervisor, would import on its own.
_FORK_SERVERS = (
    "rallypoint.launch.server.forkserver",
    "rallypoint.launch.worker.collective_thread",
)
_SUPERVISORS = (
    "rallypoint.launch.cli",
    "rallypoint.launch.run_command",
    "rallypoint.launch.supervisor",
    "rallypoint.launch.command_line.settings",
    "rallypoint.launch.coordination.coordinator",
    # Where several nodes meet, each supervisor would import these.
    "rallypoint.launch.coordination.peers",
    "rallypoint.rendezvous.backends.tcp_home",
    "rallypoint.control.slowness.slow_words",
    *(f"rallypoint.rendezvous.backends.{each}" for each in ("tcp", "etcd", "file", "memory")),
)
# torch's, for TORCH_CPP_LOG_LEVEL.
_LOG_LEVELS = ("INFO", "WARNING", "ERROR", "FATAL")
# Loaded for fork servers only: what a supervisor does to its own modules does not affect these.
_servers_modules: dict[str, types.ModuleType] = {}
# What an interpreter has in sys.path besides its first entry, which depends on how it was started.
_installed: list[str] = []


def main() -> NoReturn:
    del sys.modules["huge_pages"]  # programs might see it
    line = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # collections are a third of the time that these imports take
    for name in (*_FORK_SERVERS, *sys.argv[2:-1]):
        # Tests/stub has less than torch has. What asks to be called in workers asks again when a script imports it.
        with contextlib.suppress(ImportError), supervisor_line.nothing_awaited():
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rallypoint"]:
        _servers_modules[name] = sys.modules.pop(name)
    for name in _SUPERVISORS:
        importlib.import_module(name)
    os.environ.pop("ROOM", None)
    torch_private.keep_operators_at_exit()
    if "torch._dynamo" in sys.modules:
        # As a worker's first process group does: it would free, object by object, what imports have put there.
        sys.modules["torch._dynamo"].trace_rules.clear_lru_cache()
    gc.freeze()  # what torch leaves as garbage is not worth a quarter of a second
    collector.settle()
    gc.enable()
    for count in itertools.count():
        if count == _FEW:
            use_huge_pages()
        message, received, _, _ = socket.recv_fds(line, 1, 16)
        if not message:
            os._exit(0)
        order_fd, *fds = received
        with open(order_fd, "rb") as file:
            file.seek(0)
            order = json.load(file)
        pid = os.fork()
        if not pid:
            middle = os.getpid()
            pid = os.fork()  # its parent exits, so the subreaper adopts it
            if pid:
                line.send(str(pid).encode())
                os._exit(0)
            line.close()
            while os.getppid() == middle:  # a program may ask for its parent at once
                time.sleep(0.0005)
            _become(order, fds)
        for fd in fds:
            os.close(fd)
        os.waitpid(pid, 0)
        line.send(b".")


def _become(order: dict[str, Any], fds: list[int]) -> NoReturn:
    numbers = [0, 1, 2, *order.get("pass_fds", [])]
    _place(fds, numbers)
    if order["net"]:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(order["net"]) as file:
            assert libc.setns(file.fileno(), CLONE_NEWNET) == 0, "CLONE_NEWNET"
        assert libc.unshare(CLONE_NEWUTS) == 0, "CLONE_NEWUTS"
        socket.sethostname(order["host"])
    if order["new_session"]:
        os.setsid()
    os.chdir(order["cwd"])
    sys.path[1:1] = order["path"]
    _installed[:] = sys.path[1:]
    if order["run"] == "fork server":
        _become_fork_server(order["name"], order["env"], order["pass_fds"])
    _take_environment(order["env"])
    process.set_title(" ".join(order["command"]))
    sys.orig_argv = order["command"]
    if order["fork_server"] == "forked":
        subprocess.Popen = _Popen  # type: ignore[misc]
        if "torch.distributed.run" in sys.modules:
            _have_servers_modules()  # torch has loaded its plug-ins from these
    known_modules = frozenset(sys.modules)
    # At the end, this module is emptied, and all modules that only it refers to would be destroyed one by one.
    _outlive = tuple(globals().values())
    code, interrupted = 0, False
    try:
        _run(order["run"], order["name"], order["words"])
    except SystemExit as error:
        code = ending.exit_code(error)
    except BaseException as error:
        error.__traceback__ = _without_us(error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
        code = ending.show(error)
    # Does everything that an interpreter does at exit, except taking torch apart.
    ending.leave(code, interrupted=interrupted, known_modules=known_modules)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Put these descriptors at these numbers, and close all others."""
    above = max(*fds, *numbers) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    for first, last in itertools.pairwise([*sorted(numbers), max(copies) + 1]):
        os.closerange(first + 1, last)


def _run(what: str, name: str, words: list[str]) -> None:
    """Run what the command line asks for, as Python does."""
    if what == "module":
        sys.path[0] = os.getcwd()
        sys.argv = [name, *words]
        if name != "rallypoint":
            _be_fresh()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    _be_fresh()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if what == "code":
        sys.path[0], sys.argv = "", ["-c", *words]
        exec(compile(name, "<string>", "exec"), vars(main))
        return
    if what == "stdin":
        sys.path[0], sys.argv = "", ["-", *words]
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), vars(main))
        return
    sys.path[0], sys.argv = os.path.dirname(os.path.realpath(name)), [name, *words]
    main.__file__ = name
    with open(name, "rb") as file:
        code = compile(file.read(), name, "exec")
    exec(code, vars(main))


def _be_fresh() -> None:
    bootstrap._own_state()
    preloaded.hide("torch")


def _without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>"}:
        tb = tb.tb_next
    return tb


def _take_environment(env: dict[str, str]) -> None:
    """Replace the environment by these variables, and show them in /proc."""
    os.environ.clear()
    os.environ.update(env)
    if hasattr(sys.modules.get("torch"), "_C"):  # tests/stub has none
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
        level.value = _LOG_LEVELS.index(env.get("TORCH_CPP_LOG_LEVEL", "WARNING"))
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    assert len(text) <= end - start, "more than supervisors.ENVIRONMENT_ROOM"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks where a fork server would be started; starts everything else."""

    def __new__(cls, words: Sequence[str], **options: Any) -> Any:
        if not isinstance(words, list) or not any(
            "forkserver import main" in word for word in words
        ):
            return super().__new__(cls)
        code = words.index("-c")
        if words[1:code] != subprocess._args_from_interpreter_flags():  # type: ignore[attr-defined]
            return super().__new__(cls)
        assert options["start_new_session"]  # a fork of the zygote does the same
        pid = os.fork()
        if pid == 0:
            _become_fork_server(words[code + 1], options["env"], options["pass_fds"])
        return types.SimpleNamespace(pid=pid, returncode=None)


def _become_fork_server(code: str, env: dict[str, str], fds: Sequence[int]) -> NoReturn:
    try:  # an error must not return into the code of the supervisor that forked
        _forget_parent(fds)
        _have_servers_modules()
        torch_private.keep_operators_at_exit = (
            _do_nothing  # done; it would look at each of them again
        )
        subprocess.Popen = _Popen.__base__  # type: ignore[misc]
        before = dict(os.environ)
        _take_environment(env)
        if hasattr(sys.modules.get("torch"), "set_num_threads"):  # tests/stub has none
            # As if torch were imported now. Workers find one thread each, if the supervisor says so.
            preloaded._catch_up(sys.modules["torch"], before, env)
        # In a notebook these are other objects.
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        sys.argv = ["-c"]
        sys.path[:] = ["", *_installed]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(module))
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _do_nothing() -> None:
    pass


def _forget_parent(fds: Sequence[int] = ()) -> None:
    """Reset what executing another program would reset, and keep only these descriptors."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    os.setsid()
    kept = sorted({0, 1, 2, *fds})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)


def _have_servers_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rallypoint"]:
        del sys.modules[name]
    sys.modules.update(_servers_modules)


if __name__ == "__main__":
    main()
