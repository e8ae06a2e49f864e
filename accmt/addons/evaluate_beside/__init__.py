"""Evaluates the checkpoints and models of a run in another process: `accmt evaluate`."""
