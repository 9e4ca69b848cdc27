"""Function launches: real workers, real Gloo, from this process and from scripts and notebooks.

pytest loads this file from its path, so workers cannot import it: what is defined here travels by
value, which is one of the things tested.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import redirect_stderr, redirect_stdout

import psutil
import pytest
import torch
import torch.distributed as dist

import supervisors
from pace import pace
from ports import free_port
from rallypoint.errors import ConfigError, LaunchError, WorkersFailed
from rallypoint.launch import (
    MultiprocessConfig,
    functions,
    init_and_run,
    init_dist,
    init_process_group_from_backend,
    launch_subprocesses,
    parallel_mesh,
)
from rallypoint.launch.worker import process_group
from rallypoint.parallel import current_mesh


pytestmark = pytest.mark.integration

TWO = MultiprocessConfig(world_size=2, backend="gloo")
# Forks of this process, which has torch already, for when it does not matter how workers are launched.
FORKS = MultiprocessConfig(world_size=2, backend="gloo", launch_method="fork")
# Seconds allowed for bad input, from the call to its error.
SOON = 5.0


@pytest.fixture(autouse=True)
def outside_of_any_job(monkeypatch, tmp_path_factory):
    # Where the folders of failed launches go; they are kept.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def fork_servers():
    return supervisors.ForkServers()


@pytest.fixture(autouse=True)
def fork_servers_are_forks(request, monkeypatch, fork_servers):
    """A launch does not wait for the import of torch. One test uses all three methods as they are."""
    if request.function is not test_every_method_returns_results_by_rank:
        monkeypatch.setattr("rallypoint.launch.server.server_process.subprocess", fork_servers)


@pytest.fixture
def nothing_left():
    """Descriptors, threads, children and variables are the same after the test as before."""

    def descriptors():
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
            except FileNotFoundError:
                continue  # the one that listed them
        return sorted(found)

    def look():
        return {
            "descriptors": descriptors(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "children": {child.pid for child in psutil.Process().children(recursive=True)},
            "variables": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
            "signal handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
            "wakeup descriptor": wakeup_fd(),
        }

    def wakeup_fd():
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        return fd

    import gc

    gc.collect()
    before = look()
    yield
    gc.collect()
    assert look() == before


def total(value: float) -> float:
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()


class Counter:
    """Returned by workers, compared here: it must be this very class."""

    def __init__(self, start: int) -> None:
        self.start = start

    def add(self, amount: int = 1) -> Counter:
        return Counter(self.start + amount + dist.get_rank())


# -- calls and results --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_every_method_returns_results_by_rank(method, nothing_left):
    around = {"key": 5}
    here = os.getpid()

    def work(a, *, b):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        assert os.getpid() != here
        return total(dist.get_rank() + 1), a, b, around["key"], [os.environ[n] for n in names]

    size = 2 if method == "spawn" else 3  # there each worker imports torch on its own
    cfg = MultiprocessConfig(world_size=size, backend="gloo", launch_method=method)
    results = launch_subprocesses(work, cfg, "a", b="b")
    assert results == [
        (
            size * (size + 1) / 2,
            "a",
            "b",
            5,
            [str(rank), str(rank), str(size), str(size), "localhost"],
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (lambda amount: Counter(amount + dist.get_rank()), [7, 8]),
        (Counter(10).add, [17, 18]),
        (functools.partial(Counter.add, Counter(20)), [27, 28]),
    ],
    ids=["lambda", "bound method", "partial"],
)
def test_functions_of_any_kind_and_classes_keep_their_identity(func, expected):
    results = launch_subprocesses(func, TWO, 7)
    assert [result.start for result in results] == expected
    assert all(type(result) is Counter for result in results)


def test_setup_runs_before_there_is_a_group_and_shares_variables_with_the_function():
    seen = []

    def setup():
        seen.append((os.environ["RANK"], dist.is_initialized()))

    def work():
        return seen, dist.is_initialized()

    assert launch_subprocesses(work, TWO, setup=setup) == [
        ([("0", False)], True),
        ([("1", False)], True),
    ]
    assert seen == [], "the caller's own is not touched"


def test_big_tensors_come_back_right():
    def work(weights):
        return weights * (dist.get_rank() + 1), weights.sum().item()

    weights = torch.arange(4_000_000, dtype=torch.float64)  # 32 MB there, 32 MB back from each
    for rank, (scaled, seen) in enumerate(launch_subprocesses(work, TWO, weights)):
        assert seen == weights.sum().item()
        assert torch.equal(scaled, weights * (rank + 1))


def test_workers_import_what_the_caller_can_and_stand_where_it_stands(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def where():\n    import os\n    return os.getcwd()\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "argv", ["script.py", "--flag"])
    monkeypatch.chdir(tmp_path)
    from only_here import where

    def work():
        import only_here

        return only_here.where(), sys.argv, sys.path

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    expected = (str(tmp_path), ["script.py", "--flag"], sys.path)
    assert launch_subprocesses(work, TWO) == [expected, expected]
    assert launch_subprocesses(where, TWO) == [str(tmp_path)] * 2
    del sys.modules["only_here"]


def test_sys_exit_without_an_error_returns_none():
    def work():
        if dist.get_rank() == 1:
            sys.exit()
        return 1

    assert launch_subprocesses(work, FORKS) == [1, None]


# -- the mesh -----------------------------------------------------------------------------------------


def test_each_axis_of_the_mesh_reduces_over_its_own_ranks():
    def work():
        mesh = parallel_mesh()
        found = {}
        for axis in ("pp", "dp", "mp"):
            tensor = torch.tensor([float(10 ** dist.get_rank())])
            dist.all_reduce(tensor, group=mesh[axis].get_group())
            found[axis] = int(tensor.item())
        return found, mesh.mesh.tolist()

    cfg = MultiprocessConfig(
        world_size=4,
        model_parallelism=2,
        backend="gloo",
        data_parallel_backend="cpu:gloo",
        launch_method="fork",
    )
    grid = [[[0, 1], [2, 3]]]
    assert launch_subprocesses(work, cfg) == [
        ({"pp": 1, "dp": 101, "mp": 11}, grid),
        ({"pp": 10, "dp": 1010, "mp": 11}, grid),
        ({"pp": 100, "dp": 101, "mp": 1100}, grid),
        ({"pp": 1000, "dp": 1010, "mp": 1100}, grid),
    ]


def test_every_launch_has_a_mesh():
    def work():
        mesh = current_mesh()
        alone = mesh.degree("tp") == mesh.degree("pp") == 1
        return mesh.peers("dp"), mesh.group("dp") is dist.group.WORLD, alone, parallel_mesh()

    assert launch_subprocesses(work, FORKS) == [((0, 1), True, True, None)] * 2


def test_the_mesh_ends_with_the_job(nothing_left):
    def work():
        assert current_mesh().degree("dp") == 1

    init_and_run(work, MultiprocessConfig(world_size=1, backend="gloo"))
    assert current_mesh() is None


# -- several launches, one job ------------------------------------------------------------------------


def test_two_launches_in_two_threads_form_one_job(nothing_left):
    cfg = MultiprocessConfig(
        world_size=4,
        local_world_size=2,
        backend="gloo",
        master_addr="127.0.0.1",
        master_port=free_port(),
    )
    results = {}

    def launch(offset):
        results[offset] = launch_subprocesses(
            lambda: (dist.get_rank(), os.environ["LOCAL_RANK"], total(dist.get_rank())),
            cfg,
            rank_offset=offset,
        )

    threads = [threading.Thread(target=launch, args=(offset,)) for offset in (2, 0)]
    threads[0].start()
    time.sleep(0.5)  # it knocks at a store that does not exist yet
    threads[1].start()
    for thread in threads:
        thread.join()
    assert results == {0: [(0, "0", 6.0), (1, "1", 6.0)], 2: [(2, "0", 6.0), (3, "1", 6.0)]}


def test_a_store_that_nobody_serves_is_named(caplog, monkeypatch):
    monkeypatch.setattr(process_group, "_SILENCE", 0.0)
    port = free_port()
    with pytest.raises(ConnectionError, match=rf"no store at localhost:{port} within 0 s"):
        process_group.wait_for_store("localhost", port, timeout=0.4)
    assert f"waiting for the store at localhost:{port}" in caplog.text


@pytest.mark.parametrize(
    ("fields", "offset", "words"),
    [
        ({"world_size": 4}, 2, "rank_offset 2: expected 0 to 0"),
        ({"world_size": 4, "local_world_size": 2}, 3, "rank_offset 3: expected 0 to 2"),
        (
            {"world_size": 4, "local_world_size": 2},
            2,
            "master_port: 2 of the job's 4 workers start here",
        ),
        ({"world_size": 4, "rank": 1}, 0, "rank 1: a launch assigns the ranks of its workers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, offset, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        launch_subprocesses(print, MultiprocessConfig(**fields), rank_offset=offset)


def test_a_store_file_works_once(tmp_path):
    cfg = MultiprocessConfig(
        world_size=2, backend="gloo", init_method=f"file://{tmp_path}/store", launch_method="fork"
    )
    assert launch_subprocesses(lambda: total(1), cfg) == [2.0, 2.0]
    (tmp_path / "store").write_bytes(b"left over")
    with pytest.raises(ConfigError, match="another job has used it"):
        launch_subprocesses(lambda: total(1), cfg)


def test_a_port_in_use_is_named_before_any_worker_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cfg = MultiprocessConfig(world_size=2, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConfigError, match=rf"^master_port '{port}': the port is in use"):
            launch_subprocesses(print, cfg)


# -- in this process ------------------------------------------------------------------------------------


def test_one_worker_is_this_process_with_a_group_and_everything_is_put_back(caplog, nothing_left):
    caplog.set_level(logging.INFO, logger="rallypoint")
    order = []

    def work(a, *, b):
        order.append("work")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return os.getpid(), dist.get_world_size(), total(3), a, b, [os.environ[n] for n in names]

    cfg = MultiprocessConfig(world_size=1, backend="gloo")
    (found,) = launch_subprocesses(work, cfg, 1, b=2, setup=lambda: order.append("setup"))
    assert found == (os.getpid(), 1, 3.0, 1, 2, ["0", "1", "0", "1"])
    assert order == ["setup", "work"]
    assert not dist.is_initialized()
    (line,) = [record for record in caplog.records if record.name.startswith("rallypoint")]
    assert line.levelno == logging.INFO
    assert "world_size is 1" in line.getMessage()


def test_a_default_of_one_worker_is_told_where_it_is_seen(caplog, monkeypatch):
    monkeypatch.setattr("rallypoint.launch.worker.backends.num_cuda_devices", lambda: 0)
    assert launch_subprocesses(dist.get_world_size, MultiprocessConfig(backend="gloo")) == [1]
    (line,) = [record for record in caplog.records if record.name.startswith("rallypoint")]
    assert line.levelno == logging.WARNING, "Python shows warnings without any set-up"
    assert "world_size is unset" in line.getMessage()


def test_inline_raises_what_the_function_raises_and_puts_everything_back(nothing_left):
    with pytest.raises(ZeroDivisionError):
        launch_subprocesses(lambda: 1 // 0, MultiprocessConfig(world_size=1, backend="gloo"))
    assert not dist.is_initialized()


def test_inline_keeps_a_group_that_is_there():
    process_group.init_alone("gloo")
    try:
        group = dist.group.WORLD
        cfg = MultiprocessConfig(world_size=1, backend="gloo")
        assert launch_subprocesses(lambda: dist.group.WORLD is group, cfg) == [True]
        assert dist.group.WORLD is group
        with pytest.raises(ConfigError, match=r"launch_method 'fork': .* has a process group"):
            launch_subprocesses(print, MultiprocessConfig(world_size=2, launch_method="fork"))
        with pytest.raises(ConfigError, match="already"):
            init_process_group_from_backend("gloo")
    finally:
        dist.destroy_process_group()


# -- joining a job in other ways ------------------------------------------------------------------------


def test_init_dist_completes_the_config_and_needs_a_port_for_more_than_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # init_dist sets it; this puts it back afterwards
    cfg = init_dist(MultiprocessConfig(world_size=1, backend="gloo"))
    try:
        assert (cfg.rank, cfg.local_rank, cfg.backend, cfg.master_port) == (0, 0, "gloo", None)
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        assert parallel_mesh() is None
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="master_port: 2 ranks need a port"):
        init_dist(MultiprocessConfig(world_size=2, rank=0, backend="gloo"))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((0, 0, 1, 1, "localhost", 0, "env://", "gloo"), {}),
        ((0, 0, 1), {"backend": "gloo"}),
        ((), {"rank": 0, "world_size": 1, "backend": "gloo"}),
        ((), {"cfg": MultiprocessConfig(world_size=1, backend="gloo")}),
    ],
)
def test_init_dist_takes_the_first_fields_of_a_config_too(monkeypatch, args, kwargs):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # init_dist sets it; this puts it back afterwards
    cfg = init_dist(*args, **kwargs)
    try:
        assert (cfg.rank, cfg.local_rank, cfg.world_size, cfg.backend) == (0, 0, 1, "gloo")
        assert (dist.get_rank(), dist.get_world_size(), os.environ["RANK"]) == (0, 1, "0")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {"ranks": 0}, "not ranks"),
        ((0,), {"rank": 0}, "not rank"),
        ((0, 0, 1, 1, "a", 0, "env://", "gloo", 2), {}, "not 9 arguments"),
        ((MultiprocessConfig(), 0), {}, "alone, or separate arguments"),
    ],
)
def test_init_dist_names_what_it_does_not_take(args, kwargs, words):
    with pytest.raises(TypeError, match=words):
        init_dist(*args, **kwargs)


@pytest.mark.parametrize("start", [launch_subprocesses, init_and_run])
def test_a_config_in_another_place_is_named(start):
    with pytest.raises(ConfigError, match=r"cfg 1.0: expected a MultiprocessConfig .*func, cfg"):
        start(abs, 1.0, MultiprocessConfig(world_size=2))
    with pytest.raises(ConfigError, match=r"abs.*: expected a MultiprocessConfig .*func, cfg"):
        start(MultiprocessConfig(world_size=2), abs)


@pytest.mark.parametrize("world_size", [1, 2])
def test_setup_in_the_third_place_is_named(world_size):
    def takes_one(x, *, step=1):
        return x

    cfg = MultiprocessConfig(world_size=world_size, backend="gloo")
    for args in ((os.getpid, 1.0), (os.getpid, 0, 1.0), (None, 0, 1.0)):
        with pytest.raises(ConfigError, match=r"go to .*takes_one.*write setup=") as caught:
            launch_subprocesses(takes_one, cfg, *args)
        assert caught.value.field == "setup"
    # A function may be just what the function wants.
    one = MultiprocessConfig(world_size=1, backend="gloo")
    assert launch_subprocesses(takes_one, one, os.getpid) == [os.getpid]
    assert launch_subprocesses(lambda *args: len(args), one, os.getpid, 0, 1.0) == [3]


def test_init_and_run_joins_by_tcp_and_leaves(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent("""\
        import sys
        import torch, torch.distributed as dist
        from rallypoint.launch import MultiprocessConfig, init_and_run

        def work(start, *, step):
            tensor = torch.tensor([float(start + step * dist.get_rank())])
            dist.all_reduce(tensor)
            return tensor.item()

        rank, url = int(sys.argv[1]), sys.argv[2]
        cfg = MultiprocessConfig(rank=rank, world_size=2, backend="gloo", init_method=url)
        print(init_and_run(work, cfg, 1, step=10, setup=lambda: print("setup")))
        print(dist.is_initialized())
        """)
    )
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        supervisors.Popen(
            [sys.executable, script, str(rank), url],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=100)
        assert out == "setup\n12.0\nFalse\n"


def test_a_group_that_does_not_add_up_is_not_accepted(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(3))
    with pytest.raises(LaunchError, match=r"rank 0: .* over 1 ranks .* came to 3, expected 1"):
        init_and_run(print, MultiprocessConfig(world_size=1, backend="gloo"))
    assert not dist.is_initialized()


def test_init_and_run_leaves_the_group_when_the_function_raises():
    with pytest.raises(ZeroDivisionError):
        init_and_run(lambda: 1 // 0, MultiprocessConfig(world_size=1, backend="gloo"))
    assert not dist.is_initialized()


# -- failures -------------------------------------------------------------------------------------------


def test_the_report_names_the_root_cause_and_shows_the_users_code_only(nothing_left):
    def inner():
        raise ValueError("shard 17 is empty")

    def work():
        if dist.get_rank() == 1:
            inner()
        dist.barrier()

    with pytest.raises(WorkersFailed) as caught:
        launch_subprocesses(work, TWO)
    report = caught.value.report
    text = str(caught.value)
    assert report.root_cause.rank == 1
    assert report.root_cause.raised.type == "ValueError"
    assert [victim.rank for victim in report.victims] == [0]
    assert "rank 1 raised ValueError" in text.splitlines()[0]
    assert "shard 17 is empty" in text
    assert "in inner" in text
    assert "rallypoint/launch/" not in text, "our own frames say nothing to a user"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(0), "rank 0 exited with code 0 before its function returned"),
        (lambda: sys.exit(3), "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: (x for x in ()), "the result of rank 0, of type generator, cannot be pickled"),
    ],
    ids=["os._exit(0)", "sys.exit(3)", "SIGKILL", "result"],
)
def test_every_other_way_to_fail_is_told_too(end, words, nothing_left):
    started = time.monotonic()
    cfg = MultiprocessConfig(world_size=2, backend="gloo", launch_method="fork")
    with pytest.raises(WorkersFailed) as caught:
        launch_subprocesses(lambda: end() if dist.get_rank() == 0 else None, cfg)
    text = " ".join(str(caught.value).split())
    assert words in text
    assert "rallypoint/launch/" not in text
    assert time.monotonic() - started < SOON * pace()


def test_what_cannot_be_pickled_starts_no_process(monkeypatch, nothing_left):
    monkeypatch.setattr(functions.Supervisor, "run", lambda self: pytest.fail("started"))
    lock = threading.Lock()
    for method in ("forkserver", "spawn"):
        cfg = MultiprocessConfig(world_size=2, launch_method=method)
        with pytest.raises(ConfigError, match=r"its variable 'lock'.*launch_method='fork'"):
            launch_subprocesses(lambda: lock, cfg)
        with pytest.raises(ConfigError, match="argument 0 of 'print'"):
            launch_subprocesses(print, cfg, lock)


def test_a_call_that_workers_cannot_load_says_what_they_lack(tmp_path):
    class Stranger:
        def __reduce__(self):
            return (__import__, ("no_such_module_anywhere",))

    with pytest.raises(WorkersFailed) as caught:
        launch_subprocesses(print, TWO, Stranger())
    assert "No module named 'no_such_module_anywhere'" in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("func", "setup", "field"), [(None, None, "func"), (print, "setup", "setup")]
)
def test_what_cannot_be_called_is_refused(func, setup, field):
    with pytest.raises(ConfigError) as caught:
        launch_subprocesses(func, TWO, setup=setup)
    assert caught.value.field == field


# -- output and logging ---------------------------------------------------------------------------------


def test_output_and_log_lines_appear_on_the_callers_streams_with_rank_and_world_size(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)

    def work():
        print("hello from", dist.get_rank())
        logging.getLogger("mine").info("step %d", 5)
        logging.getLogger("mine").debug("not this")

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        launch_subprocesses(work, TWO)
    assert sorted(out.getvalue().splitlines()) == ["hello from 0", "hello from 1"]
    lines = [line for line in err.getvalue().splitlines() if "mine" in line]
    assert sorted(lines) == [f"[rank {rank}/2] INFO mine: step 5" for rank in range(2)]
    assert "not this" not in err.getvalue()


def test_logging_that_setup_has_set_up_is_left_alone():
    def setup():
        logging.basicConfig(format="MINE %(message)s", level=logging.INFO)

    err = io.StringIO()
    with redirect_stderr(err):
        launch_subprocesses(lambda: logging.getLogger("mine").info("here"), TWO, setup=setup)
    lines = err.getvalue().splitlines()
    assert lines.count("MINE here") == 2
    assert "[rank" not in err.getvalue()


# -- fork -----------------------------------------------------------------------------------------------


def test_forks_leave_the_callers_children_buffers_and_threads_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        import multiprocessing, sys, threading, time, torch
        from rallypoint.launch import MultiprocessConfig, launch_subprocesses

        torch.set_num_threads(2)
        product = torch.ones(600, 600) @ torch.ones(600, 600)  # OpenMP's threads are there now
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,), daemon=True)
        child.start()
        sys.stdout.write("once\\n")
        lock = threading.Lock()

        def work():
            with lock:
                return (torch.ones(600, 600) @ torch.ones(600, 600)).sum().item()

        cfg = MultiprocessConfig(world_size=2, backend="gloo", launch_method="fork")
        assert launch_subprocesses(work, cfg) == [600.0**3] * 2
        child.join(0.3)
        print(child.exitcode)
        """)
    )
    done = supervisors.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        env=buffered(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\nNone\n"


def buffered():
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


# -- scripts and notebooks ------------------------------------------------------------------------------


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        import dataclasses
        import torch.distributed as dist
        from rallypoint.launch import MultiprocessConfig, launch_subprocesses

        print("top of the script")

        @dataclasses.dataclass
        class Result:
            rank: int

        def work():
            return Result(dist.get_rank())

        results = launch_subprocesses(work, MultiprocessConfig(world_size=2, backend="gloo"))
        print(results == [Result(0), Result(1)], [type(r) is Result for r in results])
        """)
    )
    done = supervisors.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "top of the script\nTrue [True, True]\n"


def test_the_report_shows_the_file_and_the_line_of_a_function_of_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from rallypoint.launch import MultiprocessConfig, launch_subprocesses\n"
        "def main():\n"
        "    def nested(batch):\n"
        "        return batch['image']\n"
        "    def work():\n"
        "        return nested({})\n"
        "    launch_subprocesses(work, MultiprocessConfig(world_size=2, backend='gloo'))\n"
        "main()\n"
    )
    done = supervisors.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    report = done.stderr.partition("root cause")[2]
    assert re.search(r'script\.py", line 4, in nested', report), done.stderr
    assert "│     return batch['image']" in report


NOTEBOOK = """
import io, sys

class OutStream(io.TextIOBase):  # as a notebook's: text, no descriptor
    def __init__(self):
        self.text = ""
    def write(self, text):
        self.text += text
        return len(text)

shown, console = OutStream(), sys.stdout
sys.stdout = sys.stderr = shown
cells = {"__name__": "__main__"}
exec('''
from rallypoint.launch import MultiprocessConfig, launch_subprocesses
import torch.distributed as dist
factor = 10
def helper(x):
    return x * factor
def work():
    print("in rank", dist.get_rank())
    return helper(dist.get_rank())
''', cells)
exec('''
results = launch_subprocesses(work, MultiprocessConfig(world_size=2, backend="gloo",
                                                       launch_method=method))
'''.replace("method=method", f"method={sys.argv[1]!r}"), cells)
sys.stdout = console
print(cells["results"], sorted(shown.text.splitlines()))
"""


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_notebook_cell_launches_and_shows_the_output_of_workers(method):
    done = supervisors.run(
        [sys.executable, "-", method],
        input=NOTEBOOK,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 10] ['in rank 0', 'in rank 1']\n"
    assert done.stderr == ""


INTERRUPTED = """
import os, sys, time
from pathlib import Path
from rallypoint.launch import MultiprocessConfig, launch_subprocesses
import torch.distributed as dist

def work(folder):
    (Path(folder) / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(60)

try:
    cfg = MultiprocessConfig(world_size=2, backend="gloo", launch_method=sys.argv[2])
    launch_subprocesses(work, cfg, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("number", "method", "out"),
    [
        (signal.SIGINT, "forkserver", "interrupted\n"),
        (signal.SIGTERM, "forkserver", ""),
        pytest.param(signal.SIGKILL, "forkserver", "", marks=pytest.mark.long),
        (signal.SIGKILL, "fork", ""),
    ],
)
def test_a_signal_to_the_caller_ends_the_workers_then_has_its_effect(number, method, out, tmp_path):
    caller = supervisors.Popen(
        [sys.executable, "-c", INTERRUPTED, tmp_path, method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 100
    while len(pids := [int(p.read_text() or 0) for p in tmp_path.glob("*.pid")]) < 2 or 0 in pids:
        assert time.monotonic() < end
        time.sleep(0.01)
    below = psutil.Process(caller.pid).children(recursive=True)
    assert set(pids) <= {process.pid for process in below}
    caller.send_signal(number)
    told, _ = caller.communicate(timeout=60)
    assert caller.returncode == -number
    assert told == out
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_nothing_is_left_when_the_fork_server_is_killed(method, tmp_path, nothing_left):
    def work():
        if dist.get_rank() == 0:
            middle = os.fork()
            if middle == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                (tmp_path / "daemon.pid").write_text(str(os.getpid()))
                time.sleep(60)
            os.waitpid(middle, 0)
            while not (tmp_path / "daemon.pid").exists():
                time.sleep(0.01)
            server = os.getppid()
            (tmp_path / "daemon.pid").rename(tmp_path / "done")
            os.kill(server, signal.SIGKILL)
        time.sleep(60)

    cfg = MultiprocessConfig(world_size=2, backend="gloo", launch_method=method)
    with pytest.raises(WorkersFailed, match=r"fork server \(pid \d+\) was killed by SIGKILL"):
        launch_subprocesses(work, cfg)
    assert not psutil.pid_exists(int((tmp_path / "done").read_text()))
