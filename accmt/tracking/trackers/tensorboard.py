"""TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accmt.tracking.media import Media
from accmt.tracking.replay import Rewinding, Row
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.spec import RunStart, TrackerRun, TrackerSpec
from accmt.tracking.values import Scalar


class TensorBoard(TrackerSpec):
    """TensorBoard: event files in the run folder. Keywords are those of `torch.utils.tensorboard.SummaryWriter`.

    A resumed run writes a further event file, which withdraws the points that a killed attempt logged after the
    checkpoint.
    """

    name = "tensorboard"
    package = "tensorboard"
    kwargs_of = "torch.utils.tensorboard:SummaryWriter"
    reserved = frozenset({"log_dir"})
    rewinding = Rewinding.WITHDRAWS

    def build(self, start: RunStart) -> TrackerRun:
        folder, options = start.place.run_folder, {"purge_step": start.resume.first_step, **start.kwargs}
        return TensorBoardRun(run_name=folder.name, logging_dir=folder.parent, **options)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        return ["tensorboard", "--logdir", str(place.base_folder)]


class TensorBoardRun(TrackerRun):
    """Accelerate's TensorBoard tracker, which keeps the configuration in the run's own event file."""

    base = "accelerate.tracking:TensorBoardTracker"

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Write `values` where TensorBoard's HPARAMS page finds them together with the run's scalars.

        `SummaryWriter.add_hparams`, which Accelerate calls, opens a second run for them, named by the time of day, and
        writes beside them that there are no metrics, and that the run succeeded.
        """
        from torch.utils.tensorboard.summary import hparams

        _, start_of_session, _ = hparams(values, {})  # type: ignore[no-untyped-call]
        self.writer.file_writer.add_summary(start_of_session)
        self.writer.flush()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows with the times when they were logged, and hand them to the operating system."""
        for row in rows:
            for name, value in row.values.items():
                self.writer.add_scalar(name, value, global_step=row.step, walltime=row.time)
        self.writer.flush()

    def add_images(self, media: Media) -> None:
        for name, image in media.images().items():
            layout = "HW" if image.mode == "L" else "HWC"
            self.writer.add_image(name, np.asarray(image), media.step, media.time, dataformats=layout)
        self.writer.flush()

    def finish(self, status: str = "FINISHED") -> None:
        super().finish()
