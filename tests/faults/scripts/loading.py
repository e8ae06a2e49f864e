"""Trains on data whose reading fails in a loader's worker, or beside one.

python loading.py FAULT WORKERS, with a FAULT of "raise", "kill" or "step"
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import accmt.data.fetching as loader_workers
from tests.resume.unbroken import Augmented, Fragile, make

loader_workers._LEAVE_S = 3600.0  # a worker that is not ended, but waited for, would hold the run so long


class Failing(Augmented):
    """Points of which one cannot be read, or whose reading ends the worker."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self.fault == "raise":
            raise LookupError("no such point")
        if index == 5 and self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Stopping(Fragile):
    """Fails in its third step, while workers wait for more to do."""

    def step(self, batch: Any) -> Any:
        if self.state.global_step == 2:
            raise LookupError("no third step")
        return super().step(batch)


def main(fault: str, workers: str) -> None:
    module = Stopping() if fault == "step" else Fragile()
    make("out/model", dataloader_num_workers=int(workers), shuffle_train=False).fit(module, Failing(fault))


if __name__ == "__main__":
    main(*sys.argv[1:])
