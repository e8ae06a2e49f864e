"""The Trainer: what users call."""

from accmt.trainer.trainer import Trainer

__all__ = ["Trainer"]
