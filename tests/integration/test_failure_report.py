"""The failure report, end to end: each way a worker can fail, as report.json, as text, as torchelastic reads it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import supervisors
from rallypoint.launch.output.report import columns
from stub_torch import STUB


pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RALLY = (sys.executable, "-m", "rallypoint", "run")
# How often a race is run; set REPORT_REPEATS to 10 or more while working on it.
REPEATS = int(os.environ.get("REPORT_REPEATS", "1"))

FIELDS = {
    *("host", "node_rank", "rank", "local_rank", "pid", "generation", "exit_code", "signal"),
    *("signal_name", "raised", "native_stack", "cause", "stderr", "headline", "stopped_by_us"),
}

# Only rank 1 of 2 fails; the other waits to be stopped.
ALONE = """
import ctypes, os, signal, sys, time
print("a line on stderr from rank", os.environ["RANK"], file=sys.stderr, flush=True)
def fail():
    {failure}
if os.environ["RANK"] == "1":
    fail()
time.sleep(60)
"""

# All ranks all-reduce; then `failure` runs; what follows shows the loss of a peer to the others.
TOGETHER = """
import os, signal, sys, time
import torch
import torch.distributed as dist
rank, generation = int(os.environ["RANK"]), int(os.environ["RALLY_GENERATION"])
dist.init_process_group("gloo")
tensor = torch.ones(4)
def step():
    dist.all_reduce(tensor)
for _ in range(3):
    step()
{failure}
while True:
    step()
