"""Bad input is answered in one line that names the mistake and the fix, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import supervisors
from stub_torch import STUB


pytestmark = pytest.mark.integration

RALLY = str(Path(sys.executable).parent / "rally")
MISTAKE, AT_RUN_TIME = 2, 1
# Variables with which a process to fork from would be of use to one test only.
READ_AT_A_START = ("CUDA_", "PYTHON", "TORCH_")
# Linux capabilities (linux/capability.h) that put root above permissions.
DAC_OVERRIDE, DAC_READ_SEARCH, NET_BIND_SERVICE = 1, 2, 10


def without_privileges() -> None:
    """In the child, make permissions hold for root too. It stays root, so that the venv stays readable."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH, NET_BIND_SERVICE):
        assert libc.prctl(24, capability, 0, 0, 0) == 0, "PR_CAPBSET_DROP"


@dataclass(frozen=True)
class Answer:
    exit_code: int
    line: str


class Asker:
    """Runs ``rally`` in a folder with a few files, and checks what holds after every mistake."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        (folder / "train.py").write_text("print('ran')")
        (folder / "empty folder").mkdir()
        (folder / "a file").write_text("")
        (folder / "raises.py").write_text("raise ValueError('why')")
        (folder / "exits.py").write_text("raise SystemExit(3)")

    def ask(self, *words: str, unprivileged: bool = False, **env: str) -> Answer:
        """What ``rally WORDS`` says, which must be a single line.

        Args:
            unprivileged: permissions hold for the command, even if the tests run as root.
        """
        marker = uuid.uuid4().hex
        plain = {"PATH": f"{Path(RALLY).parent}:/usr/bin:/bin", "HOME": str(self.folder)}
        plain |= {"TMPDIR": str(self.tmp), "RALLY_TEST": marker, "PYTHONDONTWRITEBYTECODE": "1"}
        # An empty torch: none of these commands gets as far as a worker.
        plain["PYTHONPATH"] = str(STUB)
        anew = unprivileged or any(name.startswith(READ_AT_A_START) for name in env)
        before = sorted(self.folder.rglob("*"))
        done = supervisors.run(
            [RALLY, *words],
            cwd=self.folder,
            env=plain | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            preexec_fn=without_privileges if unprivileged and os.geteuid() == 0 else None,
            imports=("torch",),
            forked=not anew,
        )
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert done.stderr.endswith("\n")
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("rally: ")
        assert len(done.stderr) < 400, "nobody reads a line of that length"
        assert sorted(self.folder.rglob("*")) == before, "files are left"
        assert processes_with(marker) == []
        return Answer(done.returncode, done.stderr.removeprefix("rally: ").rstrip())


def processes_with(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in path.joinpath("environ").read_bytes():
                found.append(path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_the_search_for_processes_finds_them():
    with subprocess.Popen(["sleep", "60"], env={"RALLY_TEST": "a certain mark"}) as process:
        try:
            end = time.monotonic() + 60
            while processes_with("a certain mark") != ["sleep 60 "] and time.monotonic() < end:
                time.sleep(0.01)
            assert processes_with("a certain mark") == ["sleep 60 "]
        finally:
            process.kill()


@pytest.fixture
def asker(tmp_path) -> Asker:
    return Asker(tmp_path)


@dataclass(frozen=True)
class Mistake:
    """``rally run WORDS``, and what the answer must contain.

    Args:
        names: the thing that is wrong.
        fix: what to do about it, or what would be right.
    """

    words: str
    names: str
    fix: str
    exit_code: int = MISTAKE
    env: dict[str, str] = field(default_factory=dict)


def _mistake(words: str, names: str, fix: str, exit_code: int = MISTAKE, /, **env: str) -> Mistake:
    return Mistake(words, names, fix, exit_code, env)


MISTAKES = [
    # flags
    _mistake("--nproc-per-nod2 2 train.py", "--nproc-per-nod2", "did you mean --nproc-per-node?"),
    _mistake("--max_restart5 2 train.py", "--max_restart5", "did you mean --max-restarts?"),
    _mistake("--elastic train.py", "--elastic", "rally run --help"),
    _mistake("-x train.py", "-x", "no such flag"),
    _mistake("-n 2 train.py", "-n", "did you mean --nproc-per-node?"),
    _mistake("-np 2 train.py", "-n", "did you mean --nproc-per-node?"),
    _mistake("--log train.py", "--log: could be", "--log-dir, --logs-specs"),
    _mistake("--nproc-per-node", "--nproc-per-node", "expected a value (N)"),
    _mistake("--log-dir --standalone train.py", "--log-dir", "write --log-dir=--standalone if"),
    _mistake("--standalone=1 train.py", "--standalone", "takes no value"),
    _mistake("", "no script", "rally run [flags] script.py"),
    _mistake("--standalone", "no script", "rally run [flags] script.py"),
    # size of the job
    _mistake("--nproc-per-node 0 train.py", "--nproc-per-node '0'", "at least 1"),
    _mistake("--nproc-per-node -1 train.py", "--nproc-per-node '-1'", "at least 1"),
    _mistake("--nproc-per-node many train.py", "--nproc-per-node 'many'", "a number"),
    _mistake("--nproc_per_node=2.5 train.py", "--nproc-per-node '2.5'", "a number"),
    _mistake("--nproc-per-node= train.py", "--nproc-per-node ''", "a number"),
    _mistake("--nproc-per-node ² train.py", "--nproc-per-node '²'", "a number"),
    _mistake("--nproc-per-node 100000000 train.py", "no more than", "start fewer workers"),
    _mistake("--nnodes two train.py", "--nnodes 'two'", "number of nodes"),
    _mistake("--nnodes ² train.py", "--nnodes '²'", "number of nodes"),
    _mistake("--nnodes 1:2:3 train.py", "--nnodes '1:2:3'", "number of nodes"),
    _mistake("--nnodes 2: train.py", "--nnodes '2:'", "number of nodes"),
    _mistake("--nnodes 0 train.py", "--nnodes '0'", "at least 1 node"),
    _mistake("--nnodes 3:2 train.py", "--nnodes '3:2'", "MIN no larger than MAX"),
    _mistake("--nnodes 2:4 train.py", "--rdzv-endpoint", "--rdzv-endpoint HOST:29400"),
    _mistake(
        "--nnodes 2:4 --rdzv-backend static train.py", "--nnodes '2:4'", "leave --rdzv-backend out"
    ),
    _mistake(
        "--nnodes 2:4 --rdzv-backend etcd train.py", "--rdzv-endpoint", "--rdzv-endpoint etcd://"
    ),
    _mistake("--nnodes 2:4 --rdzv-endpoint etc://h train.py", "--rdzv-endpoint 'etc://h'", "etcd"),
    _mistake(
        "--nnodes 2:4 --rdzv-endpoint h --secret-file nowhere train.py",
        "--secret-file 'nowhere'",
        "cannot be read",
    ),
    _mistake(
        "--nnodes 2:4 --rdzv-endpoint h --rdzv-conf is_host=maybe train.py",
        "is_host 'maybe'",
        "true or false",
    ),
    _mistake("--nnodes 2 --node-rank 2 train.py", "--node-rank '2'", "0 to 1"),
    _mistake("--nnodes 2 --node-rank x train.py", "--node-rank 'x'", "whole number"),
    _mistake("--node-rank x train.py", "--node-rank 'x'", "whole number"),
    _mistake("--hosts a,,b train.py", "--hosts 'a,,b'", "one of the names is empty"),
    _mistake(
        "--hostfile missing train.py",
        "--hostfile 'missing': cannot be read: No such file or directory (check the path",
        "it is relative to /",
    ),
    _mistake("--hostfile empty\\folder train.py", "Is a directory", "a host on each line"),
    _mistake("--hostfile= train.py", "--hostfile ''", "is a variable of the shell not set?"),
    # meeting point
    _mistake("--master-port 65536 train.py", "--master-port '65536'", "0 to 65535"),
    _mistake("--master-port -1 train.py", "--master-port '-1'", "0 or more"),
    _mistake("--master-port http train.py", "--master-port 'http'", "whole number"),
    _mistake(
        "--master-addr no.such.host.invalid --master-port 29999 train.py",
        "--master-addr 'no.such.host.invalid'",
        "give an IP address",
    ),
    _mistake(
        "--rdzv-backend zookeeper train.py", "'zookeeper'", "known: etcd (also etcd-v2), file"
    ),
    _mistake("--rdzv-endpoint host:port train.py", "--rdzv-endpoint 'host:port'", "a port from 0"),
    _mistake("--rdzv-endpoint :29400 train.py", "--rdzv-endpoint ':29400'", "tcp://node0"),
    _mistake(
        "--nnodes 2 --rdzv-backend c10d train.py", "--rdzv-endpoint", "--rdzv-endpoint HOST:29400"
    ),
    _mistake(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:0 train.py",
        "--rdzv-endpoint 'host:0'",
        "--rdzv-endpoint host:29400",
    ),
    _mistake("--rdzv-conf join_timeout train.py", "--rdzv-conf 'join_timeout'", "NAME=VALUE"),
    _mistake("--rdzv-conf timeout=x train.py", "--rdzv-conf timeout 'x'", "expected seconds"),
    _mistake("--rdzv-conf timeout=nan train.py", "timeout 'nan'", "a number above 0"),
    _mistake("--rdzv-conf timeout=0 train.py", "timeout '0'", "a number above 0"),
    _mistake("--nnodes 2 --rdzv-endpoint= train.py", "--rdzv-endpoint ''", "variable of the shell"),
    _mistake(
        "--nnodes 2 --node-rank 1 --master-addr= train.py", "--master-addr ''", "host of node 0"
    ),
    _mistake("--bind= train.py", "--bind ''", "an address of this machine, or *"),
    _mistake("--secret-file= train.py", "--secret-file ''", "expected a file"),
    # failure and restart
    _mistake("--max-restarts -1 train.py", "--max-restarts '-1'", "0 or more"),
    _mistake("--max-restarts x train.py", "--max-restarts 'x'", "whole number"),
    _mistake("--shutdown-timeout inf train.py", "--shutdown-timeout 'inf'", "number of seconds"),
    _mistake("--monitor-interval x train.py", "--monitor-interval 'x'", "number of seconds"),
    _mistake(
        "--hosts 192.0.2.1 --ssh-options=-i'k train.py", "--ssh-options", "not a shell's words"
    ),
    _mistake("--hosts node[01-04] train.py", "'node[01-04]'", "scontrol show hostnames"),
    _mistake("--signals-to-handle SIGFOO train.py", "'SIGFOO'", "`kill -l` lists the names"),
    _mistake("--signals-to-handle SIGTERM,KILL train.py", "'KILL'", "cannot be forwarded"),
    _mistake("--signals-to-pass SIGFOO train.py", "--signals-to-pass 'SIGFOO'", "`kill -l`"),
    _mistake(
        "--signals-to-handle TERM,USR1 --signals-to-pass USR1 train.py",
        "--signals-to-pass 'USR1'",
        "name it in one",
    ),
    # output
    _mistake("--redirects 4 train.py", "--redirects '4'", "0 (none), 1 (stdout)"),
    _mistake("-r x train.py", "--redirects 'x'", "0 (none), 1 (stdout)"),
    _mistake("--tee 0:4 train.py", "--tee '0:4'", "0:3,11:1"),
    _mistake("-t -1:1 train.py", "-t", "found -1:1 (write -t=-1:1"),
    _mistake("-t=-1:1 train.py", "--tee '-1:1'", "0:3,11:1"),
    _mistake("--tee 0:1:1 train.py", "--tee '0:1:1'", "0:3,11:1"),
    _mistake("--tee 0:3,0:1 train.py", "--tee '0:3,0:1'", "local rank 0 is named twice"),
    _mistake("--redirects 1:1,0:3,1:1 train.py", "--redirects", "local rank 1 is named twice"),
    _mistake("--log-max-size 10 train.py", "--log-max-size '10'", "at least 1K (with a unit: 10M)"),
    _mistake("--metrics= train.py", "--metrics ''", ":PORT, HOST:PORT or a path"),
    _mistake("--local-ranks-filter 0,a train.py", "--local-ranks-filter '0,a'", "0,1,10"),
    _mistake("--log-dir a\\file train.py", "--log-dir 'a file'", "a writable folder"),
    _mistake("--log-dir a\\file/logs train.py", "'a file/logs'", "a writable folder"),
    _mistake("--log-dir /proc/nope train.py", "'/proc/nope'", "a writable folder"),
    _mistake("--log-dir /dev/full train.py", "'/dev/full'", "a writable folder"),
    # how workers start
    _mistake("--start-method teleport train.py", "'teleport'", "forkserver, exec"),
    _mistake("--numa-binding nearby train.py", "'nearby'", "node, socket"),
    _mistake(
        "--preload no_such_module train.py", "--preload no_such_module", "PYTHONPATH", AT_RUN_TIME
    ),
    _mistake(
        "--preload raises train.py", "--preload raises: ValueError: why", "check", AT_RUN_TIME
    ),
    _mistake("--preload exits train.py", "--preload exits: SystemExit: 3", "check", AT_RUN_TIME),
    _mistake(
        "--nproc-per-node 3 --virtual-local-rank train.py",
        "CUDA_VISIBLE_DEVICES '0,1'",
        "2 are visible",
        CUDA_VISIBLE_DEVICES="0,1",
    ),
    # what to run
    _mistake("--nproc-per-node train.py", "no script given", "the value of --nproc-per-node"),
    _mistake("--hang-after train.py", "no script given", "the value of --hang-after"),
    _mistake("--no-python ./train.py", "program './train.py'", "chmod +x ./train.py"),
    _mistake("tran.py", "script 'tran.py'", "did you mean train.py?"),
    _mistake("-m train.py", "--module 'train.py'", "leave -m out: rally run … train.py"),
    _mistake("train", "script 'train'", "did you mean train.py?"),
    _mistake("nowhere/train.py", "script 'nowhere/train.py'", "there is no folder nowhere"),
    _mistake("train.py/x.py", "script 'train.py/x.py'", "there is no folder train.py"),
    _mistake("zzz.py", "script 'zzz.py'", "looked in /"),
    _mistake("python train.py --lr 1", "script 'python'", "leave python out: rally run … train.py"),
    _mistake("/usr/bin/python3.11 -u train.py", "'/usr/bin/python3.11'", "or add --no-python"),
    _mistake("sleep 1", "/usr/bin/sleep is a program", "add --no-python"),
    _mistake("/usr/bin/sleep 1", "not a Python script", "add --no-python"),
    _mistake("empty\\folder", "script 'empty folder'", "without a __main__.py"),
    _mistake("x" * 256 + ".py", "cannot be read: File name too long", "check the path"),
    _mistake("--no-python nothing-there", "program 'nothing-there'", "not found"),
    _mistake("--no-python ./train.py", "program './train.py'", "not executable"),
    _mistake("--no-python -m train", "--no-python", "cannot be combined with --module"),
    # the environment
    _mistake("train.py", "PET_NPROC_PER_NODE 'many'", "a number", PET_NPROC_PER_NODE="many"),
    _mistake("train.py", "PET_MAX_RESTARTS '-2'", "0 or more", PET_MAX_RESTARTS="-2"),
    _mistake("train.py", "PET_STANDALONE 'yes'", "0 or 1", PET_STANDALONE="yes"),
    _mistake("train.py", "PET_MODULE '²'", "0 or 1", PET_MODULE="²"),
    _mistake("train.py", "PET_TEE '9'", "3 (both)", PET_TEE="9"),
    _mistake("train.py", "PET_START_METHOD 'x'", "forkserver, exec", PET_START_METHOD="x"),
    _mistake(
        "train.py",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT 'soon'",
        "number of seconds",
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon",
    ),
    _mistake(
        "train.py", "PYTHON_EXEC '/no/python'", "no such interpreter", PYTHON_EXEC="/no/python"
    ),
]


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda m: " ".join([*m.env, m.words[:50]]).strip() or "nothing"
)
def test_mistake_is_named_with_its_fix(asker: Asker, mistake: Mistake):
    # A backslash stands for a space within a word.
    words = [word.replace("\\", " ") for word in mistake.words.split()]
    answer = asker.ask("run", *words, **mistake.env)
    assert answer.exit_code == mistake.exit_code
    assert mistake.names in answer.line
    assert mistake.fix in answer.line


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("rnu train.py", "did you mean run?"),
        ("train.py --epochs 3", "did you mean: rally run train.py --epochs 3"),
        ("--nproc-per-node 2 train.py", "did you mean: rally run --nproc-per-node 2 train.py"),
        ("dance", "known: run"),
    ],
)
def test_unknown_command_is_answered_with_the_nearest(asker: Asker, words: str, fix: str):
    answer = asker.ask(*words.split())
    assert answer.exit_code == MISTAKE
    assert repr(words.split()[0]) in answer.line
    assert fix in answer.line


def test_script_without_read_permission(asker: Asker):
    (asker.folder / "train.py").chmod(0o200)
    answer = asker.ask("run", "train.py", unprivileged=True)
    assert answer.exit_code == MISTAKE
    assert "script 'train.py': no permission to read it" in answer.line
    assert "chmod u+r train.py" in answer.line


def test_script_in_a_closed_folder(asker: Asker):
    (asker.folder / "empty folder").chmod(0)
    answer = asker.ask("run", "empty folder/train.py", unprivileged=True)
    assert answer.exit_code == MISTAKE
    assert "script 'empty folder/train.py': cannot be read: Permission denied" in answer.line
    assert "check the path and its folders" in answer.line


def test_log_folder_without_write_permission(asker: Asker):
    (asker.folder / "empty folder").chmod(0o500)
    answer = asker.ask("run", "--log-dir", "empty folder/logs", "train.py", unprivileged=True)
    assert answer.exit_code == MISTAKE
    assert "--log-dir 'empty folder/logs'" in answer.line
    assert "Permission denied" in answer.line


@pytest.mark.parametrize("flag", ["--master-port {port}", "--rdzv-endpoint 127.0.0.1:{port}"])
def test_port_in_use(asker: Asker, flag: str):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        answer = asker.ask("run", *flag.format(port=port).split(), "train.py")
    assert answer.exit_code == MISTAKE
    assert port in answer.line
    assert "the port is in use" in answer.line
    assert "choose another one, or 0 for any free port" in answer.line


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ("--node-rank 0 --master-addr 127.0.0.1 --master-port {port}", "--master-port"),
        ("--rdzv-endpoint 127.0.0.1:{port} --rdzv-conf is_host=true", "--rdzv-endpoint"),
    ],
)
def test_port_in_use_on_the_node_that_is_to_serve(asker: Asker, flags: str, option: str):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        words = ("--nnodes", "2", "--insecure", *flags.format(port=port).split())
        answer = asker.ask("run", *words, "train.py")
    assert answer.exit_code == MISTAKE
    assert f"{option} '{port}': the port is in use" in answer.line
    assert "choose another one, the same on all nodes" in answer.line


@pytest.mark.parametrize(
    "flags",
    [
        "--bind 203.0.113.1 --rdzv-endpoint 127.0.0.1:{port}",
        "--node-rank 0 --master-addr 203.0.113.1 --bind 203.0.113.1 --master-port {port}",
    ],
)
def test_an_address_that_this_machine_does_not_have(asker: Asker, flags: str):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    words = ("--nnodes", "2", "--insecure", *flags.format(port=port).split())
    answer = asker.ask("run", *words, "train.py")
    assert answer.exit_code == MISTAKE
    assert "address to listen on '203.0.113.1': this machine does not have it" in answer.line
    assert "--bind" in answer.line


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("run", ""), "script '': an empty name"),
        (("checkpoints", ""), "checkpoints '': expected a place"),
        (("secret", ""), "secret '': expected a file"),
    ],
)
def test_an_empty_word_is_told_as_such(asker: Asker, words: tuple[str, ...], names: str):
    answer = asker.ask(*words)
    assert answer.exit_code == MISTAKE
    assert names in answer.line
    assert "is a variable of the shell not set?" in answer.line


def test_a_file_is_no_folder_of_checkpoints(asker: Asker):
    answer = asker.ask("checkpoints", "a file")
    assert answer.exit_code == MISTAKE
    assert answer.line.startswith(
        "checkpoints 'a file': a file, expected a folder (name the folder"
    )


def test_port_that_is_not_permitted(asker: Asker):
    first = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if first.exists() and int(first.read_text()) <= 81:
        pytest.skip("every port is permitted to everybody here")
    answer = asker.ask("run", "--master-port", "81", "train.py", unprivileged=True)
    assert answer.exit_code == MISTAKE
    assert "--master-port '81': binding this port is not permitted" in answer.line
    assert "1024" in answer.line


@pytest.fixture
def mount_small(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system with room for that many files, its own folder included."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a file system")
    folder = tmp_path / "disk"

    def mount(files: int) -> Path:
        folder.mkdir()
        options = f"size=64k,nr_inodes={files}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            check=False,
            capture_output=True,
        )
        if done.returncode != 0:
            pytest.skip("mounting is not allowed here")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


@pytest.mark.parametrize(
    ("files", "exit_code"), [(1, MISTAKE), (2, AT_RUN_TIME), (3, AT_RUN_TIME), (4, AT_RUN_TIME)]
)
def test_log_folder_on_a_full_disk(tmp_path, mount_small, files: int, exit_code: int):
    """The disk fills up at the run's folder, the attempt's, the worker's, or the log file."""
    disk = mount_small(files)
    (tmp_path / "work").mkdir()
    answer = Asker(tmp_path / "work").ask(
        "run", "--log-dir", str(disk), "--redirects", "3", "train.py"
    )
    assert answer.exit_code == exit_code
    assert str(disk) in answer.line
    assert "No space left on device" in answer.line
    assert "--log-dir" in answer.line


