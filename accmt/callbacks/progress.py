"""A progress bar that reads the clock once per step; without a terminal, occasional plain lines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Protocol, TextIO, TypeGuard, TypeVar

from accmt.callbacks.callback import MainProcessCallback
from accmt.messages import say

T = TypeVar("T")

SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = (10.0, 20.0, 60.0)
"""Seconds before the first, the second and each further line."""
SHARE_OF_LAST_RATE = 0.3
BAR_WIDTH = 20


def is_notebook() -> bool:
    """Return whether this process runs a notebook; IPython is never imported for this."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_shell()).__mro__)


class _Display(Protocol):
    """Displays progress as a bar or as lines."""

    def wait_s(self) -> float:
        """Return the seconds until the next drawing, and count this one."""

    def draw(self, step: int, stage: str, values: list[str]) -> None: ...


class ProgressBar(MainProcessCallback):
    """Shows epoch, step, time left, loss, the best value and where it was saved, lr, speed and the latest evaluation.

    Without a terminal, such as in the log of a cluster job, the same values are logged as a line after 10 seconds,
    after 30, and then once a minute.

    Args:
        enable: True always draws a bar, False shows nothing, None draws a bar if the stream is a terminal.
        loss_name: The name of the training loss in the logged rows.
        stream: The output of the bar; None means stderr.

    Processes: main only.
    """

    def __init__(
        self, *, enable: bool | None = None, loss_name: str = "train_loss", stream: TextIO | None = None
    ) -> None:
        self._enable = enable
        self._loss_name = loss_name
        self._stream = stream
        self._display: _Display | None = None
        self._next_drawing = math.inf
        self._shown: dict[str, float] = {}
        self._rates = _Rates()
        self._total_validation: int | None = None

    def show(self, values: Mapping[str, float]) -> None:
        """Add values to the right of the bar; they appear at the next drawing and stay until replaced."""
        self._shown.update(values)

    def on_fit_start(self) -> None:
        if self._enable is False:  # a bar that was never started ignores all other hooks
            return
        self._shown.clear()
        self._rates = _Rates()
        stream = self._stream or sys.stderr
        total = self.trainer.estimated_stepping_batches
        planned = int(total) if math.isfinite(total) else None
        if _is_drawn(stream, self._enable):
            self._display = _Bar(stream, planned, self.state.global_step, self._epoch())
        else:
            self._display = _Lines(planned)
        self._restart_clock()

    def on_update_end(self) -> None:
        if perf_counter() >= self._next_drawing:
            self._draw(self._epoch())

    def on_log(self, values: Mapping[str, float]) -> None:
        loss = values.get(self._loss_name)
        if loss is not None:
            self._shown["loss"] = loss

    def on_evaluation_start(self) -> None:
        if self._display is not None and self.trainer.run.val_loaders:
            self._total_validation = 0
            for loader in self.trainer.run.val_loaders.values():
                size = loader.source.num_micro_batches
                if size is None:  # a stream: then the total is unknown, too
                    self._total_validation = None
                    break
                self._total_validation += size
            if isinstance(self._display, _Bar):
                self._draw_evaluation()

    def on_after_validation_step(self) -> None:
        if perf_counter() >= self._next_drawing:
            self._draw_evaluation()

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        self.show(metrics)
        self._restart_clock()

    def on_fit_end(self) -> None:
        if isinstance(self._display, _Bar):
            self._draw(self._epoch(is_over=self.state.finished))
            self._display.close()
        self._display, self._next_drawing = None, math.inf

    def _epoch(self, *, is_over: bool = False) -> str:
        stage = f"epoch {self.state.epoch + (not is_over)}"
        if self.trainer.run.cadence.epochs is not None:
            stage += f"/{self.trainer.run.cadence.epochs}"
        return stage

    def _draw_evaluation(self) -> None:
        stage = f"evaluating {self.state.val_step}"
        if self._total_validation is not None:
            stage += f"/{self._total_validation}"
        self._draw(stage, is_training=False)

    def _draw(self, stage: str, *, is_training: bool = True) -> None:
        if self._display is None:
            return
        self._next_drawing = perf_counter() + self._display.wait_s()
        if is_training:
            self._rates.measure(self.state.samples_seen)
        self._display.draw(self.state.global_step, stage, self._values())

    def _values(self) -> list[str]:
        """Return the values to show, most important first; those that do not fit are omitted."""
        values: dict[str, float] = {}
        groups = getattr(self.module.optimizer, "param_groups", None)
        if groups:  # a user's optimizer may have none, or not exist yet
            values["lr"] = float(groups[0]["lr"])
        if self._rates.samples_per_s is not None and "tokens_per_s" not in self._shown:
            values["samples/s"] = self._rates.samples_per_s
        values |= self._shown
        texts = {name: f"{name} {value:.4g}" for name, value in values.items()}
        for name, value in list(self.state.best.items())[:1]:
            texts["best"] = f"best {name.removeprefix('best_')} {value:.4g}"
            step = self.trainer.run.saver.selection.saved_at(name)
            if step is not None:
                texts["best"] += f" saved at {step:,}"
        important = [texts.pop(name) for name in ("loss", "best", "lr", "samples/s", "tokens_per_s") if name in texts]
        return important + list(texts.values())

    def _restart_clock(self) -> None:
        """Exclude the time of an evaluation from the training rate."""
        self._rates.restart(self.state.samples_seen)
        if isinstance(self._display, _Bar):
            self._next_drawing = perf_counter()
        elif self._display is not None and self._next_drawing == math.inf:  # lines keep their interval
            self._next_drawing = perf_counter() + self._display.wait_s()


