"""DVCLive, read back from its files in the run folder."""

from __future__ import annotations

from collections import Counter

import yaml

from accmt import DVCLive
from accmt.tracking import read_history
from tests.trackers.contract import STATUSES, TrackerContract


class TestDVCLive(TrackerContract):
    kind = DVCLive
    replaces = True
    has_key_of_its_own = False
    kinds = ("images",)
    statuses = dict(zip(STATUSES, STATUSES, strict=True))

    def folder(self, tracking):
        return tracking.run_folder / "dvclive"

    def points(self, tracking, name="loss"):
        lines = (self.folder(tracking) / "plots" / "metrics" / f"{name}.tsv").read_text().splitlines()
        rows = [line.split("\t") for line in lines[1:]]
        return sorted((int(step), float(value)) for step, value in rows)

    def config(self, tracking):
        return yaml.safe_load((self.folder(tracking) / "params.yaml").read_text())

    def media(self, tracking, kind):
        folder = self.folder(tracking) / "plots" / "images"
        paths = [path.relative_to(folder) for path in folder.rglob("*.png")]
        assert {path.name for path in paths} == {"3.png"}
        return dict(Counter(str(path.parent).removesuffix("/0").removesuffix("/1") for path in paths))

    def status(self, tracking):
        """Return that of the history: DVCLive keeps none."""
        return read_history(tracking.run_folder)[-1]["status"]

    def test_keywords_are_those_of_live(self):
        assert {"save_dvc_exp", "report"} <= DVCLive().accepted_names()
        assert not {"dir", "resume"} & DVCLive().accepted_names()
