"""A script cannot tell a worker from ``python script.py``.

Every probe is a script. It runs under plain ``python``, under ``rally run`` with the fork server and
with ``--start-method exec``, and what it prints, its tracebacks and its exit code must be the same.

Most probes do not use torch. They run with an empty module of that name in its place, and their
supervisor is a fork of one that has been imported: a worker's whole path is the real one, and only
seconds of importing are saved. What torch itself reads or holds is probed with the real torch,
many facts in one run.

What stays different, and is therefore not compared (docs/failure-modes.md):

- ``RALLY_*``, ``RANK`` and torchrun's other variables are set; stderr is a pipe (on a terminal:
  a pseudo-terminal), so its lines may come later than stdout's.
- The outermost frames of the stack are ours: seen by ``inspect.stack()``, by a warning whose
  ``stacklevel`` leads out of the script (plain: ``sys:1``), by recursion (some 15 levels fewer).
- ``faulthandler.is_enabled()`` is true: the report shows where Python stood at a native fault.
- With the fork server: numpy and all else that torch imports is in ``sys.modules`` before the script imports it,
  and torch's warning filters and ``atexit`` functions (multiprocessing's) are older than the script's.
- A worker has no controlling terminal (``/dev/tty``), under torchrun neither.
- ``__del__`` of objects that a daemon thread can reach is not called.
"""

from __future__ import annotations

import json
import os
import pty
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import supervisors
import terminals
from stub_torch import STUB


pytestmark = pytest.mark.integration

PYTHON = "python"
LAUNCHERS = ("forkserver", "exec")
REAL = ("torch", "torch.distributed", "torch.utils.data")
TIMEOUT = 240  # the slowest probe takes 8 s on two busy cores

# None of the settings of a job that these tests may be part of, nor of the machine's own.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("TORCHELASTIC_", "PET_", "RALLY_", "PYTHON", "SLURM_"))
    and name not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
} | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

Files = Mapping[str, str | bytes]


