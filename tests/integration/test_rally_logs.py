"""``rally logs``, and output as JSON, of real jobs."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pace import pace
from ports import free_port
from rallypoint._core import log_folder, standard_streams
from rallypoint.control.client import connect
from rallypoint.control.logs import command
from rallypoint.control.logs.command import last_lines
from rallypoint.errors import ControlError
from rallypoint.launch.cli import main
from resized_job import Job
from supervisors import RALLY, Popen, run


PATIENCE = 60.0 * pace()
SCRIPT = """
import os, sys, time
for step in range(3):
    print("rank", os.environ["RANK"], "step", step, flush=True)
print("to stderr", file=sys.stderr, flush=True)
if sys.argv[1:] == ["wait"]:
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.05)
    print("the end", flush=True)
"""


@pytest.fixture(name="script")
def _script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.integration
def test_json_lines_are_in_order_in_files_and_on_the_console(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    words = ["--nproc-per-node", "2", "--log-dir", str(logs), "--tee", "3"]
    done = run(
        [RALLY, "run", *words, "--log-format", "json", str(script)], capture_output=True, text=True
    )
    assert done.returncode == 0
    shown = [json.loads(each) for each in (done.stdout + done.stderr).splitlines()]
    assert sorted((each["rank"], each["text"]) for each in shown if each["stream"] != "rally") == [
        *((0, f"rank 0 step {step}") for step in range(3)),
        (0, "to stderr"),
        *((1, f"rank 1 step {step}") for step in range(3)),
        (1, "to stderr"),
    ]
    assert {each["generation"] for each in shown if each["stream"] != "rally"} == {0}
    assert main(["logs", str(logs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    by_time = sorted(
        (each for each in shown if each["stream"] != "rally"), key=lambda each: each["monotonic"]
    )
    assert [each.partition("] ")[2] for each in lines] == [each["text"] for each in by_time]
    assert main(["logs", str(logs), "--rank", "1", "--grep", "step [12]", "--tail", "1"]) == 0
    assert capsys.readouterr().out == "[rank 1] rank 1 step 2\n"


@pytest.mark.integration
def test_a_redirected_stream_is_not_on_the_console(script: Path, tmp_path: Path) -> None:
    words = ["--log-dir", str(tmp_path / "logs"), "--redirects", "1", "--log-max-size", "1K"]
    done = run([RALLY, "run", *words, str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and "to stderr" in done.stderr
    (file,) = (tmp_path / "logs").glob("*/attempt_0/0/stdout.log")
    assert file.read_text() == "".join(f"rank 0 step {step}\n" for step in range(3))


@pytest.mark.integration
def test_a_running_job_is_followed_to_its_end(
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"logs-{os.getpid()}"
    words = ["--rdzv-id", name, "--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    job = Popen(
        [RALLY, "run", *words, str(script), "wait"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not list((tmp_path / "logs").glob("*/attempt_0/0/stderr.log")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        text = "rank 0 step 2"
        while [f"[rank 0] {text}"] != [
            each for each in last_lines(connect(name), [0], 1) if text in each
        ]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert last_lines(connect(name), [7], 1) == []
        write = standard_streams.write

        def write_and_go_on(text: str, **how: bool) -> None:
            """The job ends once it is followed, and not before."""
            write(text, **how)
            Path(f"{script}.go").touch()

        monkeypatch.setattr(standard_streams, "write", write_and_go_on)
        assert main(["logs", name, "-f"]) == 0
    finally:
        job.wait(PATIENCE)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "[rank 0] the end"
    assert sorted(shown[:-1]) == [
        "[rank 0 err] to stderr",
        *(f"[rank 0] rank 0 step {step}" for step in range(3)),
    ]


FAILS = """
import os, sys, time
generation = os.environ["RALLY_GENERATION"]
print("generation", generation, flush=True)
while not os.path.exists(f"{__file__}.go-{generation}"):
    time.sleep(0.02)
if generation == "0":
    for step in range(1000):
        print("step", step)
    raise ValueError("why it failed")
