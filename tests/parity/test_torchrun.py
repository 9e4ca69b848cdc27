"""One probe script under the installed `torchrun` and under `rally run`: what does a worker see?

Each case is a command line with the launcher's name left out. What torchrun makes of it is on record
for each version of torch, in ``recorded/``; ``make parity-live`` runs both sides and rewrites the
record. Under a version that has none, torchrun is run as well.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import supervisors
from ports import free_port
from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.flags import FLAGS
from rallypoint.launch.command_line.given import find, parse, resolve
from stub_torch import STUB


pytestmark = pytest.mark.parity

BIN = Path(sys.executable).parent
LAUNCHERS = {"torchrun": [str(BIN / "torchrun")], "rally": [str(BIN / "rally"), "run"]}
# torchrun takes 2 to 3 s for most cases on an idle core.
PATIENCE = 180

RECORD = Path(__file__).parent / "recorded" / f"torchrun-{torch.__version__.partition('+')[0]}.json"
LIVE = "PARITY_LIVE" in os.environ or not RECORD.exists()

# -- what is compared -----------------------------------------------------------------------------

# Variables of a worker that cannot or must not be equal, and what must hold of them instead.
# Everything else in the environment has to be the same, byte for byte.
MUST_DIFFER = {
    "PROBE_OUT": "the test's own: where this side's probes write",
    "TMPDIR": "the test's own: a temporary folder per side",
    "RALLY_GENERATION": "ours alone: the number of the round, which counts restarts on one node",
    "RALLY_JOB": "ours alone: marks the processes of a job, so that all of them can be found",
    "RALLY_SECRET_FD": "ours alone: where a program's Python reads the job's secret",
    "RALLY_SECRET_PROC": "ours alone: where programs that a worker starts read it",
}


def _normal(name: str, value: str, case: Case) -> str:
    """The value as far as it is determined."""
    if name == "MASTER_PORT" and "{port}" not in case.flags:
        assert 1023 < int(value) < 65536
        return "any free port"
    named = "--rdzv-id" in case.flags and "--standalone" not in case.flags
    if name == "TORCHELASTIC_RUN_ID" and not named and value != "none":
        return f"a new UUID, version {uuid.UUID(value).version}"
    if name == "MASTER_ADDR" and value in {socket.gethostname(), socket.getfqdn()} - {"localhost"}:
        return "this host"
    if name == "TORCHELASTIC_ERROR_FILE" and value:
        # <temporary or log folder>/<run id>_<random>/attempt_0/1/error.json; we leave out the
        # run id's level where nobody named a folder.
        return "/".join(Path(value).parts[-3:])
    return value


def _determined(run: Run, case: Case) -> Run:
    """What every run of this case has in common."""
    probes = {
        name: seen
        | {
            "env": {
                variable: _normal(variable, value, case)
                for variable, value in sorted(seen["env"].items())
                if variable not in MUST_DIFFER
            }
        }
        for name, seen in sorted(run.probes.items())
    }
    return replace(run, probes=probes)


# Where the probe ends up in a worker; what a worker knows of it is compared as well.
PROBE = """\
import json, os, signal, sys, time

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def note(name, text=""):
    path = os.path.join(os.environ["PROBE_OUT"], name)
    with open(path + "~", "w") as file:
        file.write(text)
    os.rename(path + "~", path)


def wait_for(name):
    while not os.path.exists(os.path.join(os.environ["PROBE_OUT"], name)):
        time.sleep(0.01)


def on_signal(number, frame):
    note(f"{attempt}.{rank}.signal", signal.Signals(number).name)
    sys.exit(0)


end = os.environ.get("PROBE_END", "well")
if end == "on signal":
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)
seen = {"argv": sys.argv, "name": __name__, "file": __file__, "cwd": os.getcwd()}
seen |= {"path0": sys.path[0], "package": __package__, "env": dict(os.environ)}
# A line is one write: under torchrun (python -u) print would make two, and lines of two ranks could mix.
sys.stdout.write(f"out of rank {rank}: apple\\n")
sys.stdout.write(f"out of rank {rank}: pear\\n")
sys.stdout.flush()
sys.stderr.write(f"err of rank {rank}: orange, pear\\n")
sys.stderr.flush()
# Last: rank 1 fails once rank 0 has written this.
note(f"{attempt}.{rank}.json", json.dumps(seen))
if end == "well" or (end == "fails at first" and attempt != "0"):
    sys.exit(0)
