"""What a module logs besides its losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

from accmt.errors import ArgumentError, ModuleContractError, explain, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from accmt.metrics.logged import LoggedValues
    from accmt.state import TrainingState
    from accmt.tracking.media import MediaLog


_OF_LIGHTNING: Mapping[str, str] = {
    "add_dataloader_idx": "leave it out: the name of the validation set is added where there are several",
    "batch_size": 'return {"loss": loss, "weight": weight}, or define get_batch_size',
    "enable_graph": "leave it out: no graph is kept",
    "metric_attribute": "leave it out: metrics are the Trainer's, Trainer(metrics=[...])",
    "on_epoch": "leave it out: Trainer(log_every=-1) makes one row of each epoch",
    "on_step": "leave it out: Trainer(log_every=10) says when there is a row, and instant=True makes one now",
    "rank_zero_only": "leave it out: a value may be logged on some processes only",
    "reduce_fx": 'write reduction="sum", or leave it out for the mean',
    "sync_dist": "leave it out: values are means over all processes",
    "sync_dist_group": "leave it out: values are means over all processes",
}
_KEYWORDS = ("value", "step", "reduction", "instant", "prog_bar", "logger")


def _reject_keywords(name: Any, others: Mapping[str, Any]) -> None:
    for keyword in others:
        where, expected = f"log({name!r}, {keyword}=...)", f"a keyword of log: {', '.join(_KEYWORDS)}"
        is_known = keyword in _OF_LIGHTNING
        got = "a keyword of Lightning's log" if is_known else "a keyword that log does not have"
        do = _OF_LIGHTNING.get(keyword) or f"did you mean {nearest(keyword, _KEYWORDS, cutoff=0)}?"
        raise ArgumentError(explain(where, got, expected, do))


class Logs(Protocol):
    """Where a run puts what its module logs."""

    of_training: LoggedValues
    of_evaluation: LoggedValues
    shown: dict[str, float]
    logged: dict[str, float]

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Any,
        step: int | None,
        reduction: str,
        *,
        instant: bool,
        prog_bar: bool,
        logger: bool,
    ) -> None: ...
    def media(self, method: str) -> MediaLog | None: ...
    def of_bar(self, row: Mapping[str, float]) -> dict[str, float]: ...
    def of_trackers(self, row: Mapping[str, float]) -> dict[str, float]: ...


class LogsValues:
    """The part of `AcceleratorModule` that logs.

    Attributes:
        logs: During a run: what was logged, and the newest rows.
    """

    logs: Logs
    state: TrainingState

    def log(
        self,
        name: str | Mapping[str, float | Tensor],
        value: float | Tensor | None = None,
        step: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        *,
        instant: bool = False,
        prog_bar: bool = False,
        logger: bool = True,
        **others: Any,
    ) -> None:
        """Log a value: in training it comes with the next row, in evaluation with its results.

        It is averaged over the batches that logged it, on all processes, each with the weight of its batch. It may be
        logged in some batches or on some processes only. Nothing waits for the device, and no graph is kept.

        Args:
            name: Its name; or values by name, and no `value`.
            value: A number, or a tensor of one element; it stays as it is.
            step: The step of the row, where `instant`; None is the number of optimizer steps.
            reduction: "mean", or "sum" for the sum over batches and processes, whatever they weigh.
            instant: Whether this process makes a row of its own of the value, now. That waits for the device.
            prog_bar: Whether the progress bar shows it.
            logger: Whether trackers and `history.jsonl` get it.
            **others: None; for those of Lightning's `log` the error says what to write here.

        Raises:
            ModuleContractError: The value is not one number, the name is taken, or nothing is running.
            ArgumentError: There is no such reduction or keyword, or a `step` without `instant`.
        """
        _reject_keywords(name, others)
        self._require_run(f"log({name!r}, ...)")
        self.logs.log(name, value, step, reduction, instant=instant, prog_bar=prog_bar, logger=logger)

    def log_dict(self, values: Mapping[str, float | Tensor], **options: Any) -> None:
        """Log several values.

        Args:
            values: Values by name.
            **options: As for `log`.
        """
        self.log(values, **options)

    def log_images(self, images: Mapping[str, Any], step: int | None = None) -> None:
        """Log images: they are written into the run folder, and trackers that show images get them from there.

        Shapes: tensors `[images, channels, height, width]`, NumPy arrays `[images, height, width, channels]`, with 1, 3
        or 4 channels or without that dimension; one image without the first.

        Args:
            images: By name: a tensor, an array, an image of Pillow, or a list of such images, which may differ in
                size. Bytes (uint8), or floats from 0 to 1; what is outside is cut off, with a warning.
            step: The optimizer step that they belong to; None is the number of optimizer steps.

        Raises:
            ArgumentError: A shape, a type or a name is wrong.
            MissingPackageError: Pillow is not installed.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_images")
        if media is not None:
            media.log_images(images, self._step(step))

    def log_table(
        self, name: str, columns: Sequence[str], data: Iterable[Iterable[Any]], step: int | None = None
    ) -> None:
        """Log a table, which goes where images do.

        Args:
            name: Its name.
            columns: The names of the columns.
            data: The rows: strings, numbers, bools or None; other values are logged as text.
            step: As in `log_images`.

        Raises:
            ArgumentError: A row does not fit the columns, or a name is wrong.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_table")
        if media is not None:
            media.log_table(name, columns, data, self._step(step))

    def log_artifact(self, path: str | PathLike[str], step: int | None = None) -> None:
        """Log a copy of a file, which goes where images do.

        Args:
            path: The file; it may change or go afterwards.
            step: As in `log_images`.

        Raises:
            ArgumentError: It is not there, or a folder.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_artifact")
        if media is not None:
            media.log_artifact(path, self._step(step))

    def log_artifacts(self, folder: str | PathLike[str], step: int | None = None) -> None:
        """Log copies of all files of a folder, under the folder's name.

        Args:
            folder: The folder.
            step: As in `log_images`.

        Raises:
            ArgumentError: It is not there, a file, or one that the run folder lies in.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_artifacts")
        if media is not None:
            media.log_artifacts(folder, self._step(step))

    def _step(self, step: int | None) -> int:
        return self.state.global_step if step is None else step

    def _media(self, method: str) -> MediaLog | None:
        self._require_run(method)
        return self.logs.media(method)

    def _require_run(self, where: str) -> None:
        if "logs" not in self.__dict__:
            raise ModuleContractError(explain(where, "no run", "a call during a run", "log in a step"))
