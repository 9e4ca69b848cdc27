"""The lock on the lines to the workers: two threads asking at once would read each other's answers.

A worker has one pipe for its stacks, and one socket for questions about its collectives. The lock is fork-safe: a fork may
start its own jobs.
"""

from __future__ import annotations

from rallypoint._core import forks


LINES = forks.Lock()
