"""What of a rank stays on its host, in memory that outlives the worker."""
