"""The loop: builds a run, trains it, evaluates it and saves its best model."""
