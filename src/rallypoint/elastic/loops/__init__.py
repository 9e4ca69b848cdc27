"""Where a script is in its loops over epochs and batches, and the state that only this rank has there."""
