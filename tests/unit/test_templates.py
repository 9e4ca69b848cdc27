"""Templates with real processes: imports that must not be kept, and workers that become the server's children."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rallypoint._core import clock, process
from rallypoint.launch.server import learning, templates
from rallypoint.launch.server.channel import Message
from rallypoint.launch.server.templates import Templates


PACKAGES = {
    "sets_a_variable": "import os\nos.environ['FROM_IMPORT'] = 'x'\n",
    "starts_a_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    ),
    "raises": "raise ValueError('why')\n",
    "hangs": "import threading\nthreading.Event().wait()\n",
    "exits": "import os\nos._exit(0)\n",
    "is_killed": "import os\nos.kill(os.getpid(), 9)\n",
    "leaves_a_file_open": "file = open(__file__)\n",
    "prints": "import os\nos.write(1, b'noticed')\n",
    "handles_a_signal": "import signal\nsignal.signal(signal.SIGUSR1, print)\n",
    "starts_a_process": "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n",
    "reads_the_rank": "import os\nrank = os.environ.get('RANK')\n",
    "loads_another": "import another\n",
    "another": "",
    "lists_the_environment": "import os\nall_of_it = dict(os.environ)\n",
}


# What a fork of the template prints to until it has its own streams; nothing else of the template is left open.
OUTPUT = ["/memfd:rally-output (deleted)"] * 2


class Server:
    """What the fork server does around its templates."""

    def __init__(self, become: Callable[[Message, list[int]], None]) -> None:
        def become_worker(
            message: Message, fds: list[int], changes: Mapping[str, str | None]
        ) -> None:
            become({**message, "changes": dict(changes)}, fds)

        self.told: list[Message] = []
        self.templates = Templates(self._fork, become_worker, self.told.append)
        self.forked: list[int] = []

    def _fork(self, become: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self.templates.close_in_child()
                become()
            finally:
                os._exit(1)
        self.forked.append(pid)
        return pid

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.told
            poller = select.poll()
            for each in self.templates.filenos():
                poller.register(each, select.POLLIN)
            due = self.templates.next_time()
            left = deadline - time.monotonic() if due is None else due - time.monotonic()
            poller.poll(max(0.0, left) * 1000 + 1)
            self.templates.go_on()

    def workers_ahead(self, count: int) -> set[int]:
        """The waiting workers, once there are ``count`` of them and they are this process's children."""
        self.wait_for(lambda: len(self.templates.pids()) >= count + 1)
        ahead = self.templates.pids() - {*self.forked}
        while not ahead <= {*process.children(os.getpid())}:
            time.sleep(0.001)  # an adoption is not announced
        return ahead

    def close(self) -> None:
        for pid in self.templates.pids():
            os.kill(pid, signal.SIGKILL)
        self.templates.close_in_child()
        for pid in self.forked:
            os.waitpid(pid, 0)
        for pid in process.children(os.getpid()):  # a process that an import started
            with open(f"/proc/{pid}/comm") as file:
                if file.read() == "sleep\n":
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def report(message: Message, fds: list[int]) -> None:
    """What a worker does: describe itself on its first descriptor."""
    modules = sorted(set(PACKAGES).intersection(sys.modules))
    variable = os.environ.get("FROM_IMPORT")
    files = [each for each in open_files() if "rally-output" in each]
    text = repr([message["name"], modules, variable, message["changes"], os.getppid(), files])
    os.write(fds[0], text.encode())
    os._exit(7)