if rank == "1":
    wait_for(f"{attempt}.0.json")
    if end == "by segfault":
        signal.raise_signal(signal.SIGSEGV)
    if end in ("fails", "fails at first"):
        sys.exit(7)
time.sleep(60)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command line and what comes of it.

    Args:
        flags: ``{port}`` is a free port, the same for both; ``{logs}`` a folder for each.
        exit_code: ours; torchrun has 1 for every failure, so of it only "failed" is compared.
        send: a signal the launcher gets once all workers are up.
    """

    flags: tuple[str, ...] = ()
    target: tuple[str, ...] = ("probe.py",)
    env: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    exit_code: int = 0
    send: signal.Signals | None = None


def _case(line: str = "", target: str = "probe.py", /, **rest: Any) -> Case:
    return Case(flags=tuple(line.split()), target=tuple(target.split()), **rest)


TWO = "--nproc-per-node 2"
CASES: dict[str, Case] = {
    "no flags": _case(),
    "two workers": _case(TWO, workers=2),
    "three workers": _case("--nproc-per-node 3", workers=3),
    "underscores, equals signs, short forms": _case(
        "--nproc_per_node=2 --max-r 1 --role=trainer", workers=2
    ),
    "standalone": _case(f"--standalone {TWO}", workers=2),
    "standalone overrules": _case(
        "--standalone --rdzv-id x --rdzv-backend etcd --rdzv-endpoint nowhere.invalid:1"
    ),
    "master port": _case(f"{TWO} --master-port {{port}}", workers=2),
    "master address and port": _case("--master-addr localhost --master-port {port}"),
    "static endpoint": _case("--rdzv-endpoint localhost:{port}"),
    "c10d with a name": _case(
        f"{TWO} --rdzv-id job-7 --rdzv-backend c10d --rdzv-endpoint localhost:0", workers=2
    ),
    "settings of the rendezvous": _case("--rdzv-conf timeout=30,join_timeout=20"),
    "a role before teed lines": _case("--role trainer --tee 3 --log-dir {logs}"),
    "restart": _case(f"--max-restarts 2 {TWO}", workers=2, env={"PROBE_END": "fails at first"}),
    "restarts used up": _case(
        f"--max-restarts 1 {TWO}", workers=2, env={"PROBE_END": "fails"}, exit_code=7
    ),
    "a worker fails": _case(TWO, workers=2, env={"PROBE_END": "fails"}, exit_code=7),
    "a worker crashes": _case(
        TWO, workers=2, env={"PROBE_END": "by segfault"}, exit_code=128 + signal.SIGSEGV
    ),
    "a module": _case(TWO, "-m package.module a -b", workers=2),
    "a folder": _case("", "folder a"),
    "a program": _case("--no-python", f"{sys.executable} probe.py a -b"),
    "a program in the path": _case(f"--no_python {TWO}", "sh run.sh a", workers=2),
    "run path": _case("--run-path", "{cwd}/probe.py a"),
    "log folder": _case(f"--log-dir {{logs}} --redirects 3 {TWO}", workers=2),
    "log folder without redirects": _case("--log_dir={logs}"),
    "no log folder": _case("--log-dir /dev/null --redirects 3"),
    "redirects by rank": _case(f"--log-dir {{logs}} -r 0:1,1:2 {TWO}", workers=2),
    "redirects in the short form": _case(f"--log-dir {{logs}} -r3 -t=1 {TWO}", workers=2),
    "tee": _case(f"--log-dir {{logs}} --tee 3 {TWO}", workers=2),
    "teed ranks filtered": _case(
        f"--log-dir {{logs}} --tee 3 --local-ranks-filter 0 {TWO}", workers=2
    ),
    "ranks filtered": _case(f"--local_ranks_filter 1 {TWO}", workers=2),
    "lines duplicated": _case(
        f"--log-dir {{logs}} --tee 3 --duplicate-stdout-filters apple,plum"
        f" --duplicate-stderr-filters orange,,,plum {TWO}",
        workers=2,
    ),
    "lines of shown ranks duplicated": _case(
        f"--log-dir {{logs}} -t3 --duplicate-stdout-filters pear --local-ranks-filter 1 {TWO}",
        workers=2,
    ),
    "prefix template": _case(
        f"--log-dir {{logs}} --tee 3 {TWO}",
        workers=2,
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}|${rank}|${local_rank}|$x> "},
    ),
    "workers by variable": _case("", env={"PET_NPROC_PER_NODE": "2"}, workers=2),
    "restarts by variable": _case("", env={"PET_MAX_RESTARTS": "4", "PET_ROLE": "r"}),
    "switch by variable": _case("", "package a", env={"PET_MODULE": "1", "PET_STANDALONE": "0"}),
    "a flag beats its variable": _case(
        "--nproc-per-node 1 --role flag", env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "variable"}
    ),
    "virtual local ranks": _case(
        f"--virtual-local-rank {TWO}", workers=2, env={"CUDA_VISIBLE_DEVICES": "4,5"}
    ),
    "arguments like flags": _case("", "probe.py --nproc-per-node 7 -- x --tee 3 -r"),
    "arguments with spaces": Case(target=("probe.py", "", "a b", "*", "$HOME", '"', "é")),
    "threads, devices and NCCL are chosen": _case(
        f"{TWO} --",
        workers=2,
        env={
            "OMP_NUM_THREADS": "3",
            "CUDA_VISIBLE_DEVICES": "4, 5",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        },
    ),
    "flags of torchrun that mean nothing here": _case(
        "--monitor-interval 0.05 --start-method fork --event-log-handler null"
    ),
    "told to stop": _case(
        TWO,
        workers=2,
        env={"PROBE_END": "on signal"},
        send=signal.SIGTERM,
        exit_code=128 + signal.SIGTERM,
    ),
    "another signal": _case(
        f"--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 9 {TWO}",
        workers=2,
        env={"PROBE_END": "on signal"},
        send=signal.SIGUSR1,
        exit_code=128 + signal.SIGUSR1,
    ),
    "unknown flag": _case("--nproc-of-node 2", exit_code=2),
    "nothing to run": _case("--standalone", "", exit_code=2),
    "no such script": _case("", "nothing.py", exit_code=2),
    "no workers": _case("--nproc-per-node many", exit_code=2),
}


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one launcher made of a case."""

    exit_code: int
    stdout: str
    stderr: str
    probes: dict[str, dict[str, Any]]
    signals: dict[str, str]
    logs: dict[str, str]


