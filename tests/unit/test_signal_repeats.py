"""Whether a signal that comes again means haste."""

from __future__ import annotations

import signal

import pytest

from rallypoint._core.signal_repeats import MOMENT, is_repeat
from rallypoint.launch.supervision.worker_signals import SILENCE


@pytest.mark.parametrize(
    ("first", "number", "seconds", "repeats"),
    [
        ("SIGTERM", "SIGTERM", 0.01, True),  # timeout, in a process group that gets it
        ("SIGHUP", "SIGHUP", 0.01, True),  # the kernel's and the shell's
        ("SIGTERM", "SIGHUP", 0.01, True),  # systemd's, for a session
        ("SIGQUIT", "SIGQUIT", 0.01, True),
        ("SIGINT", "SIGINT", 0.01, True),  # a wrapper passes on what the terminal sends to both
        ("SIGINT", "SIGINT", 0.15, False),  # a person
        ("SIGTERM", "SIGTERM", 2.1, False),
        ("SIGTERM", "SIGINT", 0.01, False),
        ("SIGINT", "SIGTERM", 0.01, False),
        ("SIGTERM", "SIGQUIT", 0.01, False),
    ],
)
def test_what_is_delivered_twice_is_a_repeat(
    first: str, number: str, seconds: float, *, repeats: bool
) -> None:
    two = signal.Signals[first], signal.Signals[number]
    assert is_repeat(*two, seconds) is repeats


def test_slurm_repeats_sigterm_much_later() -> None:
    assert is_repeat(signal.SIGTERM, signal.SIGTERM, 30.0, sigterm_repeats=True)
    assert not is_repeat(signal.SIGTERM, signal.SIGINT, 30.0, sigterm_repeats=True)


def test_a_signal_that_is_sent_as_advised_is_no_repeat() -> None:
    # After this long, `rally run` says that a second signal kills the workers.
    assert SILENCE >= MOMENT
