"""Which collectives the workers have begun, and who waits for whom."""
