"""ClearML, read back from its offline sessions."""

from __future__ import annotations

import json
import os
from collections import Counter
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

    def events(self, tracking):
        lines = (self.session(tracking) / "metrics.jsonl").read_text().splitlines()
        return [event for line in lines for event in json.loads(line)]

    def points(self, tracking, name="loss"):
        own = self.title_and_series(name)
        events = [one for one in self.events(tracking) if (one.get("metric"), one.get("variant")) == own]
        return sorted((one["iter"], float(one["value"])) for one in events)

    def media(self, tracking, kind):
        if kind == "artifact":
            return {one["key"] for one in self.task(tracking)["execution"]["artifacts"]}
        events = [one for one in self.events(tracking) if one.get("iter") == 3]
        if kind == "images":
            return dict(Counter(one["metric"] for one in events if one["type"] == "training_debug_image"))
        (plot,) = (json.loads(one["plot_str"]) for one in events if one["type"] == "plot")
        cells = plot["data"][0]["cells"]["values"]
        return [list(row) for row in zip(*cells, strict=True)]

    def task(self, tracking):
        return json.loads((self.session(tracking) / "task.json").read_text())

    def title_and_series(self, name):
        from accelerate.tracking import ClearMLTracker

        return ClearMLTracker._get_title_series(name)

    def config(self, tracking):
        return {name: one["value"] for name, one in self.task(tracking)["hyperparams"]["General"].items()}

    def status(self, tracking):
        return self.config(tracking)["accmt.status"]
