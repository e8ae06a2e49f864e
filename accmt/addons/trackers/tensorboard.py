"""TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from accmt.addons.trackers.delivery_state import Rewinding, Row
from accmt.addons.trackers.spec import RunStart, TrackerRun, TrackerSpec
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media, Scalar

_POLL_S = 0.02


class TensorBoard(TrackerSpec):
    """TensorBoard: event files in the run folder. Keywords are those of `torch.utils.tensorboard.SummaryWriter`.

    A resumed run writes another event file, which removes the points that a killed attempt logged after the
    checkpoint.
    """

    name = "tensorboard"
    package = "tensorboard"
    kwargs_of = "torch.utils.tensorboard:SummaryWriter"
    reserved = frozenset({"log_dir"})
    rewinding = Rewinding.WITHDRAWS

    def build(self, start: RunStart) -> TrackerRun:
        folder, options = start.place.run_folder, {"purge_step": start.resume.first_step, **start.kwargs}
        # Event files are read in the order of their names, which contain the time in seconds, and then numbers that are
        # compared as strings: "10" comes before "9". If two attempts started in the same second, the purge of the
        # earlier one could be read last, and remove the rows of the later one.
        # Source: `EventFileWriter.__init__` in tensorboard/summary/writer/event_file_writer.py.
        while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(_POLL_S)
        return TensorBoardRun(run_name=folder.name, logging_dir=folder.parent, **options)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        return ["tensorboard", "--logdir", str(place.base_folder)]


class TensorBoardRun(TrackerRun):
    """Accelerate's TensorBoard tracker, with the configuration in the same event file as the run."""

    base = "accelerate.tracking:TensorBoardTracker"

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Write `values` so that TensorBoard's HPARAMS page shows them together with the run's scalars.

        `SummaryWriter.add_hparams`, which Accelerate calls, would create a second run named after the time, and also
        record that there are no metrics and that the run succeeded.
        """
        from torch.utils.tensorboard.summary import hparams

        _, start_of_session, _ = hparams(values, {})  # type: ignore[no-untyped-call]
        self.writer.file_writer.add_summary(start_of_session)
        self.writer.flush()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows with their timestamps, and flush them to the operating system."""
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
