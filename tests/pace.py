"""How much slower this machine is than a quiet, fast one, so that tests that look at clocks pass on any machine.

Measured once, when pytest starts, under the load at that time; child processes read it from a variable.
Deadlines that only end a hang need no factor: they are long.
"""

import os
import time


_VARIABLE = "TEST_PACE"
# Seconds that the work below takes on a core with no other load.
_REFERENCE = 0.2


def measure() -> float:
    """The factor, 1 to 20; from now on :func:`pace` returns it in this process and its children."""
    began = time.monotonic()
    sum(number * number for number in range(4_000_000))
    factor = (time.monotonic() - began) / _REFERENCE
    os.environ[_VARIABLE] = f"{min(max(1.0, factor), 20.0):.2f}"
    return pace()


def pace() -> float:
    """The factor to multiply time limits by."""
    return float(os.environ.get(_VARIABLE, "1"))