"""


@dataclass
class Result:
    code: int
    text: str
    report: dict
    folder: Path
    error_file: Path

    @property
    def root(self) -> dict:
        return self.report["root_cause"]

    @property
    def summary(self) -> str:
        """The report as printed, without what workers printed."""
        return self.text[self.text.index("rally: the job failed") :]

    def torchelastic(self) -> ProcessFailure:
        return ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(self.error_file))


def run(
    tmp_path: Path,
    source: str,
    *flags: str,
    failure: str = "",
    workers: int = 2,
    script: str = "train.py",
    env: dict[str, str] | None = None,
    through: tuple[str, ...] = (),
) -> Result:
    folder = tmp_path / uuid.uuid4().hex[:6]
    folder.mkdir()
    path = folder / script
    path.write_text(source.replace("{failure}", failure))
    error_file = folder / "outer" / "error.json"
    stub = {} if "torch" in source else {"PYTHONPATH": str(STUB)}
    done = supervisors.run(
        [
            *(
                *through,
                *RALLY,
                "--nproc-per-node",
                str(workers),
                "--log-dir",
                str(folder / "logs"),
            ),
            *(*flags, str(path)),
        ],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file), **stub, **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "rally: the job failed" in done.stderr, done.stderr
    assert done.stderr.count("rally: the job failed") == 1, "one summary"
    run_folder = next((folder / "logs").iterdir())
    report = json.loads((run_folder / "report.json").read_text())
    result = Result(done.returncode, done.stderr, report, run_folder, error_file)
    check_form(result)
    return result


def check_form(result: Result) -> None:
    """What holds for every report."""
    report = result.report
    assert result.code == report["exit_code"] != 0
    assert Path(report["log_folder"]).is_dir()
    lines = result.summary.splitlines()
    assert len(lines) <= 40, result.summary
    for line in lines:
        if not line.startswith(("  logs  ", "  report  ")):
            assert columns(line) <= 100, line
    assert "\x1b" not in result.summary, "colour, but no terminal"
    assert lines[-1] == f"  report       {result.folder / 'report.json'}"
    assert lines[-2] == f"  logs         {report['log_folder']}"
    workers = [*([report["root_cause"]] if report["root_cause"] else []), *report["victims"]]
    for worker in workers:
        assert set(worker) >= FIELDS
        assert worker["host"] == socket.gethostname()
        assert worker["pid"] > 1
    ranks = [worker["rank"] for worker in workers]
    assert len(set(ranks)) == len(ranks), "a worker is either the cause or a victim, once"
    if report["root_cause"]:
        record = result.torchelastic()
        assert record.message["errorCode"] == result.code


# -- each way to fail ------------------------------------------------------------------------------

EXEC = ("--start-method", "exec")


@dataclass(frozen=True)
class Way:
    failure: str
    code: int
    headline: str
    raised: str | None = None
    message: str = ""
    traceback: str = ""
    native: str = ""


WAYS = {
    "raise": Way(
        'raise ValueError("expected 3 channels")',
        code=1,
        headline="raised ValueError",
        raised="ValueError",
        message="expected 3 channels",
        traceback='raise ValueError("expected 3 channels")',
    ),
    "a long and hostile message": Way(
        'raise ValueError("\\x1b[31m" + "wide 漢字 " * 400 + "\\n\\tnext\\r\\x07")',
        code=1,
        headline="raised ValueError",
        raised="ValueError",
        message="wide 漢字 wide",
        traceback="in fail",
    ),
    "a cause behind it": Way(
        "try: {}['weights']\n    except KeyError as e: raise RuntimeError('no checkpoint') from e",
        code=1,
        headline="raised RuntimeError",
        raised="RuntimeError",
        message="no checkpoint",
        traceback="KeyError: 'weights'",
    ),
    "sys.exit(3)": Way(
        "sys.exit(3)",
        code=3,
        headline="exited with code 3",
        raised="SystemExit",
        message="3",
        traceback="sys.exit(3)",
    ),
    "sys.exit(text)": Way(
        'sys.exit("the licence server refused us")',
        code=1,
        headline="exited with code 1",
        raised="SystemExit",
        message="the licence server refused us",
        traceback="in fail",
    ),
    "os._exit(7)": Way("os._exit(7)", code=7, headline="exited with code 7"),
    "segfault": Way(
        "ctypes.string_at(0)",
        code=128 + signal.SIGSEGV,
        headline="was killed by SIGSEGV",
        native="in fail",
    ),
    "abort": Way(
        "os.abort()",
        code=128 + signal.SIGABRT,
        headline="was killed by SIGABRT",
        native="in fail",
    ),
    "SIGKILL": Way(
        "os.kill(os.getpid(), signal.SIGKILL)",
        code=128 + signal.SIGKILL,
        headline="was killed by SIGKILL",
    ),
    "segfault that its own faulthandler shows": Way(
        "import faulthandler; faulthandler.enable()\n    os.kill(os.getpid(), signal.SIGSEGV)",
        code=128 + signal.SIGSEGV,
        headline="was killed by SIGSEGV",
        native="in fail",
    ),
    "a child crashes": Way(
        "if os.fork() == 0: ctypes.string_at(0)\n    os.wait(); raise RuntimeError('no child')",
        code=1,
        headline="raised RuntimeError",
        raised="RuntimeError",
        message="no child",
        traceback="in fail",
        native="in fail",
    ),
    "SIGTERM from elsewhere": Way(
        "os.kill(os.getpid(), signal.SIGTERM)",
        code=128 + signal.SIGTERM,
        headline="was killed by SIGTERM",
    ),
    "exit in a handler": Way(
        "try: raise ValueError('expected 3 channels')\n    except ValueError: sys.exit(3)",
        code=3,
        headline="exited with code 3 while handling ValueError",
        raised="ValueError",
        message="expected 3 channels",
        traceback="in fail",
    ),
    "raise a frozen error": Way(
        "import dataclasses\n    @dataclasses.dataclass(frozen=True)\n    class Frozen(Exception):\n        code: int"
        "\n    raise Frozen(7)",
        code=1,
        headline="raised fail.<locals>.Frozen",
        raised="fail.<locals>.Frozen",
        message="7",
        traceback="in fail",
    ),
    "an import error": Way(
        "import no_such_module",
        code=1,
        headline="raised ModuleNotFoundError",
        raised="ModuleNotFoundError",
        message="No module named 'no_such_module'",
        traceback="import no_such_module",
    ),
}


# In a fork, exceptions, exit codes and faults are different.
IN_A_FORK = ("raise", "raise a frozen error", "sys.exit(text)", "segfault", "abort")


@pytest.mark.parametrize(
    ("method", "name"),
    [*(("exec", name) for name in WAYS), *(("forkserver", name) for name in IN_A_FORK)],
)
def test_each_way_to_fail(tmp_path, method, name):
    way = WAYS[name]
    flags = ("--start-method", method)
    result = run(tmp_path, ALONE, *flags, failure=way.failure)
    assert result.code == way.code, result.text
    root = result.root
    assert root["headline"] == way.headline
    assert (root["rank"], root["local_rank"], root["node_rank"], root["generation"]) == (1, 1, 0, 0)
    if way.code > 128:
        assert (root["exit_code"], root["signal"]) == (None, way.code - 128)
        assert root["signal_name"] == signal.Signals(way.code - 128).name
    else:
        assert (root["exit_code"], root["signal"], root["signal_name"]) == (way.code, None, None)
    assert "a line on stderr from rank 1" in root["stderr"]
    assert root["cause"] == ""
    if way.raised is None:
        assert root["raised"] is None
        assert "a line on stderr from rank 1" in result.summary
    else:
        assert root["raised"]["type"] == way.raised
        assert way.message in root["raised"]["message"]
        assert way.traceback in root["raised"]["traceback"]
        assert "bootstrap.py" not in root["raised"]["traceback"], "only the script's own frames"
        assert f"{way.raised}: " in result.summary
    assert way.native in root["native_stack"]
    if way.native:
        assert "train.py" in result.summary
    assert not root["stopped_by_us"]

    (victim,) = result.report["victims"]
    assert (victim["rank"], victim["stopped_by_us"]) == (0, True)
    assert victim["signal_name"] == "SIGTERM"
    assert f"rank 1 {way.headline}" in result.summary.splitlines()[0]
    assert "1 other failed as a result" in " ".join(result.summary.split())
    assert "  victims      rank 0: stopped (SIGTERM)" in result.summary

    record = result.torchelastic()
    assert record.timestamp > 1_600_000_000 if way.raised else record.timestamp == 0
    assert (way.raised or way.headline) in record.message["message"]
    stack = record.message["extraInfo"]["py_callstack"]
    assert way.traceback in stack and way.native in stack


@pytest.mark.parametrize("flags", [EXEC, ()], ids=["exec", "forkserver"])
def test_a_syntax_error_of_the_script(tmp_path, flags):
    result = run(tmp_path, "x = 1\ndef broken(:\n    pass\n", *flags, workers=1)
    assert result.root["raised"]["type"] == "SyntaxError"
    assert "def broken(:" in result.summary
    assert "train.py" in result.summary
    assert result.code == 1
    assert result.report["victims"] == []
    assert "failed as a result" not in result.summary


def test_an_error_in_a_module_that_the_script_imports(tmp_path):
    source = "import pathlib, sys\npathlib.Path(__file__).with_name('helper.py').write_text('import json\\njson.loads(\"\")\\n')\nimport helper\n"
    result = run(tmp_path, source, *EXEC, workers=1)
    assert result.root["raised"]["type"] == "json.decoder.JSONDecodeError"
    assert "helper.py" in result.summary


def test_the_workers_own_error_file_is_written(tmp_path):
    result = run(tmp_path, ALONE, *EXEC, failure="raise ValueError('x')")
    for rank, message in ((1, "ValueError: x"), (0, "was killed by SIGTERM")):
        file = result.folder / f"attempt_0/{rank}/error.json"
        assert json.loads(file.read_text())["message"]["message"] == message


def test_what_torchs_record_decorator_wrote_stays(tmp_path):
    """Scripts with @record write the error file themselves."""
    source = """
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("from record")
main()
"""
    result = run(tmp_path, source, workers=1)
    record = json.loads((result.folder / "attempt_0/0/error.json").read_text())
    assert "main" in record["message"]["extraInfo"]["py_callstack"]
    assert result.root["raised"]["message"] == "from record"


def test_stderr_has_only_the_last_lines_without_progress_bars(tmp_path):
    failure = r"""
    for n in range(100):
        sys.stderr.write(f"\r{n}%")
    sys.stderr.write("\n" + "\x1b[31mred\x1b[0m\n" + "".join(f"line {n}\n" for n in range(50)))
    sys.stderr.flush()
    os._exit(9)"""
    result = run(tmp_path, ALONE, *EXEC, failure=failure.strip())
    kept = result.root["stderr"]
    assert kept[-1] == "line 49"
    assert len(kept) <= 20
    assert "│ line 49" in result.summary


# -- who is to blame -------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_one_raises_and_the_others_lose_their_peer(tmp_path, repeat):
    """The culprit takes its time to exit; its peers are dead before it."""
    failure = """
