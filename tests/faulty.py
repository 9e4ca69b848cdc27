"""For the scripts of tests: a process is killed at the places that the test names, at each of them once.

Such a script is called with a folder, and with these places in JSON: ``[[2, 0, "backward"], …]``, say, for step and rank.
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable


FOLDER = pathlib.Path(sys.argv[1])
FAULTS = json.loads(sys.argv[2])


def die_at(*place: object, of: Callable[[], int] = os.getpid) -> None:
    """Be killed here, if the test says so and nobody was.

    Args:
        of: says which process is killed instead of this one, and ends it, too.
    """
    for number, given in enumerate(FAULTS):
        if given == [*place] and _is_first(number):
            os.kill(of(), signal.SIGKILL)
            signal.pause()


def _is_first(number: int) -> bool:
    try:
        (FOLDER / f"fault {number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