"""


@pytest.mark.integration
def test_the_end_of_a_generation_is_shown_before_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why there is a next one. The restart is over before the follower looks again."""
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    name = f"ends-{os.getpid()}"
    words = ["--rdzv-id", name, "--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    job = Popen(
        [RALLY, "run", *words, "--max-restarts", "1", str(script)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE

    def wait_for(pattern: str) -> None:
        while not any(each.stat().st_size for each in (tmp_path / "logs").glob(pattern)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def selected(*_: object) -> None:
        """The follower waits: meanwhile all of it happens."""
        if not (go := Path(f"{script}.go-0")).exists():
            go.touch()
            wait_for("*/attempt_1/0/stdout.log")
        else:
            Path(f"{script}.go-1").touch()
            real_select([], [], [], 0.05)

    try:
        wait_for("*/attempt_0/0/stdout.log")
        real_select = select.select
        monkeypatch.setattr(command.select, "select", selected)
        assert main(["logs", name, "-f"]) == 0
    finally:
        for generation in (0, 1):
            Path(f"{script}.go-{generation}").touch()
        job.wait(PATIENCE)
    shown = [each.partition("] ")[2] for each in capsys.readouterr().out.splitlines()]
    assert "step 999" in shown
    assert shown.index("ValueError: why it failed") < shown.index("generation 1")


@pytest.mark.integration
def test_a_job_is_followed_by_its_folder_and_found_beside_a_folder_of_its_name(
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, logs = f"named-{os.getpid()}", tmp_path / "logs"
    (tmp_path / name).mkdir()  # its data, say
    monkeypatch.chdir(tmp_path)
    words = ["--rdzv-id", name, "--log-dir", "logs", "--redirects", "3"]
    job = Popen([RALLY, "run", *words, str(script), "wait"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + PATIENCE
        while not any("step 2" in each.read_text() for each in logs.glob("*/attempt_0/0/*.log")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert main(["logs", name, "--grep", "step 2"]) == 0
        assert capsys.readouterr() == ("[rank 0] rank 0 step 2\n", "")
        write = standard_streams.write

        def write_and_go_on(text: str, **how: bool) -> None:
            """The job ends once it is followed, and not before."""
            write(text, **how)
            Path(f"{script}.go").touch()

        monkeypatch.setattr(standard_streams, "write", write_and_go_on)
        assert main(["logs", "-f", "logs", "--grep", "step 2|the end"]) == 0
    finally:
        Path(f"{script}.go").touch()
        job.wait(PATIENCE)
    assert capsys.readouterr() == ("[rank 0] rank 0 step 2\n[rank 0] the end\n", "")
    assert main(["logs", "-f", "logs", "--grep", "the end"]) == 0
    shown, said = capsys.readouterr()
    assert shown == "[rank 0] the end\n"
    assert said.startswith("rally: no job of this user on this host writes to logs/")


@pytest.mark.integration
def test_a_job_on_the_terminal_says_where_its_output_is(script: Path, tmp_path: Path) -> None:
    name = f"nologs-{os.getpid()}"
    job = Popen(
        [RALLY, "run", "--rdzv-id", name, str(script), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        job.stdout.readline()
        connect(name)
        assert main(["logs", name]) == 1
    finally:
        Path(f"{script}.go").touch()
        job.communicate(timeout=PATIENCE)
    with pytest.raises(ControlError, match="rally logs FOLDER"):
        from rallypoint.control.logs import command

        command.command([name])


@pytest.mark.integration
def test_output_of_all_nodes(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two supervisors with a folder each; the first one is asked. What is written later arrives with -f."""
    port = free_port()
    name = f"far-{os.getpid()}"
    words = ["--nnodes", "2", "--rdzv-id", name, "--insecure", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--redirects", "3", "--log-format", "json"]
    folders = [tmp_path / "a", tmp_path / "b"]
    nodes = [
        Popen(
            [RALLY, "run", *words, "--log-dir", str(folder), str(script), "wait"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for folder in folders
    ]

    def holds(text: str) -> bool:
        return all(
            any(text in each.read_text() for each in folder.glob("*/attempt_0/0/*.log"))
            for folder in folders
        )

    try:
        deadline = time.monotonic() + PATIENCE
        while not (holds("step 2") and holds("to stderr")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = str(nodes[0].pid)
        assert main(["logs", pid]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert sorted(shown) == sorted(
            line
            for rank in range(2)
            for line in (
                f"[rank {rank} err] to stderr",
                *(f"[rank {rank}] rank {rank} step {step}" for step in range(3)),
            )
        )
        for rank in range(2):  # each host's are in order
            own = [line for line in shown if line.startswith(f"[rank {rank}]")]
            assert own == sorted(own)
        assert main(["logs", pid, "--rank", "0,1", "--tail", "1", "--grep", "step"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
        assert main(["logs", pid, "--since", "0"]) == 0
        assert capsys.readouterr().out == ""
    finally:
        Path(f"{script}.go").touch()
        for node in nodes:
            node.wait(PATIENCE)


TRAINS = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rallypoint import elastic

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
session = elastic.session(net, optimizer)
session.on_resize(lambda before, now: None, in_place=True)
with session:
    while session.position < 400:
        with session.step():
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}, step {session.position}", flush=True)
        (folder / f"new {os.getpid()}").write_text(f"{session.position}")
        os.replace(folder / f"new {os.getpid()}", folder / f"at {os.getpid()}")
        while (folder / "wait").exists() and session.position >= int((folder / "wait").read_text()):
            time.sleep(0.01)
"""


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_output_is_that_of_the_rank_that_a_worker_has_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost, and the ranks of the others change; then a worker of a node that stays is lost."""
    job = Job(tmp_path, 2, 3, TRAINS, ())
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "rank ${rank}>")
    job.words[4:4] = ["--tee", "3", "--max-losses", "9"]
    try:
        job.hold_at(10)
        for _ in range(3):
            job.start()
        job.wait(lambda: len(job.at(10)) == 6, "six ranks train")
        before = set(job.steps())
        job.kill(job.nodes[0])
        job.hold_at(20)
        job.wait(lambda: len(job.at(20)) == 4, "four ranks go on")
        victim = min(job.steps())
        os.kill(victim, signal.SIGKILL)
        job.hold_at(30)
        job.wait(lambda: len(job.at(30)) == 4, "a lost one is replaced")
        assert victim in before
        assert main(["logs", str(job.nodes[1].pid)]) == 0
        shown = capsys.readouterr().out.splitlines()
        job.go_on()
        for node in job.nodes:
            node.wait(120)
    finally:
        job.close()
    for rank in range(4):
        # From before both losses, with the rank that it had then.
        old = re.compile(rf"\[rank {rank}\] rank \d of 6, step 10")
        assert any(old.fullmatch(line) for line in shown), (rank, shown)
        for step in (20, 30):
            assert f"[rank {rank}] rank {rank} of 4, step {step}" in shown, (rank, step, shown)
    teed = [line for line in job.output().splitlines() if ", step " in line]
    assert {line[:15] for line in teed if ", step 30" in line} == {
        f"rank {rank}>rank {rank} o" for rank in range(4)
    }
    assert all(line.startswith(f"{line[:6]}>{line[:6]} ") for line in teed)


@pytest.mark.parametrize(
    "words",
    [
        ["--since", "x"],
        ["--grep", "("],
        ["--rank", "a"],
        ["--no"],
        ["a", "b"],
        ["--grep"],
        ["--grep", ""],
        ["--tail"],
    ],
)
def test_mistakes(words: list[str]) -> None:
    assert main(["logs", *words]) == 2


def test_a_rank_that_there_is_not_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = tmp_path / "run" / "attempt_0"
    for rank in ("0", "1"):
        (attempt / rank).mkdir(parents=True)
        (attempt / rank / "stdout.log").write_text(f"line of {rank}\n")
    log_folder.note_ranks(attempt, "here", {0: 0, 1: 1})
    assert main(["logs", str(tmp_path / "run"), "--rank", "1"]) == 0
    assert "line of 1" in capsys.readouterr().out
    assert main(["logs", str(tmp_path / "run"), "--rank", "1,9"]) == 1
    assert capsys.readouterr().err == "rally: no output of rank 9 (there: ranks 0, 1)\n"


def test_of_a_folder_that_users_share_each_sees_the_own_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    for run_folder in (own, others):
        (run_folder / "attempt_0" / "0").mkdir(parents=True)
        (run_folder / "attempt_0" / "0" / "stdout.log").write_text(f"{run_folder.name}\n")
    iterdir = Path.iterdir

    def guarded(folder: Path) -> Iterator[Path]:
        if folder == others:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", guarded)  # tests may run as root, who may read everything
    assert main(["logs", str(tmp_path)]) == 0
    assert "own" in capsys.readouterr().out
    assert main(["logs", str(others)]) == 1
    assert f"rally: cannot read {others}: Permission denied (" in capsys.readouterr().err
