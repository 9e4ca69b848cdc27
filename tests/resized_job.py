"""A job that loses and gains nodes, and whose workers report their progress in files.

After each step its script writes the number of complete steps to ``at <pid>`` and a line of JSON about the step (its number
is ``step``) to ``log <pid>``. It waits at the step that the file ``wait`` names, and until then for ``$PAUSE`` seconds after each
step: others have time to come, and few steps suffice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic import wait_until
from ports import free_port
from rallypoint._core import proc_stat
from supervisors import Popen


# Seconds.
PAUSE = 0.15


class Job:
    """A job with two workers per node.

    Args:
        folder: the job's: holds its script and what that writes.
        least, most: how many nodes take part.
        script: what the workers run.
        words: the script's arguments after the folder.
        conf: the rendezvous configuration.
    """

    def __init__(
        self,
        folder: Path,
        least: int,
        most: int,
        script: str,
        words: Sequence[object],
        conf: str = "lease=10",
    ) -> None:
        (folder / "train.py").write_text(script)
        self.folder = folder
        flags = ["--nnodes", f"{least}:{most}", "--nproc-per-node", "2", "--insecure"]
        flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", conf]
        flags += ["--rdzv-id", "resized", "--max-restarts", "3"]
        self.words = [sys.executable, "-m", "rallypoint", "run", *flags]
        self.words += map(str, [folder / "train.py", folder, *words])
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.go_on()

    def start(self) -> subprocess.Popen[bytes]:
        output = (self.folder / f"node {len(self.nodes)}").open("wb")
        env = {**os.environ, "PAUSE": str(PAUSE)}
        with output:
            self.nodes.append(Popen(self.words, env=env, stdout=output, stderr=output))
        return self.nodes[-1]

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node *")))

    def wait(self, look: Callable[[], Any], what: str) -> Any:
        def watched() -> Any:
            assert any(node.poll() is None for node in self.nodes), "all nodes have ended"
            return look()

        try:
            return wait_until(watched, what, 120, every=PAUSE / 2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def steps(self) -> dict[int, int]:
        """Each live worker's complete steps, by pid."""
        found = {}
        for path in self.folder.glob("at *"):
            pid = int(path.name.split()[1])
            if proc_stat.fields(pid)[:1] not in ([], ["Z"]):
                found[pid] = int(path.read_text())
        return found

    def at(self, step: int) -> list[int]:
        """The pids of workers that are at that step or past it."""
        return [pid for pid, done in self.steps().items() if done >= step]

    def told(self) -> list[dict[str, Any]]:
        lines = [
            {"pid": int(path.name.split()[1]), **json.loads(line)}
            for path in self.folder.glob("log *")
            for line in path.read_text().splitlines()
        ]
        return sorted(lines, key=lambda each: (each["step"], each["rank"]))

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Kill a node with all of its processes."""
        tree = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for each in tree:
            try:
                each.kill()
            except psutil.Error:
                pass
        node.wait()

    def hold_at(self, step: int) -> None:
        (self.folder / "new wait").write_text(str(step))
        (self.folder / "new wait").rename(self.folder / "wait")

    def go_on(self) -> None:
        self.hold_at(1 << 30)

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                self.kill(node)
