"""Goodput: how much of the time of a run trained the model, and checkpoints at the interval that loses least."""
