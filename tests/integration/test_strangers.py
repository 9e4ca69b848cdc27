"""Another user of the host, and another host, beside jobs started with defaults: they learn and reach nothing."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import supervisors
from rallypoint._core import secret


pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user"),
]

PATIENCE = 180.0
NOBODY = 65534

# Worker: says that it runs, and exits when the file "stop" exists. Rank 0 leaves the secret for us.
WORKER = """
import os, pathlib, signal, sys
from rallypoint._core import secret
import torch.distributed as dist
dist.init_process_group("gloo")
here = pathlib.Path(sys.argv[1])
(here / f"secret-{os.environ['RANK']}").write_bytes(secret.held() or b"")
print("some output", file=sys.stderr)
dist.barrier()
if os.environ["RANK"] == "0":
    fd = os.open(here / "ready", os.O_WRONLY)
    os.write(fd, f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}\\n".encode())
fd = os.open(here / "stop", os.O_RDONLY)
os.read(fd, 1)
dist.barrier()
if sys.argv[2] != "0" and dist.get_rank():
    signal.pause()  # the first failure is to be the other rank's
sys.exit(int(sys.argv[2]))
"""

# A stranger: all that it can read of any process, of the temporary files, and of the workers' store.
SPY = """
import os, sys, pathlib
folder, host, port = sys.argv[1:4]
from torch.distributed import TCPStore  # while the interpreter's files can be read
from datetime import timedelta
os.setgroups([]); os.setgid(65534); os.setuid(65534)
seen = []
for pid in os.listdir("/proc"):
    for name in ("cmdline", "environ", "stat", "maps"):
        try:
            seen.append(pathlib.Path("/proc", pid, name).read_bytes())
        except (OSError, ValueError):
            pass
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            seen.append(pathlib.Path("/proc", pid, "fd", fd).read_bytes()[:1000000])
    except (OSError, ValueError):
        pass
def walk(path):
    try:
        names = os.listdir(path)
    except NotADirectoryError:
        try:
            seen.append(path.read_bytes())
        except OSError:
            pass
        return
    except OSError:
        return
    for name in names:
        if not (path / name).is_symlink() and not (path / name).is_fifo():
            walk(path / name)
walk(pathlib.Path(folder))
store = TCPStore(host, int(port), None, False, timedelta(seconds=60), wait_for_workers=False)
keys = store.list_keys() if hasattr(store, "list_keys") else []
for key in [*keys, "secret", "rpc/secret"]:
    seen.append(key.encode())
    if key in keys or store.check([key]):
        seen.append(store.get(key))
sys.stdout.buffer.write(b"\\n".join(seen))
"""


class Running:
    """A job that waits, and what a stranger sees of it meanwhile."""

    def __init__(self, folder: Path, words: list[str], code: int = 0) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        for name in ("ready", "stop"):
            os.mkfifo(folder / name)
        (folder / "tmp").mkdir()
        command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2", *words]
        with (folder / "stderr").open("wb") as stderr:
            self.process = supervisors.Popen(
                [*command, "worker.py", str(folder), str(code)],
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder / "tmp")},
                stderr=stderr,
            )
        with (folder / "ready").open() as ready:
            self.addr, self.port = ready.readline().split()

    def secret(self) -> bytes:
        found = {(self.folder / f"secret-{rank}").read_bytes() for rank in range(2)}
        assert len(found) == 1
        (one,) = found
        assert len(one) >= secret.MIN_BYTES
        return one

    def spied(self) -> bytes:
        done = supervisors.run(
            [sys.executable, "-c", SPY, str(self.folder), self.addr, self.port],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def end(self) -> int:
        with (self.folder / "stop").open("w") as stop:
            stop.write("xx")  # one for each worker, whenever it comes
            stop.flush()
            return self.process.wait(PATIENCE)

    def listening(self) -> list[str]:
        """Addresses at which a process of the job listens on TCP."""
        done = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
        parents = [line.split() for line in done.stdout.splitlines()[1:]]
        ours = {str(self.process.pid)}
        while more := {pid for pid, parent in parents if parent in ours} - ours:
            ours |= more
        inodes = set()
        for pid in ours:
            for fd in Path("/proc", pid, "fd").iterdir():
                try:
                    inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
                except OSError:
                    continue
        rows = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
        ]
        return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that others may enter and read, as they may most home folders."""
    os.umask(0o022)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    return tmp_path


