"""What a run prints besides its progress bar: model summary, evaluations and run summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from accmt.callbacks.callback import Callback, MainProcessCallback
from accmt.libraries.private_names import mark_rows_dynamic
from accmt.messages import say
from accmt.registry import addon
from accmt.sharded_tensors import class_of

# ---- Run summary


MAX_LINES = 10
_MAX_VALUES = 6


class EndSummary(MainProcessCallback):
    """Prints a line at the start of a run, and a summary at its end.

    The summary has the status, work done, latest and best values, and where to find more.

    Args:
        loss_name: The name of the training loss; its mean over the last epoch is printed.

    Processes: main only.
    """

    order = float("inf")  # after callbacks that save or finish something

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._begin_s = 0.0
        self._samples_before = 0

    def on_fit_start(self) -> None:
        self._begin_s, self._samples_before = monotonic(), self.state.samples_seen
        say(addon("describe_start")(self.trainer.run))

    def on_fit_end(self) -> None:
        rows = list(self._rows())[: MAX_LINES - 1]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        say("\n".join(["run summary", *lines]))

    def _rows(self) -> Iterator[tuple[str, str]]:
        state, seconds = self.state, monotonic() - self._begin_s
        samples = state.samples_seen - self._samples_before
        steps = f"{state.global_step:,} steps"
        if state.skipped_steps:  # of the gradient scaler, or by a policy
            steps += f", {state.skipped_steps:,} skipped"
        # The status of a failed run is in its error; a run without one has finished here.
        yield "status", state.status
        yield "done", f"{steps}, {state.epoch:,} epochs, {state.samples_seen:,} samples"
        yield "time", f"{_write_time(seconds)}, {samples / max(seconds, 1e-9):,.1f} samples/s overall"
        loss = self.trainer.run.running_averages.epoch_loss
        if loss is not None:
            yield self._loss_name, f"{loss:.5g}"
        if state.metrics:
            yield "evaluation", _join(f"{name} {value:.5g}" for name, value in state.metrics.items())
        best = []
        for name, value in state.best.items():
            step = self.trainer.run.saver.selection.saved_at(name)
            where = ", not saved" if step is None else f" at step {step:,}"
            best.append(f"{name.removeprefix('best_')} {value:.5g}{where}")
        if best:
            yield "best", _join(best)
        settings = self.trainer.settings
        if self.trainer.run.saver.selection.has_saved:
            yield "model", str(settings.model_folder)
        yield "report", f"accmt report {self.trainer.log_dir}"
        command = self.trainer.dashboard_command
        if command:
            yield "dashboard", command


def _join(texts: Iterable[str]) -> str:
    listed = list(texts)
    joined = ", ".join(listed[:_MAX_VALUES])
    if len(listed) > _MAX_VALUES:  # the summary is read in a terminal
        joined += f" and {len(listed) - _MAX_VALUES} more"
    return joined


def _write_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min {whole_seconds:02} s"
    return f"{minutes} min {whole_seconds:02} s"


# ---- One line per evaluation


class EvaluationReport(MainProcessCallback):
    """Prints one line per evaluation: the position in the run, the mean training loss of the epoch, and the results.

    An arrow compares each value with the previous evaluation; "best" marks a new best value, and "saved" means that
    the model was saved. Values with the same names are aligned in columns.

    Args:
        loss_name: The name of the training loss.

    Processes: main only.
    """

    order = math.inf

    def __init__(self, loss_name: str = "train_loss") -> None:
        self._loss_name = loss_name
        self._last: dict[str, float] = {}
        self._best_before: dict[str, float] = {}
        self._is_saved = False

    def on_fit_start(self) -> None:
        # Without it, the first line after a resume would have no arrows.
        self._last = dict(self.state.metrics)  # of the resumed run

    def on_evaluation_start(self) -> None:
        self._is_saved = False
        self._best_before = dict(self.state.best_metrics)

    def on_save_model(self, folder: Path) -> None:
        self._is_saved = True

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        total = self.trainer.estimated_stepping_batches
        step, of_total = str(self.state.global_step), ""
        if math.isfinite(total):
            step, of_total = step.rjust(len(f"{total:.0f}")), f" of {total:.0f}"
        values: dict[str, float] = {}
        loss = self.trainer.run.running_averages.epoch_loss
        if loss is not None:
            values[self._loss_name] = loss
        values |= metrics
        epoch = self.state.epoch + 1
        if self.state.train_step == 0 and self.state.epoch > 0:  # at the end of an epoch, which is already counted
            epoch -= 1
        epochs = self.trainer.run.cadence.epochs
        head = f"step {step}{of_total}, epoch {str(epoch).rjust(len(str(epochs or '')))}:"
        cells = []
        for name, value in values.items():
            last, self._last[name] = self._last.get(name, math.nan), value
            mark = _compare(value, last)
            if mark and value == self.state.best_metrics.get(name) and value != self._best_before.get(name):
                mark += " best"
            cells.append(f"{name} {value:<7.4g} {mark:<6}")
        if self._is_saved:
            cells.append("saved")
        say("  ".join([head, *cells]).rstrip())


def _compare(value: float, last: float) -> str:
    if value > last:
        return "↑"
    if value < last:
        return "↓"
    if value == last:
        return "="
    return ""  # NaN: there was no evaluation before


# ---- Model summary


class ModelSummary(MainProcessCallback):
    """Prints a table of the model's layers at the start.

    Args:
        max_depth: See `summarize`.

    Processes: main only.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self) -> None:
        say(summarize(self.module.unwrapped_model, self.max_depth))


def summarize(model: nn.Module, max_depth: int = 1) -> str:
    """Return a table of the model's submodules: class, parameters and trainable parameters, then totals.

    Shared parameters count once in the totals.

    Args:
        model: The model.
        max_depth: 1 shows direct submodules, 2 also theirs, and so on; -1 shows all.
    """
    table = [("part", "class", "parameters", "trained")]
    for name, part in model.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            table.append((name, type(part).__name__, *_count(part)))
    table.append(("", class_of(model).__name__, *_count(model)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, kind, size, trained in table:
        lines.append(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {trained:>{widths[3]}}")
    size_mb = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()]) / 1e6
    return "\n".join([class_of(model).__name__, *lines, f"{size_mb:,.1f} MB of weights and buffers"])


def _count(module: nn.Module) -> tuple[str, str]:
    """Return the numbers of all and of the trainable parameters."""
    size = trained = 0
    for parameter in module.parameters():
        size += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return f"{size:,}", f"{trained:,}"


class DynamicRows(Callback):
    """Marks the number of samples as dynamic for the compiler, and the length as static.

    The compiler then builds one graph per length, not per batch. A batch of one sample gets a separate graph.
    """

    order = -1e6  # mark batches before the hooks of other callbacks use them

    def on_before_training_step(self, batch: Any) -> None:
        mark_rows_dynamic([value for value in _tensors(batch) if value.ndim])

    on_before_validation_step = on_before_training_step


def _tensors(batch: Any) -> list[torch.Tensor]:
    match batch:
        case torch.Tensor():
            return [batch]
        case Mapping():
            return list(chain.from_iterable(map(_tensors, batch.values())))
        case list() | tuple():
            return list(chain.from_iterable(map(_tensors, batch)))
        case _:
            return []
