"""Names the causes of differences between launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accmt.addons.prove.experiments import READING_MODIFIES, Findings
from accmt.addons.prove.launches import Launch, Outcome
from accmt.trainer.digests import changed_attributes


@dataclass(frozen=True)
class Cause:
    """A cause of a difference.

    Attributes:
        name: A short name.
        got: What was seen.
        do: What to change.
    """

    name: str
    got: str
    do: str


def find_random(repeated: Outcome, reference: Outcome, findings: Findings) -> list[Cause]:
    """Return why the same launch differs from itself."""
    if repeated.batches != reference.batches and findings.data.startswith(READING_MODIFIES):
        return find_in_findings(Findings(data=findings.data))
    if repeated.batches != reference.batches:
        got = "two runs with the same seed read different batches"
        do = "draw random numbers from torch, numpy or random, which are seeded, not from the clock or the system"
        return [Cause("random data without a seed", got, do)]
    got = "two runs with the same seed read the same batches but compute different results"
    do = "look for unseeded generators, clocks, and iteration over sets of strings in the module and its callbacks"
    return [Cause("a random step without a seed", got, do)]


def find_in_findings(findings: Findings) -> list[Cause]:
    """Return the causes that the experiments on one process show, the first ones first in the path of a batch."""
    found = []
    if findings.data:
        do = "make __getitem__ depend only on the index (and random numbers), and return copies"
        found.append(
            Cause("state in the dataset", f"reading a sample twice gives different results: {findings.data}", do)
        )
    if findings.collate:
        do = (
            "compute each sample in __getitem__, and only pad and stack in the collate function; "
            "or accept that results depend on the batch size per process, as with mixup"
        )
        found.append(Cause("a collate function that mixes samples", findings.collate, do))
    if findings.repeated:
        do = "make training_step depend only on the batch, the weights and self.state.global_step"
        got = f"two steps with the same batch differ; what changed: {findings.repeated}"
        found.append(Cause("state in the module", got, do))
    if found:
        return found
    if findings.batch_norm:
        do = "use group or layer norm, or Trainer(sync_batchnorm=True) on several GPUs, or accept the difference"
        found.append(Cause("batch norm", f"{findings.batch_norm}, use the statistics of each micro-batch", do))
    if findings.weight.startswith("the loss is a sum"):
        found.append(Cause("a loss that is a sum", findings.weight, "return the mean over the samples"))
    elif findings.weight:
        do = 'return {"loss": loss, "weight": number} with the number of entries in the mean'
        found.append(Cause("a missing weight", findings.weight, do))
    if findings.padding:
        do = "pass the attention mask to the model, and leave padding out of the loss"
        found.append(Cause("a loss that depends on padding", findings.padding, do))
    if findings.compares:
        do = (
            "the loss compares samples or uses batch statistics: keep the batch size per process without accumulation, "
            "or gather the compared samples from all processes"
        )
        found.append(Cause("a loss that compares samples", findings.compares, do))
    return found


def find_on_processes(findings: Findings) -> list[Cause]:
    """Return the causes that the experiments on two processes show."""
    do = "do the same on all processes; only print and write files on the main process"
    if findings.data_on_processes:
        return [Cause("a branch on the rank in the data", findings.data_on_processes, do)]
    if findings.on_processes:
        return [Cause("a branch on the rank", findings.on_processes, do)]
    return []


def find_factor(launch: Launch, outcome: Outcome) -> list[Cause]:
    """Return a factor that all gradients of a launch have."""
    if outcome.ratio is None or math.isnan(outcome.ratio):
        return []
    what = "processes" if launch.processes > 1 else "accumulated batches"
    got = f"all gradients are {outcome.ratio:.4g} times those of one batch"
    do = f"do not scale the loss by the number of {what}: accmt does it"
    return [Cause("a loss that is scaled by hand", got, do)]


def find_resume(outcome: Outcome, reference: Outcome) -> list[Cause]:
    """Return what an interrupted run has lost."""
    lost = [
        f"{owner}: self.{name}"
        for owner, before in reference.attributes.items()
        for name in changed_attributes(before, outcome.attributes.get(owner, {}))
    ]
    got = f"not restored: {', '.join(lost)}" if lost else "state that no checkpoint contains"
    do = "return it from state_dict (of module or callback), and restore it in load_state_dict"
    return [Cause("state that no checkpoint contains", got, do)]


def find_in_workers(outcome: Outcome, reference: Outcome) -> list[Cause]:
    """Return why loader workers change the result."""
    is_of_data = outcome.batches != reference.batches
    got = "the batches differ" if is_of_data else "the batches are the same, but the results differ"
    do = "make __getitem__ depend only on the index: each worker has its own copy of the dataset"
    return [Cause("a dataset that behaves differently in a loader worker", got, do)]


def find_in_metrics(names: list[str], launch: Launch, findings: Findings) -> list[Cause]:
    """Return why results of an evaluation differ."""
    found = []
    for name in names:
        key = name.partition("@")[0]
        seen = findings.evaluation.get(key) or (findings.evaluation.get("loss") if "loss" in key else None)
        if seen and seen.startswith("it is a mean over"):
            do = 'return {"loss": loss, "weight": number} from validation_step'
            found.append(Cause("a missing weight in validation", f"{name}: {seen}", do))
        elif seen or launch.processes == 1:
            do = "return (predictions, references) from validation_step, and compute it with a Metric over all samples"
            got = f"{name} changes with the batch size" + (f": {seen}" if seen else "")
            found.append(Cause("a metric that averages means", got, do))
        else:
            do = "return the value of each batch from validation_step, or use a Metric: both are reduced over processes"
            found.append(
                Cause(
                    "a metric that is not reduced over processes", f"{name} differs on {launch.processes} processes", do
                )
            )
    return found


def find_callback(names: list[str], differs_without: Callable[[tuple[int, ...]], bool]) -> list[Cause]:
    """Return the callbacks without which launches agree.

    Args:
        names: The names of the callbacks.
        differs_without: Whether launches still differ with only some of the callbacks.
    """
    if not names or differs_without(()):
        return []
    guilty = [name for index, name in enumerate(names) if len(names) == 1 or differs_without((index,))]
    got = f"without {', '.join(guilty or names)}, launches agree"
    do = "change gradients in on_before_optimizer_step, in the same way on all processes, not once per micro-batch"
    return [Cause("a callback", got, do)]


def names_that_differ(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], tolerance: float
) -> list[str]:
    """Return the names of values that differ in lists of evaluations."""
    found: dict[str, None] = {}
    for one, other in zip(ours, theirs, strict=False):
        for name in one.keys() & other.keys():
            if relative_error(one[name], other[name]) > tolerance:
                found[name] = None
    return list(found)


def relative_error(one: float, other: float) -> float:
    """Return the relative difference of two numbers; 0 if both are NaN."""
    if math.isnan(one) and math.isnan(other) or one == other:
        return 0.0
    error = abs(one - other) / max(abs(other), 1e-3)
    return error if math.isfinite(error) else math.inf
