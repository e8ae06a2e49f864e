"""A scheduler: half the rate every so many steps."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR


def halving(optimizer: Optimizer, every: int = 2) -> LRScheduler:
    """Build it."""
    return StepLR(optimizer, step_size=every, gamma=0.5)
