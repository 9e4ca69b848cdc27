"""Whether the OOM killer did it: counters read from cgroup v1, v2 and mixed trees, intact and broken."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rallypoint.launch.output.oom import (
    OomCounters,
    explain,
    read_counters,
    tells_of_killed_child,
)


V2_EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
VMSTAT = "nr_free_pages 1\noom_kill {}\noom_kill_other 9\n"


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, folder) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def vmstat(self, kills: int) -> None:
        (self.proc / "vmstat").write_text(VMSTAT.format(kills))

    def v2(self, path: str, kills: int, root: str = "") -> str:
        return self._write(f"{root}/{path}/memory.events", V2_EVENTS, kills)

    def v1(self, path: str, kills: int) -> str:
        return self._write(f"memory/{path}/memory.oom_control", V1_CONTROL, kills)

    def _write(self, name: str, text: str, kills: int) -> str:
        file = self.cgroup / name.strip("/").replace("//", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.format(kills))
        return str(file)

    def read(self) -> OomCounters:
        return read_counters(self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_v2(machine):
    machine.belongs_to("0::/job")
    machine.vmstat(4)
    file = machine.v2("job", 1)
    before = machine.read()
    assert before == OomCounters({file: 1}, 4)
    machine.v2("job", 2)
    assert explain(before, machine.read()) == (
        f"killed by the kernel's OOM killer: memory limit of the cgroup ({file})"
    )


def test_v1(machine):
    machine.belongs_to("9:name=systemd:/x", "4:cpu,memory:/job", "0::/elsewhere")
    file = machine.v1("job", 0)
    before = machine.read()
    assert before.groups == {file: 0}
    machine.v1("job", 1)
    assert file in explain(before, machine.read())


def test_v1_memory_is_not_looked_for_in_other_hierarchies(machine):
    machine.belongs_to("3:cpuset:/job", "4:memory:/other")
    machine.v1("job", 5)
    assert machine.read().groups == {}


def test_hybrid_layout_of_systemd(machine):
    machine.belongs_to("0::/job")
    file = machine.v2("job", 3, root="unified")
    assert machine.read().groups == {file: 3}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_limit_that_was_hit_may_be_an_ancestors(machine, version):
    line = "0::/slurm/job_7/step_0" if version == "v2" else "4:memory:/slurm/job_7/step_0"
    machine.belongs_to(line)
    write = getattr(machine, version)
    for path in ("slurm/job_7/step_0", "slurm/job_7", "slurm"):
        write(path, 0)
    before = machine.read()
    assert len(before.groups) == 3
    hit = write("slurm/job_7", 1)
    assert f"({hit})" in explain(before, machine.read())


def test_a_container_sees_only_its_own_part_of_the_tree(machine):
    machine.belongs_to("4:memory:/docker/0123abcd")  # the path as the host sees it
    file = machine.v1("", 2)  # the container's own group is what is mounted
    assert machine.read().groups == {file: 2}


def test_the_whole_machine_out_of_memory(machine):
    machine.belongs_to("0::/")
    machine.vmstat(1)
    before = machine.read()
    machine.vmstat(2)
    assert explain(before, machine.read()) == (
        "perhaps killed by the kernel's OOM killer, which ended processes on this machine meanwhile"
    )


def test_somebody_elses_process_is_no_evidence(machine):
    machine.belongs_to("0::/job")
    machine.v2("job", 0)
    machine.vmstat(1)
    before = machine.read()
    machine.vmstat(2)  # in another container
    assert explain(before, machine.read()) is None


def test_nothing_moved_nothing_is_said(machine):
    machine.belongs_to("0::/job")
    machine.v2("job", 7)
    machine.vmstat(7)
    assert explain(machine.read(), machine.read()) is None


def test_a_counter_seen_for_the_first_time_proves_nothing():
    """A group that appeared in the meantime may have counted before we looked."""
    assert explain(OomCounters({}, None), OomCounters({"/a": 3}, 9)) is None


def test_nothing_can_be_read(machine):
    assert machine.read() == OomCounters({}, None)
    assert read_counters(machine.proc / "no", machine.cgroup / "no") == OomCounters({}, None)


def test_files_that_are_folders_are_left_out(machine):
    machine.belongs_to("0::/job")
    (machine.cgroup / "job" / "memory.events").mkdir(parents=True)
    (machine.proc / "vmstat").mkdir()
    assert machine.read() == OomCounters({}, None)


def test_old_kernels_without_the_counter(machine):
    machine.belongs_to("4:memory:/job")
    machine.v1("job", 0)
    (machine.cgroup / "memory/job/memory.oom_control").write_text("under_oom 0\n")
    (machine.proc / "vmstat").write_text("nr_free_pages 1\n")
    assert machine.read() == OomCounters({}, None)


@given(
    text=st.one_of(
        st.binary(max_size=200), st.sampled_from([b"oom_kill \xc2\xb2", b"oom_kill", b"0::/a\0b"])
    )
)
def test_any_bytes_in_any_file_are_survived(tmp_path_factory, text):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.belongs_to("0::/job", "4:memory:/job")
    machine.v2("job", 1)
    (machine.cgroup / "job/memory.events").write_bytes(text)
    (machine.proc / "vmstat").write_bytes(text)
    machine.read()
    (machine.proc / "self/cgroup").write_bytes(text)
    machine.read()


def test_the_real_machine_is_readable_at_all():
    counters = read_counters()
    assert all(kills >= 0 for kills in counters.groups.values())


@pytest.mark.parametrize(
    ("message", "tells"),
    [
        ("DataLoader worker (pid(s) 16094, 16095) exited unexpectedly", True),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", True),
        ("DataLoader worker (pid 7) is killed by signal: Bus error. ", False),
        (
            "A process in the process pool was terminated abruptly while the future was running or pending.",
            True,
        ),
        ("process 3 terminated with signal SIGKILL", True),
        ("process 3 terminated with signal SIGSEGV", False),
        ("Command '['ffmpeg']' died with <Signals.SIGKILL: 9>.", True),
        ("Command '['ffmpeg']' returned non-zero exit status 1.", False),
    ],
)
def test_what_tells_of_a_killed_child(message, tells):
    assert tells_of_killed_child(message) is tells
