"""The first attempt of a run that is killed: python -m tests.trackers.killed TRACKER FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.state import PartialState

from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.addons.trackers.spec import resolve_trackers
from accmt.tracking import Tracking

CHECKPOINT_AT, KILLED_AT = 10, 17


def make(log_with: Any, folder: Path, *, run_name: str = "run", offline: Any = "auto") -> Tracking:
    """Make the tracking of a run; the project is named by the folder, for some stores are shared by all tests."""
    return Tracking(
        resolve_trackers(log_with),
        track_name=folder.name,
        run_name=run_name,
        logging_dir=folder,
        tracker_kwargs={},
        is_main_process=True,
        verbose=False,
        offline=offline,
    )


def main() -> None:
    """Log up to `KILLED_AT`, wait until the tracker was handed everything, and be killed."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    PartialState(cpu=True)
    tracking = make(name, folder)
    tracking.start({"lr": 0.1})
    for step in range(KILLED_AT + 1):
        tracking.log({"loss": float(step)}, step)
        if step == CHECKPOINT_AT:
            (folder / "state.json").write_text(json.dumps(tracking.state_dict()))
    ends = time.monotonic() + 60
    while DeliveryFile.read(tracking.run_folder).accounts[name].delivered < KILLED_AT + 2:
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
