"""An empty ``torch`` in place of the real one, for workers that do not need it.

A launch then takes its real course; it only saves a second or two of importing. Everything that concerns torch
itself is tested with the real one.

    env = {**os.environ, "PYTHONPATH": str(STUB)}
"""

from pathlib import Path


# The folder for PYTHONPATH.
STUB = Path(__file__).parent / "stub"
