"""After a loss: whose state is right, and how all ranks get to the same step."""
