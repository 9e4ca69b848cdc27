"""Turns the text of faulthandler or the JSON of py-spy into records of stacks. Pure.

A record lists frames as in a traceback, with the most recent call last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rallypoint._core import script_frames


Frame = dict[str, Any]  # file, line, function
Thread = dict[str, Any]  # name, frames

_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

_OUR_THREAD = re.compile(r"/rallypoint/launch/worker/collective_thread\.py$")


def from_faulthandler(text: str) -> list[Thread]:
    """The threads in what ``faulthandler.dump_traceback`` wrote, the main thread first."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            threads.append({"name": found[2] or "", "frames": []})
        elif threads and (found := _FRAME.match(line)):
            number = 0 if found[2] == "???" else int(found[2])
            frame = {"file": found[1], "line": number, "function": found[3]}
            threads[-1]["frames"].insert(0, frame)
    # faulthandler lists the threads from the youngest to the oldest.
    return _trimmed(threads[::-1])


def from_py_spy(text: str) -> list[Thread]:
    """The threads in what ``py-spy dump --json`` printed, the main thread first.

    Raises:
        ValueError: the text is something else.
    """
    try:
        found = json.loads(text)
        found.sort(key=lambda each: each["os_thread_id"] != each["pid"])
        threads = [
            {
                "name": each["thread_name"] or "",
                "frames": [
                    {"file": frame["filename"], "line": frame["line"], "function": frame["name"]}
                    for frame in reversed(each["frames"])
                ],
            }
            for each in found
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"unexpected output of py-spy: {error!r}") from None
    return _trimmed(threads)


def _trimmed(threads: Sequence[Thread]) -> list[Thread]:
    """The threads without our own, and the main thread without the frames above the script."""
    for thread in threads[:1]:
        frames = thread["frames"]
        thread["frames"] = frames[script_frames.beginning([each["file"] for each in frames]) :]
    return [each for each in threads if not _is_ours(each)]


def _is_ours(thread: Thread) -> bool:
    return any(_OUR_THREAD.search(each["file"]) for each in thread["frames"])
