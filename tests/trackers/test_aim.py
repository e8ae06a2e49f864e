"""Aim, read back by its own client, once the repository is indexed (as `aim up` does by itself)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from accmt import Aim
from tests.trackers.contract import TrackerContract

READ = """
import json, sys
from aim import Repo, Run
run = Run(run_hash=sys.argv[1], repo=sys.argv[2], read_only=True)
curves = {metric.name: metric.dataframe()[["step", "value"]].values.tolist() for metric in run.metrics()}
images = {
    images.name: len(steps[3][0]) if isinstance(steps[3][0], list) else 1
    for of_run in Repo(sys.argv[2]).query_images("", report_mode=0).iter_runs()
    for images in of_run
    for steps in [dict(images.data.items())]
}
print(json.dumps({"images": images, "curves": curves, "hparams": run["hparams"], "status": run["accmt.status"]}))
"""


class TestAim(TrackerContract):
    kind = Aim
    replaces = True
    has_key_of_its_own = False
    kinds = ("images",)

    def read(self, tracking):
        if getattr(tracking, "read_back", None) is None:
            tracking.read_back = self.read_back(tracking)
        return tracking.read_back

    def read_back(self, tracking):
        repository = str(tracking.run_folder.parents[1])
        index = [str(Path(sys.executable).with_name("aim")), "storage", "--repo", repository, "reindex", "-y"]
        subprocess.run(index, check=True, capture_output=True)
        script = [sys.executable, "-W", "ignore", "-c", READ, self.run_id(tracking), repository]
        return json.loads(subprocess.run(script, check=True, capture_output=True, text=True).stdout)

    def points(self, tracking, name="loss"):
        return sorted((int(step), value) for step, value in self.read(tracking)["curves"][name])

    def config(self, tracking):
        return self.read(tracking)["hparams"]

    def media(self, tracking, kind):
        return self.read(tracking)[kind]

    def status(self, tracking):
        return self.read(tracking)["status"]