@dataclass(frozen=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What to run.

    Args:
        files: the contents of the folder it runs in, as ``str`` or ``bytes``.
        target: script (or ``-m module``) and its arguments.
        make: builds more in the folder.
        flags: of ``rally run``.  python_flags: of the interpreter, for both.
        stdin: what it reads.
        stdout: makes the descriptor of its stdout; default a pipe that is read.
        keep: files it writes, to be compared too.
        real_torch: torch itself, not the empty module.
        prepared: the fork server, too, is a fork of a process with all imports. For what does not depend on how
            a fork server starts.
    """

    files: Files = field(default_factory=dict)
    target: Sequence[str] = ("probe.py",)
    make: Callable[[Path], None] | None = None
    flags: Sequence[str] = ()
    python_flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    stdout: Callable[[], int] | None = None
    keep: Sequence[str] = ()
    real_torch: bool = False
    prepared: bool = False


@pytest.fixture(scope="module")
def stub_torch() -> Path:
    """A folder with a ``torch`` that imports at once."""
    return STUB


Runner = Callable[..., dict[str, Done]]


@pytest.fixture
def run(tmp_path: Path, stub_torch: Path) -> Runner:
    """Run a probe in all three ways, each in a folder of its own; names of folders become ``<dir>``."""

    def run_all(probe: Probe, launchers: Sequence[str] = LAUNCHERS) -> dict[str, Done]:
        hows = (PYTHON, *launchers)
        with ThreadPoolExecutor(len(hows)) as pool:
            jobs = {how: pool.submit(run_one, probe, how, tmp_path, stub_torch) for how in hows}
            return {how: job.result() for how, job in jobs.items()}

    return run_all


def run_one(
    probe: Probe,
    how: str,
    tmp_path: Path,
    stub_torch: Path,
) -> Done:
    folder = tmp_path / {PYTHON: "dir_plain", "forkserver": "dir_forks", "exec": "dir_execs"}[how]
    folder.mkdir()
    write(folder, probe)
    launch = [] if how == PYTHON else ["-m", "rallypoint", "run", "--start-method", how]
    env = {**ENVIRONMENT, **probe.env}
    if not probe.real_torch:
        env["PYTHONPATH"] = str(stub_torch)
    stdout = subprocess.PIPE if probe.stdout is None else probe.stdout()
    # Python reads flags and variables at startup: they need a fresh interpreter, not a fork of a prepared one.
    start: type[subprocess.Popen[bytes]] = supervisors.Popen
    more: dict[str, Any] = {"imports": ("torch",)}
    if how == PYTHON or probe.python_flags or probe.env:
        start, more = subprocess.Popen, {}
    elif probe.real_torch:
        start, more = (
            (supervisors.Popen, {"imports": REAL}) if probe.prepared else (subprocess.Popen, {})
        )
    elif how == "forkserver" and not probe.prepared:
        more = {"imports": ()}
    try:
        process = start(
            [
                sys.executable,
                *probe.python_flags,
                *launch,
                *([] if how == PYTHON else probe.flags),
                *probe.target,
            ],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.PIPE,
            **more,
        )
    finally:
        if stdout != subprocess.PIPE:
            os.close(stdout)
    try:
        out, err = process.communicate(probe.stdin, TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.communicate()
        raise
    return done_of(probe, folder, process.returncode, out or b"", err)


def done_of(probe: Probe, folder: Path, code: int, out: bytes, err: bytes) -> Done:
    return Done(
        code=code if code >= 0 else 128 - code,  # as a shell shows it, and as rally exits
        out=comparable(out, folder),
        err=comparable(err, folder),
        files={
            name: (folder / name).read_text() if (folder / name).exists() else "(none)"
            for name in probe.keep
        },
    )


def write(folder: Path, probe: Probe) -> None:
    for name, content in probe.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if probe.make is not None:
        probe.make(folder)


def comparable(data: bytes, folder: Path) -> str:
    text = data.decode(errors="backslashreplace").replace(str(folder), "<dir>")
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)


def assert_same(done: Mapping[str, Done]) -> None:
    plain = done[PYTHON]
    for how in done.keys() - {PYTHON}:
        ran = done[how]
        assert ran.out == plain.out, how
        # What rally adds comes after all that the script has printed.
        assert ran.err[: len(plain.err)] == plain.err, how
        added = ran.err[len(plain.err) :]
        if plain.code == 0:
            assert added == "", how
        else:
            assert added.lstrip("\n").startswith("rally: the job failed"), how
        assert ran.code == plain.code, how
        assert ran.files == plain.files, how


# -- how a script ends: its exit code, and every byte it prints on the way -------------------------

ENDS: dict[str, str | bytes] = {
    "the end of the file": "print('done')",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit None": "import sys; sys.exit(None)",
    "exit 256 is 0": "import sys; sys.exit(256)",
    "exit -1 is 255": "import sys; sys.exit(-1)",
    "exit True": "import sys; sys.exit(True)",
    "exit with a text": "import sys; print('before'); sys.exit('a reason')",
    "exit with an object": "import sys; sys.exit(['a', 1])",
    "exit without stderr": "import sys; sys.stderr = None; sys.exit('a reason')",
    "os._exit": "import os; os._exit(5)",
    "os.abort": "import os; os.abort()",
    "killed by its own signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "quit() in a function": "def f():\n    quit(4)\nf()",
    "an exception": "def f(n):\n    return 1 / n\nprint('before')\nf(0)",
    "a chained exception": (
        "try:\n    {}['key']\nexcept KeyError as error:\n    raise ValueError('worse') from error"
    ),
    "an exception in a handler": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    undefined_name",
    "an exception group": (
        "def f():\n    raise TypeError('inner')\n"
        "def g():\n"
        "    try:\n        f()\n"
        "    except TypeError as error:\n"
        "        raise ExceptionGroup('outer', [error, OSError(2, 'no file')])\n"
        "g()"
    ),
    "an exception with notes": "e = ValueError('x')\ne.add_note('a note')\nraise e",
    "an exception without a message": "raise Exception",
    "an exception that cannot be shown": (
        "class Bad(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Bad"
    ),
    "an exception of a library": "import json\njson.loads('{')",
    "a long traceback": (
        "def f(n):\n    if n == 0:\n        raise ValueError('x' * 5000)\n    return g(n - 1)\n"
        "def g(n):\n    return f(n)\nf(300)"
    ),
    "a syntax error": "x = = 1\n",
    "an error of indentation": "if True:\npass\n",
    "a string that does not end": "x = 'abc\n",
    "a character that is not UTF-8": b"x = 1\ny = '\xe9'\n",
    "a null byte": b"x = 1\0\n",
    "an unknown encoding": "# -*- coding: no-such-thing -*-\nx = 1\n",
    "an import that fails": "import no_such_module",
    "an import that raises": "import raises",
    "a syntax error in an import": "import broken",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "a subclass of KeyboardInterrupt": "class K(KeyboardInterrupt): pass\nraise K('x')",
    "SIGINT from outside": (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)"
    ),
    "its own excepthook": (
        "import sys\n"
        "def hook(kind, value, tb):\n    print('hook', kind, value, tb.tb_lineno, tb.tb_next)\n"
        "sys.excepthook = hook\n1 / 0"
    ),
    "an excepthook that raises": (
        "import sys\ndef hook(kind, value, tb):\n    raise OSError('in the hook')\n"
        "sys.excepthook = hook\n1 / 0"
    ),
    "an excepthook that exits": (
        "import sys\ndef hook(kind, value, tb):\n    sys.exit(7)\nsys.excepthook = hook\n1 / 0"
    ),
    "no excepthook": "import sys\ndel sys.excepthook\n1 / 0",
    "sys.last_value at exit": (
        "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1 / 0"
    ),
    "atexit, last first": (
        "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\nprint('end')"
    ),
    "atexit after an exception": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "atexit that raises": (
        "import atexit\natexit.register(print, 'still called')\n"
        "@atexit.register\ndef f():\n    raise ValueError('in atexit')"
    ),
    "atexit that exits": "import atexit, sys\natexit.register(lambda: sys.exit(9))\nprint('end')",
    "a thread that runs on": (
        "import threading, time\n"
        "go = threading.Event()\n"
        "def f():\n    go.wait()\n    time.sleep(0.05)\n    print('the thread')\n"
        "threading.Thread(target=f).start()\n"
        "import atexit; atexit.register(print, 'atexit')\nprint('main')\ngo.set()"
    ),
    "a thread that raises": (
        "import threading\n"
        "t = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint('main')"
    ),
    "an executor that still works": (
        "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool, go = ThreadPoolExecutor(1), threading.Event()\n"
        "for n in range(3):\n"
        "    pool.submit(lambda n=n: (go.wait(), time.sleep(0.05), print('task', n)))\n"
        "print('main')\ngo.set()"
    ),
    "a pool of processes that still works": (
        "from concurrent.futures import ProcessPoolExecutor\nimport multiprocessing as mp\n"
        "pool = ProcessPoolExecutor(1, mp.get_context('fork'))\n"
        "done = pool.submit(pow, 2, 3)\n"
        "done.add_done_callback(lambda done: print(done.result()))"
    ),
    "a daemon thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('main')"
    ),
    "a daemon thread of the script": (
        "import threading, time\nLIMIT = 100\n"
        "def f():\n    while LIMIT > 0:\n        time.sleep(0.001)\n"
        "threading.Thread(target=f, daemon=True).start()\ntime.sleep(0.05)\nprint('main')"
    ),
    "__del__ that uses the script's globals": (
        "import os\n"
        "class A:\n    def __del__(self):\n        print('del', helper(os.sep))\n"
        "def helper(x):\n    return 'helped ' + x\n"
        "a = A()\nb = [A()]\nprint('end')"
    ),
    "__del__ in a frame of the exception": (
        "class A:\n    def __del__(self):\n        print('del')\n"
        "def f():\n    a = A()\n    raise ValueError\nf()"
    ),
    "__del__ in an imported module": "import has_del\nprint('end')",
    "weakref.finalize": (
        "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')\nprint('end')"
    ),
    "a line that does not end": "print('no newline', end='')",
    "stderr without a newline": "import sys; sys.stderr.write('half a line'); sys.exit(1)",
    "text in C's buffer": "import ctypes; ctypes.CDLL(None).printf(b'from C'); print('from Python')",
    "stdout replaced by an object": (
        "import sys\n"
        "class Tee:\n"
        "    def __init__(self, stream): self.stream = stream\n"
        "    def write(self, text): return self.stream.write(text)\n"
        "    def flush(self): self.stream.flush()\n"
        "sys.stdout = Tee(sys.stdout)\nprint('through the tee')"
    ),
    "stdout that cannot be flushed": (
        "import sys\nclass Odd:\n    def write(self, text): pass\nsys.stdout = Odd()"
    ),
    "stdout deleted": "import sys\ndel sys.stdout",
    "stdout closed": "import sys\nprint('x')\nsys.stdout.close()",
    "descriptors closed": "import os\nprint('x', flush=True)\nos.closerange(3, 100)\nprint('y')",
    "a fork that runs to the end": (
        "import atexit, os\natexit.register(lambda: print('atexit', who))\n"
        "pid = os.fork()\n"
        "who = 'parent' if pid else 'child'\n"
        "if pid: print('status', os.waitpid(pid, 0)[1])\n"
        "print('end', who)"
    ),
    "a fork that raises": (
        "import os\npid = os.fork()\n"
        "if pid == 0: raise ValueError('in the child')\n"
        "print('code', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    "logging without handlers": (
        "import logging\nlogging.warning('a warning')\nlogging.getLogger('x').error('an error')"
    ),
    "logging to stderr": (
        "import logging\nlogging.basicConfig(level='INFO', format='%(name)s %(module)s %(message)s')\n"
        "logging.info('said')"
    ),
    "a warning": (
        "import warnings\ndef f():\n    warnings.warn('old', DeprecationWarning, stacklevel=2)\n"
        "f()\nf()\nwarnings.warn('other')"
    ),
    "its own faulthandler": "import faulthandler, sys; faulthandler.enable(sys.stderr); print('on')",
    "asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n"
        "    print(asyncio.current_task().get_name())\nasyncio.run(f())"
    ),
    "an exception in asyncio": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    raise ValueError('x')\n"
        "asyncio.run(f())"
    ),
    "a coding cookie": "# -*- coding: latin-1 -*-\nprint(ascii('é'))".encode("latin-1"),
    "a byte order mark": b"\xef\xbb\xbfprint('after the mark')\n",
    "an empty script": "",
    "future annotations stay ours": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
}
IMPORTED = {
    "raises.py": "def f():\n    raise ValueError('at import')\nf()\n",
    "broken.py": "x = = 1\n",
    "has_del.py": "class A:\n    def __del__(self):\n        print('del')\na = A()\n",
}


# A worker runs and ends by the same code with either start method. With exec these are always tried, one of each
# kind of end; the others are among the long tests.
ALSO_EXECUTED = {
    "the end of the file",
    "exit with a text",
    "os._exit",
    "killed by its own signal",
    "a chained exception",
    "a long traceback",
    "a syntax error",
    "an import that raises",
    "KeyboardInterrupt",
    "its own excepthook",
    "atexit that raises",
    "a thread that runs on",
    "a daemon thread of the script",
    "__del__ that uses the script's globals",
    "text in C's buffer",
    "stdout replaced by an object",
    "descriptors closed",
    "a fork that raises",
    "a warning",
}
assert ENDS.keys() >= ALSO_EXECUTED


def by_launcher(sources: Mapping[str, Any], also_executed: Collection[str]) -> list[Any]:
    """Each source with each launcher. With exec, those that are not named are long tests."""
    return [
        pytest.param(
            source,
            launcher,
            id=f"{name}-{launcher}",
            marks=[pytest.mark.long] if launcher == "exec" and name not in also_executed else [],
        )
        for name, source in sources.items()
        for launcher in LAUNCHERS
    ]


@pytest.mark.parametrize(("source", "launcher"), by_launcher(ENDS, ALSO_EXECUTED))
def test_output_traceback_and_exit_code_are_those_of_python(
    source: str | bytes, launcher: str, run: Runner
) -> None:
    assert_same(run(Probe(files={**IMPORTED, "probe.py": source}, prepared=True), [launcher]))


ENDS_OF_A_MODULE = {
    "ValueError": "raise ValueError('x')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SystemExit": "raise SystemExit('why')",
    "a syntax error": "x = = 1",
    "an import that fails": "import mod.missing",
}


@pytest.mark.parametrize(("source", "launcher"), by_launcher(ENDS_OF_A_MODULE, ["ValueError"]))
def test_a_module_fails_as_under_python_m(source: str, launcher: str, run: Runner) -> None:
    files = {"mod/__init__.py": "", "mod/part.py": source}
    assert_same(run(Probe(files=files, target=["-m", "mod.part"], prepared=True), [launcher]))


@pytest.mark.parametrize("limit", [200, 1000])
def test_recursion_error_of_a_script(limit: int, run: Runner) -> None:
    # Our frames are below the script's, which leaves it fewer levels: only the count differs.
    source = f"import sys\nsys.setrecursionlimit({limit})\ndef f():\n    f()\nf()"
    done = run(Probe(files={"probe.py": source}))
    plain = re.sub(r"repeated \d+ more", "repeated N more", done[PYTHON].err)
    for how in LAUNCHERS:
        assert re.sub(r"repeated \d+ more", "repeated N more", done[how].err).startswith(plain)
        missing = [
            int(re.findall(r"repeated (\d+) more", done[each].err)[0]) for each in (PYTHON, how)
        ]
        assert 0 <= missing[0] - missing[1] <= 16


def test_stdin_reaches_a_single_worker(run: Runner) -> None:
    source = "import sys\nprint(input())\nprint(sys.stdin.read().upper(), sys.stdin.isatty())"
    assert_same(run(Probe(files={"probe.py": source}, stdin=b"eins\nzwei\n")))


def test_files_that_were_not_closed_are_flushed(run: Runner) -> None:
    source = (
        "import logfile, threading\n"
        "mine = open('mine.txt', 'w'); mine.write('a'); data = open('data.bin', 'wb'); data.write(b'b')\n"
        "def hold():\n"
        "    inner = open('inner.txt', 'w'); inner.write('c')\n"
        "    print.__self__.kept = inner\n"  # in builtins: something from before the script holds it
        "hold()\n"
    )
    module = "out = open('module.txt', 'w')\nout.write('d')\n"
    keep = ["mine.txt", "data.bin", "inner.txt", "module.txt"]
    done = run(Probe(files={"probe.py": source, "logfile.py": module}, keep=keep, prepared=True))
    assert_same(done)
    assert list(done["forkserver"].files.values()) == ["a", "b", "c", "d"]


def test_del_that_raises_at_exit(run: Runner) -> None:
    # The interpreter can no longer read the source then; we still can, and show the line too.
    source = "class A:\n    def __del__(self):\n        raise ValueError('in del')\na = A()"
    done = run(Probe(files={"probe.py": source}, prepared=True))
    assert "ValueError: in del" in done[PYTHON].err
    for how in LAUNCHERS:
        assert done[how].err.replace("    raise ValueError('in del')\n", "") == done[PYTHON].err


def test_files_are_flushed_beside_a_daemon_thread(run: Runner) -> None:
    # Plain Python may lose the buffers of files that a daemon thread can still reach.
    source = (
        "import threading\n"
        "threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()\n"
        "file = open('file.txt', 'w')\nfile.write('kept')\n"
    )
    done = run(Probe(files={"probe.py": source}, keep=["file.txt"], prepared=True))
    assert done["forkserver"].files == {"file.txt": "kept"}


# -- streams --------------------------------------------------------------------------------------

STREAMS = (
    "import json, os, sys\n"
    "facts = {s.name: [s.fileno(), s.mode, s.encoding, s.errors, s.newlines, s.line_buffering,\n"
    "    s.write_through, type(s.buffer).__name__, s.isatty(), s is getattr(sys, '__' + s.name[1:-1] + '__')]\n"
    "    for s in (sys.stdin, sys.stdout, sys.stderr)}\n"
    "print(json.dumps(facts), flush=True)\n"
)
# Python's own way; by default stdout is live (test_logs.py).
BLOCKS = ("--block-buffered",)
# os._exit drops what is in buffers: what comes out shows what was buffered.
WHAT_IS_BUFFERED = STREAMS + (
    "sys.stdout.write('text without newline')\n"
    "sys.stdout.buffer.write(b'bytes')\n"
    "sys.stdout.write('a line\\n')\n"
    "sys.stderr.write('error text')\n"
    "os._exit(0)\n"
)


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("flags", "python_flags", "env"),
    [
        (BLOCKS, (), {}),
        (BLOCKS, (), {"PYTHONIOENCODING": "latin-1:replace"}),
        (BLOCKS, (), {"PYTHONUTF8": "1"}),
        (BLOCKS, (), {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    ],
    ids=["default", "PYTHONIOENCODING", "PYTHONUTF8", "C locale"],
)
def test_streams_are_made_and_buffered_as_python_does(
    flags: Sequence[str], python_flags: Sequence[str], env: dict[str, str], run: Runner
) -> None:
    files = {"probe.py": WHAT_IS_BUFFERED}
    assert_same(run(Probe(files=files, flags=flags, python_flags=python_flags, env=env)))


def test_unbuffered_is_what_python_u_is(tmp_path: Path, stub_torch: Path) -> None:
    files = {"probe.py": WHAT_IS_BUFFERED}
    plain = run_one(Probe(files=files, python_flags=["-u"]), PYTHON, tmp_path, stub_torch)
    assert "bytes" in plain.out
    for how in LAUNCHERS:
        done = run_one(Probe(files=files, flags=["--unbuffered"]), how, tmp_path, stub_torch)
        assert (done.out, done.err, done.code) == (plain.out, plain.err, plain.code), how


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (closed_pipe, "print('x' * 100_000)"),
        (closed_pipe, "import sys; print('x'); sys.exit(3)"),
        (full_device, "print('x')"),
        (full_device, "import sys; print('x'); sys.exit(3)"),
    ],
)
def test_stdout_that_cannot_be_written_is_told_as_python_does(
    make: Callable[[], int], source: str, run: Runner
) -> None:
    assert_same(run(Probe(files={"probe.py": source}, flags=BLOCKS, stdout=make)))


def test_a_terminal_is_a_terminal_for_the_script(tmp_path: Path, stub_torch: Path) -> None:
    source = WHAT_IS_BUFFERED.replace(
        "print(json", "facts['size'] = os.get_terminal_size(1)\nprint(json"
    )
    outputs = {}
    for how in (PYTHON, *LAUNCHERS):
        ours, theirs = pty.openpty()
        probe = Probe(files={"probe.py": source}, stdout=lambda fd=theirs: fd)
        done = run_one(probe, how, tmp_path, stub_torch)
        try:
            outputs[how] = (done.code, done.err, terminals.read_until(ours, None).decode())
        finally:
            os.close(ours)
    assert '"<stdout>": [1, "w", "utf-8"' in outputs[PYTHON][2]
    assert "a line" in outputs[PYTHON][2]
    for how in LAUNCHERS:
        code, err, out = outputs[how]
        # A BufferedWriter of ours keeps the lines of several workers whole.
        assert (code, err, out.replace("WholeLines", "BufferedWriter")) == outputs[PYTHON], how


def test_a_worker_that_writes_into_a_file_knows_it(tmp_path: Path, stub_torch: Path) -> None:
    # The fork server's own stdout is the terminal.
    source = STREAMS.replace(
        "print(json.dumps(facts)", "print(json.dumps(facts), file=open('facts', 'w')"
    )
    found = {}
    for how in (PYTHON, *LAUNCHERS):
        if how == PYTHON:
            end = os.open(tmp_path / "plain.out", os.O_WRONLY | os.O_CREAT)
            ours = -1
        else:
            ours, end = pty.openpty()
        flags = ["--redirects=1", "--log-dir", str(tmp_path / how), *BLOCKS]
        probe = Probe(
            files={"probe.py": source}, flags=flags, stdout=lambda fd=end: fd, keep=["facts"]
        )
        found[how] = run_one(probe, how, tmp_path, stub_torch).files["facts"]
        if ours >= 0:
            os.close(ours)
    assert json.loads(found[PYTHON])["<stdout>"][5] is False  # line_buffering
    for how in LAUNCHERS:
        assert found[how] == found[PYTHON], how


def test_a_preloaded_module_does_not_print_into_every_worker(
    tmp_path: Path, stub_torch: Path
) -> None:
    # It prints into a buffer of the fork server's, and each fork would have written that.
    files = {"talks.py": "print('loaded')\n", "probe.py": "import talks\nprint('run')\n"}
    probe = Probe(files=files, flags=["--preload", "talks", "--nproc-per-node", "3"])
    done = run_one(probe, "forkserver", tmp_path, stub_torch)
    assert sorted(done.out.split()) == ["loaded", "run", "run", "run"], done


# -- what is run, and where it looks for modules ----------------------------------------------------

WHERE = (
    "import json, os, sys, inspect\n"
    "import near\n"
    "def here(): return 1\n"
    "print(json.dumps([__name__, globals().get('__file__'), __package__, str(__spec__ and __spec__.name),\n"
    "    type(__loader__).__name__, __cached__, sys.argv, sys.orig_argv[1:], sys.path[:3], near.__file__,\n"
    "    os.getcwd(), sys.flags.safe_path, sys.flags.optimize, sys.warnoptions, sys._xoptions], indent=1))\n"
    "assert __name__ == '__main__'\n"
)
SOURCE_OF = "print(inspect.getsource(here))\n"


def link(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / "link.py").symlink_to("../src/probe.py")
    (folder / "bin" / "second").symlink_to("link.py")


def zip_app(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        for name in ("__main__.py", "near.py"):
            archive.write(folder / "src" / name, name)


def zip_script(folder: Path) -> None:
    zip_app(folder)
    data = (folder / "app.zip").read_bytes()
    (folder / "app").write_bytes(b"#!/usr/bin/env python3\n" + data)


def compiled(folder: Path) -> None:
    py_compile.compile(
        str(folder / "src/probe.py"), cfile=str(folder / "src/probe.pyc"), dfile="p.py"
    )
    (folder / "src/probe.py").unlink()


IN_SRC: Files = {"src/probe.py": WHERE + SOURCE_OF, "src/near.py": ""}
MAIN_IN_SRC: Files = {"src/__main__.py": WHERE, "src/near.py": ""}

TARGETS: dict[str, Probe] = {
    "beside it": Probe(
        files={"probe.py": WHERE, "near.py": ""}, target=["probe.py", "-x", "a b", ""]
    ),
    "in another folder": Probe(files=IN_SRC, target=["src/probe.py", "--flag=1"]),
    "by a path to be tidied": Probe(files=IN_SRC, target=["./src/../src//probe.py"]),
    "by an absolute path": Probe(
        files={"probe.py": "import os, sys\nprint(sys.argv, __file__)"},
        target=[],  # filled in by the test
    ),
    "through a link": Probe(files=IN_SRC, make=link, target=["bin/link.py"]),
    "through a link to a link": Probe(files=IN_SRC, make=link, target=["bin/second"]),
    "name with spaces": Probe(
        files={"mein skript/prüf ung.py": WHERE + SOURCE_OF, "mein skript/near.py": ""},
        target=["mein skript/prüf ung.py", "ü"],
    ),
    "without a suffix": Probe(files={"run": WHERE + SOURCE_OF, "near.py": ""}, target=["run"]),
    "compiled": Probe(
        files={**IN_SRC, "src/probe.py": WHERE}, make=compiled, target=["src/probe.pyc"]
    ),
    "a module": Probe(
        files={"pkg/__init__.py": "", "pkg/mod.py": WHERE + SOURCE_OF, "near.py": ""},
        target=["-m", "pkg.mod", "-m", "x"],
    ),
    "a package": Probe(
        files={"pkg/__init__.py": "", "pkg/__main__.py": WHERE + SOURCE_OF, "near.py": ""},
        target=["-m", "pkg", "x"],
    ),
    "a folder": Probe(files=MAIN_IN_SRC, target=["src", "x"]),
    "a folder with a slash": Probe(files=MAIN_IN_SRC, target=["./src/"]),
    "a zip archive": Probe(files=MAIN_IN_SRC, make=zip_app, target=["app.zip", "x"]),
    "a zip archive without a suffix": Probe(
        files=MAIN_IN_SRC, make=zip_script, target=["app", "x"]
    ),
    "a module that is not there": Probe(target=["-m", "no.such.module"]),
    "PYTHONSAFEPATH": Probe(
        files={"probe.py": WHERE.replace("import near", "import json as near")},
        env={"PYTHONSAFEPATH": "1"},
    ),
    "PYTHONSAFEPATH, a script's neighbour": Probe(
        files={"probe.py": "import near", "near.py": ""}, env={"PYTHONSAFEPATH": "1"}
    ),
    "PYTHONPATH comes second": Probe(files=IN_SRC, target=["src/probe.py"]),
    "python -O": Probe(files=IN_SRC, target=["src/probe.py"], python_flags=["-O"]),
    "python -X and -W": Probe(
        files=IN_SRC,
        target=["src/probe.py"],
        python_flags=["-X", "dev", "-W", "error::UserWarning"],
    ),
    "python -P": Probe(
        files={"probe.py": WHERE.replace("import near", "import json as near")}, python_flags=["-P"]
    ),
}


# With these a fork server is started, as is with any flag or variable. The others differ in what a worker does.
STARTED = {"beside it", "a module", "PYTHONPATH comes second"}
assert TARGETS.keys() >= STARTED


@pytest.mark.parametrize("name", TARGETS)
def test_argv_file_and_import_path_are_those_of_python(
    name: str, run: Runner, tmp_path: Path
) -> None:
    probe = TARGETS[name]
    if not probe.target:
        (tmp_path / "probe.py").write_text(WHERE)
        (tmp_path / "near.py").write_text("")
        probe = Probe(target=[str(tmp_path / "probe.py"), "x"])
    done = run(replace(probe, prepared=name not in STARTED))
    # The flags of rally's own interpreter are not the script's words.
    flags = "".join(json.dumps(flag)[1:-1] + '",\n  "' for flag in probe.python_flags)
    plain = done[PYTHON]
    done[PYTHON] = Done(code=plain.code, out=plain.out.replace(flags, "", 1), err=plain.err)
    assert_same(done)


def test_the_command_line_shows_the_script(tmp_path: Path, stub_torch: Path) -> None:
    # For ps, pgrep -f, psutil. It is shown in one piece, so spaces in an argument look like any others.
    source = "print(repr(open('/proc/self/cmdline').read()))"
    for how in LAUNCHERS:
        probe = Probe(files={"train.py": source}, target=["train.py", "--lr", "0.1"])
        done = run_one(probe, how, tmp_path, stub_torch)
        assert done.out == repr(f"{Path(sys.executable).name} train.py --lr 0.1\0") + "\n", how


# The package looks for them when it is first used: before the variables in memory, as many as Python was started with.
FINDS_ARGUMENTS = """
import ctypes, sys
number, words = ctypes.c_int(), ctypes.POINTER(ctypes.c_wchar_p)()
ctypes.pythonapi.Py_GetArgcArgv(ctypes.byref(number), ctypes.byref(words))
memory = open("/proc/self/cmdline").read()
there = memory.split("\\0")
print(len(there) - 1 == number.value, there[0] == words[0], "probe.py" in memory, memory[-1:] == "\\0")
"""


def test_setproctitle_finds_the_arguments_of_the_process(run: Runner) -> None:
    files = {"probe.py": "import setproctitle", "setproctitle.py": FINDS_ARGUMENTS}
    done = run(Probe(files=files, target=["probe.py"]))
    assert_same(done)
    assert done[PYTHON].out == "True True True True\n"


def test_a_command_line_longer_than_the_room_for_it(run: Runner) -> None:
    source = "import sys; print(len(sys.argv), sum(map(len, sys.argv)), len(sys.orig_argv))"
    words = [f"--file-{n}={'x' * 50}" for n in range(3000)]
    assert_same(run(Probe(files={"probe.py": source}, target=["probe.py", *words])))


# -- facts of a process, with the real torch --------------------------------------------------------

# Each function is one probe; what it returns must be the same everywhere.
FACTS = """
import json, os, sys, signal, threading, time

def main_names():
    return sorted(name for name in NAMES)

def main_attributes():
    m = sys.modules["__main__"]
    return [m.__name__, m.__doc__, m.__package__, m.__spec__, m.__cached__, m.__file__,
            type(m.__builtins__).__name__, m.__annotations__,
            [type(m.__loader__).__name__, m.__loader__.name, m.__loader__.path], type(m).__name__]

def flags():
    return str(sys.flags)

def limits():
    import resource
    return [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits(),
            resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)]