def test_ctrl_c_while_it_still_imports_ends_without_a_traceback():
    code = (
        "import sys, runpy\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'rallypoint.launch.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('rallypoint', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_a_file_that_hides_a_module_of_the_standard_library_is_named(tmp_path: Path):
    (tmp_path / "train.py").write_text("print('ran')")
    (tmp_path / "random.py").write_text("def draw(): return 4")
    # Not a fork of this process, which has already imported Python's own module.
    done = subprocess.run(
        [RALLY, "run", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == AT_RUN_TIME
    told = " ".join(done.stderr.partition("rally: ")[2].split())
    assert "random.py beside the script hides a module of the standard library: rename it" in told


def test_a_file_in_the_current_folder_hides_nothing_from_the_launcher(tmp_path: Path):
    """`--hosts` starts `python -m rallypoint` in the job's folder. The script is elsewhere, so workers do not see the file."""
    (tmp_path / "uuid.py").write_text("raise RuntimeError('not that of Python')")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print('ran')")
    # Not a fork of this process, which has already imported Python's own module.
    done = subprocess.run(
        [RALLY, "run", "--hosts", "localhost", "--start-method", "exec", "src/train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize(
    ("flag", "before", "said"),
    [
        ("--mount", "umount -l /proc", "rally: /proc is not mounted"),
        ("--pid", "true", "rally: /proc shows another pid namespace"),
    ],
)
def test_without_a_proc_of_its_own_no_job_is_started(
    tmp_path: Path, flag: str, before: str, said: str
):
    """What it found in another's would be killed under numbers that belong to other processes here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    (tmp_path / "train.py").write_text("print('ran')")
    done = subprocess.run(
        ["unshare", flag, "--fork", "sh", "-c", f"{before} && exec {RALLY} run train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout) == (AT_RUN_TIME, ""), done.stderr
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_a_machine_that_does_not_know_localhost_runs_jobs(tmp_path: Path):
    """As in a container or a chroot without /etc/hosts."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    (tmp_path / "hosts").touch()
    (tmp_path / "train.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print(os.environ['MASTER_ADDR'])\n"
    )
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"mount --bind hosts /etc/hosts && exec {RALLY} run train.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in {"127.0.0.1\n", "localhost\n"}  # a name server may know it
