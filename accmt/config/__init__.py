"""Hyper-parameters: reading them with line numbers, checking them, and the names of optimizers and schedulers."""

from accmt.config.hyperparameters import HyperParameters
from accmt.config.optimizer_names import Optimizer, Scheduler

__all__ = ["HyperParameters", "Optimizer", "Scheduler"]