import atexit
if rank == 2:
    def slow_end():
        dist.destroy_process_group()
        time.sleep(0.3)
    atexit.register(slow_end)
    raise KeyError("weights")
"""
    result = run(tmp_path, TOGETHER, failure=failure, workers=3)
    assert result.root["rank"] == 2, result.summary
    assert result.root["raised"]["type"] == "KeyError"
    assert result.code == 1
    assert [victim["rank"] for victim in result.report["victims"]] == [0, 1]
    assert "2 others failed as a result" in result.summary


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_one_is_killed_and_the_others_lose_their_peer(tmp_path, repeat, number):
    failure = f"if rank == 1: os.kill(os.getpid(), {number})"
    result = run(tmp_path, TOGETHER, failure=failure, workers=3)
    assert result.root["rank"] == 1, result.summary
    assert result.code == 128 + number
    assert [victim["rank"] for victim in result.report["victims"]] == [0, 2]
    for victim in result.report["victims"]:
        lost_its_peer = victim["raised"] is not None and "onnection" in victim["raised"]["message"]
        assert lost_its_peer or victim["stopped_by_us"]


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_all_raise_the_same(tmp_path, repeat):
    result = run(tmp_path, TOGETHER, failure="raise ValueError('nan in the loss')", workers=3)
    everybody = [result.root, *result.report["victims"]]
    assert sorted(worker["rank"] for worker in everybody) == [0, 1, 2]
    assert result.root["raised"]["type"] == "ValueError"
    times = [
        w["raised"]["at"] for w in everybody if w["raised"] and w["raised"]["type"] == "ValueError"
    ]
    assert result.root["raised"]["at"] == min(times), "the first of them"
    assert result.code == 1


CLEANS_UP = """
if rank == 1:
    try:
        raise KeyError("weights")
    except KeyError:
        dist.destroy_process_group()
        time.sleep({seconds})
        raise
