"""README.md's picture: it shows what it is for, and nothing of the machine that drew it."""

from __future__ import annotations

import html
import re
import socket
from pathlib import Path


PICTURE = Path(__file__).parent.parent / "docs" / "terminal.svg"


def words() -> str:
    """The text in the picture."""
    rows = re.findall(r"<text [^>]*>([^<]*)</text>", PICTURE.read_text())
    return html.unescape(" ".join(rows)).replace("\xa0", " ")


def test_it_shows_a_loss_and_a_report() -> None:
    for part in ("takes its place", "is back at step 30", "the job failed", "root cause"):
        assert part in words()


def test_it_shows_nothing_of_the_machine_that_drew_it() -> None:
    assert socket.gethostname() not in words().split()
    paths = re.findall(r"/\S+", words())
    assert paths
    assert all(each.startswith("/home/ada/") for each in paths), paths


def test_it_needs_no_network() -> None:
    text = PICTURE.read_text()
    assert "@font-face" not in text
    assert not re.findall(r"(?:href|src)=|url\((?!#)", text)
    assert re.search(r"font-family:[^;]*\bmonospace", text)
