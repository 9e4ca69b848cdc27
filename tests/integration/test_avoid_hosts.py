"""`rally run --avoid-hosts`: real jobs that lose hosts, and what later jobs make of that."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import wait_until
from ports import free_port
from supervisors import RALLY, Popen, run


pytestmark = pytest.mark.integration

STAY = """
import os, pathlib, threading
pathlib.Path(os.environ["RALLY_HOST_NAME"] + "-" + os.environ["RALLY_GENERATION"]).touch()
threading.Event().wait()
"""
FAIL = """
import os, signal
os.kill(os.getpid(), signal.SIGBUS)
"""
COUNT = "import os; print('size', os.environ['WORLD_SIZE'])"


class Job:
    """Supervisors of one job, side by side, as if on hosts of these names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.list = folder / "bad.txt"
        self.nodes: dict[str, Popen] = {}
        for name, text in (("stay", STAY), ("fail", FAIL), ("count", COUNT)):
            (folder / f"{name}.py").write_text(text)

    def start(self, *hosts: str, flags: tuple[str, ...], script: str) -> None:
        port = str(free_port())
        for rank, host in enumerate(hosts):
            # Where no host serves the store, any of them may be left out.
            meeting = ("--rdzv-endpoint", f"file://{self.folder}/meet", "--rdzv-id", port)
            if "--nnodes=2" in flags:
                fixed = ("--node-rank", str(rank), "--master-addr", "127.0.0.1")
                meeting = (*fixed, "--master-port", port)
            words = ("--avoid-hosts", "bad.txt", "--insecure", *meeting, *flags, script)
            with (self.folder / f"{host}.out").open("wb") as out:
                self.nodes[host] = Popen(
                    [RALLY, "run", *words],
                    cwd=self.folder,
                    env=os.environ | {"RALLY_HOST_NAME": host, "TMPDIR": str(self.folder)},
                    stdout=out,
                    stderr=out,
                )

    def said(self, host: str) -> str:
        return (self.folder / f"{host}.out").read_text()

    def wait_for(self, *marks: str) -> None:
        wait_until(lambda: all((self.folder / each).exists() for each in marks), str(marks))

    def lines(self) -> list[list[str]]:
        """Host and kind of each line."""
        text = self.list.read_text() if self.list.exists() else ""
        return [each.split()[:2] for each in text.splitlines()]

    def end(self) -> None:
        for node in self.nodes.values():
            if node.poll() is None:
                node.kill()
            node.wait(60)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


def test_a_lost_host_is_noted_once_and_left_out_after_the_second_time(job: Job) -> None:
    job.list.write_text("h3 lost 2026-01-01T00:00:00Z other its process has ended\n")
    elastic = ("--nnodes", "2:3", "--rdzv-conf", "lease=2,last_call_timeout=1")
    job.start("h1", "h2", "h3", flags=(*elastic, "--shutdown-timeout", "1"), script="stay.py")
    job.wait_for("h1-0", "h2-0", "h3-0")
    job.nodes["h3"].kill()
    job.nodes["h3"].wait(60)
    job.wait_for("h1-1", "h2-1")
    wait_until(lambda: len(job.lines()) > 1, "a line about h3")
    for host in ("h1", "h2"):
        job.nodes[host].send_signal(signal.SIGTERM)
    assert {job.nodes[host].wait(60) for host in ("h1", "h2")} == {128 + signal.SIGTERM}
    assert job.lines() == [["h3", "lost"]] * 2, "both others know of it"

    job.start("h1", "h2", "h3", flags=elastic, script="count.py")
    ends = {host: node.wait(120) for host, node in job.nodes.items()}
    assert ends == {"h1": 0, "h2": 0, "h3": 0}, job.said("h1")
    assert "h3 is left out (--avoid-hosts" in job.said("h3")
    assert "it was lost twice, last: node 2 is lost: its process" in job.said("h3")
    assert "size 2" in job.said("h1")


def test_a_job_of_fixed_size_reports_the_lost_host(job: Job) -> None:
    fixed = ("--nnodes=2", "--rdzv-conf", "lease=2", "--log-dir", "logs")
    job.start("h1", "h2", flags=fixed, script="stay.py")
    job.wait_for("h1-0", "h2-0")
    job.nodes["h2"].kill()
    assert job.nodes["h1"].wait(120) == 1
    assert job.lines() == [["h2", "lost"]]
    (report,) = (job.folder / "logs").glob("*/report.json")
    assert json.loads(report.read_text())["lost_hosts"] == ["h2"]


def test_a_host_on_which_a_worker_is_killed_is_noted_and_the_job_says_so(job: Job) -> None:
    env = os.environ | {"RALLY_HOST_NAME": "h1", "RALLY_EVENTS": ""}
    words = (RALLY, "run", "--nproc-per-node", "2", "--avoid-hosts", "bad.txt")
    for done in (1, 2):
        ended = run([*words, "fail.py"], cwd=job.folder, env=env, capture_output=True, text=True)
        assert ended.returncode == 128 + signal.SIGBUS, ended.stderr
        assert "to be avoided" not in ended.stderr
        assert job.lines() == [["h1", "failed"]] * done
    ended = run([*words, "count.py"], cwd=job.folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "h1 is to be avoided (it failed twice, last: rank " in ended.stderr
    assert "was killed by SIGBUS), but this job needs all its hosts" in ended.stderr
    assert ended.stdout.count("size 2") == 2
