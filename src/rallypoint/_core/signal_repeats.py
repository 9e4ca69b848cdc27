"""Whether a signal that comes again is a repeat, or means that somebody is in a hurry.

Whatever passes signals on may deliver one twice within milliseconds: ``timeout`` and other wrappers that got it themselves, a
shell whose terminal disappears (the kernel sends SIGHUP, too), and systemd, which sends SIGHUP right behind SIGTERM.
"""

from __future__ import annotations

import signal


# Seconds. A person who presses Ctrl-C a second time takes longer than KEY.
MOMENT, KEY = 2.0, 0.1
_OF_PROGRAMS = frozenset({signal.SIGTERM, signal.SIGHUP})


def is_repeat(first: int, number: int, seconds: float, *, sigterm_repeats: bool = False) -> bool:
    """Whether a signal has the same cause as the first one, so it hurries nobody.

    Args:
        first: the signal that stopped the job.
        number: the one that came afterwards.
        seconds: between the two.
        sigterm_repeats: SIGTERM may come again much later, as from Slurm.
    """
    if sigterm_repeats and first == number == signal.SIGTERM:
        return True
    if first != number and not {first, number} <= _OF_PROGRAMS:
        return False
    return seconds < (KEY if number == signal.SIGINT else MOMENT)
