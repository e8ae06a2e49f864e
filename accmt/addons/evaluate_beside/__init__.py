"""Evaluates the checkpoints of a run in another process: `accmt evaluate`."""
