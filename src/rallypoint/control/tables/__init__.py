"""Jobs and workers as tables for people: ``rally ps``, ``rally top``."""
