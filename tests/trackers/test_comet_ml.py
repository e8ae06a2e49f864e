"""Comet, read back from the archives that `comet upload` takes."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from zipfile import ZipFile

from accmt import CometML
from accmt.tracking import Tracking
from tests.trackers.contract import TrackerContract


def archives(tracking: Tracking) -> list[ZipFile]:
    """Return the archives of all attempts; that of a killed one is empty."""
    paths = sorted((tracking.run_folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    return [archive for archive in map(ZipFile, paths) if "messages.json" in archive.namelist()]


def messages(tracking: Tracking, kind: str) -> Iterator[dict]:
    for archive in archives(tracking):
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            if message["type"] == kind:
                yield message["payload"]


class TestCometML(TrackerContract):
    kind = CometML
    switch = {"online": False}

    def points(self, tracking, name="loss"):
        metrics = [message["metric"] for message in messages(tracking, "metric_msg")]
        return sorted((one["step"], float(one["metricValue"])) for one in metrics if one["metricName"] == name)

    def config(self, tracking):
        parameters = [message["param"] for message in messages(tracking, "parameter_msg")]
        return {one["paramName"]: one["paramValue"] for one in parameters}

    def status(self, tracking):
        others = messages(tracking, "log_other")
        *_, status = (message["value"] for message in others if message["key"] == "accmt.status")
        return status

    def media(self, tracking, kind):
        uploads = [one for one in messages(tracking, "file_upload")]
        if kind == "images":
            names = [one["additional_params"]["figName"] for one in uploads if one["upload_type"] == "visualization"]
            return dict(Counter("one" if name == "one" else name.rpartition("/")[0] for name in names))
        assets = {one["additional_params"]["fileName"]: one for one in uploads if one["upload_type"] == "asset"}
        table = assets.pop("predictions/00000003.csv")
        if kind == "artifact":
            return {name.split("/")[0] for name in assets}
        (archive,) = archives(tracking)
        header, *rows = csv.reader(archive.read(table["file_path"]).decode().splitlines())
        assert header == ["text", "p"]
        return [[text, float(p) if p else None] for text, p in rows]

    def test_both_attempts_have_the_same_key(self, tmp_path):
        tracking = self.go_on(tmp_path, self.run_until_killed(tmp_path))
        (archive,) = archives(tracking)
        assert json.loads(archive.read("experiment.json"))["offline_id"] == tracking.run_ids["comet_ml"]
