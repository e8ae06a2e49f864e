"""Hyper-parameters: reading them with line numbers, checking them, and the names of optimizers and schedulers."""

from accmt.config.hyperparameters import HyperParameters

__all__ = ["HyperParameters"]