def _modules_of(folder: Path) -> Path:
    """One place for all cases: processes to fork from are kept for each PYTHONPATH."""
    return folder.parent / "modules"


def _run(launcher: str, case: Case, folder: Path, port: int) -> Run:
    """Both launchers use one folder, one after the other."""
    out, logs, temporary = (folder / launcher / name for name in ("out", "logs", "tmp"))
    for path in (out, temporary):
        path.mkdir(parents=True)
    words = [*LAUNCHERS[launcher], *case.flags, *case.target]
    values = {"{port}": str(port), "{logs}": str(logs), "{cwd}": str(folder)}
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), "PROBE_OUT": str(out)}
    # What Python itself sets when it starts with neither; a fork has started before.
    env |= {"LC_CTYPE": "C.UTF-8"}
    env |= {"TMPDIR": str(temporary), "PYTHONPATH": str(_modules_of(folder)), **case.env}
    with (
        (folder / launcher / "stdout").open("w") as stdout,
        (folder / launcher / "stderr").open("w") as stderr,
        supervisors.Popen(
            words,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            imports=(),
            forked=launcher == "rally",
        ) as process,
    ):
        try:
            if case.send is not None:
                _wait_until(lambda: len(list(out.glob("*.json"))) == case.workers, process)
                process.send_signal(case.send)
            code = process.wait(PATIENCE)
        finally:
            process.kill()
    return Run(
        exit_code=code,
        stdout=(folder / launcher / "stdout").read_text(),
        stderr=(folder / launcher / "stderr").read_text(),
        probes={path.stem: json.loads(path.read_text()) for path in out.glob("*.json")},
        signals={path.stem: path.read_text() for path in out.glob("*.signal")},
        logs=_logs(logs),
    )


