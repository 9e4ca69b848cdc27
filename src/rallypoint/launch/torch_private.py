"""Every private name of torch and Python that this package uses, and what for.

Nothing else in ``launch`` uses one, which ``tests/test_architecture.py`` enforces. ``tests/unit/test_torch_private.py``
checks each name and its signature in the installed torch and Python.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from traceback import TracebackException
from types import FrameType
from typing import Any

from rallypoint._core import ddp_groups, env


# The text of another process's exception, as concurrent.futures attaches it; multiprocessing's class is public.
REMOTE_TRACEBACKS = frozenset(
    {"multiprocessing.pool.RemoteTraceback", "concurrent.futures.process._RemoteTraceback"}
)


# Parts of torch that are expensive to import, and that torch imports late or a script imports itself.
LEARNABLE = (
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch.distributed._composable",
    "torch.distributed.algorithms",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
)


# -- what a rank's collectives are ---------------------------------------------------------------------------


def around_groups(
    at_first: Callable[[], None], around: Callable[[], AbstractContextManager[None]]
) -> None:
    """Have this process create its process groups in a context, and call a function before the first one.

    Each default group that follows another one gets keys of its own in the store. Does nothing if torch is not imported yet.

    Args:
        at_first: called once, right before the first group is created.
        around: makes the context, in which a group's threads start.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    create = getattr(c10d, "_new_process_group_helper", None)
    if create is None:
        return
    waiting = [at_first]
    has_formed = _separate_keys(c10d)

    @functools.wraps(create)
    def create_in_context(*args: Any, **more: Any) -> Any:
        if waiting:
            waiting.pop()()
        with around():
            created = create(*args, **more)
        has_formed()
        return created

    c10d._new_process_group_helper = create_in_context


def _separate_keys(c10d: Any) -> Callable[[], None]:
    """Have each default group of this process use other keys in the job's store than the ones before it.

    torch gives all of them the same keys, as if each had a store to itself: a rank would find the address that another one had
    in the group before.

    Returns:
        To be called whenever a group has formed. (If some ranks' attempt fails, all use the same keys again.)
    """
    module: Any = sys.modules.get("torch.distributed.rendezvous")
    connect = getattr(module, "_create_c10d_store", None)
    if connect is None:
        return lambda: None
    groups: Counter[tuple[str, int, int]] = Counter()
    meeting: list[tuple[str, int, int]] = []

    @functools.wraps(connect)
    def connect_with_prefix(
        hostname: str, port: int, rank: int, world_size: int, *args: Any, **more: Any
    ) -> Any:
        store = connect(hostname, port, rank, world_size, *args, **more)
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return store  # rank 0 serves one for this group
        place = hostname, port, world_size
        meeting[:] = [place]
        count = groups[place]
        return c10d.PrefixStore(f"group_{count}", store) if count else store

    def has_formed() -> None:
        groups.update(meeting)
        meeting.clear()

    module._create_c10d_store = connect_with_prefix
    return has_formed


def hold_groups() -> None:
    """Have all DistributedDataParallel modules that are made from now on end before their groups do."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    kind: Any = getattr(module, "DistributedDataParallel", None)
    initialize = getattr(kind, "_ddp_init_helper", None)
    if initialize is None:
        return

    @functools.wraps(initialize)
    def initialize_and_hold(self: Any, *args: Any, **more: Any) -> None:
        initialize(self, *args, **more)
        ddp_groups.hold(self)

    kind._ddp_init_helper = initialize_and_hold


def begin_flight_recorder(calls: int) -> None:
    """Have the recorder of all backends but NCCL keep the last ``calls`` calls, unless the user has set a number. The
    recorder reads the variable when it is first used, so call this before that."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    module: Any = sys.modules["torch"]._C._distributed_c10d
    if any(env.get(each) is not None for each in names):
        return
    # Another torch may record in another way: then its own number stays.
    with env.overlay({names[0]: str(calls)}), contextlib.suppress(Exception):
        module._dump_fr_trace_json(includeCollectives=False)


