"""The output of a job's workers: ``rally logs``."""
