"""Checkpoints of a session."""
