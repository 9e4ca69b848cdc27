"""Which lines of a Python stack a report shows: those of the user's own code, and where it ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


# How Python begins a traceback.
BEGINNING = "Traceback (most recent call last):"
_FRAME = re.compile(r'[ |+]*File "(.*)", line \d+')
# Installed packages, Python's own modules, and code that is not in a file.
_OF_OTHERS = re.compile(r"/(?:site-packages|dist-packages|lib/python3\.\d+)/|^<")


def of(traceback: str, most: int) -> list[str]:
    """The stack without its first line and without the message, in at most ``most`` lines.

    If it is too long, ``^^^`` markers, blank lines and headings go first; then frames of installed packages, except for
    the last frame; then the user's outer frames. A line says how much is left out.
    """
    lines = _stack(traceback)
    if len(lines) > most:
        lines = [each for each in lines if each.strip(" ^~") and each != BEGINNING]
    return lines if len(lines) <= most else _chosen(lines, most)


def _stack(traceback: str) -> list[str]:
    lines = traceback.rstrip().splitlines()
    if lines and lines[0] == BEGINNING:
        lines = lines[1:]
    inside = [index for index, line in enumerate(lines) if line.startswith(" ")]
    end = inside[-1] + 1 if inside else 0
    # Lines of the message may be indented too. (In an exception group, frames follow a bar.)
    frames = [index for index in inside if lines[index].startswith('  File "')]
    if frames and not any(lines[index].startswith("  |") for index in inside):
        end = frames[-1] + 1
        while end < len(lines) and lines[end].startswith(("    ", "  [Previous line")):
            end += 1
    return lines[:end]


def _chosen(lines: Sequence[str], most: int) -> list[str]:
    """Whole frames, as many as there is room for."""
    frames = _frames(lines)
    own = [index for index, frame in enumerate(frames) if _is_own(frame)]
    last = len(frames) - 1
    wanted = [last, *reversed(own), *range(last - 1, -1, -1)]
    kept: set[int] = set()
    for index in wanted:
        if len(_text(frames, kept | {index})) <= most:
            kept.add(index)
    if kept:
        return _text(frames, kept)
    left_out = len(lines) - most + 1
    return [f"… {left_out} lines left out", *lines[left_out:]]


def _frames(lines: Sequence[str]) -> list[list[str]]:
    """Each frame with the lines that follow it. Lines before the first frame count as one of their own."""
    frames: list[list[str]] = []
    for line in lines:
        if not frames or _FRAME.match(line):
            frames.append([])
        frames[-1].append(line)
    return frames


def _is_own(frame: Sequence[str]) -> bool:
    found = _FRAME.match(frame[0])
    return found is not None and not _OF_OTHERS.search(found[1])


def _text(frames: Sequence[Sequence[str]], kept: set[int]) -> list[str]:
    text: list[str] = []
    left_out = 0
    for index, frame in enumerate([*frames, []]):
        if index < len(frames) and index not in kept:
            left_out += len(frame)
            continue
        if left_out:
            text.append(f"… {left_out} line{'s' if left_out > 1 else ''} left out")
            left_out = 0
        text += frame
    return text
