"""Trackio, read back from its own store."""

from __future__ import annotations

from collections import Counter

from accmt import Trackio
from accmt.tracking import Tracking
from tests.trackers.contract import TrackerContract


def project_of(tracking: Tracking) -> str:
    return tracking._place.track_name


class TestTrackio(TrackerContract):
    kind = Trackio
    has_key_of_its_own = False
    statuses = dict.fromkeys(("FINISHED", "FAILED", "KILLED", "PREEMPTED"))

    def rows(self, tracking):
        from trackio.sqlite_storage import SQLiteStorage

        return SQLiteStorage.get_logs(project_of(tracking), tracking.run_name, run_id=self.run_id(tracking))

    def points(self, tracking, name="loss"):
        return sorted((row["step"], float(row[name])) for row in self.rows(tracking) if name in row)

    def media(self, tracking, kind):
        from trackio.sqlite_storage import SQLiteStorage

        if kind == "artifact":
            artifacts = SQLiteStorage.get_run_artifacts(project_of(tracking), tracking.run_name, self.run_id(tracking))
            return {one["name"] for one in artifacts["output"]}
        values = {name: one for row in self.rows(tracking) for name, one in row.items() if isinstance(one, dict)}
        if kind == "table":
            return [list(row.values()) for row in values["predictions"]["_value"]]
        names = [name for name, one in values.items() if one["_type"] == "trackio.image"]
        return dict(Counter("one" if name == "one" else name.rpartition("/")[0] for name in names))

    def config(self, tracking):
        from trackio.sqlite_storage import SQLiteStorage

        return SQLiteStorage.get_run_config(project_of(tracking), tracking.run_name, run_id=self.run_id(tracking))

    def status(self, tracking):
        return None

    def doubled_by_a_kill(self):
        return 18
