"""How a Python process ends: output for uncaught exceptions, exit codes, and finalization.

The interpreter does this in C, for a script that it runs itself. We run a worker's script, so we
repeat it here, in the same order and words (Python/pythonrun.c, Python/pylifecycle.c).

[Note: Exit]
A worker of the fork server exits by ``os._exit``, after everything Python promises at exit: threads
joined, ``atexit`` functions called, the script's globals and modules dropped (so that ``__del__`` runs
and files are flushed), Python's and C's streams flushed. C's exit handlers and C++ static destructors
do not run: with torch, in 8 forks, they take longer than a training step, because they touch, and so
copy, every page. With ``--start-method exec`` workers exit normally.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Collection
from typing import Any, NoReturn

from rallypoint._core import raised
from rallypoint.launch import torch_private


# The folder of our own frames.
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Python's exit code if it cannot flush its streams.
CANNOT_FLUSH = 120
# Seconds to flush files whose locks a daemon thread may hold.
FLUSH_PATIENCE = 1.0
# What this process must not drop before it exits.
_outlives: list[object] = []


def without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without its leading frames from this package."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OURS):
        tb = tb.tb_next
    return tb


def forget_us(error: BaseException) -> None:
    """Remove this package's leading frames from an exception's traceback."""
    raised.set_traceback(error, without_us(error.__traceback__))


# -- an uncaught exception -------------------------------------------------------------------
#
# Call these when the exception is no longer being handled. Otherwise an error in a hook would print
# "During handling of the above exception", which plain Python does not.


def exit_code(error: SystemExit) -> int:
    """The code of ``sys.exit(…)``; a text is printed, as by the interpreter."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    stream = getattr(sys, "stderr", None)
    if stream is None:
        stream = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace")
    try:
        print(error.code, file=stream, flush=True)
    except BaseException:  # noqa: BLE001, S110  a broken __str__ or stream does not change the code
        pass
    return 1


