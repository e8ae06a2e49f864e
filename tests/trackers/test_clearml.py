"""ClearML, read back from its offline sessions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accmt.tracking import ClearML
from tests.trackers.contract import TrackerContract


class TestClearML(TrackerContract):
    pytestmark = pytest.mark.feature("A22")
    kind = ClearML
    keeps_nan = False
    replaces = True  # for the second session has no points of the first

    def session(self, tracking):
        return Path(os.environ["CLEARML_CACHE_DIR"]) / "offline" / self.run_id(tracking)

    def points(self, tracking, name="loss"):
        lines = (self.session(tracking) / "metrics.jsonl").read_text().splitlines()
        title, series = self.title_and_series(name)
        return sorted(
            (one["iter"], float(one["value"]))
            for line in lines
            for one in json.loads(line)
            if (one.get("metric"), one.get("variant")) == (title, series)
        )

    def title_and_series(self, name):
        from accelerate.tracking import ClearMLTracker

        return ClearMLTracker._get_title_series(name)

    def config(self, tracking):
        task = json.loads((self.session(tracking) / "task.json").read_text())
        return {name: one["value"] for name, one in task["hyperparams"]["General"].items()}

    def status(self, tracking):
        return self.config(tracking)["accmt.status"]