def open_files() -> list[str]:
    """What each descriptor refers to, except the one used for the listing."""
    found = []
    for fd in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    folder = tmp_path / "installed"
    folder.mkdir()
    for name, text in PACKAGES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(learning, "LEARNABLE", tuple(PACKAGES))
    monkeypatch.setattr(
        "site.getsitepackages",
        lambda: [str(folder)],
    )
    monkeypatch.setattr(templates, "QUIET", 0.0)
    monkeypatch.setattr(templates, "IMPORT_PATIENCE", 3.0)
    monkeypatch.delenv("FROM_IMPORT", raising=False)
    with process.adopting_orphans():
        made = Server(report)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("starts_a_thread", "starts a thread"),
        ("raises", "ValueError: why"),
        ("hangs", "took too long"),
        ("exits", "ended"),
        ("is_killed", "ended"),
        ("leaves_a_file_open", "leaves a file open"),
        ("prints", "prints"),
        ("handles_a_signal", "handles a signal"),
        ("starts_a_process", "starts a process"),
        ("reads_the_rank", "reads RANK, which workers set"),
        ("lists_the_environment", "reads the whole environment"),
    ],
)
def test_a_package_that_a_script_could_notice_is_left_out(
    server: Server, package: str, why: str
) -> None:
    server.templates.hear(package, ["RANK"])
    server.templates.hear("sets_a_variable", ["RANK"])
    server.wait_for(lambda: server.told and server.told[-1]["packages"])
    assert server.told[-1]["packages"] == ("sets_a_variable",)
    assert why in server.told[-1]["against"][package]
    assert package not in sys.modules, "nothing is imported in the server itself"


def test_workers_of_a_template_are_children_of_the_server(server: Server) -> None:
    server.templates.hear("sets_a_variable", ["RANK"])
    server.wait_for(lambda: server.told)
    read, write = os.pipe()
    names = ["worker 1.0", "worker 1.1", "worker 1.2"]
    started: dict[str, int] = {}
    for some in (names[:1], names[1:]):  # two batches
        started |= server.templates.start(
            [({"do": "spawn", "name": each}, [write]) for each in some]
        )
    os.close(write)
    assert sorted(started) == names
    with open(read) as file:
        said = file.read()
    for pid in started.values():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for name in names:
        # What the import sets is set only when the script imports it.
        changes = {"FROM_IMPORT": "x"}
        assert repr([name, ["sets_a_variable"], None, changes, os.getpid(), OUTPUT]) in said


def test_workers_start_from_the_template_in_use_until_the_next_one_is_ready(server: Server) -> None:
    """A worker lost in the meantime must not wait for imports that have already been done."""
    server.templates.hear("sets_a_variable", [])
    server.wait_for(lambda: server.told)
    (pid,) = server.templates.pids()
    server.templates.hear("hangs", [])
    server.wait_for(lambda: len(server.templates.pids()) == 2)
    read, write = os.pipe()
    started = server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [write])])
    os.close(write)
    with open(read) as file:
        assert "sets_a_variable" in file.read()
    os.waitpid(started["worker 1.0"], 0)
    server.wait_for(lambda: "hangs" in server.told[-1]["against"])
    # The template in use has everything that can be imported.
    assert server.templates.pids() == {pid}
    assert server.templates.next_time() is None
    # The next template replaces it.
    server.templates.hear("another", [])
    server.wait_for(lambda: "another" in server.told[-1]["packages"])
    assert pid not in server.templates.pids()
    assert len(server.templates.filenos()) == 1


def test_a_worker_that_waits_is_started_without_the_template(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SUCCESSION", 0.0)
    server.templates.hear("sets_a_variable", ["RANK"])
    server.templates.keep_ahead(2)
    waiting = server.workers_ahead(2)
    (template,) = set(server.forked)
    for pid in waiting:
        os.kill(pid, signal.SIGTERM)  # sent to the whole job, before this worker is part of it
    os.kill(template, signal.SIGSTOP)
    read, write = os.pipe()
    started = server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [write])])
    os.close(write)
    with open(read) as file:
        said = file.read()
    changes = {"FROM_IMPORT": "x"}
    expected = ["worker 1.0", ["sets_a_variable"], None, changes, os.getpid(), OUTPUT]
    assert said == repr(expected)
    assert started["worker 1.0"] in waiting
    assert os.waitstatus_to_exitcode(os.waitpid(started["worker 1.0"], 0)[1]) == 7
    assert server.templates.pids() == {template, *waiting} - {*started.values()}
    os.kill(template, signal.SIGCONT)
    server.wait_for(lambda: len(server.templates.pids()) == 3)