def torch_is_not_imported_yet():
    return [name for name in sys.modules if name.partition(".")[0] == "torch"]

def torch_can_be_looked_up():
    import importlib.util
    spec = importlib.util.find_spec("torch")
    return [spec.name, spec.origin, list(spec.submodule_search_locations), "torch" in sys.modules]

def signals():
    import faulthandler  # of the report, and shown as such by is_enabled()
    faulthandler.disable()
    return [{s.name: str(signal.getsignal(s)) for s in signal.Signals},
            sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.set_wakeup_fd(-1),
            [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigPnd"))],
            [signal.getitimer(signal.ITIMER_REAL)]]

def threads():
    main = threading.main_thread()
    return [threading.current_thread() is main, main.name, main.ident == threading.get_ident(),
            main.native_id == os.getpid(), threading.active_count(), len(os.listdir("/proc/self/task")),
            threading.Thread(target=print).name]

def executors():
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: threading.current_thread().name).result()

def tasks():
    import asyncio
    async def name():
        return asyncio.current_task().get_name()
    return asyncio.run(name())

def hooks():
    return [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
            sys.unraisablehook is sys.__unraisablehook__, threading.excepthook is threading.__excepthook__,
            sys.gettrace(), sys.getprofile(), sys.breakpointhook is sys.__breakpointhook__]

