"""`rally doctor` and `rally run --preflight`: on this host, and between two hosts with one fault each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic import Hosts, wait_until
from ports import free_port
from supervisors import RALLY, Popen


PATIENCE = 90.0


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RALLY, *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_one_node_is_examined_without_a_network() -> None:
    done = run("doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["healthy"] else 1), done.stderr
    assert {"open files", "CPUs", "memory", "/dev/shm", "disk", "torch"} <= {
        each["what"] for each in told["findings"]
    }
    assert told["links"] == []


def test_a_problem_comes_first_and_decides_the_exit_code() -> None:
    words = ["-c", f'ulimit -n 300; exec "{RALLY}" doctor']
    done = subprocess.run(["sh", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("PROBLEM  open files")
    assert "problem" in done.stdout.splitlines()[-1]


def test_preflight_starts_no_job_that_would_fail(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it runs')\n")
    words = f'exec "{RALLY}" run --preflight {script}'
    for limit, code in (("", 0), ("ulimit -n 300; ", 1)):
        done = subprocess.run(
            ["sh", "-c", limit + words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        assert ("it runs" in done.stdout) == (code == 0)
        assert ("rally: preflight: 1 problem" in done.stderr) == (code == 1)


TRAINS = """
import os, pathlib, sys, threading
here = pathlib.Path(sys.argv[1])
(here / f"{os.environ['RALLY_GENERATION']}-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}").touch()
while not (here / "go").exists():
    threading.Event().wait(0.05)
"""


def test_a_node_that_comes_later_is_checked_by_itself_and_joins(tmp_path: Path) -> None:
    """The others train and take no part in a check."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    words = (
        *("--nnodes", "2:3", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "x"),
        *("--insecure", "--rdzv-conf", "last_call_timeout=1,lease=2", "--shutdown-timeout", "1"),
    )

    def start(*more: str) -> Popen:
        return Popen(
            [RALLY, "run", *words, *more, str(script), str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    nodes = [start(), start()]
    try:
        wait_until(lambda: (tmp_path / "0-2-1").exists(), "the first two train")
        conf = "last_call_timeout=1,lease=2,join_timeout=3"
        nodes.append(start("--preflight", "--rdzv-conf", conf))
        wait_until(lambda: list(tmp_path.glob("*-3-2")), "the third one has joined")
    finally:
        (tmp_path / "go").touch()
        said = [each.communicate(timeout=120)[1] for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0, 0], said
    assert "preflight: no other node took part, so this one was checked by itself" in said[2]


def test_a_secret_that_can_be_read_once_is_enough_for_check_and_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('it runs')\n")
    secret = "printf 0123456789abcdef"
    words = f'exec "{RALLY}" run --preflight --secret-file <({secret}) {script}'
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "it runs\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "takes no script"),
        (["--nnodes", "x"], "expected a number of nodes"),
        (["--jsn"], "no such flag"),
        (
            ["--hosts", "a,b"],
            "--hosts 'a,b': rally doctor checks the node it runs on (rally run --hosts",
        ),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    done = run("doctor", *words)
    assert done.returncode == 2
    assert said in done.stderr


# -- two hosts ----------------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    both = Hosts(2)
    yield both
    both.close()


def examine(
    hosts: Hosts, *words: str, ports: tuple[int, int] = (29400, 29400), **of_second: Any
) -> list[dict[str, Any]]:
    """Run doctors on both hosts; ``env`` and ``prefix`` are the second one's."""
    started = []
    for index in range(2):
        fault = of_second if index == 1 else {}
        where = f"{hosts.addr(0)}:{ports[index]}"
        started.append(
            subprocess.Popen(
                [
                    *(*hosts.prefix(index), *fault.get("prefix", ())),
                    *(RALLY, "doctor", "--json", "--nnodes", "2", "--rdzv-endpoint", where, *words),
                ],
                env={**os.environ, "RALLY_SECRET": "s" * 32, **fault.get("env", {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = []
    for each in started:
        shown, said = each.communicate(timeout=PATIENCE)
        assert shown, said
        told.append(json.loads(shown))
        assert each.returncode == (0 if told[-1]["healthy"] else 1)
    return told


def problems(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (each["what"], each["where"]) for each in told["findings"] if each["level"] == "problem"
    ]


@pytest.mark.netns
@pytest.mark.long
def test_two_healthy_hosts(hosts: Hosts) -> None:
    for told in examine(hosts):
        assert problems(told) == []
        assert [each["host"] for each in told["nodes"]] == ["host-0", "host-1"]
        assert [(each["source"], each["target"]) for each in told["links"]] == [(0, 1), (1, 0)]
        assert all(each["bandwidth"] > 1e6 for each in told["links"])
        assert told["all_reduce"]["problem"] == ""
        assert told["all_reduce"]["bandwidth"] > 1e6
        assert [each["gloo"][0] for each in told["nodes"]] == ["eth0", "eth0"]


@pytest.mark.netns
@pytest.mark.long
def test_a_slow_cable(hosts: Hosts) -> None:
    """Only what the second host sends is slow."""
    words = ["dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "50ms"]
    net = f"--net={hosts.net(1)}"
    done = subprocess.run(["nsenter", net, "tc", "qdisc", "add", *words], check=False)
    if done.returncode:
        pytest.skip("this kernel has no token bucket filter")
    for told in examine(hosts):
        assert problems(told) == [("bandwidth", "node 1 (host-1) to node 0 (host-0)")]
        there, back = (each["bandwidth"] for each in told["links"])
        assert back < 3e6 < there


@pytest.mark.netns
@pytest.mark.long
def test_little_shared_memory_on_one_host(hosts: Hosts) -> None:
    mount = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"'
    for told in examine(hosts, prefix=("unshare", "-m", "sh", "-c", mount, "sh")):
        assert problems(told) == [("/dev/shm", "node 1 (host-1)")]


@pytest.mark.netns
@pytest.mark.long
def test_another_torch_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    info = tmp_path / "torch-9.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.0\n")
    for told in examine(hosts, env={"PYTHONPATH": str(tmp_path)}):
        assert problems(told) == [("torch", "")]
        assert "node 1 (host-1): 9.9.0" in told["findings"][0]["found"]


@pytest.mark.netns
@pytest.mark.long
def test_a_port_at_which_nothing_listens(hosts: Hosts) -> None:
    first, second = examine(hosts, "--rdzv-conf", "join_timeout=3", ports=(29400, 29401))
    for told in (first, second):
        assert problems(told) == [("meeting", "")]
    assert "1 of 2 nodes arrived" in first["findings"][0]["found"]
    assert f"cannot reach the rendezvous at {hosts.addr(0)}:29401" in second["findings"][0]["found"]


@pytest.mark.netns
@pytest.mark.long
def test_a_pulled_cable(hosts: Hosts) -> None:
    hosts.cut(1)
    first, second = examine(hosts, "--rdzv-conf", "join_timeout=3")
    assert problems(first)[0] == problems(second)[0] == ("meeting", "")
