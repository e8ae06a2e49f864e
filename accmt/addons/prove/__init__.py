"""`Trainer.prove` and `accmt prove`: trains a few steps in several ways, and explains any differences.

The reference is one process whose step is one large batch. The same samples are then trained on with two processes,
with accumulation, loader workers, a token budget and an interruption, and evaluated with other batch sizes. Where a
launch differs, experiments (`causes.py`) find the cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from accmt.addons.prove import causes as find
from accmt.addons.prove.bits import DEFAULT_UNITS, BitsProof, prove_bits
from accmt.addons.prove.causes import Cause, Findings, Laboratory, names_that_differ, relative_error
from accmt.addons.prove.launches import (
    Launch,
    Outcome,
    Subject,
    is_compared,
    run_forked,
    run_launch,
    train_as,
)
from accmt.callbacks import build_callbacks
from accmt.checks.table import require_module
from accmt.engine.sync_batchnorm import is_batch_norm
from accmt.errors import ArgumentError, fail
from accmt.messages import say, speaking
from accmt.processes import num_processes

_METRIC = 1e-3

REFERENCE = Launch("reference")
REPEATED = Launch("the same again", saves=True)
PROCESSES = Launch("2 processes", processes=2, divided_by=2)
ACCUMULATION = Launch("4 accumulated batches", divided_by=4)
WORKERS = Launch("2 loader workers", workers=2)
RESUMED = Launch("interrupted and resumed", resumes=True)
EVALUATION = Launch("evaluation with batches of 3", val_batch_size=3)


@dataclass(frozen=True)
class Row:
    """A launch in the table.

    Attributes:
        name: The launch.
        gradient: The largest relative error of a gradient or weight.
        value: The largest relative error of a logged value or metric.
        first: The first tensor or value that differs; "" if none does.
        error: The error that ended the launch, or "".
        is_skipped: Whether the launch is not possible with these data.
    """

    name: str
    gradient: float = 0.0
    value: float = 0.0
    first: str = ""
    error: str = ""
    is_skipped: bool = False

    @property
    def is_right(self) -> bool:
        """Whether the launch equals the reference."""
        return self.is_skipped or not (self.first or self.error)


@dataclass(frozen=True)
class Proof:
    """The result of `Trainer.prove`.

    Attributes:
        rows: The launches.
        causes: What is wrong; empty if nothing is, or if no cause was found.
        steps: Optimizer steps of each launch.
        batch_size: Samples of a step.
    """

    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    steps: int
    batch_size: int

    @property
    def is_right(self) -> bool:
        """Whether all launches equal the reference."""
        return all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        title = f"{self.steps} steps of {self.batch_size} samples, compared to one process with one batch per step"
        lines = [title, f"  {'launch':<{width}}  gradients  metrics  first difference"]
        for row in self.rows:
            where, _, rest = row.error.partition("\n  got: ")  # in short: where it is, and what was found
            error = ": ".join(part.partition("\n")[0] for part in (where.rpartition("errors.")[2], rest) if part)
            first = error or row.first or "-"
            numbers = (
                f"{row.gradient:>9.1e}  {row.value:>7.1e}" if not (row.error or row.is_skipped) else f"{'':>9}  {'':>7}"
            )
            lines.append(f"  {row.name:<{width}}  {numbers}  {'not possible: ' if row.is_skipped else ''}{first}")
        for cause in self.causes:
            lines += ["", f"{cause.name}: {cause.got}", f"  {cause.do}"]
        if self.is_right:
            lines += ["", "all launches give the same results"]
        elif not self.causes:
            lines += ["", "no experiment explains the difference: start with the first tensor that differs"]
        return "\n".join(lines)


def prove(
    trainer: Any,
    module: Any,
    train_dataset: Any = None,
    val_dataset: Any = None,
    *,
    datamodule: Any = None,
    steps: int = 4,
    samples: int = 64,
    fit: Callable[..., Any] | None = None,
    compares_bits: bool = False,
) -> Proof | BitsProof:
    """Implement `Trainer.prove`.

    Args:
        trainer: The Trainer.
        module: The module.
        train_dataset: As for `fit`.
        val_dataset: As for `fit`.
        datamodule: As for `fit`.
        steps: Optimizer steps of each launch.
        samples: Maximum training samples.
        fit: The Trainer's `fit`, if it has been replaced.
        compares_bits: Whether launches with `same_bits` are compared bit for bit, instead.
    """
    require_module(module, "prove")
    where = "Trainer.prove"
    if not hasattr(os, "fork"):
        raise fail(
            ArgumentError, where, got="a system without fork", expected="Linux or macOS", do="use WSL on Windows"
        )
    if num_processes() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        do = "run it in one process: it starts the others"
        raise fail(ArgumentError, where, got="a program launched with several processes", expected="one process", do=do)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        do = "hide the GPU: CUDA_VISIBLE_DEVICES= accmt prove script.py (it runs on CPUs)"
        raise fail(
            ArgumentError, where, got="a program that has used the GPU", expected="one that can be forked", do=do
        )
    if steps < 2 or samples < 4 * steps:
        got, expected = f"steps={steps}, samples={samples}", "at least 2 steps, and 4 samples per step"
        do = "steps=4, samples=64; of accmt prove: --steps 4 --samples 64"
        raise fail(ArgumentError, where, got=got, expected=expected, do=do)
    for name in ("accelerate", "accmt.setup.build", "accmt.loop.fit", "torch._dynamo", "torch.nn.parallel"):
        import_module(name)  # once here, instead of in every fork
    hps = trainer.settings.hps
    size = (getattr(train_dataset, "batch_size", None) or hps.train_batch_size) * (
        trainer.settings.optimization.accumulation_at(0) or 1
    )
    with TemporaryDirectory(prefix="accmt-prove-") as path:
        folder = Path(path)
        uses_batch_norm = _uses_batch_norm(module, folder)
        size = max(8 if uses_batch_norm else 4, min(size, samples // steps) // 4 * 4)
        data = train_dataset, val_dataset, datamodule
        subject = Subject(trainer, module, *data, steps, size, uses_batch_norm, folder, fit or type(trainer).fit)
        units = trainer.settings.optimization.same_bits or DEFAULT_UNITS
        with speaking(verbose=trainer.settings.running.verbose):
            if compares_bits:
                return prove_bits(replace(subject, batch_size=max(units, size // units * units)), units)
            rows, causes = _Comparison(subject).run()
    return Proof(tuple(rows), tuple(causes), steps, size)


def _uses_batch_norm(module: Any, folder: Path) -> bool:
    is_built = getattr(module, "model", None) is not None

    def search() -> dict[str, Any]:
        if not is_built:
            module.configure_model()
        return {"found": any(map(is_batch_norm, module.model.modules()))}

    found = search() if is_built else run_forked(1, search, folder)
    return bool(found.get("found"))  # an error is reported by the reference


class _Comparison:
    """Runs the launches of a proof, and then what explains their differences."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._findings: dict[int, Findings] = {}
        self._reference = Outcome()

    def run(self) -> tuple[list[Row], list[Cause]]:
        """Return the table and the causes."""
        say(f"prove: {self._subject.steps} steps of {self._subject.batch_size} samples, with one process")
        self._reference = run_launch(self._subject, REFERENCE)
        if self._reference.error:
            return [Row(REFERENCE.name, error=self._reference.error)], [_cause_of_error(self._reference)]
        is_manual = self._subject.module.uses_manual_optimization
        launches = [REPEATED, PROCESSES, *([] if is_manual else [ACCUMULATION]), WORKERS]
        if self._reference.tokens and not is_manual:
            launches.append(Launch("max_tokens", max_tokens=-(-self._reference.tokens // 2)))
        if self._reference.metrics:
            launches.append(EVALUATION)
        launches.insert(1, RESUMED)
        rows, causes, differing = list[Row](), list[Cause](), list[tuple[Launch, Outcome, Row]]()
        for launch in launches:
            say(f"prove: {launch.name}")
            outcome = run_launch(self._subject, launch)
            row = self._compare(launch, outcome)
            rows.append(row)
            if not row.is_right:
                differing.append((launch, outcome, row))
            if launch is REPEATED and not row.is_right and not row.error:
                return rows, find.find_random(outcome, self._reference, self._experiment(1))
        for launch, outcome, row in differing:
            say(f"prove: looking for what differs in: {launch.name}")
            causes += [one for one in self._explain(launch, outcome, row) if one not in causes]
        return rows, causes

    def _compare(self, launch: Launch, outcome: Outcome) -> Row:
        if outcome.error:
            is_skipped = launch.max_tokens is not None and outcome.is_refused
            return Row(launch.name, error=outcome.error, is_skipped=is_skipped)
        reference, first, value = self._reference, "", 0.0
        of_evaluation = {name for metrics in reference.metrics for name in metrics}
        for step, values in reference.values.items():
            for name, number in values.items():
                own = outcome.values.get(step, {}).get(name)
                if own is not None and name not in of_evaluation and is_compared(name):
                    value = max(value, relative_error(own, number))
                    if relative_error(own, number) > max(_METRIC, outcome.tolerance) and not first:
                        first = f"{name} at step {step}: {own:.6g} instead of {number:.6g}"
        for own_metrics, metrics in zip(outcome.metrics, reference.metrics, strict=False):
            for name, number in metrics.items():
                if name in own_metrics:
                    value = max(value, relative_error(own_metrics[name], number))
                    if relative_error(own_metrics[name], number) > max(_METRIC, outcome.tolerance) and not first:
                        first = f"{name}: {own_metrics[name]:.6g} instead of {number:.6g}"
        found = outcome.first or outcome.first_weight
        if found is not None:
            what = "gradient" if outcome.first else "weight"
            first = f"the {what} of {found[1]} at step {found[0]}"
        return Row(launch.name, max(outcome.gradient, min(outcome.weight, 1e9)), value, first)

    def _explain(self, launch: Launch, outcome: Outcome, row: Row) -> list[Cause]:
        if row.error:
            return [_cause_of_error(outcome)]
        reference = self._reference
        findings = self._experiment(1)
        is_of_training = outcome.first is not None or outcome.first_weight is not None or "at step" in row.first
        found: list[Cause] = []
        if is_of_training:
            if launch.resumes:
                return find.find_resume(outcome, reference)
            found = find.find_in_findings(findings)
            if launch.workers:
                of_data = [cause for cause in found if "data" in cause.name]
                return of_data or find.find_in_workers(outcome, reference)
            if launch.processes > 1:
                found = found or find.find_on_processes(self._experiment(launch.processes))
            if not found:
                settings, module = self._subject.trainer.settings, self._subject.module
                callbacks = [*build_callbacks(settings.running.callbacks), *build_callbacks(module.get_callbacks())]
                called = [type(callback).__name__ for callback in callbacks]
                found = find.find_callback(called, lambda kept: self._differs(launch, with_callbacks=kept))
            found = found or find.find_factor(launch, outcome)
            if not found and self._subject.uses_batch_norm and not self._differs(launch, freezes_batch_norm=True):
                got, do = "with running statistics, launches agree", "use group or layer norm, or accept the difference"
                found = [Cause("batch norm", got, do)]
        names = names_that_differ(outcome.metrics, reference.metrics, _METRIC)
        if names and not is_of_training:
            found += find.find_in_metrics(names, launch, findings)
        return found

    def _experiment(self, processes: int) -> Findings:
        if processes not in self._findings:
            launch = Launch("experiments", processes=processes, divided_by=processes, with_callbacks=())

            def body() -> dict[str, Any]:
                laboratory = Laboratory()
                train_as(self._subject, launch, [laboratory])
                return vars(laboratory.findings)

            found = run_forked(processes, body, self._subject.folder)
            self._findings[processes] = Findings() if found.get("error") else Findings(**found)
        return self._findings[processes]

    def _differs(self, launch: Launch, **changes: Any) -> bool:
        variant = "-" + "-".join(f"{name}{value}" for name, value in changes.items())
        reference = run_launch(self._subject, replace(REFERENCE, **changes), variant)
        outcome = run_launch(self._subject, replace(launch, **changes), variant)
        return bool(reference.error or outcome.error or outcome.first or outcome.first_weight)


def _cause_of_error(outcome: Outcome) -> Cause:
    message = (outcome.error or "").partition(": ")[2] or str(outcome.error)
    got, _, do = message.partition("\n  do: ")
    return Cause("an error", got, do or "fix the error; the same launch outside of a proof shows where it was raised")
