"""A tracker: one line of text for each row."""

from pathlib import Path

from accelerate.tracking import GeneralTracker, on_main_process


class TextFile(GeneralTracker):
    """Any tracker of Accelerate will do; a `TrackerSpec` of `accmt.addons.trackers` can say more."""

    name = "text_file"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self._path = Path(logging_dir) / "rows.txt"

    @property
    def tracker(self) -> Path:
        return self._path

    @on_main_process
    def log(self, values: dict, step: int | None = None, **_: object) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {' '.join(sorted(values))}\n")
