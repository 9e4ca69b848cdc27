"""What a session is given (modules, optimizers, schedulers), and the transfer of its state to another rank."""
