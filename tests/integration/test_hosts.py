"""`rally run --hosts`: real sshd on hosts of their own (network namespaces)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic import Hosts, make_hosts, wait_until
from pace import pace
from rallypoint._core import process


pytestmark = [pytest.mark.integration, pytest.mark.netns]

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PORT = 2222

RANKS = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.getcwd(), os.environ.get("NCCL_X"),
      os.environ.get("MINE"), os.environ.get("OTHER"), flush=True)
sys.exit(7 if sys.argv[1:] == [os.environ["RANK"]] else 0)
"""
STAY = """
import os, pathlib, signal, subprocess, sys, threading
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path("started-" + os.environ["RANK"]).touch()
threading.Event().wait()
"""
# A module that only the first host has: it is not in the job's folder.
HELP = """
class Box:
    def __init__(self, what):
        self.what = what

def total(box, size):
    import os, torch, torch.distributed as dist
    x = torch.tensor([float(box.what + dist.get_rank())])
    dist.all_reduce(x)
    print("rank", dist.get_rank(), flush=True)
    return Box((x.item(), os.environ["LOCAL_WORLD_SIZE"], b"x" * size))
"""
CALL = """
import sys, time
sys.path.insert(0, sys.argv[1])
import helper
from rallypoint.errors import LaunchError, WorkersFailed
from rallypoint.launch import MultiprocessConfig, launch_subprocesses

def call(func, *args, **more):
    return launch_subprocesses(func, MultiprocessConfig(**more), *args, hosts=sys.argv[3].split(","), ssh_options=sys.argv[2])

def fails(path):
    import os, pathlib
    if os.environ["RANK"] == "1":
        raise ValueError("no such luck")
    time.sleep(60)
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", x.item())
"""


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()[:90]
    except OSError:
        return f"{pid}, which has ended"