def collector():
    import gc
    return [gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.garbage, gc.callbacks]

def multiprocessing_state():
    import multiprocessing as mp
    return [mp.current_process().name, mp.parent_process(), mp.active_children(),
            mp.get_start_method(allow_none=True), len(mp.current_process().authkey), mp.process.ORIGINAL_DIR,
            mp.Process(target=print).name]

def descriptors_of_a_child():
    import subprocess
    script = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    return subprocess.run([sys.executable, "-c", script], close_fds=False, capture_output=True, text=True).stdout

def subprocesses():
    import subprocess
    done = subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture_output=True, text=True)
    broken = subprocess.run("yes | head -1", shell=True, capture_output=True, text=True)
    return [done.returncode, done.stdout, done.stderr, broken.stderr, os.system("exit 4")]

def own_process():
    return [os.getcwd(), oct(os.umask(0o22)), os.nice(0), sorted(os.sched_getaffinity(0)), os.getuid()]

def logging_state():
    import logging
    record = logging.makeLogRecord({})
    return [logging.getLogger().handlers, logging.getLogger().level, logging.lastResort.stream is sys.stderr,
            record.relativeCreated < 20_000, record.processName, record.threadName]

def temporary_folder():
    import tempfile
    os.environ["TMPDIR"] = os.getcwd()
    return tempfile.gettempdir()

