"""What stays on a rank's host, in memory that outlives the worker."""
