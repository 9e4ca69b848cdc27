"""`--avoid-hosts`: what counts against a host, the list, and which hosts are left out because of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.avoidance import avoid_file, avoid_list, own_host, trouble
from rallypoint.launch.avoidance.trouble import Kind, Trouble
from rallypoint.launch.command_line.given import parse
from rallypoint.launch.command_line.settings import config_from
from rallypoint.launch.config import Job, LaunchConfig, RendezvousConfig, TargetKind
from rallypoint.launch.hosts import host_ends, listing
from rallypoint.launch.hosts.merging import Part
from rallypoint.launch.output.failure import Raised, WorkerFailure
from rallypoint.launch.submit import command as submit
from rallypoint.launch.supervision.host_troubles import HostTroubles


def lost(host: str, incident: str, why: str = "silent") -> Trouble:
    return Trouble(host=host, kind=Kind.LOST, incident=incident, why=why)


def failed(host: str, incident: str, why: str = "killed") -> Trouble:
    return Trouble(host=host, kind=Kind.FAILED, incident=incident, why=why)


def failure(error: tuple[str, str] | None = None, **more: Any) -> WorkerFailure:
    raised = error and Raised(
        type=error[0], message=error[1], traceback="", at=1.0, timestamp=1, chains=((error,),)
    )
    fields: dict[str, Any] = {
        "host": "h1",
        "node_rank": 0,
        "rank": 3,
        "local_rank": 0,
        "pid": 7,
        "generation": 0,
        "exit_code": 1 if error else None,
        "signal": None,
        "raised": raised,
        "native_stack": "",
        "cause": "",
        "stderr": (),
        "at": 1.0,
        "stopped_by_us": False,
    }
    return WorkerFailure(**{**fields, **more})


# -- what counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        failure(signal=signal.SIGKILL),
        failure(signal=signal.SIGBUS),
        failure(("OSError", "[Errno 28] No space left on device: '/scratch/x'")),
        failure(("OSError", "[Errno 5] Input/output error")),
        failure(("OSError", "[Errno 116] Stale file handle")),
        failure(("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered")),
        failure(("RuntimeError", "No CUDA-capable device is detected")),
    ],
    ids=str,
)
def test_what_a_host_does_counts(found: WorkerFailure) -> None:
    told = trouble.of_failure(found, "i")
    assert told is not None
    assert (told.host, told.kind, told.incident) == ("h1", Kind.FAILED, "i")
    assert told.why.startswith("rank 3 ")


@pytest.mark.parametrize(
    "found",
    [
        failure(signal=signal.SIGSEGV),
        failure(signal=signal.SIGABRT),
        failure(exit_code=75),
        failure(("ValueError", "a bad batch")),
        failure(("FileNotFoundError", "[Errno 2] No such file or directory: 'x'")),
        failure(("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")),
        failure(("RuntimeError", "CUDA error: device-side assert triggered")),
        failure(signal=signal.SIGKILL, stopped_by_us=True),
        failure(signal=signal.SIGKILL, hung=True),
        failure(exit_code=0),
    ],
    ids=str,
)
def test_what_a_script_or_the_supervisor_does_says_nothing_of_the_host(
    found: WorkerFailure,
) -> None:
    assert trouble.of_failure(found, "i") is None


# -- the list ---------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b.x", "b", "10.0.0.1", "10.0.0.2", "fd00::1"])
TROUBLES = st.builds(
    Trouble,
    host=NAMES,
    kind=st.sampled_from(Kind),
    incident=st.sampled_from(["i1", "i2", "i3"]),
    why=st.text(max_size=300),
)


@given(st.lists(TROUBLES, max_size=8))
def test_what_is_written_is_read(troubles: list[Trouble]) -> None:
    told = avoid_list.parse(avoid_list.lines_for(troubles, "2026-01-01T00:00:00Z"), "x").troubles
    assert [(e.host, e.kind, e.incident) for e in told] == [
        (e.host, e.kind, e.incident) for e in troubles
    ]


@given(st.lists(TROUBLES, max_size=8))
def test_nothing_is_written_twice_and_twice_is_once_too_often(troubles: list[Trouble]) -> None:
    """However many nodes write what they know, in whatever order."""
    once = avoid_list.AvoidList(troubles=avoid_list.AvoidList().missing(troubles))
    assert once.missing(troubles) == ()
    for host in {each.host for each in troubles}:
        mine = {e.incident for e in troubles if avoid_list.is_same(e.host, host)}
        assert bool(once.reason(host)) == (len(mine) >= 2)
        assert (host in once.hosts()) <= bool(once.reason(host))


def test_the_reason_is_told() -> None:
    text = """
    # ours
    node9                    # its fan
    node7 lost 2026-11-26T11:30:14Z i1 its process has ended
    node7 failed 2026-11-26T11:31:14Z i1 rank 3 was killed by SIGBUS
    node8 lost 2026-11-26T11:30:14Z i1 silent
    node7.example failed 2026-11-26T12:10:02Z i2 rank 12 was killed by SIGBUS # again
    """
    read = avoid_list.parse(text, "x")
    assert read.reason("node9") == "it is on the list"
    assert read.reason("NODE7") == (
        "it was lost once and failed once, last: rank 12 was killed by SIGBUS # again"
    )
    assert read.reason("node8") == ""
    assert read.reason("node7.other.example") == "", "one incident of a host with this name"
    assert read.hosts() == ("node9", "node7")


def test_twice_lost_is_said_so() -> None:
    read = avoid_list.AvoidList(troubles=(lost("a", "i1"), lost("a", "i2"), lost("a", "i3")))
    assert read.reason("a") == "it was lost 3 times, last: silent"


@pytest.mark.parametrize(
    "line", ["node7 is broken\n", "a,b\n", "node7 lost\n", "node7 lost 2026\n"]
)
def test_a_line_that_is_neither_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2 is neither a host nor a record"):
        avoid_list.parse("# x\n" + line, "--avoid-hosts x")


def test_a_line_that_is_being_written_is_none_yet() -> None:
    assert avoid_list.parse("a\nnode7 lo", "x") == avoid_list.AvoidList(by_hand=("a",))


# -- the file ---------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_an_empty_list(tmp_path: Path) -> None:
    assert avoid_file.read(tmp_path / "bad", "--avoid-hosts") == avoid_list.AvoidList()
    with pytest.raises(ConfigError, match=r"the folder .*none does not exist .make it first"):
        avoid_file.read(tmp_path / "none" / "bad", "--avoid-hosts")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        avoid_file.read(tmp_path, "--avoid-hosts")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        avoid_file.read(tmp_path / "binary", "--avoid-hosts")


def test_lines_of_people_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_text("node9  # its fan")  # no newline at the end
    avoid_file.add(path, [lost("node7", "i1")])
    avoid_file.add(path, [lost("node7", "i1"), failed("node8", "i1")])
    first, *records = path.read_text().splitlines()
    assert first == "node9  # its fan"
    assert [each.split()[:2] for each in records] == [["node7", "lost"], ["node8", "failed"]]


WRITER = """
import sys
from pathlib import Path
from rallypoint.launch.avoidance import avoid_file
from rallypoint.launch.avoidance.trouble import Kind, Trouble
print("ready", flush=True)
sys.stdin.readline()
for at in range(50):
    avoid_file.add(Path(sys.argv[1]), [Trouble(host="h", kind=Kind.LOST, incident=f"i{at}", why="x" * 150)])
