"""Inside a worker: becoming one, running the target, exiting as Python does; function calls and their process groups."""
