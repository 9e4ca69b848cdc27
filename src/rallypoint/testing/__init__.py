"""Tools for testing distributed programs: ranks, a network that fails on request, a manual clock, a check for leaks.

Rallypoint's own tests use them. Nothing here needs pytest.
"""

from .fault_proxy import FaultProxy
from .leaks import Leak, no_leaks
from .manual_clock import ManualClock
from .ranks import CaseFailed, Ranks, run_ranks


__all__ = ["CaseFailed", "FaultProxy", "Leak", "ManualClock", "Ranks", "no_leaks", "run_ranks"]
