"""After a loss: who is right, and how all come to one step."""
