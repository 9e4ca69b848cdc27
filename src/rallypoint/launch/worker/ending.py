"""How a Python process ends: what an uncaught exception prints, exit codes, and what happens on the way out.

The interpreter does this in C, for a script that it runs itself. A worker's script is run by us, so
it is done here again, in the same order and words (Python/pythonrun.c, Python/pylifecycle.c).

[Note: Exit]
A worker of the fork server leaves by ``os._exit`` after everything Python promises at exit: threads
joined, ``atexit`` functions called, the script's globals and modules dropped (so that ``__del__`` runs
and files are flushed), Python's and C's streams flushed. Left out are C's exit handlers and the C++
static destructors, which take longer in 8 forks of a process with torch (they touch, and so copy,
every page) than their training step. ``--start-method exec`` ends in the ordinary way.
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

from rallypoint.launch import torch_private


# Where our own frames come from.
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# What Python exits with when it cannot flush its streams.
CANNOT_FLUSH = 120
# How long files may take to flush that a daemon thread may be holding.
FLUSH_PATIENCE = 1.0


def without_us(tb: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without its first frames, which are this package's."""
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OURS):
        tb = tb.tb_next
    return tb


# -- an exception nobody caught -------------------------------------------------------------------
#
# These are called when the exception is no longer being handled: what a hook raises must not get
# "During handling of the above exception", which plain Python does not print there.


def exit_code(error: SystemExit) -> int:
    """The code of ``sys.exit(…)``; a text is printed, as the interpreter does."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    stream = getattr(sys, "stderr", None)
    if stream is None:
        stream = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace")
    try:
        print(error.code, file=stream, flush=True)
    except BaseException:  # noqa: BLE001, S110  a broken __str__ or stream changes nothing about the code
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
    second.__traceback__ = without_us(second.__traceback__)
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
    except BaseException:  # noqa: BLE001, S110  nowhere to say it
        pass


def _unraisable(error: BaseException, where: object) -> None:
    """Print "Exception ignored in: …", or call the hook that the script has set for this."""
    error.__traceback__ = without_us(error.__traceback__)
    hook: Any = getattr(sys, "unraisablehook", sys.__unraisablehook__)
    try:
        if hook is sys.__unraisablehook__:  # takes a type that only the interpreter can make
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
    except BaseException:  # noqa: BLE001, S110  there is nobody left to tell
        pass


# -- streams --------------------------------------------------------------------------------------


def flush_streams() -> bool:
    """Flush ``sys.stdout`` and ``sys.stderr``, whatever they are by now. False if it could not be done."""
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
    except BaseException:  # noqa: BLE001  as the interpreter takes it
        return False


def _flush_files() -> None:
    """Flush files that something still holds (a frame, a module that was here before the script).

    The interpreter would take down what holds them, and a file that is let go of flushes itself.
    """
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which asks the object, and so may run its code
        if issubclass(kind, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                if not thing.closed:
                    thing.flush()
            except BaseException:  # noqa: BLE001, S110  as its own end would pass it over
                pass


# -- leaving: see [Note: Exit] ----------------------------------------------------------------------


def leave(code: int, *, interrupted: bool, known_modules: Collection[str]) -> NoReturn:
    """End this fork as the interpreter ends a process.

    No caller may hold the script's exception any more: its frames hold the script's objects.

    Args:
        code: the exit code.
        interrupted: by an uncaught KeyboardInterrupt: the process then dies of SIGINT.
        known_modules: names of what was imported before the script ran.
    """
    _join_threads()
    try:
        torch_private.run_exit_functions()
    except BaseException as error:  # noqa: BLE001
        _unraisable(error, atexit)
    if not flush_streams():
        code = CANNOT_FLUSH
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
    # The script may have put streams of its own before the real ones.
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
    """Tells whether the globals of ``__main__``, a dict, still live: it lives as long as they do."""

    def __init__(self, space: dict[str, object]) -> None:
        self.space = space


def _drop_script(known_modules: Collection[str]) -> None:
    """Let go of ``__main__`` and of what it imported, so that ``__del__`` runs and files are flushed.

    What can no longer be reached then goes, all at once and with its globals still in place, as in
    the interpreter. Daemon threads, which it would have frozen, go on here, so they keep what they
    can reach.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    # The order in which a collector finds things is the order in which it will finalize them: found
    # from the module, a text file comes before its buffer. By age the buffer would be closed first,
    # and what the text file holds be lost. The interpreter, too, collects once before it lets go.
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
        # One of them may hold a file's lock for ever, so it is not this thread that waits for it.
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
    """Drop the values of a module that somebody holds, but not what their ``__del__`` may want to call."""
    tools = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
    for name, value in list(space.items()):
        if not name.startswith("__") and not issubclass(type(value), tools):
            space[name] = None