def own_source():
    import inspect, linecache
    return [inspect.getsource(own_source), linecache.getline(__file__, 2), inspect.getfile(own_source),
            inspect.getmodule(own_source).__name__]

class Something:
    def __eq__(self, other):
        return type(other) is Something

def pickles():
    import copy, pickle
    return [pickle.loads(pickle.dumps(Something())) == Something(), copy.deepcopy(Something()) == Something(),
            pickle.dumps(Something, 0).decode(), pickle.loads(pickle.dumps(pickles)) is pickles]

def type_hints():
    import dataclasses, typing
    @dataclasses.dataclass
    class Config:
        thing: "Something"
    return str(typing.get_type_hints(Config))

def seen_by_c():
    import ctypes
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    names = ["CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "PATH"]
    return [[os.environ.get(name), (getenv(name.encode()) or b"").decode()] for name in names]

def rank_is_seen_by_c():
    import ctypes
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return (getenv(b"RANK") or b"None").decode() == str(os.environ.get("RANK"))

def a_submodule_of_torch_first():
    from torch.nn import functional
    import torch, importlib
    return [functional is torch.nn.functional, torch.__spec__.origin, type(torch.__spec__.loader).__name__,
            type(torch.__loader__).__name__, importlib.import_module("torch.optim") is torch.optim,
            [str(type(finder)) for finder in sys.meta_path]]

def torch_threads():
    import torch
    return [torch.get_num_threads(), torch.get_num_interop_threads(), torch.__config__.parallel_info()]

def torch_defaults():
    import torch
    return [str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized(),
            torch.distributed.is_initialized(), str(torch.distributed.get_debug_level()),
            torch.multiprocessing.get_sharing_strategy(), torch.cuda._is_in_bad_fork()]

def torch_computes():
    import torch
    torch.manual_seed(1)
    net = torch.nn.Linear(300, 300)
    loss = net(torch.randn(64, 300)).square().sum()
    loss.backward()
    return [loss.item(), net.weight.grad.norm().item(), torch.initial_seed()]

def seeded_numbers():
    import random, numpy, torch
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    return [random.random(), numpy.random.rand(), torch.rand(1).item(), numpy.random.default_rng(4).random()]

def warning_filters():
    import warnings, torch
    return sorted(str(each) for each in warnings.filters if "numpy" not in str(each))

def locale_settings():
    import locale
    return [locale.setlocale(locale.LC_ALL, None), locale.getpreferredencoding(False), sys.getfilesystemencoding()]

def finalizing():
    return sys.is_finalizing()

if __name__ == "__main__":
    NAMES = list(vars())
    probes = [value for name, value in list(vars().items())
              if callable(value) and getattr(value, "__code__", None) and value.__module__ == "__main__"]
    print(json.dumps({probe.__name__: probe() for probe in probes}, default=repr))
"""
FACT_NAMES = re.findall(r"^def (\w+)", FACTS, re.MULTILINE)
FACT_ENV = {
    "CUDA_VISIBLE_DEVICES": "1,0",
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, stub_torch: Path) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("facts")
    probe = Probe(
        files={"sub/probe.py": FACTS}, target=["sub/probe.py", "x"], env=FACT_ENV, real_torch=True
    )
    found = {}
    for how in (PYTHON, *LAUNCHERS):
        done = run_one(probe, how, folder, stub_torch)
        assert done.code == 0, done
        assert done.err == "", done
        found[how] = json.loads(done.out)
    return found


@pytest.mark.parametrize("name", FACT_NAMES)
def test_a_worker_has_what_a_plain_process_has(name: str, facts: dict[str, dict[str, Any]]) -> None:
    for how in LAUNCHERS:
        assert facts[how][name] == facts[PYTHON][name], how


# Both with real torch, which an exec'd interpreter imports like any other: that case is among the long tests.
BOTH = pytest.mark.parametrize(
    "launcher", ["forkserver", pytest.param("exec", marks=pytest.mark.long)]
)


# Scripts that set variables before they import torch.
SETTERS = {
    "sets_torch.py": (
        "import os, logging\n"
        "os.environ['OMP_NUM_THREADS'] = '2'\n"
        "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
        "os.environ['TORCH_LOGS'] = '+inductor'\n"
        "import torch, threading\n"
        "print(torch.get_num_threads(), torch.distributed.get_debug_level())\n"
        "print(logging.getLogger('torch._inductor').level, logging.getLogger('torch._dynamo').level)\n"
        "t = threading.Thread(target=lambda: print(torch.get_num_threads()))\nt.start()\nt.join()\n"
    ),
    **{
        f"sets_{name}.py": (
            f"import os, sys\nos.environ['{name}'] = '{value}'\nimport torch, io\nfrom tqdm import tqdm\n"
            "bar = tqdm('abc', file=io.StringIO())\n"
            "print(bar.disable, sys.modules['tqdm'].tqdm is tqdm, len(list(bar)))\n"
        )
        for name, value in (("TQDM_DISABLE", "1"), ("HOME", "/nowhere"))
    },
}
SETS_WHAT_IS_NOT_APPLIED = (
    "import os, pathlib\n"
    "os.environ['TORCHINDUCTOR_FORCE_DISABLE_CACHES'] = '1'\n"
    "os.environ['PYTORCH_JIT'] = '0'\n"
    "os.environ['TORCH_TRACE'] = os.getcwd() + '/trace'\n"
    "os.environ['MINE'] = '1'\n"
    "import torch\n"
    "f = torch.jit.script(pathlib.Path)\n"
    "handlers = [each.root_dir for each in torch._logging._internal.trace_log.handlers]\n"
    "print(f is pathlib.Path, handlers == [os.getcwd() + '/trace'])\n"
)
# Runs scripts one after another, each in a fork that has not imported torch. Their output goes into files. The
# first argument is a folder that has an empty torch: for scripts that only need tqdm, which torch then does not import.
EACH_IN_A_FORK = """
import os, sys
rank = os.environ.get("RANK", "0")
for name in sys.argv[2:]:
    pid = os.fork()
    if pid == 0:
        if sys.argv[1] and name != "sets_torch.py":
            sys.path.insert(1, sys.argv[1])
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{rank}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [name]
        exec(compile(open(name).read(), name, "exec"))
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0, name
"""


class Setters:
    """What these scripts print. One launch for all: a fork server that imports torch takes seconds of a core."""

    def __init__(self, folder: Path, stub_torch: Path) -> None:
        self._folder = folder
        self._stub_torch = stub_torch
        self._ran: dict[str, dict[str, str]] = {}

    def run(self, how: str) -> dict[str, str]:
        """The contents of the files, named ``SCRIPT.RANK.out`` and ``SCRIPT.RANK.err``."""
        if how not in self._ran:
            names, ranks = [*SETTERS], 1
            if how == "forkserver":
                names, ranks = [*names, "not_applied.py"], 2
            # What tqdm does in a plain process does not depend on who imports it first.
            stub = str(self._stub_torch) if how == PYTHON else ""
            probe = Probe(
                files={
                    **SETTERS,
                    "not_applied.py": SETS_WHAT_IS_NOT_APPLIED,
                    "all.py": EACH_IN_A_FORK,
                },
                target=["all.py", stub, *names],
                flags=["--nproc-per-node", str(ranks)],
                keep=[f"{n}.{r}.{s}" for n in names for r in range(ranks) for s in ("out", "err")],
                real_torch=True,
            )
            done = run_one(probe, how, self._folder, self._stub_torch)
            assert (done.code, done.out, done.err) == (0, "", ""), done
            self._ran[how] = done.files
        return self._ran[how]

    def assert_same(self, script: str, launcher: str) -> str:
        """That a worker prints what a plain process does. Returns what that is on stdout."""
        plain, worker = self.run(PYTHON), self.run(launcher)
        for name in worker:
            if name.startswith(f"{script}."):
                assert worker[name] == plain[re.sub(r"\.\d\.", ".0.", name)], name
        assert f"{script}.0.err" in worker
        return plain[f"{script}.0.out"]


@pytest.fixture(scope="module")
def setters(tmp_path_factory: pytest.TempPathFactory, stub_torch: Path) -> Setters:
    return Setters(tmp_path_factory.mktemp("setters"), stub_torch)


@BOTH
def test_what_torch_reads_at_import_may_be_set_by_the_script(
    setters: Setters, launcher: str
) -> None:
    # The fork server has imported torch before.
    out = setters.assert_same("sets_torch.py", launcher)
    if len(os.sched_getaffinity(0)) > 1:
        assert out.startswith("2 DebugLevel.DETAIL")


@BOTH
@pytest.mark.parametrize("name", ["TQDM_DISABLE", "HOME"])
def test_what_tqdm_reads_at_import_may_be_set_by_the_script(
    setters: Setters, launcher: str, name: str
) -> None:
    """Torch imports tqdm, which looks through the whole environment for names of its own: no line about other names."""
    out = setters.assert_same(f"sets_{name}.py", launcher)
    assert out == f"{'TQDM' in name} True 3\n"


def test_what_torch_reads_at_import_alone_is_told(setters: Setters) -> None:
    """Once, and neither for what the environment of `rally run` has nor for what has been applied."""
    told = setters.run("forkserver")
    outs, errs = ([told[f"not_applied.py.{rank}.{s}"] for rank in (0, 1)] for s in ("out", "err"))
    assert outs == ["True True\n"] * 2, told
    assert "".join(errs).count("may have no effect") == 1, told
    assert "rally: TORCHINDUCTOR_FORCE_DISABLE_CACHES: read when torch was imported" in errs[0]


# -- several workers: nothing random may be shared --------------------------------------------------

RANDOM = """
import json, random, secrets, tempfile, uuid, os, sys
import multiprocessing as mp
import numpy, torch
sys.stdout.write(json.dumps({
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "numpy default_rng": numpy.random.default_rng().random(),
    "torch initial seed": torch.initial_seed(),
    "torch": torch.rand(1).item(),
    "torch generator": torch.Generator().seed(),
    "DataLoader base seed": torch.empty((), dtype=torch.int64).random_().item(),
    "uuid1": str(uuid.uuid1()), "uuid4": str(uuid.uuid4()), "secrets": secrets.token_hex(),
    "tempfile": tempfile.mktemp(), "mkdtemp": tempfile.mkdtemp(dir="."),
    "SystemRandom": random.SystemRandom().random(), "urandom": os.urandom(8).hex(),
    "authkey": bytes(mp.current_process().authkey).hex(),
}) + "\\n")
"""
RANDOM_NAMES = re.findall(r'"([\w ]+)":', RANDOM)


@pytest.fixture(scope="module")
def random_states(
    tmp_path_factory: pytest.TempPathFactory, stub_torch: Path
) -> list[dict[str, Any]]:
    """What two workers of one generation and two of the next draw."""
    probe = Probe(
        files={
            "probe.py": RANDOM
            + "sys.stdout.flush()\nos._exit(int(os.environ['RALLY_GENERATION'] == '0'))"
        },
        # (numpy imports its random part at first use: without the preload, in the worker.)
        flags=["--nproc-per-node=2", "--max-restarts=1", "--preload=numpy.random"],
        real_torch=True,
        prepared=True,
    )
    done = run_one(probe, "forkserver", tmp_path_factory.mktemp("random"), stub_torch)
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.parametrize("name", RANDOM_NAMES)
def test_workers_do_not_share_randomness(name: str, random_states: list[dict[str, Any]]) -> None:
    drawn = [str(state[name]) for state in random_states]
    assert len(drawn) >= 3  # the first generation's second worker may have been stopped before
    assert len(set(drawn)) == len(drawn)


def test_no_worker_holds_another_workers_descriptors(tmp_path: Path, stub_torch: Path) -> None:
    # The fork server receives the descriptors of all workers at once, and must not pass them on to the others.
    source = (
        "import os, sys\n"
        "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if os.path.islink(f'/proc/self/fd/{fd}')]\n"
        "sys.stdout.write(repr(sorted(l.partition(':')[0] for l in links if 'proc' not in l)) + '\\n')\n"
    )
    probe = Probe(files={"probe.py": source}, flags=["--nproc-per-node", "4", "--unbuffered"])
    done = run_one(probe, "forkserver", tmp_path, stub_torch)
    # stdin, stdout, stderr and the pipe for stacks; the line to the supervisor, and the socket for questions.
    assert done.out.splitlines() == [repr(["pipe"] * 4 + ["socket"] * 2)] * 4, done


# -- processes that a script starts -----------------------------------------------------------------

PROCESSES = """
import json, multiprocessing as mp, os, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return index ** 2, info.id, info.num_workers, torch.get_num_threads()

def load(context):
    workers = 2 if context == "fork" else 1  # others import torch by themselves
    batches = DataLoader(Squares(), batch_size=2, num_workers=workers, multiprocessing_context=context)
    loaded = [[column.tolist() for column in batch] for batch in batches]
    # A queue's feeder thread that the interpreter's end cuts short, between the removal of its
    # semaphore and telling so, has Python's resource tracker warn of a leak, with any launcher.
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join()
    return loaded

def double(x):
    return 2 * x, mp.current_process().name, mp.parent_process().name, __name__

def work(context):
    ctx = mp.get_context(context)
    queue, value, lock = ctx.Queue(), ctx.Value("i", 0), ctx.Lock()
    process = ctx.Process(target=put, args=(queue, value, lock))
    process.start()
    got = queue.get()
    process.join()
    with ctx.Pool(1) as pool:
        doubled = pool.map(double, range(3))
    return got, value.value, process.exitcode, [each[0::3] for each in doubled]

def put(queue, value, lock):
    with lock:
        value.value = 7
    queue.put([sys.argv[1:], __name__, torch.ones(2).tolist()])

def manage():
    with mp.Manager() as manager:
        shared = manager.dict(a=1)
        shared["b"] = 2
        return dict(shared)

def share():
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=8)
    memory.buf[0] = 5
    other = SharedMemory(memory.name)
    found = other.buf[0]
    other.close(), memory.close(), memory.unlink()
    tensor = torch.zeros(3).share_memory_()
    process = mp.get_context("fork").Process(target=tensor.fill_, args=(4,))
    process.start(), process.join()
    return found, tensor.tolist()

