"""Inside a worker: becoming one, running the target, ending as Python does; functions and their groups."""
