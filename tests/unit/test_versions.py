"""The version of torch that a node tells the others, without an import of torch."""

import subprocess
import sys
from pathlib import Path

import pytest


# As a supervisor does, which never imports torch; nor should it need importlib.metadata.
PROGRAM = """
import sys
from rallypoint.rendezvous import versions
print(versions.torch())
print("torch" in sys.modules, "importlib.metadata" in sys.modules)
"""


def told(*first: Path) -> list[str]:
    program = f"import sys; sys.path[:0] = {[str(each) for each in first]!r}\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_it_is_the_installed_one() -> None:
    torch = pytest.importorskip("torch")
    version = ".".join(torch.__version__.split(".")[:2])
    assert told() == [version, "False False"]


@pytest.mark.parametrize("line", ["__version__ = '9.8.7+cu1'", '__version__: str="9.8.7"'])
def test_it_is_the_one_that_would_be_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('it is imported')")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\n")
    assert told(tmp_path) == ["9.8", "False False"]


def test_one_without_such_a_file_is_as_its_installer_noted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch.py").write_text("raise SystemExit('it is imported')")
    assert told(tmp_path) == [told()[0], "False True"]
