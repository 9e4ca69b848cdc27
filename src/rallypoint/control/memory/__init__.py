"""What the workers' memory consists of: private and shared, by mapping, and on devices."""
