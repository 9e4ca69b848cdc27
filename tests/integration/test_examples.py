"""The examples do what their docstrings say, under rally as under python and torchrun.

``EXAMPLES_LAUNCHER=torchrun pytest …`` puts torchrun in rally's place, which tells a fault of an
example from a fault of the launcher.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import supervisors


if TYPE_CHECKING:
    from types import ModuleType


pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHER = os.environ.get("EXAMPLES_LAUNCHER", "rally")

# No run should come near this: the slowest of these jobs takes 10 s on two cores.
TIMEOUT = 240

# What examples import, and what torch imports when an optimizer first steps: it takes seconds in every process.
IMPORTS = (
    *(*supervisors.TORCH, "sklearn.datasets", "sklearn.model_selection", "rich.progress"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.distributions"),
)

# The same number of threads everywhere, and none of the settings of a job that these tests may be part of.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name
    not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    and not name.startswith("TORCHELASTIC_")
} | {"OMP_NUM_THREADS": "1"}


def command(launcher: str, *options: str) -> list[str]:
    match launcher:
        case "python":
            return [sys.executable]
        case "torchrun":
            launch = ["torch.distributed.run", "--standalone"]
        case "rally":
            launch = ["rallypoint", "run"]
        case _:
            raise ValueError(f"no launcher {launcher!r}")
    return [sys.executable, "-m", *launch, "--nproc-per-node", "2", *options]


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return supervisors.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        imports=IMPORTS,
    )


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, *arguments, cwd=cwd)


def succeed(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return well(run(*arguments, cwd=cwd))


def well(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def reported_accuracy(output: str) -> float:
    found = re.findall(r"accuracy ([\d.]+)% on \d+ held-out images", output)
    assert len(found) == 1, f"one rank reports once:\n{output}"
    return float(found[0]) / 100


def load_checkpoint(output: Path) -> dict:
    assert not list(output.glob("*.tmp")), "a temporary file was left behind"
    return torch.load(output / "checkpoint.pt", weights_only=True)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The output folder of two epochs in one process without a launcher."""
    folder = tmp_path_factory.mktemp("alone")
    demo = [*command("python"), EXAMPLES / "digits_ddp.py"]
    succeed(*demo, "--epochs", "2", "--min-accuracy", "0", cwd=folder)
    return folder / "demo-output"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The whole demo on two ranks, as a user would start it: the process and its output folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = succeed(*command(LAUNCHER), EXAMPLES / "digits_ddp.py", cwd=folder)
    return done, folder / "demo-output"


