"""Building the optimizer and the learning-rate scheduler that the hyper-parameters name."""

from accmt.optimization.chained import ChainedOptimizer
from accmt.optimization.optimizers import build_optimizer
from accmt.optimization.schedulers import build_scheduler

__all__ = ["ChainedOptimizer", "build_optimizer", "build_scheduler"]