def hidden(data: bytes, spied: bytes) -> None:
    """Check that ``spied`` holds ``data`` in none of the forms in which programs write bytes."""
    for form in (data, data.hex().encode(), base64.b64encode(data)[:-2], repr(data)[2:-1].encode()):
        assert form not in spied


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.parametrize(
    "words",
    [["--tee", "3"], ["--start-method", "exec"], ["--secret-file", "given"]],
    ids=["fork", "exec", "file"],
)
def test_another_user_learns_no_secret_and_the_network_reaches_nothing(
    folder: Path, words: list[str]
) -> None:
    if "given" in words:
        made = b"a secret that was given in a file"
        (folder / "given").touch(mode=0o600)
        (folder / "given").write_bytes(made + b"\n")
    job = Running(folder, words)
    try:
        held = job.secret()
        if "given" in words:
            assert held == made
        for name in ("secret-0", "secret-1"):  # our own notes
            (folder / name).unlink()
        spied = job.spied()
        assert b"worker.py" in spied, "the spy sees what is public"
        hidden(held, spied)
        assert job.listening(), "the workers' store"
        assert set(job.listening()) <= LOOPBACK
    finally:
        code = job.end()
    assert code == 0
    hidden(held, (folder / "stderr").read_bytes())


def test_logs_and_reports_are_for_their_owner_alone(folder: Path) -> None:
    (folder / "there").mkdir(mode=0o755)
    job = Running(folder, ["--log-dir", "there/new/logs", "--tee", "3"], 3)
    assert job.end() == 3
    assert (folder / "there").stat().st_mode & 0o777 == 0o755, "not ours to change"
    found = [folder / "there/new", *(folder / "there/new").rglob("*")]
    names = {each.name for each in found}
    assert {"stderr.log", "report.json", "error.json"} <= names
    for each in found:
        wanted = 0o700 if each.is_dir() else 0o600
        assert each.stat().st_mode & 0o777 == wanted, each
    report = json.loads(next(each for each in found if each.name == "report.json").read_text())
    assert "secret" not in json.dumps(report)


def test_a_users_variable_stays_and_another_secret_does_not_mislead_workers(folder: Path) -> None:
    """--secret-file wins over RALLY_SECRET, in the workers too."""
    made = b"a secret that was given in a file"
    (folder / "given").touch(mode=0o600)
    (folder / "given").write_bytes(made)
    (folder / "s.py").write_text(
        "import os\nfrom rallypoint._core import secret\n"
        "print(secret.find().decode(), os.environ.get('RALLY_SECRET'), flush=True)\n"
    )
    command = [sys.executable, "-m", "rallypoint", "run"]
    env = {**os.environ, "RALLY_SECRET": "that of the environment", "TMPDIR": str(folder)}

    def said(*words: str) -> str:
        done = supervisors.run(
            [*command, *words, "s.py"],
            cwd=folder,
            env=env,
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().strip()

    assert said() == "that of the environment that of the environment"
    assert said("--secret-file", "given") == f"{made.decode()} None"


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_job_of_one_node_runs_where_its_own_name_is_a_loopback_address(
    folder: Path,
) -> None:
    """Debian's 127.0.1.1."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 here.example here\n")
    (folder / "s.py").write_text(
        "import torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\n"
    )
    script = (
        "hostname here && ip link set lo up && mount --bind hosts /etc/hosts && exec "
        f"{sys.executable} -m rallypoint run --nproc-per-node 2 --master-addr here --master-port 0 s.py"
    )
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