def test_the_demo_reads_digits_and_leaves_a_checkpoint_and_a_picture(demo):
    done, output = demo
    assert reported_accuracy(done.stdout) >= 0.97
    assert "demo-output/checkpoint.pt" in done.stdout
    assert "demo-output/digits.png" in done.stdout

    checkpoint = load_checkpoint(output)
    assert checkpoint["epoch"] == len(checkpoint["losses"]) == len(checkpoint["accuracies"]) == 20

    picture = (output / "digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 30_000, "an empty figure is smaller"


def test_the_demo_learns_the_same_alone_and_on_two_ranks(demo, alone):
    losses = load_checkpoint(demo[1])["losses"]
    assert losses[:2] == pytest.approx(load_checkpoint(alone)["losses"], rel=1e-3)


@pytest.mark.long
def test_the_demo_learns_the_same_under_torchrun(tmp_path, demo):
    script = EXAMPLES / "digits_ddp.py"
    succeed(*command("torchrun"), script, "--epochs", "2", "--min-accuracy", "0", cwd=tmp_path)
    losses = load_checkpoint(tmp_path / "demo-output")["losses"]
    assert losses == pytest.approx(load_checkpoint(demo[1])["losses"][:2], rel=1e-3)


@pytest.mark.long
def test_a_demo_begun_alone_resumes_on_two_ranks_as_if_uninterrupted(tmp_path, alone, demo):
    shutil.copytree(alone, tmp_path / "demo-output")
    done = succeed(
        *command(LAUNCHER),
        *(EXAMPLES / "digits_ddp.py", "--resume", "--epochs", "3", "--min-accuracy", "0"),
        cwd=tmp_path,
    )
    assert "resumed after epoch 2" in done.stderr
    losses = load_checkpoint(tmp_path / "demo-output")["losses"]
    assert losses == pytest.approx(load_checkpoint(demo[1])["losses"][:3], rel=1e-3)


# A demo that draws nothing, for where the picture has been looked at already: it takes a second.
UNDRAWN = """\
import sys

del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
import digits_ddp

digits_ddp.draw = lambda *_: None
digits_ddp.main()
"""
# Rank 1 of the first attempt kills itself as soon as there is a checkpoint to return to.
SABOTAGE = """\
import os, signal, sys, threading, time
from pathlib import Path

def strike():
    while not Path("demo-output/checkpoint.pt").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=strike, daemon=True).start()
"""


def test_the_demo_goes_on_from_its_checkpoint_after_a_worker_was_killed(
    tmp_path, demo, monkeypatch
):
    if LAUNCHER == "torchrun":  # its second attempt reads the Gloo addresses of the first
        monkeypatch.setitem(ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "sabotage.py").write_text(SABOTAGE + UNDRAWN)
    done = succeed(
        *command(LAUNCHER, "--max-restarts", "1"),
        *("sabotage.py", EXAMPLES / "digits_ddp.py", "--epochs", "5", "--min-accuracy", "0"),
        cwd=tmp_path,
    )
    resumed = re.search(r"resumed after epoch (\d+)", done.stderr)
    assert resumed, done.stderr
    assert 1 <= int(resumed[1]) < 5
    checkpoint = load_checkpoint(tmp_path / "demo-output")
    assert checkpoint["epoch"] == 5
    assert checkpoint["losses"][:3] == pytest.approx(
        load_checkpoint(demo[1])["losses"][:3], rel=1e-3
    )


def test_the_demo_fails_below_the_asked_accuracy(tmp_path, alone):
    # Both epochs are in the checkpoint already: this run only judges them.
    (tmp_path / "undrawn.py").write_text(UNDRAWN)
    done = python(
        tmp_path / "undrawn.py",
        *(EXAMPLES / "digits_ddp.py", "--epochs", "2", "--resume", "--min-accuracy", "1"),
        cwd=alone.parent,
    )
    assert done.returncode == 1
    assert "is below --min-accuracy 100.00%" in done.stderr


@pytest.mark.long
def test_fsdp2_restores_an_accurate_model_from_its_sharded_checkpoint(tmp_path):
    done = succeed(*command(LAUNCHER), EXAMPLES / "digits_fsdp2.py", cwd=tmp_path)
    assert reported_accuracy(done.stdout) > 0.90
    shards = sorted(path.name for path in (tmp_path / "demo-output" / "fsdp2").glob("*.distcp"))
    assert shards == ["__0_0.distcp", "__1_0.distcp"]


def losses_of(output: Path) -> list[float]:
    return json.loads((output / "losses.json").read_text())


@pytest.mark.parametrize(
    ("example", "flag"),
    [("digits_2d.py", "--tensor-parallel"), ("digits_moe.py", "--expert-parallel")],
)
def test_parallel_examples_learn_the_same_alone_and_on_several_ranks(tmp_path, example, flag):
    options = [EXAMPLES / example, "--epochs", "2", "--batch-size", "128", "--output"]
    done = well(python(*options, "alone", cwd=tmp_path))
    assert reported_accuracy(done.stdout) > 0.3
    wanted = losses_of(tmp_path / "alone")
    assert len(wanted) == 2
    assert wanted[1] < wanted[0]
    # Two replicas of two parts: every axis is used.
    launch = command(LAUNCHER, "--nproc-per-node", "4")
    succeed(*launch, *options, "four", flag, "2", cwd=tmp_path)
    assert losses_of(tmp_path / "four") == pytest.approx(wanted, rel=1e-9)


def test_uneven_shards_learn_what_one_process_learns(tmp_path):
    options = [EXAMPLES / "digits_uneven.py", "--epochs", "2", "--output"]
    done = well(python(*options, "alone", "--shards", "2", cwd=tmp_path))
    assert reported_accuracy(done.stdout) > 0.5
    wanted = losses_of(tmp_path / "alone")
    assert wanted[1] < wanted[0]
    succeed(*command(LAUNCHER), *options, "two", cwd=tmp_path)
    assert losses_of(tmp_path / "two") == pytest.approx(wanted, rel=1e-9)


def test_a_parameter_server_learns_what_one_process_learns(tmp_path):
    options = [EXAMPLES / "parameter_server.py", "--output"]
    done = well(python(*options, "alone", cwd=tmp_path))
    assert reported_accuracy(done.stdout) > 0.95
    wanted = losses_of(tmp_path / "alone")
    launch = command(LAUNCHER, "--nproc-per-node", "5")
    done = succeed(*launch, *options, "five", "--epochs", "3", cwd=tmp_path)
    assert "69 steps of 4 workers" in done.stdout
    assert losses_of(tmp_path / "five") == pytest.approx(wanted[:3], rel=1e-9)


def test_a_recommender_over_processes_learns_what_one_process_learns(tmp_path):
    options = [EXAMPLES / "recommender.py", "--steps", "60", "--output"]
    succeed(*command("python"), *options, "alone", cwd=tmp_path)
    succeed(*command(LAUNCHER, "--nproc-per-node", "4"), *options, "four", cwd=tmp_path)
    losses = [losses_of(tmp_path / each) for each in ("alone", "four")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[1][-1] < losses[1][0] / 2


def test_a_learner_goes_on_while_actors_leave_die_and_join(tmp_path):
    done = succeed(*command("python"), EXAMPLES / "actor_learner.py", cwd=tmp_path)
    reward = re.search(r"^reward ([\d.]+) of 200", done.stdout, re.MULTILINE)
    assert reward, done.stdout
    assert float(reward[1]) >= 195
    for happening in (
        "actor-0, actor-1, actor-2 are here",
        "actor-0 has gone: it has shut down",
        "actor-1 has gone: ",
        "actor-3 has joined",
    ):
        assert happening in done.stderr, done.stderr


@pytest.mark.skipif(LAUNCHER != "rally", reason="torchrun has no counterpart")
def test_a_launched_function_returns_the_single_process_result_from_every_rank(tmp_path):
    done = succeed(*command("python"), EXAMPLES / "function_launch.py", cwd=tmp_path)
    results = re.findall(r"(rank \d|one process): .*mean ([\d.]+), variance ([\d.]+)", done.stdout)
    assert [who for who, *_ in results] == ["rank 0", "rank 1", "rank 2", "rank 3", "one process"]
    assert len({(mean, variance) for _, mean, variance in results}) == 1


@pytest.mark.parametrize(
    ("how", "evidence"),
    [
        ("raise", "ValueError: shard digits-00017: expected images of shape"),
        ("exit", r"exit ?code\s*:? 3"),
        ("segfault", "SIGSEGV"),
        ("kill", "SIGKILL"),
    ],
)
def test_the_report_of_a_failing_job_names_the_cause(tmp_path, how, evidence):
    done = run(*command(LAUNCHER), EXAMPLES / "failing_job.py", "--how", how, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(evidence, done.stderr), done.stderr
    if LAUNCHER == "rally":
        assert re.search(r"root cause +rank 1\b", done.stderr), done.stderr


def test_the_other_ways_to_fail_raise_what_a_real_job_would():
    failures = load_example("failing_job").FAILURES
    with pytest.raises(RuntimeError, match="allocate"):
        failures["oom-like"]()
    with pytest.raises(SyntaxError, match="never closed"):
        failures["syntax"]()
    with pytest.raises(ModuleNotFoundError, match="fused_attention_kernels"):
        failures["import"]()


def test_the_readme_lists_every_example():
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}


README = (EXAMPLES.parent / "README.md").read_text()
FUNCTIONS = (EXAMPLES.parent / "docs" / "functions.md").read_text()


def program(text: str, beginning: str) -> str:
    found = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if beginning in b]
    assert len(found) == 1
    return found[0]


def test_the_job_of_the_readme_learns(tmp_path):
    (tmp_path / "train.py").write_text(program(README, "# train.py"))
    done = succeed(*command(LAUNCHER), "train.py", cwd=tmp_path)
    assert float(done.stdout.split()[1]) < 0.01


def test_the_function_launch_of_the_docs_prints_what_it_says(tmp_path):
    text = program(FUNCTIONS, "launch_subprocesses(total")
    (tmp_path / "functions.py").write_text(text)
    done = succeed(sys.executable, "functions.py", cwd=tmp_path)
    assert done.stdout.strip() == text.rpartition("#")[2].strip()


def test_the_report_in_the_readme_is_the_one_a_user_gets(tmp_path):
    shown = README.partition("ends with:\n\n```\n")[2].partition("```")[0].splitlines()
    words = [*command("rally"), "--nproc-per-node", "4", "--log-dir", "logs"]
    done = run(*words, EXAMPLES / "failing_job.py", cwd=tmp_path)
    report = done.stderr[done.stderr.index("rally: the job failed") :].splitlines()
    assert report[0] == shown[0]
    assert [line[:13] for line in report if line[2:3].isalpha()] == [
        line[:13] for line in shown if line[2:3].isalpha()
    ]


def images_of_steps(folder: Path) -> dict[tuple[str, int], list[int]]:
    lines = [
        (path.name, json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    found = {(name, record["step"]): record["ids"] for name, record in lines}
    assert len(found) == len(lines), "a step was trained on twice"
    return found


@pytest.mark.long
@pytest.mark.skipif(LAUNCHER != "rally", reason="sessions are kept by rally")
def test_a_session_goes_on_with_more_workers_and_each_rank_s_batch(tmp_path):
    train = [EXAMPLES / "elastic_digits.py", "--keep", "local"]
    train += ["--checkpoint", tmp_path / "checkpoints", "--ids", tmp_path / "ids"]
    succeed(*command(LAUNCHER), *train, "--epochs", "1", cwd=tmp_path)
    three = command(LAUNCHER, "--nproc-per-node", "3")
    done = succeed(*three, *train, "--epochs", "2", cwd=tmp_path)
    assert "3 workers now, 2 before" in done.stderr
    steps = {}
    for (_, step), ids in images_of_steps(tmp_path / "ids").items():
        steps.setdefault(step, []).extend(ids)
    # 64 images for each of two ranks, and for each of three. Step 13 is the validation.
    epochs = range(1, 13), range(14, 22)
    assert sorted(steps) == [step for epoch in epochs for step in epoch]
    for epoch in epochs:
        ids = [each for step in epoch for each in steps[step]]
        assert len(ids) == len(set(ids)) == 1437


@pytest.mark.skipif(LAUNCHER != "rally", reason="others end a job that loses a worker")
@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (2, ("--parallel", "ddp")),
        pytest.param(2, ("--parallel", "ddp", "--compile", "aot_eager"), marks=pytest.mark.long),
        pytest.param(2, ("--parallel", "fsdp"), marks=pytest.mark.long),
        pytest.param(4, ("--parallel", "tp"), marks=pytest.mark.long),
    ],
)
def test_a_language_model_ends_the_same_with_chaos(tmp_path, workers, words):
    train = [*command(LAUNCHER, "--nproc-per-node", str(workers)), EXAMPLES / "elastic_gpt.py"]
    train += [*words, "--epochs", "1", "--characters", "14000", "--batch-size", "16"]
    ends = []
    for chaos in ("0", "0.25"):
        done = succeed(*train, "--chaos", chaos, cwd=tmp_path)
        assert (chaos != "0") == ("takes its place" in done.stderr)
        written, end = done.stdout.rsplit("\n", 2)[:2]
        ends.append(
            (written, re.fullmatch(r"(loss [\d.]+ after \d+ steps); \d recoveries", end)[1])
        )
    assert ends[0] == ends[1]


@pytest.mark.skipif(LAUNCHER != "rally", reason="others end a job that loses a worker")
def test_a_session_with_chaos_trains_on_the_same_images_and_ends_the_same(tmp_path):
    train = [*command(LAUNCHER), EXAMPLES / "elastic_digits.py"]
    ends = []
    for name, chaos in (("calm", "0"), ("chaos", "0.06")):
        done = succeed(
            *(*train, "--epochs", "2", "--chaos", chaos, "--ids", tmp_path / name),
            *("--checkpoint", tmp_path / f"{name}-checkpoints"),
            cwd=tmp_path,
        )
        accuracy, recoveries = re.fullmatch(
            r"accuracy ([\d.]+)% after 48 steps; (\d+) recoveries\n", done.stdout
        ).groups()
        ends.append((accuracy, images_of_steps(tmp_path / name)))
        lost = done.stderr.count("takes its place")
        assert (lost > 0) == (name == "chaos")
        # Rank 0 itself may be among the lost.
        assert int(recoveries) <= lost
    assert ends[0] == ends[1]
    ids = [each for part in ends[0][1].values() for each in part]
    assert len(ids) == 2 * len(set(ids)) == 2 * 1437
    again = succeed(
        *(*train, "--epochs", "2", "--checkpoint", tmp_path / "chaos-checkpoints"), cwd=tmp_path
    )
    assert "continues at step 48" in again.stderr
    assert again.stdout.startswith(f"accuracy {ends[0][0]}% after 48 steps")
