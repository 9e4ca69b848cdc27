"""What a supervisor sees of running workers, and what it tells of it."""
