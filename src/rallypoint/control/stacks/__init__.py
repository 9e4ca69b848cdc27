"""Where the workers are: their stacks, read without their cooperation."""