if __name__ == "__main__":
    torch.manual_seed(0)
    results = {"DataLoader fork": load("fork"), "fork": work("fork"), "manager": manage(), "shared memory": share(),
               "name": [mp.current_process().name, str(mp.parent_process())]}
    for context in sys.argv[1:]:
        results["DataLoader " + context] = load(context)
    print(json.dumps(results))
"""


@BOTH
def test_data_loaders_and_multiprocessing_work_as_under_python(run: Runner, launcher: str) -> None:
    # spawn and forkserver import the script again, by its name.
    probe = Probe(
        files={"sub/probe.py": PROCESSES},
        target=["sub/probe.py", "spawn"],
        real_torch=True,
        prepared=True,
    )
    done = run(probe, [launcher])
    assert '"DataLoader fork": [[[0, 1], [0, 0], [2, 2], [1, 1]]' in done[launcher].out
    assert '"DataLoader spawn": [[[0, 1], [0, 0], [1, 1], [1, 1]]' in done[launcher].out
    assert_same(done)


def test_multiprocessing_contexts_import_the_script_again(run: Runner) -> None:
    source = (
        "import json, multiprocessing as mp, sys\n"
        "print('imported as', __name__, flush=True)\n"
        "def f(x): return x + 1, __name__, sys.argv\n"
        "if __name__ == '__main__':\n"
        "    for context in ('fork', 'spawn', 'forkserver'):\n"
        "        with mp.get_context(context).Pool(1) as pool:\n"
        "            print(context, pool.apply(f, (1,)), flush=True)\n"
    )
    assert_same(run(Probe(files={"probe.py": source}, target=["probe.py", "x"])))


def test_multiprocessing_finds_a_module_run_with_m(run: Runner) -> None:
    source = (
        "import multiprocessing as mp\nfrom .other import VALUE\n"
        "def f(x): return x + VALUE\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n        print(pool.map(f, [1]))\n"
    )
    files = {"pkg/__init__.py": "", "pkg/mod.py": source, "pkg/other.py": "VALUE = 5\n"}
    assert_same(run(Probe(files=files, target=["-m", "pkg.mod"])))


def test_a_process_left_running_at_the_end_is_waited_for(run: Runner) -> None:
    source = (
        "import multiprocessing as mp, time\n"
        "fork = mp.get_context('fork')\ngo = fork.Event()\n"
        "def f():\n    go.wait()\n    time.sleep(0.1)\n    print('child', flush=True)\n"
        "fork.Process(target=f).start()\nprint('main', flush=True)\ngo.set()\n"
    )
    assert_same(run(Probe(files={"probe.py": source})))


def test_a_program_gets_the_signals_of_a_plain_start(tmp_path: Path, stub_torch: Path) -> None:
    # Python ignores SIGPIPE, and a program started by it would inherit that.
    target = ["--no-python", "sh", "-c", "grep SigIgn /proc/self/status"]
    done = run_one(Probe(target=target), "exec", tmp_path, stub_torch)
    ignored = int(done.out.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)), done
