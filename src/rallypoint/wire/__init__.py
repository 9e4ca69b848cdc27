"""Bytes between processes: torch-free."""
