"""The lock of workers' lines: two who ask at a time would read each other's answers.

A worker shows its stacks and tells its collectives over one line.
"""

from __future__ import annotations

import threading


LINES = threading.Lock()
