"""Watches the losses of training: whether each is finite, and none stands far above the ones before it.

Losses stay on the device until something else waits for it: a row of the log, an evaluation, a checkpoint. So a
checkpoint never holds what a loss that is not finite has made of the weights, and seeing one costs no waiting. Only
`"on_nonfinite": "skip"` has to know before the optimizer steps, and waits once per step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from accmt.errors import NonFiniteError, explain
from accmt.messages import warn, warn_once
from accmt.metrics.weighted_sum import COMPACT_AT, Weight, stack
from accmt.processes import data_index, gather_from_data, num_data_processes, process_index
from accmt.recovery.restart import roll_back
from accmt.run import Place, Run
from accmt.sharded_tensors import total_norm

_RECENT = 100
_ENOUGH = 20
_MAX_NAMED = 16


@dataclass(frozen=True)
class Finding:
    """A loss that is wrong.

    Attributes:
        place: Where its batch was.
        what: What is wrong with it.
        is_spike: Whether it is finite.
        process: The process that had the batch.
        samples: The indices of the batch's samples in the dataset; None where the data have none.
    """

    place: Place
    what: str
    is_spike: bool
    process: int
    samples: list[int] | None

    def __str__(self) -> str:
        place = self.place
        where = f"step {place.step} (epoch {place.epoch + 1}, batch {place.micro_batch}) on process {self.process}"
        if self.samples is None:
            return f"{self.what} at {where}"
        named = ", ".join(map(str, self.samples[:_MAX_NAMED])) + (", ..." if len(self.samples) > _MAX_NAMED else "")
        return f"{self.what} at {where}, samples [{named}]"


class LossGuard:
    """The losses of this process that nobody has looked at yet, and the recent ones to compare them with.

    Args:
        reaction: What is done about a wrong one: "stop", "skip", "rollback"; None is a warning.
        spike_guard: Deviations above the mean of the last 100 losses from which a loss is a spike; None is off.
        careful_until: Windows that begin before so many samples are judged before the optimizer steps, whatever the
            reaction: a rollback has led back to before them.

    Attributes:
        reaction: What is done about a wrong one.
        skipped: The steps skipped since the last look, by the samples seen before their windows.
    """

    def __init__(self, reaction: str | None, spike_guard: float | None, *, careful_until: int = 0) -> None:
        self.reaction = reaction
        self._careful_until = careful_until
        self._spike_guard = spike_guard
        self._losses: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._places: list[Place] = []
        self._harmless: set[int] = set()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.skipped: dict[int, int] = {}

    @property
    def looks_at_every_row(self) -> bool:
        """Whether a row with a finite mean may hide something."""
        return self._spike_guard is not None or bool(self.skipped)

    def add(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Note the loss of one batch, without waiting for it."""
        self._losses.append(loss)
        self._weights.append(weight)
        self._places.append(place)
        if len(self._losses) >= COMPACT_AT:
            self._chunks.append(stack(self._losses).float())
            self._losses = []

    def judges_before_step(self, samples_before: int) -> bool:
        """Return whether the optimizer has to wait for a judgement of the window that begins there."""
        return self.reaction == "skip" or samples_before < self._careful_until

    def mark_gradients(self, loss: torch.Tensor, factor: Weight) -> Weight:
        """Return the factor of a loss; for a wrong one it is NaN, so that gradients show it to all processes."""
        highest = min(self._highest(), torch.finfo(loss.dtype).max)
        return torch.where(loss.detach() <= highest, factor, math.nan)

    def forgive(self, samples_before: int) -> None:
        """Skip the losses of a window that a gradient scaler made no step of: it is there for overflows."""
        self._harmless.add(samples_before)

    def allows_step(self, gradients: list[torch.Tensor], step: int, samples_before: int) -> bool:
        """Return whether to step with these gradients, which are reduced over processes.

        Waits for the device.
        """
        is_finite = bool(torch.isfinite(total_norm(gradients)))
        if not is_finite:
            self.skipped[samples_before] = step
        return is_finite

    def find(self) -> list[tuple[Place, float, str]]:
        """Look at the losses that were added since the last call, and return where one is wrong.

        Waits for the device.
        """
        losses = chain.from_iterable(chunk.tolist() for chunk in self._chunks)
        last = stack(self._losses).tolist() if self._losses else []
        pairs = zip(chain(losses, last), _read(self._weights), self._places, strict=True)
        judged = (
            (loss, place) for loss, weight, place in pairs if weight and place.samples_before not in self._harmless
        )
        found = [(place, loss, what) for loss, place in judged if (what := self._judge(loss))]
        self.forget()
        return found

    def forget(self) -> None:
        """Drop the losses that were added since the last look: a row with a finite mean has shown that all are."""
        self._losses, self._chunks, self._weights, self._places, self._harmless = [], [], [], [], set()

    def _judge(self, loss: float) -> str | None:
        """Return what is wrong with a loss; one that is right is among those that the next is compared with."""
        if not math.isfinite(loss):
            return f"loss {loss}"
        if loss > (highest := self._highest()):
            return f"loss {loss:.4g}, a spike above {highest:.4g}"
        if self._spike_guard is not None:
            self._recent.append(loss)
        return None

    def _highest(self) -> float:
        if self._spike_guard is None or len(self._recent) < _ENOUGH:
            return math.inf
        mean = math.fsum(self._recent) / len(self._recent)
        variance = math.fsum((loss - mean) ** 2 for loss in self._recent) / len(self._recent)
        return mean + self._spike_guard * math.sqrt(variance)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses of all processes.

        Processes: collective where there is a spike guard.
        """
        return {"recent": None if self._spike_guard is None else gather_from_data(list(self._recent))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; with another number of processes, start the comparison again."""
        if state["recent"] is not None and len(state["recent"]) == num_data_processes():
            self._recent.extend(state["recent"][data_index()])


