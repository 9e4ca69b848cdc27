"""The lock of workers' lines: two who ask at a time would read each other's answers.

A worker shows its stacks and tells its collectives over one line. A fork may start jobs of its own.
"""

from __future__ import annotations

from rallypoint._core import forks


LINES = forks.Lock()
