"""A progress bar that costs a look at the clock per step, and draws at most ten times a second."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, TextIO, TypeVar

from accmt.callbacks.base import MainProcessCallback

T = TypeVar("T")

SECONDS_BETWEEN_DRAWINGS = 0.1
SHARE_OF_LAST_RATE = 0.3


def is_notebook() -> bool:
    """Return whether this process serves a notebook; IPython is asked only where it is loaded already."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_shell()).__mro__)


class ProgressBar(MainProcessCallback):
    """Shows steps, time left, loss, lr, samples per second and the newest evaluation.

    Args:
        enable: True draws always, False never; None draws where the stream is a terminal.
        loss_name: The training loss in the rows that are logged.
        stream: Where the bar is drawn; None is stderr.

    Processes: main only.
    """

    def __init__(
        self, *, enable: bool | None = None, loss_name: str = "train_loss", stream: TextIO | None = None
    ) -> None:
        self._enable = enable
        self._loss_name = loss_name
        self._stream = stream
        self._bar: Any = None
        self._next_drawing = math.inf
        self._shown: dict[str, float] = {}
        self._last_time = 0.0
        self._last_samples = 0
        self._samples_per_s: float | None = None

    def show(self, values: Mapping[str, float]) -> None:
        """Add numbers to the right of the bar; they are seen at the next drawing, and stay until they are replaced."""
        self._shown.update(values)

    def on_fit_start(self) -> None:
        stream = self._stream or sys.stderr
        if not _is_drawn(stream, self._enable):
            return
        self._shown.clear()
        self._samples_per_s = None
        total = self.trainer.estimated_stepping_batches
        self._bar = _open_bar(stream, int(total) if math.isfinite(total) else None, self.state.global_step)
        self._restart_clock()

    def on_epoch_start(self) -> None:
        self._describe(f"epoch {self.state.epoch + 1}")

    def on_update_end(self) -> None:
        if perf_counter() >= self._next_drawing:
            self._draw()

    def on_log(self, values: Mapping[str, float]) -> None:
        loss = values.get(self._loss_name)
        if loss is not None:
            self._shown["loss"] = loss

    def on_evaluation_start(self) -> None:
        self._describe("evaluating")
        self._draw()

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        self.show(metrics)
        self._describe(f"epoch {self.state.epoch + 1}")
        self._restart_clock()

    def on_fit_end(self) -> None:
        self._draw()
        bar, self._bar, self._next_drawing = self._bar, None, math.inf
        if bar is not None:
            bar.close()

    def _describe(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_description(text, refresh=False)

    def _draw(self) -> None:
        if self._bar is None:
            return
        now = perf_counter()
        self._next_drawing = now + SECONDS_BETWEEN_DRAWINGS
        self._measure_rate(now)
        values = {"loss": None, "lr": self._lr(), "samples/s": self._samples_per_s, **self._shown}
        known = {name: f"{value:.4g}" for name, value in values.items() if value is not None}
        self._bar.set_postfix(known, refresh=False)
        self._bar.update(self.state.global_step - self._bar.n)

    def _measure_rate(self, now: float) -> None:
        samples = self.state.samples_seen - self._last_samples
        if samples <= 0 or now <= self._last_time:
            return
        rate = samples / (now - self._last_time)
        before = rate if self._samples_per_s is None else self._samples_per_s
        self._samples_per_s = SHARE_OF_LAST_RATE * rate + (1 - SHARE_OF_LAST_RATE) * before
        self._last_time, self._last_samples = now, self.state.samples_seen

    def _restart_clock(self) -> None:
        self._last_time, self._last_samples = perf_counter(), self.state.samples_seen
        self._next_drawing = self._last_time if self._bar is not None else math.inf

    def _lr(self) -> float | None:
        optimizer = getattr(self.module, "optimizer", None)
        groups = getattr(optimizer, "param_groups", None)
        return float(groups[0]["lr"]) if groups else None


def draw_batches(
    batches: Iterable[T],
    *,
    enable: bool | None,
    text: str,
    total: int | None,
    stream: TextIO | None = None,
    count: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """Pass on the batches of an evaluation, and draw how many are done.

    Args:
        batches: The batches.
        enable: As in `ProgressBar`.
        text: What stands before the bar.
        total: How many there are; None if nobody knows.
        stream: As in `ProgressBar`.
        count: How many are done with one of them.
    """
    stream = stream or sys.stderr
    if not _is_drawn(stream, enable):
        return iter(batches)
    interval = SECONDS_BETWEEN_DRAWINGS
    bar = _bar_class()(desc=text, total=total, file=stream, unit=" batches", dynamic_ncols=True, mininterval=interval)
    return _drawn(batches, bar, count)


def _drawn(batches: Iterable[T], bar: Any, count: Callable[[T], int]) -> Iterator[T]:
    with bar:
        for batch in batches:
            yield batch
            bar.update(count(batch))


def _is_drawn(stream: TextIO, enable: bool | None) -> bool:  # noqa: FBT001 - None is a third answer
    return stream.isatty() if enable is None else enable


def _open_bar(stream: TextIO, total: int | None, initial: int) -> Any:
    return _bar_class()(
        total=total, initial=initial, file=stream, unit=" steps", dynamic_ncols=True, mininterval=0, miniters=0
    )


def _bar_class() -> Any:
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread that redraws: we do

    return Bar