def test_a_worker_that_was_killed_while_it_waited_is_not_started(server: Server) -> None:
    server.templates.hear("sets_a_variable", [])
    server.templates.keep_ahead(2)
    dead, noticed = server.workers_ahead(2)
    for pid in (dead, noticed):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    server.templates.ended(noticed)
    read, write = os.pipe()
    started = server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [write])])
    os.close(write)
    with open(read) as file:
        assert "sets_a_variable" in file.read()
    assert {*started.values()}.isdisjoint({dead, noticed})
    os.waitpid(started["worker 1.0"], 0)


def test_workers_that_wait_end_with_their_template(server: Server) -> None:
    server.templates.hear("sets_a_variable", [])
    server.templates.keep_ahead(1)
    (waiting,) = server.workers_ahead(1)
    server.templates.hear("another", [])
    server.wait_for(lambda: "another" in server.told[-1]["packages"])
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) in {0, -signal.SIGKILL}
    server.wait_for(lambda: len(server.templates.pids()) == 2)


def test_workers_that_wait_end_with_the_server(server: Server) -> None:
    server.templates.hear("sets_a_variable", [])
    server.templates.keep_ahead(1)
    (waiting,) = server.workers_ahead(1)
    server.templates.close_in_child()  # as when its process ends
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 0
    server.templates.ended(waiting)


def test_a_template_that_cannot_be_forked_is_made_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, failures = os.fork, [errno.EAGAIN, errno.ENOMEM]

    def limited() -> int:
        if failures:
            raise OSError(failures.pop(), "as at a limit of processes")
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    files = len(open_files())
    server.templates.hear("sets_a_variable", [])
    server.templates.go_on()
    assert failures and len(open_files()) == files
    server.wait_for(lambda: server.told)
    assert server.told[-1]["packages"] == ("sets_a_variable",)


def test_a_template_that_was_killed_starts_nothing(server: Server) -> None:
    server.templates.hear("sets_a_variable", [])
    server.wait_for(lambda: server.told)
    (pid,) = server.templates.pids()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    read, write = os.pipe()
    assert server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [write])]) == {}
    os.close(write)
    os.close(read)


def test_a_stopped_template_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "FORK_PATIENCE", 0.2)
    server.templates.hear("sets_a_variable", [])
    server.wait_for(lambda: server.told)
    (pid,) = server.templates.pids()
    os.kill(pid, signal.SIGSTOP)
    read, write = os.pipe()
    assert server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [write])]) == {}
    os.close(write)
    with open(read, "rb") as file:
        assert file.read() == b"", "no worker is left that could start later"


def test_reports_that_say_nothing_new_put_a_template_off_for_a_while_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "QUIET", 2.0)
    due = []
    for now in (0.0, 1.0, 2.5, 4.0, 5.5):
        monkeypatch.setattr(clock.MONOTONIC, "now", lambda now=now: now)
        server.templates.hear("sets_a_variable", ["RANK"])
        due.append(server.templates.next_time())
    assert due == [2.0, 3.0, 4.5, 6.0, 6.0]
    # A new package would need another template, so the wait starts again.
    server.templates.hear("another", ["RANK"])
    assert server.templates.next_time() == 7.5


def test_a_late_report_takes_a_template_out_of_use(server: Server) -> None:
    server.templates.hear("reads_the_rank", [])
    server.wait_for(lambda: server.told)
    server.templates.hear("reads_the_rank", ["RANK"])
    assert server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [0])]) == {}


def test_a_module_that_a_script_has_under_the_same_name_is_not_loaded_before(
    server: Server, tmp_path: Path
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, name in ((own, "another"), (other, "unrelated")):
        folder.mkdir()
        (folder / f"{name}.py").touch()
    server.templates.hear("loads_another", ["RANK"], [str(other), str(tmp_path / "absent")])
    server.wait_for(lambda: server.told)
    assert server.told[-1]["packages"] == ("loads_another",)
    # A late worker has more on its path.
    server.templates.hear("loads_another", ["RANK"], [str(own)])
    assert server.templates.start([({"do": "spawn", "name": "worker 1.0"}, [0])]) == {}
    server.wait_for(lambda: server.told[-1]["against"])
    assert server.told[-1]["packages"] == ()
    assert "another, of which sys.path" in server.told[-1]["against"]["loads_another"]
