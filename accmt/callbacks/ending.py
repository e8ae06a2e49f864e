"""What is left to say at the end of a run: the essentials, in ten lines at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import say

MAX_LINES = 10


class EndSummary(MainProcessCallback):
    """Says how the run ended, what it did, the newest and the best values, and where to find more.

    Args:
        loss_name: What the training loss is called; its mean over the last epoch is said.

    Processes: main only.
    """

    order = float("inf")

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._begin_s = 0.0
        self._samples_before = 0

    def on_fit_start(self) -> None:
        self._begin_s, self._samples_before = monotonic(), self.state.samples_seen

    def on_fit_end(self) -> None:
        rows = list(self._rows())[: MAX_LINES - 1]
        width = max(len(name) for name, _ in rows)
        say("\n".join(["run summary", *(f"  {name:<{width}}  {value}" for name, value in rows)]))

    def _rows(self) -> Iterator[tuple[str, str]]:
        state, seconds = self.state, monotonic() - self._begin_s
        samples = state.samples_seen - self._samples_before
        # The status of a run that fails is in its error; a run without one is at its end here.
        skipped = f", {state.skipped_updates:,} skipped" if state.skipped_updates else ""
        yield "status", state.status
        yield "done", f"{state.global_step:,} steps{skipped}, {state.epoch:,} epochs, {state.samples_seen:,} samples"
        yield "time", f"{_write_time(seconds)}, {samples / max(seconds, 1e-9):,.1f} samples/s, all included"
        loss = self.trainer.run.running_averages.epoch_loss
        if loss is not None:
            yield self._loss_name, f"{loss:.5g}"
        if state.metrics:
            yield "evaluation", _join(f"{name} {value:.5g}" for name, value in state.metrics.items())
        if state.best:
            yield "best", _join(self._write_best(name, value) for name, value in state.best.items())
        settings = self.trainer.settings
        if self.trainer.run.saver.selection.has_saved:
            yield "model", str(settings.model_folder)
        yield "report", f"accmt report {self.trainer.log_dir}"
        command = self.trainer.dashboard_command
        if command:
            yield "dashboard", command

    def _write_best(self, name: str, value: float) -> str:
        step = self.trainer.run.saver.selection.saved_at(name)
        return f"{name.removeprefix('best_')} {value:.5g}{', not saved' if step is None else f' at step {step:,}'}"


def _join(texts: Iterable[str]) -> str:
    shown = list(texts)
    more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    return ", ".join(shown[:6]) + more


def _write_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min {rest:02} s" if hours else f"{minutes} min {rest:02} s"