def show(error: BaseException) -> int:
    """Call ``sys.excepthook`` as the interpreter does. Returns the exit code."""
    tb = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _say("sys.excepthook is missing\n")
        hook = sys.__excepthook__
    second = _call_hook(hook, error)
    if second is None:
        return 1
    forget_us(second)
    if isinstance(second, SystemExit):
        return exit_code(second)
    _say("Error in sys.excepthook:\n")
    sys.__excepthook__(type(second), second, second.__traceback__)
    _say("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, tb)
    return 1


def _call_hook(hook: object, error: BaseException) -> BaseException | None:
    try:
        hook(type(error), error, error.__traceback__)  # type: ignore[operator]  # whatever the script put there
    except BaseException as second:  # noqa: BLE001  a user's hook may do anything
        return second
    return None


def _say(text: str) -> None:
    try:
        sys.stderr.write(text)
    except BaseException:  # noqa: BLE001, S110  nowhere to write to
        pass


def _unraisable(error: BaseException, where: object) -> None:
    """Print "Exception ignored in: …", or call the hook that the script has set for this."""
    forget_us(error)
    hook: Any = getattr(sys, "unraisablehook", sys.__unraisablehook__)
    try:
        if hook is sys.__unraisablehook__:  # needs a type that only the interpreter can create
            sys.stderr.write(f"Exception ignored in: {where!r}\n")
            traceback.print_exception(error, chain=False)
            return
        hook(
            types.SimpleNamespace(
                exc_type=type(error),
                exc_value=error,
                exc_traceback=error.__traceback__,
                err_msg=None,
                object=where,
            )
        )
    except BaseException:  # noqa: BLE001, S110  nowhere to report it
        pass


# -- streams --------------------------------------------------------------------------------------


def flush_streams() -> bool:
    """Flush the current ``sys.stdout`` and ``sys.stderr``. False if one could not be flushed."""
    done = True
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        if stream is None or _is_closed(stream):
            continue
        try:
            stream.flush()
        except BaseException as error:  # noqa: BLE001  a stream of the script's own may raise anything
            done = False
            if name == "stdout":
                _unraisable(error, stream)
    return done


def flush_quietly() -> None:
    """Flush both streams between the end of a script and its traceback."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except BaseException:  # noqa: BLE001, S110  it fails again at exit, and is reported there
            pass


def _is_closed(stream: object) -> bool:
    try:
        return bool(getattr(stream, "closed", False))
    except BaseException:  # noqa: BLE001  as in the interpreter
        return False


def _flush_files() -> None:
    """Flush files that are still referenced (by a frame, or a module imported before the script).

    The interpreter would destroy what refers to them, and files flush themselves when destroyed.
    """
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which may run the object's code
        if issubclass(kind, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                if not thing.closed:
                    thing.flush()
            except BaseException:  # noqa: BLE001, S110  its finalizer would ignore this too
                pass


# -- leaving: see [Note: Exit] ----------------------------------------------------------------------


def leave(code: int, *, interrupted: bool, known_modules: Collection[str]) -> NoReturn:
    """End this fork as the interpreter ends a process.

    Callers must not hold the script's exception: its frames keep the script's objects alive.

    Args:
        code: the exit code.
        interrupted: whether an uncaught KeyboardInterrupt ended it; the process then dies of SIGINT.
        known_modules: names of the modules imported before the script ran.
    """
    _join_threads()
    try:
        torch_private.run_exit_functions()
    except BaseException as error:  # noqa: BLE001
        _unraisable(error, atexit)
    if not flush_streams():
        code = CANNOT_FLUSH
    # If DDP's reducer is the last owner of a group, torch ends the group's threads while it holds the GIL, which one of them
    # may be waiting for. So groups outlive the script.
    _outlives.extend(torch_private.process_groups())
    _drop_script(known_modules)
    _end(code, interrupted=interrupted)


def leave_in_caller(code: int, *, interrupted: bool) -> NoReturn:
    """End a fork of a caller's own program: its exit handlers and its globals are the caller's."""
    from multiprocessing import util

    _join_threads()
    try:
        torch_private.end_multiprocessing()
    except BaseException as error:  # noqa: BLE001
        _unraisable(error, util)
    if not flush_streams():
        code = CANNOT_FLUSH
    _end(code, interrupted=interrupted)


def _join_threads() -> None:
    try:
        torch_private.join_threads()
    except BaseException as error:  # noqa: BLE001  a second Ctrl-C while it waits
        _unraisable(error, threading)


def _end(code: int, *, interrupted: bool) -> NoReturn:
    # The script may have replaced sys.stdout and sys.stderr.
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001, S110
            pass
    ctypes.CDLL(None).fflush(None)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


class _Canary:
    """Lives as long as a module's globals, whose dict cannot be weakly referenced."""

    def __init__(self, space: dict[str, object]) -> None:
        self.space = space


def _drop_script(known_modules: Collection[str]) -> None:
    """Drop ``__main__`` and what it imported, so that ``__del__`` runs and files are flushed.

    Unreachable objects are collected all at once, with their globals still in place, as in the
    interpreter. The interpreter would freeze daemon threads; here they continue, so they keep what they can reach.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    # The collector finalizes objects in the order in which it finds them. In order of age, a file's buffer
    # would be closed before the text file, whose data would be lost; reached from the module, the text
    # file comes first. The interpreter, too, collects once before it drops modules.
    gc.collect()
    daemons = threading.active_count() > 1
    names = [] if daemons else [name for name in sys.modules if name not in known_modules]
    canaries = []
    for name in dict.fromkeys(["__main__", *names]):
        module = sys.modules.pop(name, None)
        if isinstance(module, types.ModuleType):
            canary = _Canary(module.__dict__)
            canaries.append(weakref.ref(canary))
            module.__dict__["__rally_canary__"] = canary
            del canary
        del module
    gc.collect()
    if daemons:
        # A daemon may hold a file's lock forever, so another thread waits for it.
        helper = threading.Thread(target=_flush_files, daemon=True)
        helper.start()
        helper.join(FLUSH_PATIENCE)
        return
    for reference in reversed(canaries):
        survivor = reference()
        if survivor is not None:
            _empty(survivor.space)
            del survivor
    gc.collect()
    _flush_files()


def _empty(space: dict[str, object]) -> None:
    """Drop the values of a module that is still referenced, but keep what their ``__del__`` may call."""
    tools = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
    for name, value in list(space.items()):
        if not name.startswith("__") and not issubclass(type(value), tools):
            space[name] = None