def flight_records(*, calls: bool) -> list[bytes]:
    """What torch's flight recorders hold, as JSON: one for all backends but NCCL, and NCCL's own if torch has it.

    Args:
        calls: include the calls; otherwise only what each group has begun and completed.
    """
    module: Any = sys.modules["torch"]._C._distributed_c10d
    dumps = [
        getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    ]
    return [dump(includeCollectives=calls, onlyActive=False) for dump in dumps if dump is not None]


def profile(path: str, seconds: float) -> bool:
    """Record all threads of this process with torch's profiler, and write a Chrome trace. Blocks for the given time.

    A profiler that the script starts meanwhile has priority: the recording ends early, and the script waits until it is written.

    Args:
        path: the file; gzipped if its name ends with ``.gz``.
        seconds: how long.
    Returns:
        Whether the recording ran for the whole time.
    Raises:
        RuntimeError: the script itself is using the profiler.
    """
    torch: Any = sys.modules["torch"]
    profiler: Any = sys.modules["torch.profiler"]
    inner: Any = sys.modules["torch.autograd.profiler"].profile
    own, ended, done = threading.get_ident(), threading.Event(), threading.Event()
    prepare = inner._prepare_trace

    @functools.wraps(prepare)
    def first(self: Any) -> Any:
        if threading.get_ident() != own:
            ended.set()
            done.wait()
        return prepare(self)

    inner._prepare_trace = first
    try:
        # torch has one profiler per process, and goes wrong if a second one starts.
        every = (each for each in gc.get_objects() if type(each) is inner)
        if any(each.entered and each.kineto_results is None for each in every):
            raise RuntimeError("the script itself uses torch's profiler")
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        recording = profiler.profile(experimental_config=threads)
        recording.start()
        try:
            is_whole = not ended.wait(seconds)
        finally:
            recording.stop()
        recording.export_chrome_trace(path)
        return is_whole
    finally:
        if inner._prepare_trace is first:
            inner._prepare_trace = prepare
        done.set()


def start_thread(call: Callable[..., None], *args: Any) -> None:
    """Start a thread that ``threading`` does not know, so that neither a script nor the interpreter's shutdown waits for it."""
    import _thread

    _thread.start_new_thread(call, args)