def _read(weights: list[Weight]) -> list[float]:
    """Return the values of weights; those on the device are read together."""
    on_device = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    values = iter(stack(on_device).tolist() if on_device else ())
    return [next(values) if isinstance(weight, torch.Tensor) else weight for weight in weights]


def check_losses(run: Run) -> None:
    """React to what is wrong with the losses since the last look.

    Processes: collective.
    """
    guard = run.guard
    own = [
        Finding(
            place,
            what,
            math.isfinite(loss),
            process_index(),
            run.train_loader.samples_of(place.epoch, place.micro_batch),
        )
        for place, loss, what in guard.find()[:_MAX_NAMED]
    ]
    found = sorted(chain.from_iterable(gather_from_data(own)), key=lambda finding: finding.place.samples_before)
    skipped, guard.skipped = guard.skipped, {}
    _warn_of_skipped([finding for finding in found if finding.place.samples_before in skipped], skipped)
    made = [finding for finding in found if finding.place.samples_before not in skipped]
    if made:
        _react(run, made)


def _warn_of_skipped(found: list[Finding], skipped: dict[int, int]) -> None:
    for finding in found:
        warn(f"{finding}: the step is skipped")
    named = {finding.place.samples_before for finding in found}
    for samples_before, step in skipped.items():
        if samples_before not in named:
            warn(f"the gradients of step {step} are not finite, though its losses are: it is skipped")


def _react(run: Run, found: list[Finding]) -> None:
    first = found[0]
    if run.guard.reaction in (None, "skip"):  # a spike that was judged by fewer losses before the step
        warn_once(f"{first}: lower the learning rate, or pass clip_grad=1.0", about="wrong losses")
        return
    run.snapshot.is_mid_step = True  # no checkpoint of this
    if run.guard.reaction == "rollback":
        window = first.place.samples_before
        roll_back(run, window, str(first), is_skipped=first.is_spike)
    skipping = 'failures={"on_nonfinite": "skip"} or "rollback"'
    do = f"lower the learning rate, pass clip_grad=1.0, or skip such steps: {skipping}"
    expected = "finite losses; the newest checkpoint is older than this one"
    raise NonFiniteError(explain("the training loss", str(first), expected, do))
