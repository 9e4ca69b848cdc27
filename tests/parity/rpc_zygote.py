"""Runs tests of torch's RPC suite, each on processes forked from one that has imported torch and the suite.

Started by ``rpc_suite.py``. Reads a first line of JSON with what to run against, then one line per
batch; writes one line of JSON per test. Single-threaded, so that it may fork. A rank is forked,
never started afresh: importing torch and the suite takes seconds, four times per test.

A rank exits through its exit handlers and after its threads, as a program does, but is then gone:
tearing down the interpreter that it inherited would take a second and show nothing about the test.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn


Result = Literal["passed", "failed", "timeout", "skipped"]

_log = logging.getLogger(__name__)

_SUITE = "torch.testing._internal.distributed"
_FIXTURES = {"tensorpipe": "TensorPipeRpcAgentTestFixture", "faulty": "FaultyRpcAgentTestFixture"}
_INHERITED_BY = dict.fromkeys(
    ("RRefAPITest", "RRefTypingTest", "FutureTypingTest", "LocalRRefTest", "JitRpcOpTest"),
    "JitRpcTest",
)
"""Classes of methods that upstream never runs as tests of their own."""
_CLASSES = "rpc_suite_classes"
"""The module that the generated classes are in: some tests send their own instance by pickle."""

_BEAT = 0.03
_GRACE = 1.5
"""Seconds that the other ranks have to fail by themselves, once one has."""
_DUMP = 0.5
"""Seconds for writing down where the threads of a rank are, before it is killed."""


class UnavailableError(Exception):
    """There is nothing to test; its text says why in one sentence."""


def main() -> None:
    orders = sys.stdin
    results = os.dup(1)
    os.dup2(2, 1)  # what imports print is no result
    setup = json.loads(orders.readline())
    sys.argv = sys.argv[:1]  # torch's tests parse the command line when they are imported
    _die_with_parent(os.getppid())
    gc.disable()  # collections are a third of the time that imports take
    try:
        if setup["against"] == "rallypoint":
            _install_rallypoint()
        importlib.import_module("torch.testing._internal.common_distributed")
    except UnavailableError as error:
        _tell(results, {"unavailable": str(error)})
        return
    for part in setup["parts"]:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _die_with_parent(zygote)
            _serve_part(part, orders, results)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)  # it has said why


def _serve_part(part: Mapping[str, Any], orders: Iterator[str], results: int) -> None:
    """Run the tests of one agent, in a process of its own, until a batch is empty."""
    classes = _load(part["agent"], part["tests"])
    gc.collect()
    gc.freeze()  # no rank need look through or copy what is here now
    gc.enable()
    _settle()
    _tell(results, {"versions": _versions(), "threads": _num_threads()})
    for line in orders:
        batch = json.loads(line)
        if not batch:
            return
        _serve(batch, classes, results)
        _tell(results, {"end": True})


def _settle() -> None:
    """Do once what each rank would do alike: it changes nothing for the tests."""
    import torch

    torch.manual_seed(0)  # it quotes the lines that called it, read from their files the first time
    # What was imported is never torn down. A rank's own finalizers run.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


# --- what is tested ------------------------------------------------------------------------------


def _load(agent: str, tests: list[Mapping[str, str]]) -> dict[str, type | str]:
    """The class of each test's key, or what stood in its way."""
    module = types.ModuleType(_CLASSES)
    sys.modules[_CLASSES] = module
    loaded: dict[str, type | str] = {}
    made: dict[str, type | str] = {}
    for test in tests:
        cls = _INHERITED_BY.get(test["cls"], test["cls"])
        if cls not in made:
            try:
                made[cls] = new = _make_class(test["file"], cls, agent)
                setattr(module, new.__name__, new)
            except Exception as error:
                _log.exception("%s cannot be made", cls)
                made[cls] = f"{type(error).__name__}: {error}"
        loaded[test["key"]] = made[cls]
    return loaded


def _install_rallypoint() -> None:
    try:
        compat = importlib.import_module("rallypoint.compat")
        ours = importlib.import_module("rallypoint.rpc")
    except ImportError as error:
        raise UnavailableError(f"nothing to put in torch's place: {error}") from error
    if not hasattr(ours, "init_rpc"):
        raise UnavailableError("rallypoint.rpc has no init_rpc")
    before = importlib.import_module("torch.distributed.rpc").init_rpc
    compat.install()
    if importlib.import_module("torch.distributed.rpc").init_rpc is before:
        raise UnavailableError("rallypoint.compat.install() left torch.distributed.rpc as it was")


