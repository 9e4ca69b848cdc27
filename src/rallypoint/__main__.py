"""The command ``rally``, also as ``python -m rallypoint``."""

import gc
import os
import sys


def main() -> int:
    """Run the command line of this process. Returns the exit code."""
    try:
        # Takes 0.1 s: time enough for a user who mistyped to press Ctrl-C.
        from rallypoint.launch.cli import main as command
    except KeyboardInterrupt:
        return 130
    code = command()
    # Python collects garbage at exit, to no purpose: that would take a tenth of a short command's time.
    gc.freeze()
    return code


def _without_current_folder() -> None:
    """`python -m` imports from the current folder first: a `uuid.py` there would hide Python's. The command `rally` does not."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been deleted, which is reported later
        return
    if sys.path[:1] == [folder] and not sys.flags.safe_path:
        del sys.path[0]


if __name__ == "__main__":
    _without_current_folder()
    raise SystemExit(main())
