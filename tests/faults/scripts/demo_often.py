"""The demo, with a checkpoint as often as `CHECKPOINT_EVERY` says."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import accmt

DEMO = Path(__file__).parents[3] / "examples" / "finetune_text_classifier.py"


class Often(accmt.Trainer):
    """A Trainer for which the environment decides when a checkpoint is due."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "checkpoint_every": os.environ["CHECKPOINT_EVERY"]})


if __name__ == "__main__":
    accmt.Trainer = Often
    runpy.run_path(str(DEMO), run_name="__main__")