def frame_of_main_thread() -> FrameType | None:
    """What the main thread runs."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def group_ranks() -> dict[str, list[int]]:
    """By the name of each process group of this process: the global ranks of its members, in order."""
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    ranks = world.pg_group_ranks
    return {
        name: sorted(ranks[group], key=ranks[group].__getitem__)
        for group, name in list(world.pg_names.items())
        if group in ranks
    }


def process_groups() -> list[Any]:
    """The process groups of this process that were not destroyed, and those that DDP modules hold."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return []
    groups = list(c10d._world.pg_map)
    ddp: Any = sys.modules.get("torch.nn.parallel.distributed")
    if ddp is not None:
        kinds = [ddp.DistributedDataParallel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        # Objects refer to their class. What a fork server has imported is frozen and thus skipped, so this takes a millisecond.
        held = (each for kind in kinds for each in gc.get_referrers(kind) if type(each) is kind)
        groups += (each.__dict__.get("process_group") for each in held)
    return groups


# -- a process that serves a store, and does nothing else ------------------------------------------------------


def store_class() -> Any:
    """c10d's ``TCPStore``, for a process that has not imported torch: only torch's libraries are loaded.

    That takes a quarter of the time and half the memory of ``import torch``, but leaves a torch that is of no other
    use. Call it once, in a process that serves only a store.

    Raises:
        Exception: this torch needs more than its libraries; ``import torch`` in another process.
    """
    spec = importlib.util.find_spec("torch")
    folders = spec and spec.submodule_search_locations
    if not folders or not importlib.machinery.PathFinder.find_spec("torch._C", folders):
        # Not a torch that we know: import it as usual, or raise the error that says what is wrong.
        return importlib.import_module("torch.distributed").TCPStore
    torch: Any = types.ModuleType("torch")
    torch.__path__ = folders
    # The libraries register their classes below the second module.
    torch.distributed = types.ModuleType("torch.distributed")
    sys.modules.update({"torch": torch, "torch.distributed": torch.distributed})
    importlib.import_module("torch._C")._c10d_init()
    return importlib.import_module("torch._C._distributed_c10d").TCPStore


# -- starting like a fresh interpreter ------------------------------------------------------------------------


def interpreter_flags() -> list[str]:
    """The command-line flags that give a new interpreter the settings of this one; multiprocessing uses them, too."""
    import subprocess

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def run_module_as_main(name: str, *, alters_argv: bool = True) -> None:
    """Run a module as ``python -m NAME`` does, or a folder with ``__main__.py`` as ``python FOLDER`` does.

    Args:
        name: the module's name; ``__main__`` for a folder.
        alters_argv: whether ``sys.argv[0]`` becomes the module's path.
    """
    import runpy

    runpy._run_module_as_main(name, alters_argv)  # type: ignore[attr-defined]


def read_log_settings() -> None:
    """Have torch read ``TORCH_LOGS`` and its kin again: it did so on import, before the worker had its variables."""
    torch: Any = sys.modules["torch"]
    # Nothing has been written yet. A new handler uses the folder that TORCH_TRACE names now.
    torch._logging._internal.LOG_TRACE_HANDLER = None
    torch._logging._internal._init_logs()


def set_original_folder() -> None:
    """Tell multiprocessing that this program was started in the current folder: spawned children look for modules there."""
    from multiprocessing import process

    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def read_jit_setting() -> None:
    """Have torch read ``PYTORCH_JIT`` again.

    Raises:
        ValueError: torch does not know the value; as on import.
    """
    torch: Any = sys.modules["torch"]
    torch.jit._state._enabled.__init__()


# -- ending like a fresh interpreter --------------------------------------------------------------------------


def join_threads() -> None:
    """Wait for all threads that are not daemons: the first thing that ``Py_FinalizeEx`` calls."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Call what is registered with ``atexit``."""
    import atexit

    atexit._run_exitfuncs()


def keep_operators_at_exit() -> None:
    """Keep torch from removing the operators that are registered now, one by one, when a fork of this process exits.

    The removal takes 134 calls, which touch memory that forks share: a tenth of a second for eight workers. It only
    keeps Python functions from being called while an interpreter shuts down, and a worker's never does.
    """
    library: Any = sys.modules.get("torch.library")
    release = getattr(library, "_del_library", None)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = each.peek()
        if release is not None and alive is not None and alive[1] is release:
            each.atexit = False


def end_multiprocessing() -> None:
    """End what multiprocessing has started in this process, as its own forks do."""
    from multiprocessing import util

    util._exit_function()  # type: ignore[attr-defined]


def forget_children() -> None:
    """Have multiprocessing forget the children of the process that this one is a fork of, as in its own forks."""
    module: Any = sys.modules.get("multiprocessing.process")
    if module is not None:
        module._children.clear()


# -- a fork of a process that has lived for a while --------------------------------------------------------------


def begin_now() -> None:
    """Make ``%(relativeCreated)d`` of log lines and the main thread's id those of a process that has just started."""
    import logging
    import threading

    created = logging.makeLogRecord({}).created
    scale = 1 if isinstance(logging._startTime, float) else 10**9  # type: ignore[attr-defined]  # ns since 3.13
    logging._startTime = type(logging._startTime)(created * scale)  # type: ignore[attr-defined]
    # CPython 3.11 and 3.12 do not renew this id after a fork (bpo-40089 renews the rest).
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]


# -- exceptions ----------------------------------------------------------------------------------------------------


def cut_message(found: TracebackException, length: int) -> None:
    """Cut the message and the notes that a traceback ends with."""
    text = getattr(found, "_str", None)
    if isinstance(text, str) and len(text) > length:
        found._str = text[:length] + "…"  # type: ignore[attr-defined]
    notes = found.__notes__
    told = "\n".join(map(str, notes)) if isinstance(notes, list) else ""
    if len(told) > length:
        found.__notes__ = [told[:length] + "…"]