"""


def test_a_culprit_that_cleans_up_first_is_named(tmp_path):
    """Its peers see their connections close long before it exits."""
    result = run(tmp_path, TOGETHER, failure=CLEANS_UP.format(seconds=2), workers=3)
    assert result.root["rank"] == 1, result.summary
    assert result.root["headline"] == "raised KeyError"
    assert not result.root["stopped_by_us"]
    assert result.report["cause_known"]
    assert all("closed" in each["raised"]["message"].lower() or "reset" in each["raised"]["message"]
               for each in result.report["victims"])  # fmt: skip


def test_a_culprit_that_cleans_up_for_too_long_is_asked(tmp_path):
    failure = CLEANS_UP.format(seconds=60).replace("KeyError", "ValueError")
    result = run(tmp_path, TOGETHER, "--cause-timeout", "1", failure=failure, workers=3)
    assert result.root["rank"] == 1, result.summary
    assert result.root["headline"] == "was handling ValueError when it was stopped"
    assert result.root["signal_name"] == "SIGTERM"
    assert (result.code, result.report["cause_known"]) == (1, True)
    assert "ValueError: weights" in result.summary


def test_who_did_not_come_to_a_monitored_barrier_is_named(tmp_path):
    failure = """
import datetime
if rank != 2:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
time.sleep(60)
"""
    flags = ("--cause-timeout", "1")
    result = run(tmp_path, TOGETHER, *flags, failure=failure, workers=3)
    assert result.root["rank"] == 0
    assert "rank 2 never arrived" in result.summary


def test_a_cause_that_nobody_tells_is_said_to_be_unknown(tmp_path):
    failure = """
if rank == 1:
    dist.destroy_process_group()
    time.sleep(60)
