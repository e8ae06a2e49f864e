"""DVCLive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accmt.addons.trackers.common import clean_path
from accmt.addons.trackers.delivery_state import Resume, Rewinding, Row
from accmt.addons.trackers.spec import RunStart, TrackerRun, TrackerSpec
from accmt.files import write_text
from accmt.tracking.values import Media


class DVCLive(TrackerSpec):
    """DVCLive: files in `<run folder>/dvclive`. Keywords are those of `dvclive.Live`.

    DVC experiments, `dvc.yaml` and reports are written only if you pass the keywords for them. A resumed run removes
    the points that a killed attempt logged after the checkpoint.
    """

    name = "dvclive"
    package = "dvclive"
    kwargs_of = "dvclive:Live"
    reserved = frozenset({"dir", "resume"})
    rewinding = Rewinding.WITHDRAWS

    def build(self, start: RunStart) -> TrackerRun:
        return DVCLiveRun(start.place.run_folder / "dvclive", start.resume, **start.kwargs)

    def clean_name(self, name: str) -> str:
        return clean_path(name)


class DVCLiveRun(TrackerRun):
    """Accelerate's DVCLive tracker, with the run's steps instead of a count of calls.

    Artifacts are not supported: DVCLive accepts them only in a DVC repository.
    """

    base = "accelerate.tracking:DVCLiveTracker"

    def __init__(self, folder: Path, resume: Resume, **options: Any) -> None:
        quiet = {"save_dvc_exp": False, "dvcyaml": None, "report": None}
        # Without `resume`, DVCLive deletes the contents of the folder.
        super().__init__(dir=str(folder), **{**quiet, **options, "resume": True})
        self._folder = folder
        self._first_step = resume.first_step

    def start(self) -> None:
        if self._first_step is not None:
            # Remove the points from that step on from DVCLive's tables, whose first column is the step.
            for path in self._folder.glob("plots/metrics/**/*.tsv"):
                header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                kept = (line for line in lines if int(line.split("\t")[0]) < self._first_step)
                write_text(path, "".join([header, *kept]))
        super().start()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows under their steps; the summary is written at the end, because its cost grows with the run."""
        for row in rows:
            self.live.step = row.step
            for name, value in row.values.items():
                self.live.log_metric(name, value)

    def add_images(self, media: Media) -> None:
        """Write `plots/images/<name>/<step>.png`, which DVC shows with a slider."""
        for name, image in media.images().items():
            self.live.log_image(f"{name}/{media.step}.png", image)

    def finish(self, status: str = "FINISHED") -> None:
        super().finish()
