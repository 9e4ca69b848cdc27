"""References to values that live on another worker: who holds which, and when a value may go."""
