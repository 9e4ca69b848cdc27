"""Where the user's code starts in the Python stack of a worker. Pure.

The frames that started the script are above it. Other code of the launcher may be below: a `print` that waits for a pipe's
reader, the creation of the first process group. The user looks for what lies in between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


# In a worker, all of the user's code is called from here. (With the method `fork`, the caller's script is above.)
_STARTS = re.compile(r"/rallypoint/launch/worker/bootstrap\.py$")
# What may be on the way from there to the user's code.
_BETWEEN = re.compile(r"/rallypoint/launch/|^<frozen runpy>$")
# In a process that the script has forked, the script's own stack is above.
_OF_CHILD = re.compile(r"/multiprocessing/process\.py$")


def beginning(files: Sequence[str]) -> int:
    """The index of the first frame of the user's code.

    Args:
        files: of all frames, the most recent call last.

    Returns:
        0 if there is none: the process is still in our code, or not one of ours.
    """
    started = [place for place, file in enumerate(files) if _STARTS.search(file)]
    place = started[-1] if started else 0
    while place < len(files) and _BETWEEN.search(files[place]):
        place += 1
    children = [at for at, file in enumerate(files) if at >= place and _OF_CHILD.search(file)]
    if children:
        place = children[-1] + 1
    return place if place < len(files) else 0
