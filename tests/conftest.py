"""Applies to every test: a test undoes its changes to its own process."""

import compileall
import gc
import importlib.util
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import pace


_FOLDER = pytest.StashKey[str]()


# Several files are tested at a time, so how long an example takes says nothing.
settings.register_profile("no deadline", settings(), deadline=None)
settings.load_profile("no deadline")
# Where hypothesis keeps a test's settings.
_SETTINGS = "_hypothesis_internal_use_settings"


# Signals that a shell (for background commands), nohup and profilers ignore: processes started by tests would inherit that.
_SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
}


def pytest_configure(config: pytest.Config) -> None:
    """Sets up what all tests share: signals as in a terminal, and one folder for all temporary files."""
    for number, handler in _SIGNALS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    pace.measure()
    if not hasattr(config, "workerinput"):
        # Without bytecode, each launch would compile the package again: half of its CPU time.
        for sources in ("src", "tests"):
            compileall.compile_dir(config.rootpath / sources, quiet=2)
    gc.disable()  # until all tests are collected
    # Failed jobs keep their logs.
    multiprocessing.util.get_temp_dir()  # it removes its own when Python exits, after ours
    folder = tempfile.mkdtemp(prefix="rally-tests-")
    config.stash[_FOLDER] = folder
    os.environ["TMPDIR"] = folder  # before test modules are loaded: some copy the environment then
    tempfile.tempdir = None  # looked up again, with the new variable


# The slowest files, slowest first: started last, one of them would hold up the end of the run.
_LONGEST = [
    "test_elastic.py",
    "test_script_does_not_notice.py",
    "test_examples.py",
    "test_torchrun_handler.py",
    "test_nodes.py",
    "test_nothing_left_behind.py",
    "test_functions.py",
    "test_failure_report.py",
    "test_meeting.py",
    "test_logs.py",
    "test_store_host.py",
    "test_join.py",
    "test_bad_input.py",
    "test_silent_server.py",
    "test_restart.py",
    "test_signals_to_all.py",
    "test_rpc_guide.py",
    "test_docs.py",
    "test_mpi.py",
    "test_rpc_suite.py",
    "test_join_gradients.py",
    "test_file_store.py",
    "test_collectives.py",
    "test_shm.py",
    "test_rpc_group.py",
    "test_torchrun.py",
    "test_join_leaving.py",
    "test_dynamic.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep", type=int, default=0, help="only properties, with so many times as many examples"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    properties = [item for item in items if hasattr(_function_of(item), "hypothesis")]
    times = config.getoption("--deep")
    for item in properties:
        # Hypothesis may shrink a failing example for up to five minutes before it shows it.
        item.add_marker(pytest.mark.timeout(0 if times else 900))
    if times:
        items[:] = properties
        for test in {_function_of(item) for item in items}:
            held = getattr(test, _SETTINGS, settings.default)
            setattr(test, _SETTINGS, settings(held, max_examples=times * held.max_examples))


def _function_of(item: pytest.Item) -> Any:
    made = getattr(item, "obj", None)
    return getattr(made, "__func__", made)


# What many cases import on each of their ranks: they find it loaded. The second takes a quarter of a second.
_USED_BY_RANKS = [
    *("pytest", "torch.distributed.optim", "rallypoint.join", "rallypoint.parallel"),
    *("torch.distributed.fsdp", "torch.distributed.algorithms.ddp_comm_hooks"),
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude what is loaded now from collections: tests that look for leaks collect often."""
    # torch's threads wait for one another by spinning, which is slow when other tests want the CPU, too.
    if hasattr(sys.modules.get("torch"), "set_num_threads"):
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
    if "rallypoint.testing.ranks" in sys.modules:
        sys.modules["rallypoint.testing.ranks"].preloaded += _USED_BY_RANKS


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_FOLDER], ignore_errors=True)


# -- without torch (`make test-python`) ------------------------------------------------------------

_HAS_TORCH = importlib.util.find_spec("torch") is not None


def _needs_torch(report: pytest.CollectReport | pytest.TestReport) -> bool:
    return not _HAS_TORCH and report.failed and "No module named 'torch" in str(report.longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    return _skipped(report, collector.path) if _needs_torch(report) else report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    return _skipped(report, item.path) if _needs_torch(report) else report


def _skipped(report: Any, path: Path) -> Any:
    report.outcome, report.longrepr = "skipped", (str(path), 0, "needs torch")
    return report


# -- what each test puts back ----------------------------------------------------------------------

# pytest's own note of the current test; torch's, when an optimizer first steps.
_EXPECTED = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} - _EXPECTED
    for name in changed:  # so that one leak is one failure
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left the environment changed: {sorted(changed)}"
