"""`rally web`: the page, and who may see it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rallypoint.control.client import running
from stub_torch import STUB
from supervisors import RALLY


PATIENCE = 30.0

# The last rank waits for a file; in generation 0, rank 0 fails once there is one.
SCRIPT = """
import os, sys, time

def waits_for_a_file(name):
    while not os.path.exists(name):
        time.sleep(0.02)

generation = os.environ["RALLY_GENERATION"]
if generation == "0" and os.environ["RANK"] == "0":
    raise ValueError("bad sample")
waits_for_a_file(sys.argv[1])
raise ValueError("another one")
"""


class Web:
    """A running `rally web`, and a job."""

    def __init__(self, folder: Path) -> None:
        script, self.go = folder / "train.py", folder / "go"
        script.write_text(SCRIPT)
        self.name = f"web-{uuid.uuid4().hex[:8]}"
        flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-id", self.name]
        self.job = subprocess.Popen(
            [RALLY, "run", *flags, "--log-dir", str(folder / "logs"), str(script), str(self.go)],
            env={**os.environ, "PYTHONPATH": str(STUB)},
            stderr=subprocess.DEVNULL,
        )
        self.process = self._start()
        assert self.process.stdout is not None
        self.address = urlsplit(self.process.stdout.readline().strip())
        self.token = parse_qs(self.address.query)["token"][0]
        self.cookie = ""

    def _start(self) -> subprocess.Popen[str]:
        deadline = time.monotonic() + PATIENCE
        while not any(isinstance(told, dict) and told["id"] == self.name for _, told in running()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return subprocess.Popen(
            [RALLY, "web", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
        line = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=PATIENCE)
        try:
            line.request("GET", path, headers={"Cookie": self.cookie, **headers})
            answer = line.getresponse()
            return answer, answer.read().decode()
        finally:
            line.close()

    def enter(self) -> None:
        answer, _ = self.get(f"/?{self.address.query}")
        assert answer.status == 303
        assert answer.headers["Location"] == f"/?job={self.job.pid}"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        self.cookie = cookie.partition(";")[0]

    def state(self) -> dict[str, Any]:
        answer, text = self.get(f"/state?job={self.job.pid}")
        assert answer.status == 200, text
        told: dict[str, Any] = json.loads(text)
        return told

    def until_generation_1(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            told = self.state()
            if told["status"]["generation"] == 1 and len(told["cells"]) == 2:
                return told
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        self.go.touch()
        self.job.wait(PATIENCE)
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    started = Web(tmp_path)
    yield started
    started.close()


def test_a_job_with_a_restart_and_its_end(web: Web) -> None:
    web.enter()
    told = web.until_generation_1()
    first, second = told["status"]["generations"]
    assert (first["failed_ranks"], second["failed_ranks"]) == ([0], [])
    assert "ValueError: bad sample" in first["cause"]
    assert first["ended"] <= second["began"]
    assert second["ended"] is None
    assert [each["rank"] for each in told["cells"]] == [0, 1]
    deadline = time.monotonic() + PATIENCE
    while True:  # the workers may still be importing
        answer, text = web.get(f"/stacks?job={web.job.pid}")
        assert answer.status == 200, text
        if "ranks 0, 1, in waits_for_a_file" in json.loads(text)["text"]:
            break
        assert time.monotonic() < deadline, text
    answer, text = web.get(f"/stacks/1?job={web.job.pid}")
    assert "rank 1" in json.loads(text)["text"]
    web.go.touch()
    web.job.wait(PATIENCE)
    told = web.state()
    assert told["problem"] == "the job has ended"
    assert "another one" in told["report"]


def test_who_has_no_token_sees_nothing(web: Web) -> None:
    for path in ("/", "/?token=x", "/state", f"/stacks?job={web.job.pid}", "/other"):
        answer, text = web.get(path)
        assert answer.status == 403
        assert web.name not in text
    web.cookie = f"rally{web.address.port}=x"
    assert web.get("/state")[0].status == 403
    web.enter()
    # Cookies of other programs on this host, which Python's own parser would stumble over.
    mine = web.cookie
    for others in ('prefs={"theme": "dark"}; ', "flag; ", "x=ü; ", "path=/; "):
        web.cookie = f"{others}{mine}; z=1"
        assert web.get("/")[0].status == 200, others
    web.cookie = mine
    # Somebody else's host name that leads here.
    assert web.get("/state", Host="example.org")[0].status == 403
    assert web.get("/other")[0].status == 404
    answer, page = web.get("/")
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert web.token not in page
    assert "http" not in page.replace("https://", "http://").partition("<body>")[2]  # no CDN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "x"], "expected 0 to 65535"),
        (["--prt"], "no such flag"),
        (["a", "b"], "expected one job"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    done = subprocess.run([RALLY, "web", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_in_a_browser(web: Web, tmp_path: Path) -> None:
    web.enter()
    web.until_generation_1()
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={tmp_path}/browser", "--virtual-time-budget=5000", "--dump-dom"),
            web.address.geturl(),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    page = done.stdout
    assert f'id="name">{web.name}<' in page, done.stderr
    assert page.count("data-rank=") == 2
    assert 'class="failed"' in page
    assert "1 of 1" in page
    assert 'role="status"></p>' in page  # no problem
