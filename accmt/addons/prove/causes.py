"""Names the causes of differences between launches.

Experiments on the user's step, data and collate function find most of them: they run in a launch of their own, on the
batches of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accmt.addons.digests import changed_attributes, digest, digest_attributes
from accmt.addons.flight_recorder.examiner import rows
from accmt.addons.prove.launches import Launch, Outcome
from accmt.addons.prove.randomness import SameForAllSamples, seed_step
from accmt.callbacks import StatelessCallback
from accmt.data import first_dimension
from accmt.engine.sync_batchnorm import is_batch_norm
from accmt.loop.step_outputs import read_training_output
from accmt.processes import gather_objects, num_processes
from accmt.without_trace import without_trace

_READING_MODIFIES = "reading modifies "
_SAME = 1e-3


@dataclass
class Findings:
    """What the experiments found; each is a sentence, or "" where there is nothing to report.

    Attributes:
        data: Reading a sample twice does not give the same sample.
        data_on_processes: Processes read different samples at an index.
        collate: The batch of some samples is not a part of the batch of more.
        repeated: Two calls of the step with one batch differ.
        batch_norm: The step depends on the statistics of a batch.
        weight: The loss is a mean over something else than its weight says.
        padding: The step depends on the padding.
        compares: The samples of a batch influence one another.
        on_processes: The step depends on the process.
        evaluation: Values of the validation step that are not means over its samples.
    """

    data: str = ""
    data_on_processes: str = ""
    collate: str = ""
    repeated: str = ""
    batch_norm: str = ""
    weight: str = ""
    padding: str = ""
    compares: str = ""
    on_processes: str = ""
    evaluation: dict[str, str] = field(default_factory=dict)


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
    if repeated.batches != reference.batches and findings.data.startswith(_READING_MODIFIES):
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


# ---- The experiments


class Laboratory(StatelessCallback):
    """Makes the experiments before each training step, and before the first validation step."""

    def __init__(self) -> None:
        self.findings = Findings()
        self._is_evaluation_tried = False

    def on_before_training_step(self, batch: Any) -> None:
        run = self.trainer.run
        indices = run.train_loader.source.samples_of(self.state.epoch, self.state.train_step)
        loader = run.train_loader.source.dataloader
        data = getattr(loader.dataset, "dataset", loader.dataset)
        collate = getattr(loader.collate_fn, "collate", loader.collate_fn)
        if num_processes() > 1:
            self._compare_processes(run, data, collate, gather_objects(indices)[0] or [])
            return
        if indices and not self.findings.data:
            self.findings.data = _read_twice(data, indices[:3])
        if self.module.uses_manual_optimization:
            return
        size = first_dimension(batch) or 0
        if size < 2 or (indices and len(indices) != size):
            return
        cut = max(2, size // 3) if size > 3 else 1
        with without_trace(run.unwrapped_model):
            whole = self._measure(run, batch)
            before = digest_attributes(self.module)
            again = self._measure(run, batch)
            if abs(again.loss - whole.loss) > 1e-6 * abs(whole.loss) or _differ(whole.gradients, again.gradients):
                changed = changed_attributes(before, digest_attributes(self.module))
                self.findings.repeated = ", ".join(f"self.{name}" for name in changed) or "nothing visible"
            split = rows(batch, size, range(cut)), rows(batch, size, range(cut, size))
            by_rows = [self._measure(run, part) for part in split]
            halves = by_rows
            if indices and len(indices) == size:
                seed_step("collate", self.state.global_step)
                parts = [collate([data[index] for index in some]) for some in (indices[:cut], indices[cut:])]
                if not self.findings.collate and not all(map(_begins_like, split, parts)):
                    self.findings.collate = (
                        "the collate function changes a sample's values depending on the rest of its batch"
                    )
                halves = [self._measure(run, run.place(part)) for part in parts]
            if _is_mean(whole, halves):
                return
            if any(is_batch_norm(layer) and layer.training for layer in run.unwrapped_model.modules()):
                names = [name for name, layer in run.unwrapped_model.named_modules() if is_batch_norm(layer)]
                for layer in run.unwrapped_model.modules():
                    if is_batch_norm(layer):
                        layer.eval()
                whole, *both = (self._measure(run, part) for part in (batch, *split))
                self.findings.batch_norm = f"{len(names)} batch norm layer(s), first {names[0]}"
                if _is_mean(whole, both):
                    return
                halves = by_rows = both
            self._explain_halves(split, whole, by_rows, halves)

    def on_before_validation_step(self, batch: Any) -> None:
        if self._is_evaluation_tried or num_processes() > 1:
            return
        self._is_evaluation_tried = True
        run = self.trainer.run
        size = first_dimension(batch) or 0
        if size < 2:
            return
        parts = (batch, rows(batch, size, [0]), rows(batch, size, range(1, size)))
        with without_trace(run.unwrapped_model), torch.no_grad():
            key = next(iter(run.val_loaders))  # the first set is evaluated first
            outputs = []
            for part in parts:
                seed_step("evaluation", 0)
                with SameForAllSamples("evaluation", 0):
                    outputs.append(run.validation_step(key, part))
        values = [one if isinstance(one, Mapping) else {"loss": one} for one in outputs]
        weights = [float(one["weight"]) if "weight" in one else None for one in values]
        own = (1.0, size - 1.0) if weights[1] is None else (weights[1], weights[2] or 0.0)
        for name, value in values[0].items():
            if name == "weight" or not isinstance(value, torch.Tensor | float) or torch.as_tensor(value).numel() != 1:
                continue
            one, first, second = (float(each[name]) for each in values)
            if abs(one - (own[0] * first + own[1] * second) / sum(own)) <= _SAME * max(abs(one), _SAME):
                continue
            share = (one - second) / (first - second) if first != second else math.nan
            named = _name_weight(share, parts[1], parts[2])
            self.findings.evaluation[name] = f"it is a mean over {named}" if named else "it is not a mean over samples"

    def _measure(self, run: Any, batch: Any) -> _Measured:
        """Return loss, weight and gradients of a batch, with the weights and random numbers of this step."""
        model = run.unwrapped_model
        for weight in model.parameters():
            weight.grad = None
        seed_step("step", self.state.global_step)
        with SameForAllSamples("step", self.state.global_step):
            outputs = run.features.call_training_step(run.training_step, batch, read=batch)
            output = read_training_output(outputs)
            given = output.weight
            if given is None and run.features.weigh:
                given = run.features.find_weight(output.loss, is_given=False)
            if given is None:
                own = run.module.get_batch_size(batch) if run.counts_own_samples else None
                given = own if own is not None else first_dimension(batch)
            torch.autograd.backward(output.loss)
        gradients = [
            weight.grad.detach().to_dense().double().flatten()
            for weight in model.parameters()
            if weight.grad is not None
        ]
        return _Measured(
            float(output.loss.detach()), float(given or 0), torch.cat(gradients), output.weight is not None
        )

    def _explain_halves(
        self, split: tuple[Any, Any], whole: _Measured, by_rows: list[_Measured], halves: list[_Measured]
    ) -> None:
        if halves is not by_rows and _is_mean(whole, by_rows):
            self.findings.padding = "a sample's loss changes with the padding of its batch"
            return
        first, second = by_rows
        difference = first.gradients - second.gradients
        if not _differ(whole.gradients, first.gradients + second.gradients):
            self.findings.weight = "the loss is a sum over samples, not a mean"
            return
        square = float(difference @ difference)
        share = float((whole.gradients - second.gradients) @ difference) / square if square else math.nan
        fits = not _differ(whole.gradients, second.gradients + share * difference)
        if fits and 0 < share < 1:
            named = _name_weight(share, *split)
            says = "a weight that the step returns" if whole.is_given else "the number of samples"
            self.findings.weight = (
                f"the loss is a mean over {named or 'something else'}, and its weight in a step is {says}"
            )
        else:
            self.findings.compares = "the gradient of a batch is not the mean of the gradients of its parts"

    def _compare_processes(self, run: Any, data: Any, collate: Any, indices: list[int]) -> None:
        """Give all processes the same samples, and compare what they read and compute."""
        if not indices:
            return
        samples = [data[index] for index in indices]
        if len(set(gather_objects(digest(samples)))) > 1:
            self.findings.data_on_processes = "processes read different samples at the same index"
            return
        if self.module.uses_manual_optimization:
            return
        seed_step("collate", self.state.global_step)
        batch = run.place(collate(samples))
        with without_trace(run.unwrapped_model), run.engine.unwrapped(trains=True):
            measured = self._measure(run, batch)
        every = gather_objects((measured.loss, measured.weight, measured.gradients))
        for rank, (loss, weight, gradients) in enumerate(every):
            if loss != every[0][0] or weight != every[0][1] or _differ(every[0][2], gradients):
                got = f"process 0 has a loss of {every[0][0]:.6g} for a batch, process {rank} {loss:.6g}"
                self.findings.on_processes = got if loss != every[0][0] else "the gradients of the same batch differ"


@dataclass(frozen=True)
class _Measured:
    loss: float
    weight: float
    gradients: torch.Tensor
    is_given: bool


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    size = max(float(one.norm()), float(other.norm()))
    return not float((one - other).norm()) <= _SAME * size


def _is_mean(whole: _Measured, parts: list[_Measured]) -> bool:
    """Return whether the gradient of a batch is the mean of those of its parts, by the weights that count."""
    total = sum(part.weight for part in parts)
    if not total or len({part.gradients.shape for part in (whole, *parts)}) > 1:
        return False
    mean = sum((part.weight / total * part.gradients for part in parts), torch.zeros_like(whole.gradients))
    return not _differ(whole.gradients, mean)


def _read_twice(data: Any, indices: list[int]) -> str:
    for index in indices:
        before = digest_attributes(data)
        first = digest(data[index])
        middle = digest_attributes(data)
        if digest(data[index]) != first:
            changed = changed_attributes(before, middle)
            names = ", ".join(f"self.{name}" for name in changed)
            return _READING_MODIFIES + names if names else "no visible attribute changes"
    return ""


def _tensors(value: Any, name: str = "the batch") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"`{key}`")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"batch[{index}]")


def _begins_like(longer: Any, shorter: Any) -> bool:
    """Return whether tensors of a batch begin like those of another one, which may have more padding."""
    for (_, one), (_, other) in zip(_tensors(longer), _tensors(shorter), strict=False):
        if one.ndim != other.ndim or one.dtype != other.dtype or not one.ndim:
            continue
        common = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
        if not torch.equal(one[common], other[common].to(one.device)):
            return False
    return True


def _name_weight(share: float, first: Any, second: Any) -> str:
    """Return what a loss is a mean over, if the first part has this share of it."""
    for (name, one), (_, other) in zip(_tensors(first), _tensors(second), strict=False):
        counts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            f"the entries of {name} that are not -100": lambda t: (t != -100).sum(),
            f"the entries of {name} that are not -100, without the first of each row": lambda t: (
                t[:, 1:] != -100
            ).sum(),
            f"the entries of {name} that are not 0": lambda t: (t != 0).sum(),
            f"the sum of {name}": lambda t: t.double().sum(),
            f"the entries of {name}": lambda t: torch.tensor(t.numel()),
        }
        for what, count in counts.items():
            if "without" in what and one.ndim < 2:
                continue
            mine, theirs = float(count(one)), float(count(other))
            of_rows = len(one) / max(1, len(one) + len(other)) if one.ndim else math.nan
            if mine + theirs > 0 and abs(mine / (mine + theirs) - share) < 1e-3 and abs(of_rows - share) > 1e-3:
                return what
    return ""
