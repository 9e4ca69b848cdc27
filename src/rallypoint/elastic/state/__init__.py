"""What a session is given: modules, optimizers, schedulers; their state on its way to another rank."""
