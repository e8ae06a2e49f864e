"""`accmt prove --bits`: whether a script has the same bits on 1, 2 and 4 processes with `same_bits`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accmt.addons.digests import digest
from accmt.addons.prove.launches import Launch, Subject, is_compared, run_forked, train_as
from accmt.callbacks import Callback
from accmt.messages import say
from accmt.options.optimizer_and_scheduler_arguments import state_of
from accmt.processes import gather_objects
from accmt.sharded_tensors import make_whole

DEFAULT_UNITS = 8
_PROCESSES = (1, 2, 4)
_DATA = "the samples differ: they, their order or what draws in them depend on the process"
_STEP = (
    "the samples are the same: the step draws from a generator of its own or a clock, or uses the process or its number"
)


@dataclass(frozen=True)
class BitsRow:
    """A launch.

    Attributes:
        name: The launch.
        first: The first difference; "" if there is none.
        cause: Its likely cause.
        error: The error that ended the launch, or "".
    """

    name: str
    first: str = ""
    cause: str = ""
    error: str = ""


@dataclass(frozen=True)
class BitsProof:
    """The result of `accmt prove --bits`.

    Attributes:
        rows: The launches after the first, with which they are compared.
        steps: Optimizer steps of each launch.
        batch_size: Samples of a step.
        units: Units of a batch.
    """

    rows: tuple[BitsRow, ...]
    steps: int
    batch_size: int
    units: int

    @property
    def is_right(self) -> bool:
        """Whether all launches have the same bits."""
        return not any(row.first or row.error for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps of {self.batch_size} samples in {self.units} units, compared to one process"]
        for row in self.rows:
            lines.append(f"  {row.name}  {row.error or row.first or 'the same bits'}")
            if row.cause:
                lines.append(f"    {row.cause}")
        return "\n".join(lines)


@dataclass
class _Bits:
    """The digests of a launch: of batches by step, of weights and optimizer state by step and name, and its values."""

    batches: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    values: list[dict[str, float]] = field(default_factory=list)
    error: str = ""


def prove_bits(subject: Subject, units: int) -> BitsProof:
    """Train as one process and as several, and compare everything bit for bit."""
    found: dict[int, _Bits] = {}
    for number in _PROCESSES:
        if number > units:
            break
        name = f"{number} processes" if number > 1 else "1 process"
        say(f"prove: {name}")
        launch = Launch(name, processes=number, units=units)

        def body(launch: Launch = launch) -> dict[str, Any]:
            watching = _Watching()
            train_as(subject, launch, [watching])
            return vars(watching.bits)

        result = run_forked(number, body, subject.folder)
        found[number] = _Bits(error=result["error"]) if result.get("error") else _Bits(**result)
        if found[1].error:
            return BitsProof((BitsRow("1 process", error=found[1].error),), subject.steps, subject.batch_size, units)
    rows = [_compare(f"{number} processes", found[number], found[1]) for number in found if number > 1]
    return BitsProof(tuple(rows), subject.steps, subject.batch_size, units)


def _compare(name: str, bits: _Bits, expected: _Bits) -> BitsRow:
    if bits.error:
        return BitsRow(name, error=bits.error)
    for step, states in expected.states.items():
        cause = _STEP
        if bits.batches.get(step) != expected.batches[step]:
            cause = _DATA
        own = bits.states.get(step, {})
        for tensor, digest_of_tensor in states.items():
            if own.get(tensor) != digest_of_tensor:
                return BitsRow(name, f"{tensor} differs after step {step}", cause)
    for row, expected_row in zip(bits.values, expected.values, strict=False):
        for key, value in expected_row.items():
            if key in row and row[key] != value and not (math.isnan(value) and math.isnan(row[key])):
                return BitsRow(name, f"{key}: {row[key]!r} instead of {value!r}", "a value that is logged by process")
    return BitsRow(name)


class _Watching(Callback):
    """Notes the digests of a launch."""

    order = math.inf

    def __init__(self) -> None:
        self.bits = _Bits()
        self._batches: list[str] = []

    def on_before_training_step(self, batch: Any) -> None:
        self._batches.append(digest(batch))

    def on_update_end(self) -> None:
        step, run = str(self.state.global_step), self.trainer.run
        batches, self._batches = self._batches, []
        self.bits.batches[step] = " ".join(sorted(sum(gather_objects(batches), [])))
        names = {parameter: name for name, parameter in run.unwrapped_model.named_parameters()}
        states: dict[str, str] = {}
        for parameter, name in names.items():
            states[name] = digest(make_whole(parameter.detach()))
        for parameter, state in state_of(run.stepper.optimizer).items():
            for key, value in state.items():
                states[f"the optimizer's {key} of {names.get(parameter, 'a weight')}"] = digest(make_whole(value))
        self.bits.states[step] = states

    def on_log(self, values: Mapping[str, float]) -> None:
        self.bits.values.append({name: value for name, value in values.items() if is_compared(name)})
