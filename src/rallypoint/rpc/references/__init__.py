"""References to values on other workers: which worker holds which, and when a value is released."""
