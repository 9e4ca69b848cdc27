"""The teaching pages: their programs run and print what the pages show.

Hidden comments in a page say what to do with the block of code below them:

    <!-- file: NAME -->     write it to a file
    <!-- run: CODE -->      run its lines; the last one ends with this exit code
    <!-- shows -->          each of its lines is in that output, in this order; "…" stands for anything
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import supervisors
from ports import free_port


pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
LIMIT = 120  # seconds for a command
_BLOCK = re.compile(r"<!-- (?P<what>[^>]*?) -->\n```\w*\n(?P<text>.*?)```", re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """For each block: what to do, with what, and its text."""
    found = []
    for each in _BLOCK.finditer((DOCS / page).read_text()):
        what, _, value = each["what"].partition(": ")
        found.append((what, value, each["text"]))
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def shown_in(text: str, output: str) -> str:
    """The first line that is not in the output, or an empty string."""
    at = 0
    for line in text.splitlines():
        words = ".*?".join(re.escape(each) for each in line.strip().split("…"))
        found = re.compile(words).search(output, at)
        if found is None:
            return line
        at = found.end()
    return ""


@pytest.mark.parametrize("page", ["start.md", "tutorial.md", "autograd.md"])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    output, ran = "", 0
    for what, value, text in blocks(page):
        match what:
            case "file":
                (tmp_path / value).write_text(text)
            case "run":
                for line in text.splitlines():
                    words = shlex.split(line)
                    if words[0] == "rally":
                        words[0] = supervisors.RALLY
                    done = supervisors.run(
                        words,
                        cwd=tmp_path,
                        env=environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        timeout=LIMIT,
                        text=True,
                        check=False,
                    )
                output, ran = done.stdout, ran + 1
                assert done.returncode == int(value), output
            case "shows":
                # Ranks print in any order.
                in_order = "\n".join(sorted(output.splitlines())) if "rank" in text else output
                missing = shown_in(text, output) and shown_in(text, in_order)
                assert not missing, f"{missing!r} is not in:\n{output}"
            case _:
                pass
    assert ran


def test_the_tutorial_s_job_outlives_a_node(tmp_path: Path) -> None:
    parts = {
        f"{what}: {value}" if value else what: text for what, value, text in blocks("tutorial.md")
    }
    (tmp_path / "train.py").write_text(parts["file: train.py"])
    port = free_port()
    line = parts["nodes: two"].splitlines()[1].replace("29400", str(port))
    outputs = [tmp_path / "first", tmp_path / "second"]
    nodes = []
    for output in outputs:
        with output.open("wb") as file:
            nodes.append(
                supervisors.Popen(
                    [supervisors.RALLY, *line.split()[1:]],
                    cwd=tmp_path,
                    env=environment(),
                    stdout=file,
                    stderr=file,
                )
            )
    try:
        deadline = time.monotonic() + LIMIT
        while not any("4 workers train" in each.read_text() for each in outputs):
            assert time.monotonic() < deadline, [each.read_text() for each in outputs]
            time.sleep(0.05)
        os.kill(nodes[1].pid, signal.SIGKILL)
        assert nodes[0].wait(LIMIT) == 0
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    said = outputs[0].read_text()
    missing = shown_in(parts["two: shows"], said)
    assert not missing, f"{missing!r} is not in:\n{said}"


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.glob("*.md")), REPOSITORY / "README.md"], ids=lambda path: path.name
)
def test_programs_in_pages_are_python(page: Path) -> None:
    for text in _PYTHON.findall(page.read_text()):
        compile(text, page.name, "exec", flags=0x2000)  # await outside of functions is shown, too


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as a repository browser and the site make them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize(
    "page",
    [
        *sorted(DOCS.glob("*.md")),
        *sorted(DOCS.glob("reference/*.md")),
        *sorted(REPOSITORY.glob("*.md")),
        *(REPOSITORY / each / "README.md" for each in ("bench", "examples")),
    ],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for file, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", prose):
        target = page.parent / file if file else page
        assert target.exists(), file
        if anchor:
            assert anchor in anchors(target), f"{file}#{anchor}"
