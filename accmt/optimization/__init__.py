"""Builds the optimizer and the learning-rate scheduler from the hyper-parameters."""

from accmt.optimization.optimizers import ChainedOptimizer, build_optimizer, needs_closure
from accmt.optimization.schedulers import SeveralSchedulers, build_scheduler

__all__ = ["ChainedOptimizer", "SeveralSchedulers", "build_optimizer", "build_scheduler", "needs_closure"]
