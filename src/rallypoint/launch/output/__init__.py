"""What comes out of a job: logs, failures, the report."""
