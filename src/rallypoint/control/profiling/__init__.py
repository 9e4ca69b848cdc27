"""What the workers spend their time on: traces from torch's profiler, and samples of their stacks."""
