"""Forks of runs: a new run that begins at a step of another one, with changed settings."""

from accmt.addons.fork.checkpoints import fork_checkpoint

__all__ = ["fork_checkpoint"]
