"""Third-party packages: their modules are in this folder, installed as `pip` would do it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic import Cluster


HERE = Path(__file__).parent


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str, str, str], dict[str, str]]:
    """Install the module of a folder here, with one entry point; returns the variables that make it visible to a process."""

    def install(name: str, group: str, point: str) -> dict[str, str]:
        site = tmp_path / f"site-{name}"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").symlink_to(HERE / name / f"{name}.py")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {point}\n")
        paths = filter(None, (str(site), os.environ.get("PYTHONPATH")))
        return {"PYTHONPATH": os.pathsep.join(paths)}

    return install


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    job = Cluster(tmp_path / "job")
    job.folder.mkdir()
    try:
        yield job
        job.check_nothing_left()
    finally:
        job.close()


@pytest.fixture
def server() -> Iterator[Callable[[str], int]]:
    """Starts a server like Redis; returns its port."""
    started: list[subprocess.Popen[str]] = []

    def start(password: str = "") -> int:
        words = [sys.executable, str(HERE / "redislike" / "redislike_server.py"), password]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return int(started[-1].stdout.readline())

    yield start
    for each in started:
        each.kill()
        each.wait(60)
        assert each.stdout is not None
        each.stdout.close()
