"""Stdlib-only ground floor: clocks, the environment, frames. Private to the package."""
