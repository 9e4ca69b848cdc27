"""Finds scripts that change what the session holds between two steps, before a loss makes that a problem.

After a loss, ranks are at different places between two steps: some have made such a change already and give their state to
others, which then make it once more.
"""

from __future__ import annotations

from .state.objects import Objects


# Only after this many steps, and this many loops over batches and functions outside of them: a script does the same after later ones.
STEPS, PARTS = 3, 6


class OutsideChanges:
    """Compares the state at the end of a step with the state at the beginning of the next one, until they differ.

    Learning rates are not compared: a script may set them to values that depend only on the position.

    Args:
        objects: the session's.
        matters: a process may start between two steps.
    """

    def __init__(self, objects: Objects, *, matters: bool) -> None:
        self._objects = objects
        self._steps, self._parts = (STEPS, PARTS) if matters else (0, 0)
        self._before: dict[tuple[int, str], object] | None = None

    def end_step(self) -> None:
        """A step is complete."""
        if self._steps:
            self._steps -= 1
            self._before = self._now()

    def end_part(self) -> None:
        """A loop over batches has ended, or a function outside of one."""
        if self._parts:
            self._parts -= 1
            self._before = self._now()

    def forget(self) -> None:
        """What changes now is not changed by the script."""
        self._before = None

    def begin_step(self) -> str:
        """The next step begins. Returns what has changed, in words; empty if nothing has."""
        before, self._before = self._before, None
        if before is None:
            return ""
        now = self._now()
        if now.keys() != before.keys():  # one has become too large
            return ""
        changed = [key for key, state in now.items() if state != before[key]]
        if changed:
            self._steps = self._parts = 0
        return " and ".join(dict.fromkeys(what for _, what in changed))

    def _now(self) -> dict[tuple[int, str], object]:
        objects = self._objects
        found: dict[tuple[int, str], object] = {
            (number, f"the state of a {name}"): state
            for number, (name, state) in enumerate(objects.settings.digests())
        }
        if not objects.is_sharded:
            found[-1, "parameters"] = objects.changes()
        return found
