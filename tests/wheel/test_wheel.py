"""The wheel as a user gets it: installed with only torch and cloudpickle. `make wheel` sets up the environment.

That environment sees the packages of .venv, but not this working tree: a line in a .pth file adds a folder to the path,
but that folder's own .pth files, including the editable install's, are not read.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-wheel" / "bin"
USER = Path(__file__).parent / "programs" / "user.py"


def run(*command: str | Path, folder: Path) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_command_is_there(tmp_path: Path) -> None:
    assert "rally run" in run(BIN / "rally", "--help", folder=tmp_path)


def test_a_script_of_two_lines_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    said = run(BIN / "rally", "run", "--nproc-per-node", "2", script, folder=tmp_path)
    assert "rank 0" in said
    assert "rank 1" in said


def test_every_package_is_imported_from_the_wheel(tmp_path: Path) -> None:
    program = (
        "import sys, rallypoint, rallypoint.rpc, rallypoint.join, rallypoint.parallel, rallypoint.compat\n"
        "import rallypoint.rendezvous, rallypoint.launch\n"
        "from importlib.metadata import version\n"
        "print(rallypoint.__file__, rallypoint.__version__, version('rallypoint'))\n"
    )
    home, attribute, metadata = run(BIN / "python", "-c", program, folder=tmp_path).split()
    assert Path(home).is_relative_to(BIN.parent)
    assert attribute == metadata


def test_every_module_is_in_the_wheel(tmp_path: Path) -> None:
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there = Path(run(BIN / "python", "-c", program, folder=tmp_path).strip()) / "rallypoint"
    source = ROOT / "src" / "rallypoint"
    missing = [
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not (there / path.relative_to(source)).exists()
    ]
    assert not missing


def test_a_users_program_passes_pyright_in_strict_mode(tmp_path: Path) -> None:
    settings = {
        "include": [str(USER)],
        "typeCheckingMode": "strict",
        "pythonVersion": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run(BIN / "basedpyright", "--pythonpath", BIN / "python", folder=tmp_path)