class Site:
    """Hosts with an sshd each, and `rally run --hosts` on the first of them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.mark = f"site-{uuid.uuid4().hex}"
        self.key = folder / "key"
        self.servers: list[subprocess.Popen[bytes]] = []
        self.begun: list[subprocess.Popen[str]] = []
        for name in ("key", "host_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=60)
        # A line of sshd's configuration sets the mark in the environment of everything it starts.
        (folder / "sshd_config").write_text(
            f"Port {PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
            f"SetEnv RALLY_SITE={self.mark} XDG_STATE_HOME={folder}/state\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        for name, text in (("ranks", RANKS), ("stay", STAY), ("sum", SUM)):
            (folder / f"{name}.py").write_text(text)
        for index in range(1, hosts.count):
            assert SSHD is not None
            command = [*hosts.prefix(index), SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            self.servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        for index in range(1, hosts.count):
            wait_until(lambda at=index: self._listens(at), f"sshd on host {index}")

    def _listens(self, index: int) -> bool:
        return any(each.endswith(f":{PORT:04X}") for each in self.hosts.listening(index))

    def names(self, *more: int) -> str:
        return ",".join(self.hosts.addr(index) for index in (0, *more))

    @property
    def options(self) -> str:
        """Options for ssh."""
        return (
            f"-F none -p {PORT} -i {self.key} -o StrictHostKeyChecking=no"
            " -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        flags = ("--ssh-options", self.options, "--start-method", "exec")
        return self.start_python("-m", "rallypoint", "run", *flags, *words, env=env)

    def call(self, program: str, *hosts: str) -> subprocess.Popen[str]:
        """A program that calls functions on hosts."""
        away = self.folder / "away"
        away.mkdir()
        (away / "helper.py").write_text(HELP)
        (self.folder / "call.py").write_text(CALL + program)
        return self.start_python("call.py", str(away), self.options, ",".join(hosts))

    def start_python(
        self, *words: str, env: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        begun = subprocess.Popen(
            [*self.hosts.prefix(0), sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, "RALLY_SITE": self.mark, **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.begun.append(begun)
        return begun

    def wait_started(self, *ranks: int) -> None:
        for rank in ranks:
            wait_until((self.folder / f"started-{rank}").exists, f"rank {rank} has started")

    def left(self) -> list[str]:
        """The command lines of everything that runs for the job anywhere, except servers and the command itself."""
        mine = {os.getpid(), *(each.pid for each in (*self.servers, *self.begun))}
        found = process.marked_processes(f"RALLY_SITE={self.mark}".encode(), mine)
        return [_command_of(pid) for pid in found]

    def wait_nothing_left(self, since: float, limit: float = 5.0) -> None:
        wait_until(lambda: not self.left(), f"nothing is left; there is {self.left()}", 60)
        assert time.monotonic() - since < limit * pace()

    def close(self) -> None:
        for each in (*self.begun, *self.servers):
            for pid in (*process.descendants(each.pid), each.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            each.wait(60)
            for stream in (each.stdout, each.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd (openssh-server)")
    yield from make_hosts(3)


@pytest.fixture
def site(hosts: Hosts, tmp_path: Path) -> Iterator[Site]:
    made = Site(hosts, tmp_path)
    yield made
    made.close()


def test_a_supervisor_on_each_host_with_its_number_of_workers(site: Site) -> None:
    begun = site.start(
        *("--hosts", f"{site.names(1)}:2,{site.hosts.addr(2)}", "--forward-env", "MI*", "ranks.py"),
        env={"NCCL_X": "a b'c", "MINE": "yes", "OTHER": "no"},
    )
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    # The first host's process is local, so it has all variables.
    there = f"{site.folder} a b'c yes None"
    second, third = site.hosts.addr(1), site.hosts.addr(2)
    assert sorted(out.splitlines()) == [
        f"[{second}] rank 1 of 4 {there}",
        f"[{second}] rank 2 of 4 {there}",
        f"[{third}] rank 3 of 4 {there}",
        f"rank 0 of 4 {site.folder} a b'c yes no",
    ]
    assert site.left() == []


@pytest.mark.long
def test_one_report_and_the_exit_code_of_the_root_cause(site: Site) -> None:
    (site.folder / "hosts").write_text(f"{site.hosts.addr(0)}\n{site.hosts.addr(1)} slots=1  # b\n")
    begun = site.start("--hostfile", "hosts", "ranks.py", "1")
    _out, err = begun.communicate(timeout=180)
    assert begun.returncode == 7, err
    assert err.count("rally: the job failed") == 1, err
    assert "rank 1" in err and "host-1" in err
    assert site.left() == []


def test_a_mistake_is_told_once_and_ends_all(site: Site) -> None:
    begun = site.start("--hosts", site.names(1, 2), "nowhere.py")
    _out, err = begun.communicate(timeout=180)
    assert begun.returncode == 2
    assert err.count("nowhere.py") == 1, err
    assert site.left() == []


def test_a_host_that_cannot_be_reached(site: Site) -> None:
    begun = site.start("--hosts", f"{site.names(1)},10.78.0.77", "stay.py")
    _out, err = begun.communicate(timeout=180)
    assert begun.returncode != 0
    assert "nothing could be started on 10.78.0.77" in err
    assert site.left() == []


def test_a_host_that_could_not_be_reached_twice_is_left_out(site: Site) -> None:
    listed = site.folder / "bad.txt"
    listed.write_text("10.78.0.77 lost 2026-01-01T00:00:00Z other ssh did not reach it\n")
    hosts = f"{site.names(1)},10.78.0.77"
    begun = site.start("--hosts", hosts, "--avoid-hosts", str(listed), "stay.py")
    begun.communicate(timeout=180)
    assert begun.returncode != 0
    assert [each.split()[:2] for each in listed.read_text().splitlines()] == [
        ["10.78.0.77", "lost"]
    ] * 2
    begun = site.start("--hosts", hosts, "--avoid-hosts", str(listed), "ranks.py")
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert f"10.78.0.77 is left out (--avoid-hosts {listed}): it was lost twice" in err
    assert "rank 1 of 2" in out
    assert site.left() == []


def test_a_connection_that_a_busy_sshd_drops_is_begun_again(site: Site) -> None:
    """A bastion lets few connections log in at a time, but all hosts behind it are dialed at once."""
    config = site.folder / "busy_config"
    config.write_text((site.folder / "sshd_config").read_text().replace(f"{PORT}", "2223"))
    command = [*site.hosts.prefix(1), str(SSHD), "-D", "-e", "-f", str(config)]
    busy = subprocess.Popen(
        [*command, "-o", "MaxStartups=1:100:1"], stderr=subprocess.PIPE, text=True
    )
    site.servers.append(busy)
    wait_until(lambda: any(":08AF" in each for each in site.hosts.listening(1)), "the busy sshd")
    connects = f"import socket; s = socket.create_connection(('{site.hosts.addr(1)}', 2223)); s.recv(9); print(flush=True); input()"
    guest = site.start_python("-c", connects, stdin=subprocess.PIPE)
    assert guest.stdout is not None and busy.stderr is not None
    guest.stdout.readline()
    options = site.options.replace(f"-p {PORT}", "-p 2223")
    words = ("--hosts", site.names(1), "--ssh-options", options, "--start-method", "exec")
    begun = site.start_python("-m", "rallypoint", "run", *words, "ranks.py")
    while "MaxStartups throttling" not in busy.stderr.readline():
        assert busy.poll() is None
    guest.communicate("\n", timeout=60)
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert "rank 1 of 2" in out
    assert site.left() == []


def test_hosts_are_checked_before_the_job(site: Site) -> None:
    """The secret is read for the check and for the job."""
    begun = site.start("--hosts", site.names(1), "--preflight", "ranks.py")
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert "rank 1 of 2" in out


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(
            signal.SIGHUP, ["stubborn"], id="the terminal is closed", marks=pytest.mark.long
        ),
        pytest.param(signal.SIGINT, [], id="Ctrl-C", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, ["stubborn"], id="killed"),
    ],
)
def test_nothing_is_left_when_the_terminal_goes(site: Site, number: int, words: list[str]) -> None:
    begun = site.start("--hosts", site.names(1, 2), "stay.py", *words)
    site.wait_started(0, 1, 2)
    began = time.monotonic()
    begun.send_signal(number)
    site.wait_nothing_left(began)
    begun.communicate(timeout=60)
    if number == signal.SIGINT:
        assert begun.returncode == 128 + signal.SIGINT


def cut_the_connection(site: Site) -> None:
    (ssh,) = [
        pid
        for pid in process.children(site.begun[0].pid)
        if site.hosts.addr(2) in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    os.kill(ssh, signal.SIGKILL)


def unplug(site: Site) -> None:
    site.hosts.cut(2)


@pytest.mark.long
@pytest.mark.parametrize("what", [cut_the_connection, unplug])
def test_a_host_that_is_lost_ends_its_part_and_the_others_report_it(
    site: Site, what: Callable[[Site], None]
) -> None:
    begun = site.start(
        *("--hosts", site.names(1, 2), "--shutdown-timeout", "1", "--rdzv-conf", "lease=2"),
        "stay.py",
    )
    site.wait_started(0, 1, 2)
    began = time.monotonic()
    what(site)
    site.wait_nothing_left(began, limit=7.0)
    _out, err = begun.communicate(timeout=60)
    assert begun.returncode not in {0, 255}
    assert f"{site.hosts.addr(2)} is lost" in err
    assert "Traceback" not in err


@pytest.mark.long
def test_an_elastic_job_continues_without_a_host(site: Site) -> None:
    begun = site.start(
        *("--hosts", site.names(1, 2), "--nnodes", "2:3", "--rdzv-conf", "lease=2"),
        *("--shutdown-timeout", "1", "stay.py"),
    )
    site.wait_started(0, 1, 2)
    for rank in range(3):
        (site.folder / f"started-{rank}").unlink()
    cut_the_connection(site)
    site.wait_started(0, 1)
    assert begun.poll() is None
    begun.send_signal(signal.SIGTERM)
    begun.communicate(timeout=60)
    assert begun.returncode == 128 + signal.SIGTERM
    assert site.left() == []


@pytest.mark.long
def test_the_secret_is_on_no_command_line_and_in_no_environment(site: Site) -> None:
    secret = uuid.uuid4().hex
    begun = site.start("--hosts", site.names(1), "stay.py", env={"RALLY_SECRET": secret})
    site.wait_started(0, 1)
    found = process.marked_processes(f"RALLY_SITE={site.mark}".encode(), {os.getpid()})
    there = [pid for pid in found if pid not in {begun.pid, *process.descendants(begun.pid)}]
    assert len(there) > 2
    for pid in there:
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    begun.send_signal(signal.SIGTERM)
    begun.communicate(timeout=60)


@pytest.mark.long
def test_workers_of_the_hosts_reach_each_other(site: Site) -> None:
    begun = site.start("--hosts", site.names(1, 2), "--nproc-per-node", "2", "sum.py")
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert out == "sum 6.0\n"


# -- functions ------------------------------------------------------------------------------------


def test_a_function_of_a_module_that_only_this_host_has(site: Site) -> None:
    """A call and results larger than a pipe, and an object of a class that the other hosts do not have."""
    begun = site.call(
        "data = bytes(300_000)\n"
        "found = call(lambda d, box, size: (len(d), helper.total(box, size)), data, helper.Box(10), 200_000)\n"
        "for length, box in found:\n"
        "    print(length, type(box) is helper.Box, box.what[:2], len(box.what[2]))\n",
        *(f"{site.hosts.addr(0)}:1", f"{site.hosts.addr(1)}:2"),
    )
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    second = site.hosts.addr(1)
    shown, results = out.splitlines()[:3], out.splitlines()[3:]
    assert sorted(shown) == [f"[{second}] rank 1", f"[{second}] rank 2", "rank 0"]
    assert results == [
        "300000 True (33.0, '1') 200000",
        "300000 True (33.0, '2') 200000",
        "300000 True (33.0, '2') 200000",
    ]
    assert site.left() == []


def test_a_function_that_fails_on_another_host(site: Site) -> None:
    begun = site.call(
        "try:\n    call(fails, None, world_size=2)\n"
        "except WorkersFailed as error:\n"
        "    root = error.report.root_cause\n"
        "    print(root.rank, root.host, root.raised.type, root.raised.message)\n"
        "    print('in fails' in str(error), error.report.world_size)\n",
        *(site.hosts.addr(0), site.hosts.addr(1)),
    )
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert out.splitlines() == ["1 host-1 ValueError no such luck", "True 2"]
    assert "the job failed" not in err
    assert site.left() == []


@pytest.mark.long
def test_a_call_whose_host_cannot_be_reached(site: Site) -> None:
    begun = site.call(
        "try:\n    call(fails, None, local_world_size=1)\n"
        "except LaunchError as error:\n    print(error)\n",
        *(site.hosts.addr(0), "10.78.0.77"),
    )
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 0, err
    assert "nothing could be started on 10.78.0.77" in out
    assert site.left() == []


@pytest.mark.long
def test_nothing_is_left_of_a_call_that_is_killed(site: Site) -> None:
    begun = site.call(
        f"call(lambda: exec({STAY!r}), world_size=2)", site.hosts.addr(0), site.hosts.addr(1)
    )
    site.wait_started(0, 1)
    began = time.monotonic()
    begun.kill()
    site.wait_nothing_left(began)
    begun.communicate(timeout=60)


# -- rally submit ssh -----------------------------------------------------------------------------


def submit(site: Site, *words: str) -> subprocess.Popen[str]:
    """On hosts 1 and 2, from host 0."""
    hosts = ("--hosts", f"{site.hosts.addr(1)},{site.hosts.addr(2)}")
    options = ("--ssh-options", site.options)
    flags = (*options, "--start-method", "exec")
    command = ("-m", "rallypoint", "submit", "ssh", *hosts, *options, "--name", "x")
    return site.start_python(*command, "--", *flags, *words)


def test_a_submitted_job_is_followed_to_its_end(site: Site) -> None:
    begun = submit(site, "ranks.py", "1")
    out, err = begun.communicate(timeout=180)
    assert begun.returncode == 7, err
    lines = out.splitlines()
    assert any(line.startswith(f"[{site.hosts.addr(2)}] rank 1 of 2") for line in lines), out
    assert out.count("rally: the job failed") == 1
    (folder,) = (site.folder / "state" / "rallypoint" / "jobs").iterdir()
    assert folder.name.startswith("x-")
    assert (folder / "exit-code").read_text() == "7\n"
    assert site.left() == []


def test_a_submitted_job_goes_on_without_its_terminal(site: Site) -> None:
    begun = submit(site, "stay.py")
    site.wait_started(0, 1)
    begun.kill()
    begun.communicate(timeout=60)
    (folder,) = (site.folder / "state" / "rallypoint" / "jobs").iterdir()
    # Longer than a host waits for a terminal that says nothing.
    time.sleep(4)
    there = [*site.hosts.prefix(1), sys.executable, "-m", "rallypoint", "ps"]
    listed = subprocess.run(there, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "stay.py" in listed
    assert not (folder / "exit-code").exists()
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
    wait_until((folder / "exit-code").exists, "it has ended")
    wait_until(lambda: not site.left(), f"nothing is left; there is {site.left()}", 60)
    assert (folder / "exit-code").read_text() == f"{128 + signal.SIGTERM}\n"
