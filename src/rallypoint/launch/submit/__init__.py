"""``rally submit``: hands a job to an engine that schedules it."""
