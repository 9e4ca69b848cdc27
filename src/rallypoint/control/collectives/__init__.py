"""Which collectives the workers have started, and who waits for whom."""
