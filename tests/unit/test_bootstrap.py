"""The pieces that a worker's start and end are made of. The whole is in test_script_does_not_notice.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint._core import supervisor_line
from rallypoint.launch.config import Job, TargetKind
from rallypoint.launch.worker import bootstrap, ending, preloaded


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


# -- a job --------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(TargetKind),
    name=TEXT,
    args=st.lists(TEXT, max_size=4),
    path=st.none() | st.lists(TEXT, max_size=3),
    unbuffered=st.booleans(),
)
def test_a_job_survives_its_way_to_the_fork_server(
    kind: TargetKind, name: str, args: list[str], path: list[str] | None, unbuffered: bool
) -> None:
    job = Job(
        kind=kind,
        name=name,
        args=tuple(args),
        path=None if path is None else tuple(path),
        unbuffered=unbuffered,
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_title_is_what_was_typed() -> None:
    assert Job(kind=TargetKind.SCRIPT, name="a.py", args=("-x", "1")).title == "a.py -x 1"
    assert Job(kind=TargetKind.MODULE, name="a.b", args=()).title == "-m a.b"


# -- where it looks for modules --------------------------------------------------------------------


def script(name: str | Path) -> Job:
    return Job(kind=TargetKind.SCRIPT, name=str(name), args=())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "script.py").write_text("")
    (tmp_path / "real" / "__main__.py").write_text("")
    (tmp_path / "link.py").symlink_to("real/script.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("real/script.py", "real"),
        ("./real/../real/script.py", "real"),
        ("link.py", "real"),
        ("real", "real"),
        ("app.zip", "app.zip"),
    ],
)
def test_import_path_of_a_script(name: str, expected: str, folder: Path) -> None:
    assert bootstrap.import_path(script(name)) == str(folder / expected)


def test_import_path_of_a_module_is_the_current_folder(folder: Path) -> None:
    job = Job(kind=TargetKind.MODULE, name="x", args=())
    assert bootstrap.import_path(job) == str(folder)


def test_a_given_import_path_is_not_changed(folder: Path) -> None:
    job = Job(kind=TargetKind.FUNCTION, name="f", args=(), path=("/a", "/b"))
    assert bootstrap.import_path(job) is None
    command = bootstrap.python_command("print(sys.path)", job)
    assert subprocess.check_output(command, text=True).strip() == "['/a', '/b']"


def test_a_name_is_made_absolute_but_not_tidied(folder: Path) -> None:
    assert bootstrap._full_name("./a/../b.py") == f"{folder}/./a/../b.py"
    assert bootstrap._full_name("/x/../y.py") == "/x/../y.py"


def test_a_command_keeps_the_flags_of_this_interpreter(folder: Path) -> None:
    code = (
        "import sys\n"
        "from rallypoint.launch.worker import bootstrap\n"
        "from rallypoint.launch.config import Job, TargetKind\n"
        "job = Job(kind=TargetKind.SCRIPT, name='link.py', args=(), unbuffered=True)\n"
        "print(bootstrap.python_command('pass', job)[1:-2])"
    )
    flags = ["-O", "-P", "-B", "-W", "error::UserWarning"]
    found = subprocess.check_output([sys.executable, *flags, "-c", code], text=True)
    words = found.strip()[1:-1].replace("'", "").split(", ")
    assert {"-O", "-P", "-B", "-Werror::UserWarning", "-u"} <= set(words)


# -- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected", "printed"),
    [
        (None, 0, ""),
        (0, 0, ""),
        (3, 3, ""),
        (256, 0, ""),
        (-1, 255, ""),
        (True, 1, ""),
        ("why", 1, "why\n"),
        ("", 1, "\n"),
        (2.5, 1, "2.5\n"),
    ],
)
def test_exit_codes(
    code: object, expected: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending.exit_code(SystemExit(code)) == expected
    assert capsys.readouterr() == ("", printed)


def test_an_object_that_cannot_be_printed_still_exits_with_1() -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError

    assert ending.exit_code(SystemExit(Bad())) == 1


def test_our_frames_are_not_in_a_traceback() -> None:
    try:
        bootstrap._run_script("/no/such/script.py")
    except OSError as error:
        stripped = ending.without_us(error.__traceback__.tb_next if error.__traceback__ else None)
        assert stripped is None or "rallypoint" not in stripped.tb_frame.f_code.co_filename
    else:
        pytest.fail("ran a script that is not there")


def test_the_line_to_the_supervisor_may_be_closed() -> None:
    read, write = os.pipe()
    with held(write):
        os.close(read)
        bootstrap.send_line(write, {"kind": "x"})
        os.close(write)
        bootstrap.send_line(write, {"kind": "x"})


def test_nothing_is_written_to_what_has_taken_the_lines_number(tmp_path: Path) -> None:
    read, write = os.pipe()
    with held(write), open(tmp_path / "own", "w") as own:
        os.dup2(own.fileno(), write)
        bootstrap.send_line(write, {"kind": "x"})
    os.close(read)
    os.close(write)
    assert (tmp_path / "own").read_text() == ""


def test_who_waits_for_a_worker_is_called_in_each_that_a_fork_becomes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_line, "_held", None)
    monkeypatch.setattr(supervisor_line, "_awaited", [])
    called: list[int | None] = []
    supervisor_line.when_held(lambda: called.append(supervisor_line.held()))
    assert called == []
    read, write = os.pipe()
    try:
        supervisor_line.hold(read)
        assert called == [read]
        supervisor_line.when_held(lambda: called.append(-1))
        assert called == [read, -1]
        supervisor_line.hold(write)  # as in a fork that is a worker of another job
        assert called == [read, -1, write, -1]
    finally:
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def held(line: int) -> Iterator[None]:
    """Hold the line, as in a worker."""
    supervisor_line.hold(line)
    try:
        yield
    finally:
        supervisor_line._held = None


def told(error: BaseException) -> dict[str, object]:
    read, write = os.pipe()
    with held(write):
        bootstrap._tell(write, error, 1)
    os.close(write)
    with os.fdopen(read) as file:
        record: dict[str, object] = json.loads(file.read())
    return record


def test_an_exception_travels_as_data() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        record = told(error)
    assert record["type"] == "json.decoder.JSONDecodeError"
    assert str(record["traceback"]).startswith("Traceback (most recent call last):\n")


# -- modules kept out of sight -----------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """An imported package ``hidden_one`` with a submodule; gone afterwards."""
    root = tmp_path / "hidden_one"
    root.mkdir()
    (root / "__init__.py").write_text("runs = 0\nruns += 1\n")
    (root / "part.py").write_text("value = 1\n")
    (tmp_path / "hidden_one_more.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    import hidden_one.part  # type: ignore[import-not-found]
    import hidden_one_more  # type: ignore[import-not-found]  # noqa: F401

    yield hidden_one
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("hidden_one")]:
        del sys.modules[name]


def test_a_hidden_package_comes_back_as_it_was(package: types.ModuleType) -> None:
    spec, loader, finders = package.__spec__, package.__loader__, list(sys.meta_path)
    preloaded.hide("hidden_one")
    assert "hidden_one" not in sys.modules
    assert "hidden_one.part" not in sys.modules
    assert "hidden_one_more" in sys.modules

    import hidden_one

    assert hidden_one is package
    assert hidden_one.runs == 1
    assert (hidden_one.__spec__, hidden_one.__loader__) == (spec, loader)
    assert "hidden_one.part" in sys.modules
    assert sys.meta_path == finders


def test_importing_a_part_first_brings_all_of_it_back(package: types.ModuleType) -> None:
    preloaded.hide("hidden_one")
    from hidden_one.part import value

    assert value == 1
    assert sys.modules["hidden_one"] is package


def test_asking_for_a_hidden_package_does_not_bring_it_back(package: types.ModuleType) -> None:
    import importlib.util

    preloaded.hide("hidden_one")
    spec = importlib.util.find_spec("hidden_one")
    assert spec is not None
    assert spec.origin == package.__file__
    assert spec.submodule_search_locations == package.__path__
    assert "hidden_one" not in sys.modules


def test_hiding_what_is_not_there_changes_nothing() -> None:
    finders = list(sys.meta_path)
    preloaded.hide("no_such_package")
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": " 4,2"}, 4),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "²"}, None),
        ({"OMP_NUM_THREADS": ""}, None),
    ],
)
def test_number_of_threads_in_the_environment(env: dict[str, str], expected: int | None) -> None:
    assert preloaded.num_threads(env) == expected
