"""Aim."""

from __future__ import annotations

from collections.abc import Sequence

from accmt.addons.trackers.common import STATUS
from accmt.addons.trackers.delivery_state import Rewinding, Row
from accmt.addons.trackers.spec import RunStart, TrackerRun, TrackerSpec
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media


class Aim(TrackerSpec):
    """Aim: experiment `track_name`, run `run_name`, in `<logging_dir>/.aim`. Keywords are those of `aim.Run`.

    A resumed run continues the same Aim run, and replaces the points that a killed attempt logged after the
    checkpoint. Terminal output is captured only with `capture_terminal_logs=True`.
    """

    name = "aim"
    is_exclusive = True
    package = "aim"
    kwargs_of = "aim:Run"
    reserved = frozenset({"run_hash", "experiment", "read_only"})
    rewinding = Rewinding.WITHDRAWS  # Aim keeps one point for each step: the last

    def build(self, start: RunStart) -> TrackerRun:
        return AimRun(start)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        return ["aim", "up", "--repo", str(place.base_folder)]


class AimRun(TrackerRun):
    """A run in an Aim repository. Artifacts are not supported: Aim needs a separate storage for them."""

    base = "accelerate.tracking:AimTracker"

    def __init__(self, start: RunStart) -> None:
        options = {"capture_terminal_logs": False, **start.kwargs}
        repository = options.pop("repo", str(start.place.base_folder))
        names = {"run_hash": start.resume.run_id, "experiment": start.place.track_name}
        super().__init__(start.place.run_name, repository, **options, **names)
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.writer.hash)

    def start(self) -> None:
        super().start()
        for name, value in self._tags.items():
            self.writer[name] = value

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; a point replaces the one with the same name and step."""
        for row in rows:
            self.log(row.values, step=row.step)

    def add_images(self, media: Media) -> None:
        from aim import Image

        images = [Image(image) for image in media.images().values()]
        self.writer.track(images, name=media.name, step=media.step)

    def finish(self, status: str = "FINISHED") -> None:
        """Store the status as a parameter, because Aim has no status, and close the run."""
        self.writer[STATUS] = status
        super().finish()
