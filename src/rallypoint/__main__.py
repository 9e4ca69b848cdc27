"""The command ``rally``, also as ``python -m rallypoint``."""

import gc
import os
import sys


def main() -> int:
    """Run the command line of this process. Returns the exit code."""
    try:
        # Takes 0.1 s, in which somebody who has mistyped presses Ctrl-C.
        from rallypoint.launch.cli import main as command
    except KeyboardInterrupt:
        return 130
    code = command()
    # When Python ends it collects, for nothing: that would be a tenth of the time that a short command takes.
    gc.freeze()
    return code


def _without_current_folder() -> None:
    """`python -m` imports from the current folder first: a `uuid.py` there would hide Python's. The command `rally` does not."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been deleted, which is told later
        return
    if sys.path[:1] == [folder] and not sys.flags.safe_path:
        del sys.path[0]


if __name__ == "__main__":
    _without_current_folder()
    raise SystemExit(main())
