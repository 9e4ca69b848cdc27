"""This process as one that can be kept, and its supervisor."""
