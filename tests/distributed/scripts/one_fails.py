"""A run, or an evaluation or prediction outside of it, in which process 1 alone fails, is killed, or hangs for a while.

    torchrun --nproc-per-node 2 one_fails.py validate|predict raise|kill|wait|all FOLDER
    torchrun --nproc-per-node 2 one_fails.py fit get_optimizer|on_fit_end FOLDER

All processes fail with "all"; a run fails while it is set up or at its very end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from accmt.addons import watch
from tests.toys import Linear, make_points, make_trainer

WAITS_S = 60.0
watch._NOTED_S, watch._WARNED_S = 1.0, 3.0
warn = watch.warn


def note_warning(message: str) -> None:
    warn(message)
    Path("warned").touch()


watch.warn = note_warning


class Failing(Linear):
    """Fails in its second batch, or in one of its methods."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.batches = act, 0

    def fail(self) -> None:
        if os.environ["RANK"] != "1" and self.act != "all":
            return
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "wait":
            deadline = time.monotonic() + WAITS_S
            while not Path("warned").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            raise ValueError("the fault of this test")

    def count(self) -> None:
        self.batches += 1
        if self.batches == 2:
            self.fail()

    def validation_step(self, batch):
        self.count()
        return super().step(batch)

    def predict_step(self, batch):
        self.count()
        return self.model(batch[0])


def main(function: str, act: str, folder: str) -> None:
    os.chdir(folder)
    if function == "fit":
        setattr(Failing, act, Failing.fail)
    trainer = make_trainer({"batch_size": 2})
    module = Failing(act)
    try:
        getattr(trainer, function)(module, make_points(16))
    except ValueError as error:
        if act != "all":
            raise
        Path(f"error-{os.environ['RANK']}").write_text(str(error))
    getattr(trainer, function)(module, make_points(16))
    Path(f"done-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
