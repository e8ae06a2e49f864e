"""The Trainer."""

from accmt.trainer.trainer import Trainer

__all__ = ["Trainer"]
