"""Trainings in a session, run by `rally run` on this host: with workers killed and without; then their final states are compared.

The script, a text or a file, gets the words that :mod:`faulty` reads, followed by the test's own. Each rank writes its final
state to ``end RANK`` in the folder, as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from supervisors import run


def start(
    folder: Path,
    script: str | Path,
    ranks: int,
    faults: Sequence[Any] = (),
    *words: object,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, in a new folder."""
    folder.mkdir()
    if isinstance(script, str):
        (folder / "train.py").write_text(script)
        script = folder / "train.py"
        (folder / "faulty.py").symlink_to(Path(__file__).with_name("faulty.py"))
    command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", ranks, *flags]
    return run(
        [*command, script, folder, json.dumps(faults), *words],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "RALLY_LOG"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def train(
    folder: Path,
    script: str | Path,
    ranks: int,
    faults: Sequence[Any] = (),
    *words: object,
    flags: Sequence[str] = (),
) -> tuple[list[Any], str]:
    """Run it; it must succeed and recover from each fault. Returns the final states of all ranks, and what was said."""
    done = start(folder, script, ranks, faults, *words, flags=flags)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("fault *"))) == len(faults), "not all workers that had to die have"
    assert done.stderr.count("takes its place") == len(faults), done.stderr
    return [json.loads((folder / f"end {rank}").read_text()) for rank in range(ranks)], done.stderr


@functools.cache
def undisturbed(script: str | Path, ranks: int, *words: object) -> list[Any]:
    """The final states of the ranks without a fault; run once."""
    ends, _ = train(Path(tempfile.mkdtemp()) / "calm", script, ranks, [], *words)
    return ends
