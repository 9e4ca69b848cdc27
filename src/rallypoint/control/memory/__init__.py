"""What the memory of the workers is: private and shared, by mapping, and on devices."""
