"""Imports at once."""

STUB = True
