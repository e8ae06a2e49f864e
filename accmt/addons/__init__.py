"""What training, evaluation and resuming do not need: the core finds it by name, in `accmt.registry`."""