"""


def test_many_that_write_at_once_write_each_incident_once(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for each in writers:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in writers:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.wait(120) for each in writers] == [0] * 4
    for each in writers:
        each.communicate()
    told = avoid_file.read(path, "x").troubles
    assert sorted(each.incident for each in told) == sorted(f"i{at}" for at in range(50))


# -- who notes --------------------------------------------------------------------------------------


def test_a_supervisor_notes_each_incident_of_a_host_once(tmp_path: Path) -> None:
    said: list[str] = []
    notes = HostTroubles(str(tmp_path / "bad"), said.append)
    notes.note_loss("", "i0", "nobody knows its name")
    notes.note_loss("h2", "i1", "silent")
    for _ in range(3):
        notes.note_failure(failure(signal=signal.SIGBUS), "i1")
    notes.note_failure(failure(("ValueError", "x")), "i2")
    notes.close()
    assert said == []
    told = avoid_file.read(tmp_path / "bad", "x").troubles
    assert [(e.host, e.kind) for e in told] == [("h2", Kind.LOST), ("h1", Kind.FAILED)]
    assert [e.host for e in notes.noted] == ["h2", "h1"]


def test_a_list_that_cannot_be_written_is_said_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    notes = HostTroubles(str(tmp_path / "gone" / "bad"), said.append)
    notes.note_loss("h2", "i1", "silent")
    notes.close()
    notes.close()
    assert len(said) == 1
    assert "h2 not noted: " in said[0]
    assert "No such file or directory" in said[0]


def test_without_a_list_troubles_are_kept_for_the_terminal(tmp_path: Path) -> None:
    notes = HostTroubles(None, lambda text: None)
    notes.note_broken("h1", "i1", "the fork server was killed")
    notes.close()
    assert [e.why for e in notes.noted] == ["the fork server was killed"]
    assert Trouble.from_json(notes.noted[0].to_json()) == notes.noted[0]


def test_hosts_of_a_terminal() -> None:
    """By the names on the command line; a node that ended because it was told to proves nothing."""
    told = failed("its-own-name", "g1", "killed").to_json()
    other = lost("b", "g1").to_json()
    parts = [
        Part("me@a", started=True, exit_code=1, ssh_code=1, troubles=(told, other)),
        Part("b", started=True, ssh_code=255),
        Part("c", ssh_code=255),
        Part("d", started=True, ssh_code=255, was_told=True),
        Part("e", ssh_code=127),
    ]
    found = host_ends.troubles_of(parts, "i")
    assert [(e.host, e.kind, e.incident) for e in found] == [
        ("a", Kind.FAILED, "g1"),
        ("b", Kind.LOST, "i"),
        ("c", Kind.LOST, "i"),
    ]
    assert host_ends.troubles_of([Part("b", ssh_code=255), Part("c", ssh_code=255)], "i") == ()


# -- who is left out --------------------------------------------------------------------------------

HOSTS = listing.read_list("a,me@b:2,c,d")


def bad(*names: str) -> Callable[[str], str]:
    return lambda host: "so" if host in names else ""


@pytest.mark.parametrize(
    ("avoided", "nnodes", "chosen", "told"),
    [
        ((), None, "abcd", None),
        (("b",), None, "acd", None),
        (("b",), "2", "ac", "2"),
        (("a",), "3", "bcd", "3"),
        (("a", "b"), "2:4", "cd", "2:2"),
        (("a",), "2:4", "bcd", "2:3"),
        ((), "2:3", "abc", "2:3"),
        (("a", "b", "c"), None, "d", None),
    ],
)
def test_the_first_hosts_that_need_not_be_avoided(
    avoided: tuple[str, ...], nnodes: str | None, chosen: str, told: str | None
) -> None:
    found = listing.select(HOSTS, bad(*avoided), nnodes, "bad.txt")
    assert "".join(each.bare for each in found.hosts) == chosen
    assert found.nnodes == told
    assert found.left_out == tuple((each, "so") for each in avoided)


@pytest.mark.parametrize(
    ("avoided", "nnodes", "error"),
    [
        (("a", "b"), "3", r"'bad.txt': leaves 2 of 4 hosts, and --nnodes needs 3"),
        (("a", "b", "c", "d"), None, r"leaves 0 of 4 hosts .remove the lines"),
        ((), "x", r"--nnodes 'x': expected N or MIN:MAX"),
        ((), "5", r"leaves 4 of 4 hosts, and --nnodes needs 5"),
        ((), "3:2", r"--nnodes '3:2': expected N or MIN:MAX"),
    ],
)
def test_too_few_hosts_are_left(avoided: tuple[str, ...], nnodes: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        listing.select(HOSTS, bad(*avoided), nnodes, "bad.txt")


def config(listed: Path, least: int | None, most: int, host: str = "") -> LaunchConfig:
    return LaunchConfig(
        job=Job(kind=TargetKind.SCRIPT, name="x.py"),
        rendezvous=RendezvousConfig(run_id="x", node_rank=None, host=host),
        num_nodes=most,
        min_nodes=least,
        avoid_hosts=str(listed),
    )


@pytest.mark.parametrize(
    ("least", "most", "out", "said"),
    [
        (2, 4, True, "n7 is left out (--avoid-hosts {}): it is on the list"),
        (2, 2, False, "n7 is to be avoided (it is on the list), but this job needs all its hosts"),
        (
            None,
            1,
            False,
            "n7 is to be avoided (it is on the list), but this job needs all its hosts",
        ),
    ],
)
def test_this_host(
    least: int | None, most: int, out: bool, said: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "bad").write_text("n7\n")
    lines: list[str] = []
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert own_host.is_left_out(config(tmp_path / "bad", least, most), {}, lines.append) is out
    assert lines == [said.format(tmp_path / "bad")]
    monkeypatch.setenv("RALLY_HOST_NAME", "n8")
    assert not own_host.is_left_out(config(tmp_path / "bad", least, most), {}, lines.append)
    assert len(lines) == 1


def test_a_host_at_which_the_nodes_meet_takes_part(tmp_path: Path, monkeypatch) -> None:
    """Otherwise the others would wait for its store."""
    (tmp_path / "bad").write_text("n7\n")
    lines: list[str] = []
    monkeypatch.setenv("RALLY_HOST_NAME", "n7")
    here, there = (config(tmp_path / "bad", 2, 4, host) for host in ("127.0.0.1", "192.0.2.7"))
    assert not own_host.is_left_out(here, {}, lines.append)
    assert lines == [
        "n7 is to be avoided (it is on the list), but this job meets here (--rdzv-endpoint)"
    ]
    assert own_host.is_left_out(there, {}, lines.append)
    assert own_host.is_left_out(
        replace(here, rendezvous=replace(here.rendezvous, is_host=False)), {}, lines.append
    )


def test_nodes_of_slurm_meet_on_a_host_that_takes_part(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x.py").touch()
    (tmp_path / "bad").write_text("n1\n")
    monkeypatch.chdir(tmp_path)
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "n[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    }

    def meets(*words: str, **more: str) -> str:
        made, _ = config_from(parse([*words, "--insecure", "x.py"]), {**env, **more})
        return made.rendezvous.host

    avoid = ("--avoid-hosts", "bad")
    assert meets("--nnodes", "2:3", *avoid) == "n2"
    assert meets("--nnodes", "2:3") == "n1"
    assert meets(*avoid) == "n1", "a job of fixed size runs on all of them"
    assert meets("--nnodes", "2:3", *avoid, MASTER_ADDR="n9") == "n9"


def test_too_few_hosts_of_the_step_are_left(tmp_path: Path) -> None:
    """Otherwise each of them would leave the job to the others, and none would fail."""
    (tmp_path / "bad").write_text("n1\nn2\nn3\n")
    env = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-4]"}
    with pytest.raises(ConfigError, match="leaves 1 of the step's 4 hosts, and --nnodes needs 2"):
        own_host.is_left_out(config(tmp_path / "bad", 2, 4), env, print)
    assert not own_host.is_left_out(config(tmp_path / "bad", 1, 4), env, print)


def test_the_flag(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    made, _ = config_from(parse(["--avoid-hosts", "bad.txt", "x.py"]), dict(os.environ))
    assert made.avoid_hosts == str(tmp_path / "bad.txt")
    assert config_from(parse(["x.py"]), dict(os.environ))[0].avoid_hosts is None
    with pytest.raises(ConfigError, match=r"--avoid-hosts '': expected a file"):
        config_from(parse(["--avoid-hosts", "", "x.py"]), dict(os.environ))


# -- submit -----------------------------------------------------------------------------------------


def submitted(*words: str) -> str:
    shown: list[str] = []
    assert submit.command([words[0], "--dry-run", *words[1:]], shown.append) == 0
    return shown[0]


def test_slurm_is_asked_for_other_nodes(tmp_path: Path) -> None:
    listed = tmp_path / "bad"
    listed.write_text("n3\nn5 lost 2026 i1 x\nn5 lost 2026 i2 x\nn6 lost 2026 i1 x\n")
    flags = ("--avoid-hosts", str(listed), "t.py")
    text = submitted("slurm", "--nodes", "2", "--", *flags)
    assert "#SBATCH --exclude=n3,n5\n" in text
    assert f"rallypoint run --avoid-hosts {listed} t.py" in text
    with pytest.raises(ConfigError, match=r"--exclude: cannot be combined with --avoid-hosts"):
        submitted("slurm", "--exclude=n1", "--", *flags)
    listed.write_text("")
    assert "--exclude=n1\n" in submitted("slurm", "--exclude=n1", "--", *flags)


@pytest.mark.parametrize(
    ("engine", "hint"), [("k8s", "kubectl cordon NODE"), ("ray", "ray drain-node")]
)
def test_other_engines_choose_the_hosts_themselves(engine: str, hint: str) -> None:
    image = ["--image", "x"] if engine == "k8s" else []
    with pytest.raises(ConfigError, match=f"--avoid-hosts 'bad': .* chooses the hosts.*{hint}"):
        submitted(engine, *image, "--", "--avoid-hosts", "bad", "t.py")
