"""ClearML, read back from its offline sessions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil

from accmt import ClearML
from tests.toys import Linear, make_points, make_trainer
from tests.trackers.conftest import LEFT_BY_CLEARML
from tests.trackers.contract import TrackerContract
from tests.trackers.killed import make

CONFIGURATION = """
api {
    api_server: http://localhost:8008
    credentials { access_key: "a key", secret_key: "a secret" }
}
"""


class TestClearML(TrackerContract):
    kind = ClearML
    keeps_nan = False
    switch = {"CLEARML_OFFLINE_MODE": "1"}
    leaves = frozenset({"CLEARML_OFFLINE_MODE", *LEFT_BY_CLEARML})
    replaces = True  # for the second session has no points of the first

    def session(self, tracking):
        return Path(os.environ["CLEARML_CACHE_DIR"]) / "offline" / self.run_id(tracking)

    def left_for_upload(self, tracking, named):
        assert named == "<the zip file named at the end of the run>"
        return f"{self.session(tracking)}.zip"

    def events(self, tracking):
        lines = (self.session(tracking) / "metrics.jsonl").read_text().splitlines()
        return [event for line in lines for event in json.loads(line)]

    def points(self, tracking, name="loss"):
        own = self.title_and_series(name)
        events = [one for one in self.events(tracking) if (one.get("metric"), one.get("variant")) == own]
        return sorted((one["iter"], float(one["value"])) for one in events)

    def media(self, tracking, kind):
        if kind == "artifact":
            artifacts = {one["key"]: Path(one["uri"]) for one in self.task(tracking)["execution"]["artifacts"]}
            assert artifacts["plots"].suffix == ".zip"
            return set(artifacts)
        events = [one for one in self.events(tracking) if one.get("iter") == 3]
        if kind == "images":
            images = [one for one in events if one["type"] == "training_debug_image"]
            assert {Path(one["url"]).suffix for one in images} == {".jpeg"}
            return dict(Counter(one["metric"] for one in images))
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

    def test_no_process_is_forked_and_the_repository_is_looked_at_before_training(self, tmp_path):
        tracking = make(self.kind, tmp_path)
        children = psutil.Process().children()
        tracking.start({})
        assert psutil.Process().children() == children
        assert not [thread for thread in threading.enumerate() if "_update_repository" in thread.name]
        tracking.finish("FINISHED")

    def test_a_run_with_workers_reaches_its_end(self, tmp_path):
        trainer = make_trainer(
            model_path=str(tmp_path / "model"), log_with=self.kind, logging_dir=tmp_path, dataloader_num_workers=2
        )
        trainer.fit(Linear(), make_points(8), make_points(4))
        assert self.status(trainer.run.tracking) == "FINISHED"

    def test_a_key_in_clearmls_own_file_is_found(self, tmp_path):
        (tmp_path / "clearml.conf").write_text(CONFIGURATION)
        script = "import sys; from accmt import ClearML; sys.exit(not ClearML().has_key({}))"
        root = Path(__file__).parents[2]
        for file, found in (("clearml.conf", True), ("no.conf", False)):
            environment = {**os.environ, "CLEARML_CONFIG_FILE": str(tmp_path / file)}
            run = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, timeout=60, check=False)
            assert (run.returncode == 0) is found
