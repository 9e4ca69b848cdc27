"""This process as a worker that can be kept, and its link to the supervisor."""