def _make_class(file: str, cls: str, agent: str) -> type:
    """The class with an agent's fixture mixed in, as upstream's ``generate_tests`` makes it."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    body = importlib.import_module(f"{_SUITE}.{file.removesuffix('.py').replace('/', '.')}")
    fixture = importlib.import_module(f"{_SUITE}.rpc.{agent}_rpc_agent_test_fixture")
    mixin = getattr(fixture, _FIXTURES[agent])
    bases = (getattr(body, cls), mixin, MultiProcessTestCase)
    return type(f"Run{cls}", bases, {"__module__": _CLASSES})


def _versions() -> dict[str, str]:
    import torch

    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if "rallypoint" in sys.modules:
        versions["rallypoint"] = sys.modules["rallypoint"].__version__
    return versions


# --- a batch -------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Rank:
    number: int
    pid: int
    connection: Any
    log: Path
    code: int | None = None
    """Exit code once it has ended; negative: the signal that ended it."""
    killed: bool = False
    error: str | None = None


@dataclass(eq=False, slots=True)
class _Running:
    key: str
    folder: Path
    started: float
    deadline: float
    timeout: float
    ranks: list[_Rank]
    why_skipped: str | None
    first: _Rank | None = None
    """The rank that was the first to fail."""
    dumped: bool = False
    timed_out: bool = False
    seen: set[int] = field(default_factory=set)


def _serve(batch: Mapping[str, Any], classes: Mapping[str, Any], results: int) -> None:
    waiting = list(reversed(batch["tests"]))
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < batch["jobs"]:
            test = waiting.pop()
            cls = classes[test["key"]]
            if isinstance(cls, str):
                _tell(results, _outcome(test["key"], "failed", error=cls))
                continue
            running.append(_start(test, cls, batch["timeout"], Path(batch["folder"]), results))
        time.sleep(_BEAT)
        for test in list(running):
            if _step(test, time.monotonic()):
                running.remove(test)
                _tell(results, _judge(test))
                for rank in test.ranks:
                    rank.connection.close()
                if not batch["keep"]:
                    shutil.rmtree(test.folder, ignore_errors=True)


def _start(
    test: Mapping[str, str], cls: type, timeout: float, folder: Path, results: int
) -> _Running:
    import torch.multiprocessing

    name = test["name"]
    place = folder / test["key"]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    meeting = place / "store"
    meeting.touch()  # upstream's is there, and empty, too
    now = time.monotonic()
    why = getattr(getattr(cls, name), "__unittest_skip_why__", None)
    running = _Running(test["key"], place, now, now + timeout, timeout, [], why)
    zygote = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in range(int(cls(name).world_size)):
        ours, theirs = torch.multiprocessing.Pipe()
        log = place / f"rank{number}.log"
        pid = os.fork()
        if pid == 0:
            _settle_in(zygote, log, place, results)
            _be_rank(cls, number, name, meeting, theirs)
        theirs.close()
        running.ranks.append(_Rank(number, pid, ours, log))
    return running


def _settle_in(zygote: int, log: Path, folder: Path, results: int) -> None:
    _die_with_parent(zygote)
    os.close(results)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the zygote decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


def _be_rank(cls: Any, number: int, name: str, meeting: Path, connection: Any) -> NoReturn:
    code: Any = 0
    try:
        cls._run(number, name, str(meeting), connection)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        gc.collect()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _step(test: _Running, now: float) -> bool:
    """Note what has happened; True once no rank is left."""
    for rank in test.ranks:
        _listen(rank)
        if rank.code is None:
            _reap(rank, os.WNOHANG)
        if rank.code is not None and rank.number not in test.seen:
            test.seen.add(rank.number)
            _listen(rank)  # what it sent last
            if rank.code == _error_code() and test.first is None:
                test.first = rank
                test.deadline = min(test.deadline, now + _GRACE)
    left = [rank for rank in test.ranks if rank.code is None]
    if left and now >= test.deadline:
        if test.first is None and not test.dumped:
            test.timed_out = test.dumped = True
            test.deadline = now + _DUMP
            for rank in left:
                os.kill(rank.pid, signal.SIGUSR1)  # not reaped: the pid is still its own
            return False
        for rank in left:
            os.kill(rank.pid, signal.SIGKILL)
            rank.killed = True
            _reap(rank, 0)
            _listen(rank)
        left = []
    return not left


def _reap(rank: _Rank, flags: int) -> None:
    pid, status = os.waitpid(rank.pid, flags)
    if pid:
        rank.code = os.waitstatus_to_exitcode(status)


def _listen(rank: _Rank) -> None:
    """Take the traceback that a failing rank sends before it ends; it waits if no one reads."""
    try:
        while rank.connection.poll():
            message = rank.connection.recv()
            if isinstance(message, str) and rank.error is None:
                rank.error = message
    except (EOFError, OSError):
        return


# --- verdicts ------------------------------------------------------------------------------------


def _judge(test: _Running) -> dict[str, Any]:
    """As upstream: an error anywhere fails the test; otherwise rank 0's exit code decides."""
    seconds = time.monotonic() - test.started
    codes = [None if rank.killed else rank.code for rank in test.ranks]
    told = [f"rank {rank.number}:\n{rank.error}" for rank in test.ranks if rank.error]
    result: Result
    error: str | None = None
    if test.first is not None:
        result = "failed"
        error = f"rank {test.first.number}: {first_line(test.first.error or 'no traceback came')}"
    elif test.timed_out:
        result = "timeout"
        error = f"no end after {test.timeout:g} s; " + "; ".join(_whereabouts(test.ranks))
        told = [rank.log.read_text(errors="replace") for rank in test.ranks if rank.killed]
    elif (reason := _skip_reason(test.ranks[0].code)) is not None:
        result, error = "skipped", test.why_skipped or reason
    elif test.ranks[0].code != 0:
        result, error = "failed", f"rank 0 ended with {_ending(test.ranks[0].code)}"
        told = [test.ranks[0].log.read_text(errors="replace")]
    else:
        result = "passed"
    return _outcome(
        test.key, result, seconds=seconds, error=error, codes=codes, details="\n".join(told)
    )


