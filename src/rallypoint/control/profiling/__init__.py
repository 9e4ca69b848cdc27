"""What the workers spend their time on: traces of torch's profiler, and samples of their stacks."""
