"""An empty ``torch`` in the real one's place, for workers that do without.

A launch then goes all its real way and only a second or two of importing is saved. Whatever concerns torch
itself is tested with the real one.

    env = {**os.environ, "PYTHONPATH": str(STUB)}
"""

from pathlib import Path


# The folder for PYTHONPATH.
STUB = Path(__file__).parent / "stub"