def _outcome(
    key: str,
    result: Result,
    *,
    seconds: float = 0.0,
    error: str | None = None,
    codes: list[int | None] | None = None,
    details: str = "",
) -> dict[str, Any]:
    return {
        "key": key,
        "result": result,
        "seconds": round(seconds, 2),
        "error": error,
        "exit_codes": codes or [],
        "details": details,
    }


_CHAINED: Final = re.compile(
    r"\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n"
)


def first_line(trace: str) -> str:
    """The line of a formatted traceback that names the exception; the last one of a chain."""
    lines = _CHAINED.split(trace)[-1].splitlines()
    stack = iter(lines)
    for line in stack:
        if line.startswith("Traceback"):
            break
    named = (line.strip() for line in stack if line.strip() and not line.startswith(" "))
    return next(named, trace.strip().partition("\n")[0])[:300]


def _whereabouts(ranks: list[_Rank]) -> Iterator[str]:
    for rank in ranks:
        if rank.killed:
            yield f"rank {rank.number} {main_thread_place(rank.log.read_text(errors='replace'))}"


def main_thread_place(dump: str) -> str:
    """Where the main thread is, by faulthandler's report, which has it last; waits are passed over."""
    _, _, last = dump.rpartition("(most recent call first):\n")
    frames = re.findall(r'^  File "(.+)", line (\d+) in (\S+)', last, re.MULTILINE)
    for path, line, function in frames:
        if not path.endswith(("/threading.py", "/socket.py", "/selectors.py")):
            return f"in {function} ({Path(path).name}:{line})"
    return "somewhere unknown"


def _skip_reason(code: int | None) -> str | None:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), None)


def _error_code() -> int:
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    return MultiProcessTestCase.TEST_ERROR_EXIT_CODE


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


# --- this process --------------------------------------------------------------------------------


def _tell(results: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(results, data) :]


def _die_with_parent(parent: int) -> None:
    """No process outlives the one that started it, however that one ends. Linux; nothing elsewhere."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


if __name__ == "__main__":
    main()