class _Rates:
    """A moving average of samples per second."""

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self._last_time, self._last_samples = 0.0, 0

    def restart(self, samples: int) -> None:
        self._last_time, self._last_samples = perf_counter(), samples

    def measure(self, samples: int) -> None:
        time, num_samples = perf_counter(), samples - self._last_samples
        if num_samples <= 0 or time <= self._last_time:  # drawn twice within a step, or a clock with coarse ticks
            return
        rate = num_samples / (time - self._last_time)
        before = rate if self.samples_per_s is None else self.samples_per_s
        self.samples_per_s = SHARE_OF_LAST_RATE * rate + (1 - SHARE_OF_LAST_RATE) * before
        self._last_time, self._last_samples = time, samples


class _Bar:
    """One line in the terminal, with as many values as fit."""

    def __init__(self, stream: TextIO, total: int | None, initial: int, stage: str) -> None:
        progress = f"{{bar:{BAR_WIDTH}}} {{n_fmt}}/{{total_fmt}} {{elapsed}}<{{remaining}}"
        if total is None:
            progress = "{n_fmt} steps {elapsed}"
        encoding = getattr(stream, "encoding", None) or "ascii"  # a program may replace stderr by an object that writes
        colour = None  # NO_COLOR: the convention of https://no-color.org
        if stream is sys.stderr and stream.isatty() and "NO_COLOR" not in os.environ:
            colour = "green"
        self._bar = _bar_class()(
            desc=stage,
            total=total,
            initial=initial,
            file=_Tolerant(stream),
            bar_format=f"{{desc}} {progress}{{values}}",
            ascii=" ╸━" if encoding.lower().startswith("utf") else " -#",
            colour=colour,
            dynamic_ncols=True,
            mininterval=0,
            miniters=0,
        )

    def wait_s(self) -> float:
        return SECONDS_BETWEEN_DRAWINGS

    def draw(self, step: int, stage: str, values: list[str]) -> None:
        self._bar.set_description_str(stage, refresh=False)
        self._bar.n, self._bar.values = step, values
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """Log lines that replace the bar without a terminal."""

    def __init__(self, total: int | None) -> None:
        self._of_total = ""
        if total is not None:
            self._of_total = f" of {total:,}"
        self._waits = iter(SECONDS_BETWEEN_LINES)

    def wait_s(self) -> float:
        return next(self._waits, SECONDS_BETWEEN_LINES[-1])

    def draw(self, step: int, stage: str, values: list[str]) -> None:
        say(f"step {step:,}{self._of_total}, {stage}: " + ", ".join(values))


def draw_batches(
    batches: Iterable[T],
    *,
    enable: bool | None,
    text: str,
    total: int | None,
    stream: TextIO | None = None,
    count: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """Iterate over the batches of an evaluation with a progress bar.

    Args:
        batches: The batches.
        enable: True always draws, False never does; None draws if the stream is a terminal.
        text: The text before the bar.
        total: The number of batches; None if unknown.
        stream: See `ProgressBar`.
        count: Returns how many batches an item counts for.
    """
    stream = stream or sys.stderr
    if not _is_drawn(stream, enable):
        return iter(batches)
    interval = SECONDS_BETWEEN_DRAWINGS
    file = _Tolerant(stream)
    bar = _bar_class()(desc=text, total=total, file=file, unit=" batches", dynamic_ncols=True, mininterval=interval)
    return _drawn(batches, bar, count)


def _drawn(batches: Iterable[T], bar: Any, count: Callable[[T], int]) -> Iterator[T]:
    with bar:
        for batch in batches:
            yield batch
            bar.update(count(batch))


def _is_drawn(stream: TextIO | None, enable: bool | None) -> TypeGuard[TextIO]:  # noqa: FBT001 - None is a third answer
    if stream is None or stream.closed:  # stderr of a windowless program, or of a daemon
        return False
    if enable is None:
        return stream.isatty()
    return enable


class _Tolerant:
    """A stream whose errors are ignored, because the terminal or pipe may be closed during a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def _bar_class() -> Any:
    from tqdm.std import tqdm
    from tqdm.utils import disp_len

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no redrawing thread: we redraw ourselves
        values: Sequence[str] = ()

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            """The fields of `bar_format`, with as many `values` as fit in the line."""
            fields = {**super().format_dict, "values": ""}
            columns = fields["ncols"] or sys.maxsize
            width = disp_len(self.format_meter(**fields)) if self.values else 0
            for value in self.values:
                if width + len(value) + 2 <= columns:
                    width += len(value) + 2
                    fields["values"] += f"  {value}"
            return fields

    return Bar
