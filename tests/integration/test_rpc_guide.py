"""The programs in docs/rpc.md and the pages behind it do what they say."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import supervisors
from ports import free_port
from rallypoint import rpc


pytestmark = pytest.mark.integration

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "rpc.md", *sorted(DOCS.glob("rpc-*.md"))]
GUIDE = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
FILES = {block.split()[1]: block for block in BLOCKS if block.startswith("# ")}
# The others are pieces of one program, which runs on worker a.
PIECES = [block for block in BLOCKS if not block.startswith("# ")]

BEGIN = """\
import os, sys
sys.path.insert(0, ".")
import asyncio, json, torch
from rallypoint import rpc
from work import *

rank = int(os.environ["RANK"])
rpc.init_rpc("ab"[rank], rank=rank, world_size=2)
if rank == 0:
    exec(open("pieces.py").read())
    json.dumps(numbers)
    assert rpc.rpc_sync("b", rpc.statistics)["worker"]["name"] == "b"
    print("the end")
rpc.shutdown()
"""


def start(folder, *command):
    return supervisors.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, limit=240):
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0]
        raise AssertionError(f"it did not end within {limit} s:\n{output}") from None
    assert process.returncode == 0, output
    return output


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pieces.py").write_text("\n".join(PIECES))
    (tmp_path / "begin.py").write_text(BEGIN)
    return tmp_path


def test_the_first_program_prints_what_it_says(folder):
    output = finish(start(folder, "-m", "rallypoint", "run", "--nproc-per-node", 2, "hello.py"))
    assert output.strip() == re.search(r"#( tensor.*)", FILES["hello.py"])[1].strip()


def test_the_encrypted_program_prints_what_it_says(folder):
    output = finish(start(folder, "-m", "rallypoint", "run", "--nproc-per-node", 2, "encrypted.py"))
    assert output.strip() == re.search(r"# (tcp.*)", FILES["encrypted.py"])[1].strip()


def test_only_what_is_exported_is_called(folder):
    output = finish(start(folder, "-m", "rallypoint", "run", "--nproc-per-node", 2, "exported.py"))
    assert {"3", "1"} <= set(output.splitlines())
    assert "worker 'worker1' does not allow calls of __main__.helper" in output
    assert "mark it with @rpc.export" in output


def test_the_pieces_run_one_after_the_other(folder):
    output = finish(start(folder, "-m", "rallypoint", "run", "--nproc-per-node", 2, "begin.py"))
    assert re.search(r"^RPC ran for more than set timeout \(\d{2,3} ms\)", output, re.MULTILINE)
    assert "the end" in output


def test_the_learner_waits_for_its_actors(folder, unused_port):
    learner = start(folder, "learner.py", "learner", unused_port)
    actors = [start(folder, "learner.py", f"actor{i}", unused_port) for i in (1, 2)]
    output = finish(learner)
    assert "[4, 4]" in output
    for each in actors:
        finish(each)


def test_code_of_torchs_runs_as_it_is(folder):
    finish(start(folder, "moved.py"))


@pytest.fixture
def unused_port():
    return free_port()


def test_every_option_is_in_the_guide():
    table = GUIDE.partition("\n## Options\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(inspect.signature(rpc.NativeRpcBackendOptions).parameters) <= named
