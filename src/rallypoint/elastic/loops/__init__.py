"""Where a script is in its loops over epochs and batches, and what of it only this rank has."""
