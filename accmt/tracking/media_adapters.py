"""What each tracker does with images, tables and artifacts; one that lacks a method here has no place for them.

Only used by the classes of runs, each of which has one of these among its bases.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from accmt.tracking.media import Media

STEP = "global_step"
"""The axis of wandb's charts."""


class TensorBoardMedia:
    """Images: TensorBoard has nothing else."""

    writer: Any

    def add_images(self, media: Media) -> None:
        """Write images, and hand them to the operating system."""
        for name, image in media.images().items():
            layout = "HW" if image.mode == "L" else "HWC"
            self.writer.add_image(name, np.asarray(image), media.step, media.time, dataformats=layout)
        self.writer.flush()


class MLFlowMedia:
    """All kinds, as artifacts; one that is handed over twice is there once."""

    tracking_uri: str
    run_id: Any

    def add_images(self, media: Media) -> None:
        """Log images where MLflow's page shows them over steps."""
        client, milliseconds = self._client(), round(1000 * media.time)
        there = [file.path for file in client.list_artifacts(self.run_id, "images")]
        for name, image in media.images().items():
            key = re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", name)
            # As MLflow begins the name of the file that it writes last; a random part follows.
            written = f"images/{key.replace('/', '~')}+step+{media.step}+timestamp+{milliseconds}+"
            if not any(path.startswith(written) and path.endswith(".webp") for path in there):
                client.log_image(self.run_id, image, key=key, step=media.step, timestamp=milliseconds, synchronous=True)

    def add_table(self, media: Media) -> None:
        """Log a table at `tables/<name>/<step>.json`."""
        client, folder = self._client(), f"tables/{media.folder.parent.name}"
        path = f"{folder}/{media.folder.name}.json"
        if path in [file.path for file in client.list_artifacts(self.run_id, folder)]:
            return  # else MLflow would add the rows once more
        columns, rows = media.table()
        client.log_table(self.run_id, {title: [row[i] for row in rows] for i, title in enumerate(columns)}, path)

    def add_artifact(self, media: Media) -> None:
        """Log a file, or the files of a folder under its name."""
        if media.path.is_dir():
            self._client().log_artifacts(self.run_id, str(media.path), media.name)
        else:
            self._client().log_artifact(self.run_id, str(media.path))

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)


class WandBMedia:
    """All kinds."""

    run: Any

    def add_images(self, media: Media) -> None:
        """Log images as one panel."""
        from wandb import Image

        self._log(media, [Image(image) for image in media.images().values()])

    def add_table(self, media: Media) -> None:
        """Log a table."""
        from wandb import Table

        columns, rows = media.table()
        self._log(media, Table(columns=columns, data=rows, allow_mixed_types=True))

    def add_artifact(self, media: Media) -> None:
        """Log a file or folder as a version of the artifact of its name."""
        from wandb import Artifact

        artifact = Artifact(_clean_file_name(media.name), type="file")
        if media.path.is_dir():
            artifact.add_dir(str(media.path))
        else:
            artifact.add_file(str(media.path), name=media.name)
        self.run.log_artifact(artifact)

    def _log(self, media: Media, value: Any) -> None:
        self.run.log({media.name: value, STEP: media.step, "_timestamp": media.time})


class CometMLMedia:
    """All kinds; a table is a CSV file."""

    writer: Any
    is_offline: bool

    def add_images(self, media: Media) -> None:
        """Log images."""
        for name, image in media.images().items():
            self.writer.log_image(image, name=name, step=media.step)
        self.flush()

    def add_table(self, media: Media) -> None:
        """Log a table as `<name>/<step>.csv`."""
        columns, rows = media.table()
        self.writer.log_table(f"{media.name}/{media.folder.name}.csv", tabular_data=rows, headers=columns)
        self.flush()

    def add_artifact(self, media: Media) -> None:
        """Log a file, or the files of a folder, as assets."""
        if media.path.is_dir():
            self.writer.log_asset_folder(str(media.path), step=media.step, log_file_name=True, recursive=True)
        else:
            self.writer.log_asset(str(media.path), file_name=media.name, step=media.step)
        self.flush()

    def flush(self) -> None:
        """Wait until a service has everything.

        Raises:
            TimeoutError: It does not take it in time.
        """
        if not self.is_offline and not self.writer.flush():
            message = "Comet did not take the rows in time"
            raise TimeoutError(message)


class ClearMLMedia:
    """All kinds; a folder is a zip file."""

    task: Any

    def add_images(self, media: Media) -> None:
        """Report images as debug samples."""
        for name, image in media.images().items():
            series = name.removeprefix(f"{media.name}/")
            self.task.get_logger().report_image(media.name, series, iteration=media.step, image=image)

    def add_table(self, media: Media) -> None:
        """Report a table as a plot."""
        columns, rows = media.table()
        content = [columns, *rows]
        self.task.get_logger().report_table(media.name, media.name, iteration=media.step, table_plot=content)

    def add_artifact(self, media: Media) -> None:
        """Upload a file or a folder, which replaces one of the same name."""
        self.task.upload_artifact(media.name, artifact_object=str(media.path), wait_on_upload=True)


class AimMedia:
    """Images: Aim keeps files in a storage of its own only, which a user has to name."""

    writer: Any

    def add_images(self, media: Media) -> None:
        """Log images as one sequence."""
        from aim import Image

        images = [Image(image) for image in media.images().values()]
        self.writer.track(images, name=media.name, step=media.step)


class DVCLiveMedia:
    """Images: DVCLive takes artifacts in a DVC repository only."""

    live: Any

    def add_images(self, media: Media) -> None:
        """Write `plots/images/<name>/<step>.png`, which DVC shows with a slider."""
        for name, image in media.images().items():
            self.live.log_image(f"{name}/{media.step}.png", image)


class TrackioMedia:
    """All kinds."""

    run: Any

    def add_images(self, media: Media) -> None:
        """Log images."""
        from trackio import Image

        self.run.log({name: Image(image) for name, image in media.images().items()}, step=media.step)

    def add_table(self, media: Media) -> None:
        """Log a table."""
        from trackio import Table

        columns, rows = media.table()
        self.run.log({media.name: Table(columns=columns, data=rows, allow_mixed_types=True)}, step=media.step)

    def add_artifact(self, media: Media) -> None:
        """Log a file or folder as a version of the artifact of its name."""
        self.run.log_artifact(media.path, name=_clean_file_name(media.name), type="file")


class SwanLabMedia:
    """Images."""

    run: Any

    def add_images(self, media: Media) -> None:
        """Log images as one chart."""
        from swanlab import Image

        self.run.log({media.name: [Image(image) for image in media.images().values()]}, step=media.step)


def _clean_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
