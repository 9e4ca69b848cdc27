"""Programs that workers start or become: they belong to the same job and find its secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisors import run


pytestmark = pytest.mark.integration

PATIENCE = 180.0

# A worker that starts programs in every common way, and then becomes another one, which calls its peer.
WORKER = '''
import atexit, gc, json, multiprocessing, os, subprocess, sys, threading
from rallypoint._core import secret

def mark():
    """Which secret this process has, and how many descriptors of it."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return secret.fingerprint(secret.find() or b""), sum("rally-secret" in name for name in names)

def put(queue):
    queue.put(mark())

def call():
    from rallypoint import rpc
    atexit.register(gc.freeze)  # or an interpreter that ends looks through all of torch for cycles
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"w{1 - rank}", max, (1, 2)) == 2
    rpc.shutdown()

if __name__ == "__main__":
    match sys.argv[1]:
        case "first":
            found = {"own": mark()}
            words = [sys.executable, __file__, "child"]
            found["child"] = json.loads(subprocess.check_output(words))
            found["of a shell"] = json.loads(subprocess.check_output(" ".join(words), shell=True))
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.SimpleQueue()
                process = context.Process(target=put, args=(queue,))
                process.start()
                found[method] = queue.get()
                process.join()
            os.execv(sys.executable, [sys.executable, __file__, "again", json.dumps(found)])
        case "child":
            print(json.dumps(mark()))
        case "again":
            found = json.loads(sys.argv[2])
            found["again"] = mark()
            call()
            os.write(1, (json.dumps(found) + "\\n").encode())
'''


@pytest.mark.parametrize("method", ["forkserver", pytest.param("exec", marks=pytest.mark.long)])
def test_descendants_of_a_worker_have_the_jobs_secret(tmp_path: Path, method: str) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    words = ["--nproc-per-node", "2", "--start-method", method, "worker.py", "first"]
    done = run(
        [sys.executable, "-m", "rallypoint", "run", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    marks = {name: mark for each in found for name, mark in each.items()}
    assert set(marks) == {"own", "child", "of a shell", "fork", "spawn", "again"}
    assert len({fingerprint for fingerprint, _ in marks.values()}) == 1, marks
    # Only an interpreter that the launcher has executed inherits a descriptor; it goes no further.
    held = {name: count for name, (_, count) in marks.items() if count}
    assert held == ({} if method == "forkserver" else {"own": 1, "fork": 1}), held


FUNCTION = """
import subprocess, sys
from rallypoint.launch import MultiprocessConfig, launch_subprocesses

def fingerprints():
    '''Of the secret that this worker finds, and of the one that a program started by it finds.'''
    from rallypoint._core import secret

    code = "from rallypoint._core import secret; print(secret.fingerprint(secret.find()), end='')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return secret.fingerprint(secret.find() or b""), child.stdout

cfg = MultiprocessConfig(world_size=2, backend="gloo")
for each in launch_subprocesses(fingerprints, cfg):
    print(*each)
"""


def test_so_have_programs_that_a_function_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FUNCTION)
    done = run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_worker_that_outlives_its_launcher_is_told_and_is_not_open(tmp_path: Path) -> None:
    """A program that cannot read the secret any more does not go on without one."""
    code = "from rallypoint._core import secret; secret.find()"
    gone = {"RALLY_SECRET_PROC": "/proc/4194305/fd/3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **gone},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for each in (
        "RALLY_SECRET_PROC",
        "/proc/4194305/fd/3",
        "launcher has ended",
        "RALLY_SECRET_FILE",
    ):
        assert each in last
