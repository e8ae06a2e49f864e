"""A run with a key for a service that does not answer: python -m tests.trackers.unreachable TRACKER FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from accelerate.state import PartialState

from tests.trackers.killed import make

NOWHERE = "http://127.0.0.1:9"
VARIABLES = {
    "wandb": {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": NOWHERE},
    "comet_ml": {"COMET_API_KEY": "a" * 25, "COMET_URL_OVERRIDE": NOWHERE},
    "clearml": {
        "CLEARML_API_ACCESS_KEY": "a",
        "CLEARML_API_SECRET_KEY": "a",
        **dict.fromkeys(("CLEARML_API_HOST", "CLEARML_WEB_HOST", "CLEARML_FILES_HOST"), NOWHERE),
    },
    "swanlab": {"SWANLAB_API_KEY": "a" * 21, "SWANLAB_API_HOST": NOWHERE, "SWANLAB_WEB_HOST": NOWHERE},
}
FLUSH_S = 2.0


def main() -> None:
    """Log some rows, and write down how long the run was held up."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.update(VARIABLES[name])
    PartialState(cpu=True)
    tracking = make(name, folder)
    times = [time.monotonic()]
    tracking.start({"lr": 0.1})
    times.append(time.monotonic())
    for step in range(5):
        tracking.log({"loss": float(step)}, step)
    times.append(time.monotonic())
    tracking.finish("FINISHED", flush_s=FLUSH_S)
    times.append(time.monotonic())
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
