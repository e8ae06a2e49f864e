"""A progress bar that costs a look at the clock per step; where there is no terminal, a plain line every so often."""

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
"""Until the first line, the second, and every further one."""
SHARE_OF_LAST_RATE = 0.3
BAR_WIDTH = 20


def is_notebook() -> bool:
    """Return whether this process serves a notebook; IPython is asked only where it is loaded already."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_shell()).__mro__)


class _Display(Protocol):
    """Where progress is shown: a bar, or lines."""

    def wait_s(self) -> float:
        """Return how many seconds pass until it is drawn again, and count this drawing."""

    def draw(self, step: int, stage: str, values: list[str]) -> None: ...


class ProgressBar(MainProcessCallback):
    """Shows epoch, step, time left, loss, the best value and where it was saved, lr, speed, and the newest evaluation.

    Where the stream is no terminal, such as in the log of a cluster's job, the same numbers are a line of the log after
    10 seconds, after 30, and then once a minute.

    Args:
        enable: True draws a bar always, False neither bar nor lines; None draws a bar where the stream is a terminal.
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
        self._display: _Display | None = None
        self._next_drawing = math.inf
        self._shown: dict[str, float] = {}
        self._rates = _Rates()
        self._total_validation: int | None = None

    def show(self, values: Mapping[str, float]) -> None:
        """Add numbers to the right of the bar; they are seen at the next drawing, and stay until they are replaced."""
        self._shown.update(values)

    def on_fit_start(self) -> None:
        if self._enable is False:
            return
        self._shown.clear()
        self._rates = _Rates()
        stream = self._stream or sys.stderr
        total = self.trainer.estimated_stepping_batches
        planned = int(total) if math.isfinite(total) else None
        step = self.state.global_step
        is_drawn = _is_drawn(stream, self._enable)
        self._display = _Bar(stream, planned, step, self._epoch()) if is_drawn else _Lines(planned)
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
            sizes = [loader.source.num_micro_batches for loader in self.trainer.run.val_loaders.values()]
            known = [size for size in sizes if size is not None]
            self._total_validation = sum(known) if len(known) == len(sizes) else None
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
        epochs = self.trainer.run.cadence.epochs
        return f"epoch {self.state.epoch + (not is_over)}" + ("" if epochs is None else f"/{epochs}")

    def _draw_evaluation(self) -> None:
        of_total = "" if self._total_validation is None else f"/{self._total_validation}"
        self._draw(f"evaluating {self.state.val_step}{of_total}", is_training=False)

    def _draw(self, stage: str, *, is_training: bool = True) -> None:
        if self._display is None:
            return
        self._next_drawing = perf_counter() + self._display.wait_s()
        if is_training:
            self._rates.measure(self.state.samples_seen)
        self._display.draw(self.state.global_step, stage, self._values())

    def _values(self) -> list[str]:
        """Return what is to be seen, the most important first: what does not fit is left out."""
        samples_per_s = None if "tokens_per_s" in self._shown else self._rates.samples_per_s
        known = {"loss": None, "lr": self._lr(), "samples/s": samples_per_s} | self._shown
        texts = {name: f"{name} {value:.4g}" for name, value in known.items() if value is not None}
        for name, value in list(self.state.best.items())[:1]:
            texts["best"] = f"best {name.removeprefix('best_')} {value:.4g}"
            step = self.trainer.run.saver.selection.saved_at(name)
            texts["best"] += "" if step is None else f" saved at {step:,}"
        first = [texts.pop(name) for name in ("loss", "best", "lr", "samples/s", "tokens_per_s") if name in texts]
        return first + list(texts.values())

    def _restart_clock(self) -> None:
        """Leave what an evaluation took out of the rate of training."""
        self._rates.restart(self.state.samples_seen)
        if isinstance(self._display, _Bar):
            self._next_drawing = perf_counter()
        elif self._display is not None and self._next_drawing == math.inf:
            self._next_drawing = perf_counter() + self._display.wait_s()

    def _lr(self) -> float | None:
        optimizer = getattr(self.module, "optimizer", None)
        groups = getattr(optimizer, "param_groups", None)
        return float(groups[0]["lr"]) if groups else None


class _Rates:
    """Samples a second, of which the last ones weigh most."""

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self._last_time, self._last_samples = 0.0, 0

    def restart(self, samples: int) -> None:
        self._last_time, self._last_samples = perf_counter(), samples

    def measure(self, samples: int) -> None:
        now, done = perf_counter(), samples - self._last_samples
        if done <= 0 or now <= self._last_time:
            return
        rate = done / (now - self._last_time)
        before = rate if self.samples_per_s is None else self.samples_per_s
        self.samples_per_s = SHARE_OF_LAST_RATE * rate + (1 - SHARE_OF_LAST_RATE) * before
        self._last_time, self._last_samples = now, samples


class _Bar:
    """One line of a terminal, as wide as it is; of the values as many are shown as fit."""

    def __init__(self, stream: TextIO, total: int | None, initial: int, stage: str) -> None:
        counted = f"{{bar:{BAR_WIDTH}}} {{n_fmt}}/{{total_fmt}} {{elapsed}}<{{remaining}}"
        encoding = getattr(stream, "encoding", None) or "ascii"
        self._bar = _bar_class()(
            desc=stage,
            total=total,
            initial=initial,
            file=_Tolerant(stream),
            bar_format=f"{{desc}} {'{n_fmt} steps {elapsed}' if total is None else counted}{{values}}",
            ascii=" ╸━" if encoding.lower().startswith("utf") else " -#",
            colour="green" if stream is sys.stderr and stream.isatty() and "NO_COLOR" not in os.environ else None,
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
    """Messages: what a log without a terminal has of a bar."""

    def __init__(self, total: int | None) -> None:
        self._of_total = "" if total is None else f" of {total:,}"
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
    """Pass on the batches of an evaluation, and draw how many are done.

    Args:
        batches: The batches.
        enable: True draws always, False never; None draws where the stream is a terminal.
        text: What stands before the bar.
        total: How many there are; None if nobody knows.
        stream: As in `ProgressBar`.
        count: How many are done with one of them.
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
    if stream is None or stream.closed:
        return False
    return stream.isatty() if enable is None else enable


class _Tolerant:
    """A stream whose errors end no run: its terminal, or the pipe behind it, may be gone."""

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
        monitor_interval = 0  # no thread that redraws: we do
        values: Sequence[str] = ()

        @property
        def format_dict(self) -> MutableMapping[str, Any]:
            """What `bar_format` may name: `values` too, as many as the line has room for."""
            given = {**super().format_dict, "values": ""}
            columns = given["ncols"] or sys.maxsize
            line = disp_len(self.format_meter(**given)) if self.values else 0
            for value in self.values:
                if line + len(value) + 2 <= columns:
                    line += len(value) + 2
                    given["values"] += f"  {value}"
            return given

    return Bar
