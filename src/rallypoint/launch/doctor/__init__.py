"""``rally doctor``: whether a job can run here, before it does."""
