"""Defaults, under torch's names."""

from __future__ import annotations


DEFAULT_RPC_TIMEOUT_SEC: float = 60.0
DEFAULT_INIT_METHOD: str = "env://"
# Seconds that a graceful shutdown waits for the others; 0: no limit.
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = 16
# Use the default timeout.
UNSET_RPC_TIMEOUT: float = -1.0
