"""An evaluation or a prediction outside of a run, in which process 1 alone fails, is killed, or hangs for a while.

torchrun --nproc-per-node 2 one_fails_alone.py validate|test|predict raise|kill|wait|all FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from accmt.addons import watch
from tests.toys import Linear, make_points, make_trainer

watch._NOTED_S, watch._WARNED_S = 1.0, 5.0
WAITS_S = 10.0  # longer than what is said of a long wait takes


class Failing(Linear):
    """Fails in its second batch."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.batches = act, 0

    def fail(self) -> None:
        self.batches += 1
        if self.batches != 2 or (os.environ["RANK"] != "1" and self.act != "all"):
            return
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "wait":
            time.sleep(WAITS_S)
        else:
            raise ValueError("the fault of this test")

    def validation_step(self, batch):
        self.fail()
        return super().step(batch)

    def predict_step(self, batch):
        self.fail()
        return self.model(batch[0])


def main(function: str, act: str, folder: str) -> None:
    os.chdir(folder)
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
