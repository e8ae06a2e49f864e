"""Trains a run that fails in its eighth update.

python dying.py HOW RESUME CHECKPOINT_EVERY, with a HOW of "raise", "exit", "SIGKILL", "SIGTERM" or "none"
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from accmt import Callback
from tests.resume.unbroken import Augmented, Fragile, make

LAST = Path("out/checkpoint-model/step-00000006")
"""The last checkpoint before the process ends."""


class Dying(Callback):
    """Ends the process after seven updates."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_after_backward(self) -> None:
        if self.state.global_step != 7 or self.how == "none":
            return
        if self.how == "raise":
            raise ValueError("a batch that is bad")
        if self.how == "exit":
            os._exit(3)
        while self.how == "SIGKILL" and not LAST.exists():  # it is written while training goes on
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, self.how))


def main(how: str, resume: str, every: str) -> None:
    trainer = make(
        "out/model", checkpoint_every=every, resume={"False": False}.get(resume, resume), callbacks=[Dying(how)]
    )
    trainer.fit(Fragile(), Augmented())


if __name__ == "__main__":
    main(*sys.argv[1:])
