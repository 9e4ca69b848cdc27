"""What a supervisor observes of running workers, and what it reports."""
