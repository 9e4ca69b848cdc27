"""Stores to meet at: ``tcpstore`` (between hosts) and ``memory`` (one process; the reference)."""