"""
    result = run(tmp_path, TOGETHER, "--cause-timeout", "0.5", failure=failure, workers=3)
    assert not result.report["cause_known"]
    assert result.root["rank"] in {0, 2}
    assert "cause unknown" in result.summary
    assert "  failed first rank" in result.summary
    assert "rank 1 still ran when all others had failed" in " ".join(result.summary.split())


def test_a_rank_that_ends_while_others_need_it_is_named(tmp_path):
    result = run(tmp_path, TOGETHER, failure="if rank == 1: sys.exit(0)", workers=3)
    assert (result.root["rank"], result.root["exit_code"], result.code) == (1, 0, 1), result.summary
    assert result.report["left_early"] == [1]
    assert {each["rank"] for each in result.report["victims"]} == {0, 2}
    assert "rank 1 ended while other ranks still needed it; 2 others failed" in result.summary
    assert "  needed by    rank" in result.summary
    assert "dist.all_reduce" in result.summary


def test_a_rank_that_ends_early_is_not_blamed_for_the_error_of_another(tmp_path):
    failure = """
if rank == 1:
    sys.exit(0)
if rank == 2:
    time.sleep(0.5)
    raise ValueError("bad shard")
"""
    result = run(tmp_path, TOGETHER, failure=failure, workers=3)
    assert (result.root["rank"], result.report["left_early"]) == (2, []), result.summary


def test_of_ranks_that_wait_in_vain_the_report_says_who_had_ended(tmp_path):
    failure = """
import datetime
if rank == 2:
    time.sleep(0.5)
    os._exit(0)
dist.monitored_barrier(timeout=datetime.timedelta(seconds=10))
"""
    flags = ("--cause-timeout", "1")
    result = run(tmp_path, TOGETHER, *flags, failure=failure, workers=3)
    assert "rank 2" in result.summary
    assert "exit code 0" in result.summary


@pytest.mark.parametrize("flags", [(), ("--redirects", "3")], ids=["console", "redirects"])
def test_what_was_printed_before_a_bare_exit_is_shown(tmp_path, flags):
    failure = """
import traceback
try:
    if rank == 1:
        raise ValueError("expected 3 channels")
    while True:
        step()
except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1 + rank)
"""
    result = run(tmp_path, TOGETHER, *flags, failure=failure, workers=3)
    assert (result.root["rank"], result.code) == (1, 2), result.summary
    assert "│ ValueError: expected 3 channels" in result.summary


# Both exit after the handler: the SystemExit says nothing of the error.
EXITS_LATER = {
    "print_exc": """
    import traceback
    try: raise ValueError("expected 3 channels")
    except ValueError: traceback.print_exc()
    sys.exit(4)
