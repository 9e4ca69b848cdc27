"""How much slower than a quiet, fast machine this one is, so that tests which look at clocks hold on any.

Measured once, when pytest starts, with whatever runs beside it; processes that tests start are told by a variable.
Deadlines that only end a hang need no factor: they are long.
"""

import os
import time


_VARIABLE = "TEST_PACE"
# Seconds that the work below takes on a core of its own.
_REFERENCE = 0.2


def measure() -> float:
    """The factor, 1 to 20; from now on this process and its children find it in :func:`pace`."""
    began = time.monotonic()
    sum(number * number for number in range(4_000_000))
    factor = (time.monotonic() - began) / _REFERENCE
    os.environ[_VARIABLE] = f"{min(max(1.0, factor), 20.0):.2f}"
    return pace()


def pace() -> float:
    """What limits of time are to be multiplied by."""
    return float(os.environ.get(_VARIABLE, "1"))
