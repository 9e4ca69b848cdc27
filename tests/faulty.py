"""For test scripts: a process is killed at the places that the test names, once at each.

Such a script is called with a folder and these places as JSON: ``[[2, 0, "backward"], …]``, say, for step and rank.
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
    """Die here, if the test says so and nobody has died here yet.

    Args:
        of: returns the pid to kill instead of this process; its death ends this process, too.
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