""",
    "as Hydra does": """
    import traceback
    try: raise ValueError("expected 3 channels")
    except ValueError as error:
        print("Error executing job with overrides: ['lr=1']", file=sys.stderr)
        traceback.print_exception(None, value=error, tb=error.__traceback__.tb_next)
        print("\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
    sys.exit(4)
""",
}


@pytest.mark.parametrize("flags", [(), ("--redirects", "3")], ids=["console", "redirects"])
@pytest.mark.parametrize("name", EXITS_LATER)
def test_what_was_printed_before_an_exit_that_handles_nothing_is_shown(tmp_path, name, flags):
    result = run(tmp_path, ALONE, *EXEC, *flags, failure=EXITS_LATER[name])
    assert (result.root["rank"], result.code) == (1, 4), result.summary
    assert result.root["raised"]["type"] == "SystemExit"
    assert "  last lines of its stderr" in result.summary
    assert "│ ValueError: expected 3 channels" in result.summary
    if name == "as Hydra does":
        assert "│ Error executing job with overrides: ['lr=1']" in result.summary
        assert "│ Set the environment variable HYDRA_FULL_ERROR=1" in result.summary


def test_a_failure_during_the_restart_is_the_one_reported(tmp_path):
    failure = """
if generation == 0 and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if generation == 1 and rank == 1:
    raise KeyError("gone in the second attempt")
"""
    result = run(tmp_path, TOGETHER, "--max-restarts", "1", failure=failure)
    assert result.root["generation"] == 1
    assert result.root["raised"]["type"] == "KeyError"
    assert result.root["rank"] == 1
    assert "attempt 2 of 2" in result.summary
    assert result.report["log_folder"].endswith("attempt_1")
    assert "rank 0 was killed by SIGKILL; restarting" in result.text


# -- the terminal ----------------------------------------------------------------------------------


def on_a_terminal(tmp_path: Path, **env: str) -> str:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('x')\n")
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [*RALLY, *EXEC, str(script)], stderr=theirs, stdout=theirs, env={**clean, **env}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # EIO: all writers are gone
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(240) == 1
    text = shown.decode()
    return text[text.index("the job failed") - 40 :]


def test_coloured_on_a_terminal_only_and_not_if_asked(tmp_path):
    coloured = on_a_terminal(tmp_path, TERM="xterm")
    assert "\x1b[" in coloured
    assert re.search("\x1b\\[[0-9;]*m(rally: )?", coloured)
    assert "\x1b[" not in on_a_terminal(tmp_path, TERM="xterm", NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(tmp_path, TERM="dumb")


# -- the OOM killer --------------------------------------------------------------------------------

MEMORY_V1 = Path("/sys/fs/cgroup/memory")
MEMORY_V2 = Path("/sys/fs/cgroup")
LIMIT = 300 * 1024 * 1024


@pytest.fixture
def small_cgroup():
    """A memory cgroup of 300 MB below our own: its ``cgroup.procs``."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update({name: path.lstrip("/") for name in controllers.split(",")})
    if "memory" in own:
        parents = [MEMORY_V1 / own["memory"], MEMORY_V1]
        limit = "memory.limit_in_bytes"
    else:
        parents = [MEMORY_V2 / own.get("", ""), MEMORY_V2]
        limit = "memory.max"
    for parent in parents:
        group = parent / f"rally-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(LIMIT))
            assert int((group / limit).read_text()) == LIMIT
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (group / swap).exists():
                    (group / swap).write_text(str(LIMIT if "memsw" in swap else 0))
        except (OSError, ValueError, AssertionError):
            group.rmdir()
            continue
        yield group / "cgroup.procs"
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def inside(cgroup: Path) -> tuple[str, ...]:
    return ("sh", "-c", f'echo $$ > {cgroup} && exec "$@"', "sh")


def test_the_oom_killer_is_named(tmp_path, small_cgroup):
    """Without torch: the limit is for what the worker allocates, not for an import."""
    failure = "block = b'x' * (2 << 30)"
    result = run(tmp_path, ALONE, *EXEC, failure=failure, through=inside(small_cgroup))
    assert result.root["rank"] == 1
    assert result.root["signal_name"] == "SIGKILL"
    assert "OOM killer" in result.root["cause"]
    assert "OOM killer" in result.summary
    assert "because" in result.summary
    assert result.code == 137
    assert all("OOM" not in victim["cause"] for victim in result.report["victims"])


def test_the_oom_killer_is_named_if_it_killed_a_child_of_a_worker(tmp_path, small_cgroup):
    greedy = """[sys.executable, "-c", "block = b'x' * (2 << 30)"]"""
    failure = f"import subprocess; subprocess.run({greedy}, check=True)"
    result = run(tmp_path, ALONE, *EXEC, failure=failure, through=inside(small_cgroup))
    assert result.root["raised"]["type"] == "subprocess.CalledProcessError"
    assert result.root["cause"].startswith("a child of it was killed by the kernel's OOM killer: ")


def test_the_oom_killer_is_named_if_it_killed_the_fork_server(tmp_path, small_cgroup):
    (tmp_path / "greedy.py").write_text("block = b'x' * (2 << 30)")
    (tmp_path / "train.py").touch()
    done = supervisors.run(
        [*inside(small_cgroup), *RALLY, "--preload", "greedy", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(STUB)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = " ".join(done.stderr.split())
    assert "was killed by SIGKILL; killed by the kernel's OOM killer: memory limit of" in said
    assert " logs " not in said, "no worker was started"


@pytest.mark.parametrize("question", ["ASK_SIGNAL", "STACK_SIGNAL"])
def test_nobody_but_a_worker_that_runs_its_script_is_asked_what_it_does(tmp_path, question):
    """The question is a signal that ends a process without a handler. At first, a fork has the fork server's handlers."""
    script = f"""
import os
from rallypoint._core import process
from rallypoint._core.stack_line import STACK_SIGNAL
from rallypoint.launch.worker.job import ASK_SIGNAL
raise ValueError([process.catches(pid, {question}) for pid in (os.getppid(), os.getpid())])
"""
    result = run(tmp_path, script, workers=1)
    assert result.root["raised"]["message"] == "[False, True]", result.summary
