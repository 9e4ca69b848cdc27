"""The parts of a supervisor."""