def _wait_until(holds: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert process.poll() is None, "it ended before its workers stood"
        assert time.monotonic() < end, "its workers never stood"
        time.sleep(0.01)


def _logs(base: Path) -> dict[str, str]:
    """Files below the one folder of the run, by path; folders have a slash and no text."""
    runs = list(base.iterdir()) if base.is_dir() else []
    assert len(runs) <= 1
    found = {}
    for path in runs[0].rglob("*") if runs else ():
        if path.name == "ranks.json":
            continue  # ours, for `rally logs`
        name = str(path.relative_to(runs[0]))
        found[name + "/" * path.is_dir()] = "" if path.is_dir() else path.read_text()
    return found


def _make_targets(folder: Path) -> None:
    folder.joinpath("probe.py").write_text(PROBE)
    folder.joinpath("run.sh").write_text(f'exec {sys.executable} probe.py "$@"\n')
    folder.joinpath("folder").mkdir()
    folder.joinpath("folder", "__main__.py").write_text(PROBE)


def _make_modules(folder: Path) -> None:
    package = folder / "package"
    package.mkdir(parents=True)
    for path in ("__init__.py", "__main__.py", "module.py"):
        package.joinpath(path).write_text("" if path == "__init__.py" else PROBE)


# -- what torchrun does, on record -----------------------------------------------------------------


def _places(folder: Path, port: int) -> dict[str, str]:
    """What differs between two machines, and what stands for it in a record."""
    # The interpreter before the folder it is in, and the modules before the folder that they are not in.
    return {
        str(_modules_of(folder)): "{folder}/modules",
        str(folder): "{folder}",
        sys.executable: "{python}",
        str(BIN): "{bin}",
        str(port): "{port}",
    }


def _written(run: Run, folder: Path, port: int) -> dict[str, Any]:
    text = json.dumps(asdict(run))
    for here, anywhere in _places(folder, port).items():
        text = text.replace(here, anywhere)
    return json.loads(text)


def _read(record: dict[str, Any], folder: Path, port: int) -> Run:
    text = json.dumps(record)
    for here, anywhere in _places(folder, port).items():
        text = text.replace(anywhere, here)
    return Run(**json.loads(text))


@functools.cache
def _records() -> dict[str, dict[str, Any]]:
    """By the name of the case."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _theirs(name: str, folder: Path, port: int) -> Run:
    """The case under torchrun, run or read."""
    case = CASES[name]
    if not LIVE:
        return _read(_records()[name], folder, port)
    run = _determined(_run("torchrun", case, folder, port), case)
    # What torchrun itself prints is not compared: it holds times and process ids.
    run = replace(
        run,
        stdout="\n".join(sorted(run.stdout.splitlines())),
        stderr="\n".join(sorted(_lines_of_workers(run.stderr).elements())),
    )
    if "PARITY_LIVE" in os.environ:
        _records()[name] = _written(run, folder, port)
        RECORD.parent.mkdir(exist_ok=True)
        text = json.dumps(_records(), indent=1, sort_keys=True, ensure_ascii=False)
        RECORD.write_text(text + "\n")
    return run


@functools.cache
def _both(name: str, folder: Path) -> tuple[Run, Run]:
    folder = folder / f"case{list(CASES).index(name)}"
    folder.mkdir()
    _make_targets(folder)
    port = free_port()
    theirs = _theirs(name, folder, port)
    # The probe does without torch, and so does our fork server.
    torch_in_place = _modules_of(folder) / "torch"
    torch_in_place.symlink_to(STUB / "torch")
    try:
        return theirs, _run("rally", CASES[name], folder, port)
    finally:
        torch_in_place.unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cases")
    _make_modules(made / "modules")
    return made


@pytest.fixture
def pair(name: str, folder: Path) -> tuple[Run, Run]:
    """The case under torchrun and under rally."""
    return _both(name, folder)


# -- the comparisons ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_worker_sees_the_same(name: str, pair: tuple[Run, Run]) -> None:
    case = CASES[name]
    theirs, ours = pair[0], _determined(pair[1], case)
    for probe, seen in pair[1].probes.items():
        env = seen["env"]
        assert env["RALLY_GENERATION"] == env["TORCHELASTIC_RESTART_COUNT"], probe

    assert ours.exit_code == case.exit_code, ours.stderr
    assert (theirs.exit_code == 0) == (case.exit_code == 0), theirs.stderr

    assert set(ours.probes) == set(theirs.probes), "other workers, or in other attempts"
    if case.exit_code != 2:
        assert len({name.partition(".")[2] for name in ours.probes}) == case.workers
    for probe, seen in ours.probes.items():
        expected = theirs.probes[probe]
        for what in set(seen) - {"env"}:
            if what in {"path0", "package"} and "--run-path" in case.flags:
                continue  # runpy.run_path leaves torchrun's folder in front, and says __package__ = ""
            assert seen[what] == expected[what], f"{what} of {probe}"
        _compare_environments(seen["env"], expected["env"])

    assert Counter(ours.stdout.splitlines()) == Counter(theirs.stdout.splitlines())
    # Beside what workers write, each launcher has words of its own: our report quotes them.
    assert _lines_of_workers(ours.stderr) == _lines_of_workers(theirs.stderr)
    assert ours.signals == theirs.signals
    _compare_logs(ours.logs, theirs.logs)


def _compare_environments(ours: dict[str, str], theirs: dict[str, str]) -> None:
    different = {
        name: (theirs.get(name), ours.get(name))
        for name in sorted(ours.keys() | theirs.keys())
        if theirs.get(name) != ours.get(name)
    }
    assert not different, "variable: (under torchrun, under rally)"


def _lines_of_workers(text: str) -> Counter[str]:
    return Counter(line for line in text.splitlines() if "err of rank" in line and "│" not in line)


def _compare_logs(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert set(ours) == set(theirs)
    for name, text in ours.items():
        if "filtered" in name:  # the workers' lines come in any order
            assert Counter(text.splitlines()) == Counter(theirs[name].splitlines()), name
        else:
            assert text == theirs[name], name


@pytest.mark.parametrize("name", ["told to stop", "another signal"])
def test_workers_get_the_signal_of_the_launcher(name: str, pair: tuple[Run, Run]) -> None:
    for run in pair:
        assert set(run.signals.values()) == {CASES[name].send.name}
        assert len(run.signals) == 2


@pytest.mark.parametrize("name", ["log folder", "tee", "lines duplicated"])
def test_files_hold_what_was_written(name: str, pair: tuple[Run, Run]) -> None:
    """So that two empty log folders are not taken for equal ones."""
    for run in pair:
        assert run.logs["attempt_0/1/stdout.log"].splitlines()[0] == "out of rank 1: apple"
        assert run.logs["attempt_0/0/stderr.log"] == "err of rank 0: orange, pear\n"
        assert ("[default0]:out of rank 0: apple" in run.stdout) == ("--tee" in CASES[name].flags)
        if name == "lines duplicated":
            lines = sorted(run.logs["attempt_0/filtered_stdout.log"].splitlines())
            assert lines == ["[default0]:out of rank 0: apple", "[default1]:out of rank 1: apple"]


# -- flags ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser() -> Any:
    from torch.distributed.run import get_args_parser

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PET_")]:
            patch.delenv(name)
        return get_args_parser()


def _options(parser: Any) -> list[Any]:
    return [each for each in parser._actions if each.option_strings and each.dest != "help"]


def _as_text(value: object) -> str | None:
    """A value of torchrun's namespace as it would appear on a command line."""
    match value:
        case bool():
            return str(int(value))
        case list():
            return ",".join(item.replace(",", ",,") for item in value)
        case None:
            return None
    return str(value)


def test_every_flag_of_torchrun_is_known_in_each_spelling(parser: Any) -> None:
    options = _options(parser)
    assert len(options) > 25, "the parser is read the wrong way"
    for option in options:
        for spelling in option.option_strings:
            flag = find(spelling)
            assert flag.dest == option.dest
            assert flag.is_switch == (option.nargs == 0)
        underscored = "--" + option.dest
        assert find(underscored).dest == option.dest
        if option.choices and option.dest != "start_method":
            assert set(option.choices) == set(find(underscored).choices)


def test_defaults_are_those_of_torchrun(parser: Any) -> None:
    values, _ = resolve(parse(["script.py"]), {})
    for option in _options(parser):
        if option.dest == "start_method":
            # There it is about functions alone, and scripts are always started by exec.
            assert values[option.dest] is None
        else:
            assert values[option.dest] == _as_text(option.default), option.dest


def test_every_variable_of_torchrun_is_honoured_and_no_other(parser: Any) -> None:
    from torch.distributed.argparse_util import check_env, env

    for option in _options(parser):
        flag = find("--" + option.dest)
        assert flag.env == isinstance(option, env | check_env), flag.name
        text = flag.choices[0] if flag.choices else "1"
        values, origins = resolve(parse(["script.py"]), {f"PET_{option.dest.upper()}": text})
        assert (origins[option.dest] != "default") == flag.env
        assert (values[option.dest] == text) == flag.env


OUR_OWN = {flag.dest for flag in FLAGS if flag.own}


def test_our_own_flags_listen_to_no_variable_of_torchruns_name(parser: Any) -> None:
    known = {option.dest for option in _options(parser)}
    own = {flag.dest for flag in FLAGS} - known
    assert own == OUR_OWN  # otherwise an abbreviation of torchrun's flags could mean one of ours


_SPELLINGS = [
    spelling
    for flag in FLAGS
    if flag.dest not in OUR_OWN
    for spelling in (flag.name, flag.name[:2] + flag.name[2:].replace("-", "_"), flag.short)
    if spelling
]
_VALUES = st.sampled_from(
    ["1", "0", "x", "a=b", "", "0:3,1:1", "node", "-1", "-0.5", "a b", "-a b"]
)
_WORDS = st.one_of(
    st.sampled_from(_SPELLINGS),
    st.builds("{}={}".format, st.sampled_from(_SPELLINGS), _VALUES),
    st.builds(
        lambda name, cut: name[: max(3, cut)], st.sampled_from(_SPELLINGS), st.integers(3, 25)
    ),
    _VALUES,
    st.sampled_from(
        ["script.py", "--", "-", "-r3", "-t=2", "-mr3", "-mt", "-x", "--unknown", "--n=1"]
    ),
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(_WORDS, max_size=7).map(lambda words: [*words, "script.py"]))
def test_what_torchrun_understands_we_understand_alike(parser: Any, argv: list[str]) -> None:
    said, theirs, ours, refusal = io.StringIO(), None, None, ""
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        theirs = vars(parser.parse_args(argv))
    try:
        taken = parse(argv)
        values, _ = resolve(taken, {})
        ours = taken.target
    except ConfigError as error:
        refusal = str(error)
    if ours is None:
        # argparse takes "-1" and "-a b" for the script. Nobody's script is called that.
        script = "" if theirs is None else theirs["training_script"]
        assert theirs is None or re.fullmatch(r"-[\d.]+|-a b", script), refusal
        return
    if theirs is None:
        # argparse refuses more than we do: two spellings of one flag count as ambiguous, so does
        # what follows the script; and it checks values that have a type. We report a missing script
        # later.
        assert re.search(
            r"ambiguous|invalid (int|float) value|invalid choice|required", said.getvalue()
        )
        return
    target = (theirs.pop("training_script"), *theirs.pop("training_script_args"))
    if ours != target:
        # argparse of Python 3.11 swallows a "--" right after the script; that of 3.13 does not. We
        # leave a script's arguments alone.
        assert ours[1] == "--"
        assert (ours[0], *ours[2:]) == target
    for dest, value in theirs.items():
        text = _as_text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert float(values[dest] or "nan") == value, dest
        elif dest == "start_method":
            assert values[dest] in {text, None}
        else:
            assert values[dest] == text, dest
