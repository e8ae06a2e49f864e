"""DVCLive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accmt.files import write_text
from accmt.tracking.media import Media
from accmt.tracking.replay import Resume, Rewinding, Row
from accmt.tracking.spec import RunStart, TrackerRun, TrackerSpec
from accmt.tracking.values import clean_path


class DVCLive(TrackerSpec):
    """DVCLive: files in `<run folder>/dvclive`. Keywords are those of `dvclive.Live`.

    No DVC experiment is saved, and no `dvc.yaml` or report written, unless keywords ask for it. A resumed run takes the
    points that a killed attempt logged after the checkpoint out of the files.
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
    """Accelerate's DVCLive tracker, with the run's own steps instead of a count of the calls.

    It has no place for artifacts: DVCLive takes those in a DVC repository only.
    """

    base = "accelerate.tracking:DVCLiveTracker"

    def __init__(self, folder: Path, resume: Resume, **options: Any) -> None:
        quiet = {"save_dvc_exp": False, "dvcyaml": None, "report": None}
        # Without `resume` DVCLive empties the folder, which is this run's own.
        super().__init__(dir=str(folder), **{**quiet, **options, "resume": True})
        self._folder = folder
        self._first_step = resume.first_step

    def start(self) -> None:
        if self._first_step is not None:
            for path in self._folder.glob("plots/metrics/**/*.tsv"):
                _withdraw(path, self._first_step)
        super().start()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows under their own steps; the summary, which takes as long as the run was, is left to the end."""
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


def _withdraw(path: Path, first_step: int) -> None:
    """Take the points from `first_step` on out of one of DVCLive's tables, which have the step in front."""
    header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    write_text(path, "".join([header, *(line for line in lines if int(line.split("\t")[0]) < first_step)]))
