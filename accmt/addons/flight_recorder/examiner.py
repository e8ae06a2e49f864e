"""Measurements of a replay in the requested steps: single samples, layers, and the files of `--export`.

The first step can also be made without some of its samples. A sample's number is its index in the data. A stream has no
indices: there it is the position in the step, over all processes, from 0.

A sample is measured with the weights before the step, alone, and weighted as it counts in the step. All processes
compute the same sample at once, since a sharded model needs all of them. Dropout is replaced by its mean. If the
weighted losses of the samples do not add up to that of the step, its loss compares samples (or it normalizes over
them), and no sample has a gradient of its own: the report says so.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accmt.addons.token_batches.lengths import find_length
from accmt.addons.token_batches.windows import ByPackedRows, unpack
from accmt.data import MicroBatch, Window, derive_seed, first_dimension, seed_generators
from accmt.data.fetching import Fetched
from accmt.errors import ArgumentError, DataError, fail
from accmt.files import dumps, loads
from accmt.options import Ledger
from accmt.processes import data_index, gather_from_data, is_main_process, num_data_processes
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.sharded_tensors import is_dtensor, make_whole, total_norm

_EXACT, _REDUCED = 1e-3, 5e-2  # relative errors up to which losses count as equal: float32, and reduced precisions
_MOST_NAMED = 16
_MOST_VALUES = 10_000
_NOT_DETERMINISTIC = " does not have a deterministic implementation"
_LONGEST = 200
_MOST_SHOWN = 8
_TEXT = ("input_ids", "attention_mask")
EXAMINED_FILE = "examined.jsonl"

Place = tuple[int, int, int]
"""An epoch, and the first and last + 1 of some micro-batches in it."""


@dataclass(frozen=True)
class SampleReport:
    """A sample of a step.

    Attributes:
        number: Its index in the data; in a stream, its position in the step.
        loss: Its loss alone.
        gradient_norm: The norm of its gradient, weighted as it counts in the step.
        tokens: Its tokens; None where it has no length.
        text: What it is: its decoded text, or the kinds and shapes of its values.
    """

    number: int
    loss: float
    gradient_norm: float
    tokens: int | None
    text: str


@dataclass(frozen=True)
class StepReport:
    """A step that was made again.

    Attributes:
        step: The optimizer step, from 1.
        gradient_norm: The norm of its gradient before clipping; None if the module calls the optimizer itself.
        layers: The norm of the gradient of each layer, the largest first.
        samples: The samples, the largest gradient first.
        why_not_split: Why the samples have no gradients of their own; "" if they have.
    """

    step: int
    gradient_norm: float | None = None
    layers: list[tuple[str, float]] = field(default_factory=list)
    samples: list[SampleReport] = field(default_factory=list)
    why_not_split: str = ""

    @classmethod
    def read(cls, line: str) -> StepReport:
        """Read a line of `examined.jsonl`."""
        read = loads(line)
        samples = [SampleReport(**one) for one in read["samples"]]
        return cls(**{**read, "samples": samples, "layers": [tuple(layer) for layer in read["layers"]]})


@dataclass(frozen=True, kw_only=True)
class Examination(Ledger):
    """The ledger of a replay, with what is asked of its steps.

    Args:
        folder: Where reports are written.
        first: The first requested step.
        last: The last one.
        examines: Whether samples and layers are measured.
        without: Numbers of samples that the first step is made without.
        places: The micro-batches of the first step.
        export: Where batch, weights and gradients of the first step are written.
    """

    folder: Any
    first: Any
    last: Any
    examines: bool = True
    without: Any = ()
    places: Any = ()
    export: Any = None


class Examiner(Feature):
    """Measures the steps of a replay."""

    name = "examiner"

    def __init__(self, run: Run, asked: Examination) -> None:
        self._run = run
        self._asked = asked
        self._watched: Any = None  # a WatchedMaker
        self._batches: list[MicroBatch] = []
        self._done: set[int] = set()
        self._is_checked = not asked.without

    @classmethod
    def for_run(cls, run: EvaluationRun) -> Examiner | None:
        asked = run.settings.tracking.ledger
        return cls(run, asked) if isinstance(asked, Examination) and isinstance(run, Run) else None

    def on_training_start(self) -> None:
        loader, asked = self._run.train_loader, self._asked
        self._watched = WatchedMaker(loader.maker, set(asked.without), [tuple(place) for place in asked.places])
        loader.maker = self._watched

    def before_batch(self, micro_batch: MicroBatch) -> None:
        self._batches.append(micro_batch)

    def after_window(self, *, made_step: bool) -> None:
        step = self._run.state.global_step
        if self._is_asked(step) and made_step:  # a module that calls the optimizer itself
            self._write(StepReport(step, why_not_split="the module calls backward and the optimizer itself"))
        self._batches = []
        self._watched.read.clear()
        if self._is_checked:
            return
        epoch, _, last = self._asked.places[-1]
        state = self._run.state
        if (state.epoch, state.train_step) < (epoch, last):
            return
        self._is_checked = True  # that the step had all samples that are left out
        seen = set().union(*gather_from_data(self._watched.seen))
        missing = sorted(set(self._asked.without) - seen)
        if missing:
            got = f"{', '.join(map(str, missing))}, not among the samples of the step"
            shown = ", ".join(map(str, sorted(seen)[:_MOST_NAMED])) + (", ..." if len(seen) > _MOST_NAMED else "")
            raise fail(
                ArgumentError, "--without", got=got, expected=f"some of {shown}", do="run without --without to see them"
            )

    def on_gradients(self) -> None:
        step, model = self._run.state.global_step + 1, self._run.unwrapped_model
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        if self._asked.export is not None and step == self._asked.first and step not in self._done:
            # The batches of all processes, and the weights and gradients before the step.
            weights = {name: make_whole(value.detach()).cpu() for name, value in model.state_dict().items()}
            whole = {name: None if one is None else make_whole(one).cpu() for name, one in gradients.items()}
            batches = [one for own in gather_from_data([one.batch for one in self._batches]) for one in own]
            if is_main_process():
                place = Path(self._asked.export)
                unfinished = place.with_name(f".tmp-{place.name}")
                found = {"step": step, "batches": batches, "weights": weights, "gradients": whole}
                torch.save(found, unfinished)
                unfinished.replace(place)
        if self._is_asked(step):
            self._write(self._examine(step, {name: one for name, one in gradients.items() if one is not None}))

    def _is_asked(self, step: int) -> bool:
        asked = self._asked
        return asked.examines and asked.first <= step <= asked.last and step not in self._done

    def _write(self, report: StepReport) -> None:
        self._done.add(report.step)
        if is_main_process():
            with Path(self._asked.folder, EXAMINED_FILE).open("a", encoding="utf-8") as file:
                file.write(dumps(asdict(report)) + "\n")

    def _examine(self, step: int, gradients: dict[str, torch.Tensor]) -> StepReport:
        run = self._run
        by_layer: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name, gradient in gradients.items():
            by_layer[name.rpartition(".")[0] or "(model)"].append(gradient)
        layers = [(name, float(total_norm(of_one))) for name, of_one in by_layer.items()]
        layers.sort(key=lambda pair: pair[1], reverse=True)
        norm = math.hypot(*(norm for _, norm in layers))
        if not isinstance(watched := run.train_loader.maker, WatchedMaker):
            return StepReport(step, norm, layers, why_not_split="the data are loaded again in each epoch")
        with measuring(run) as measure:
            try:
                samples = [one for own in gather_from_data(own_samples(run, watched, run.state.epoch)) for one in own]
                alone = [measure(sample.batch, 1) for sample in samples]
                batches = [(one.batch, one) for one in self._batches if one.batch is not None]
                sized = [(batch, run.count_samples(one, batch, has_weight=True)) for batch, one in batches]
                wholes = [measure(batch, size) for own in gather_from_data(sized) for batch, size in own]
            except Exception as error:  # noqa: BLE001 - such as batch norm, which needs several samples
                why = f"single samples cannot be computed: {type(error).__name__}: {error}".partition("\n")[0]
                return StepReport(step, norm, layers, why_not_split=why)
        total = sum(one.weight for one in alone)
        reports = [
            SampleReport(
                sample.number,
                one.loss,
                one.gradient_norm * one.weight / total if total else 0.0,
                sample.tokens,
                sample.text,
            )
            for sample, one in zip(samples, alone, strict=True)
        ]
        reports.sort(key=lambda report: (not math.isfinite(report.gradient_norm), report.gradient_norm), reverse=True)
        is_reduced = str(run.accelerator.mixed_precision) != "no" or any(
            weight.dtype in (torch.bfloat16, torch.float16) for weight in run.unwrapped_model.parameters()
        )
        why_not = _compare(alone, wholes, _REDUCED if is_reduced else _EXACT)
        return StepReport(step, norm, layers, reports, why_not)


class _Measured(NamedTuple):
    loss: float
    weight: float
    gradient_norm: float


def _compare(alone: list[_Measured], wholes: list[_Measured], tolerance: float) -> str:
    """Return why the losses of samples are not parts of that of the step; "" if they are."""
    sums = [
        [math.fsum(one.weight * one.loss for one in some), sum(one.weight for one in some)] for some in (alone, wholes)
    ]
    if not all(weight for _, weight in sums):
        return "the samples have no weight"
    parts, whole = (loss / weight for loss, weight in sums)
    if not (math.isfinite(parts) and math.isfinite(whole)):
        return ""
    if abs(parts - whole) <= tolerance * max(abs(whole), abs(parts)):
        return ""
    return (
        f"the mean loss of single samples is {parts:.6g}, but the step's loss is {whole:.6g}: the loss "
        "compares samples, normalizes over them, or depends on their padding"
    )


@contextmanager
def measuring(run: Run) -> Iterator[Any]:
    """Yield a function that returns loss, weight and gradient norm of a batch; nothing that it changes remains.

    Processes: collective; all call it with the same batches.
    """
    from accmt.addons.prove.randomness import SameForAllSamples, seed_step
    from accmt.addons.token_batches.packing import count_targets
    from accmt.loop.logging import SilentLogs
    from accmt.loop.step_outputs import read_training_output
    from accmt.precisions import autocast
    from accmt.without_trace import without_trace

    model, module, step = run.unwrapped_model, run.module, run.state.global_step
    is_packed = isinstance(vars(run.train_loader.maker).get("_maker"), ByPackedRows)

    def measure(batch: Any, size: int) -> _Measured:
        for weight in model.parameters():
            weight.grad = None
        seed_step("step", step)
        with run.engine.running(None):
            with SameForAllSamples("step", step), autocast(run.accelerator):
                outputs = run.features.call_training_step(run.training_step, run.place(batch), read=batch)
                output = read_training_output(outputs)
            output.loss.backward()  # type: ignore[no-untyped-call]
        given = output.weight
        if given is None and is_packed:
            given = float(count_targets(batch))
        if run.features.weigh and run.weighting.is_explicit is not False:
            found = run.features.find_weight(output.loss, is_given=given is not None)
            given = given if found is None else found
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = float(total_norm(gradients)) if gradients else 0.0
        if any(map(is_dtensor, gradients)):  # with `same_bits`, the sum over processes, which compute the same sample
            norm *= run.engine.divisor / num_data_processes()
        return _Measured(float(output.loss.detach()), float(size if given is None else given), norm)

    logs = module.logs
    module.logs = SilentLogs(module.trainer)
    # What a step may count or collect in the module: numbers, tensors, and collections of them.
    names = set(vars(module))
    values = {name: value for name, value in vars(module).items() if _is_plain(value)}
    copies = {name: copy.deepcopy(value) for name, value in values.items()}
    try:
        with without_trace(model), run.engine.unwrapped(trains=True):
            yield measure
    finally:
        for name in set(vars(module)) - names:
            del vars(module)[name]
        for name, value in values.items():
            vars(module)[name] = _restore(value, copies[name])
        module.logs = logs
        logs.of_training.drop_batch()


def _is_plain(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not value.requires_grad
    if isinstance(value, list | tuple | set | deque):
        return depth > 0 and len(value) <= _MOST_VALUES and all(_is_plain(one, depth - 1) for one in value)
    if isinstance(value, dict):
        return depth > 0 and len(value) <= _MOST_VALUES and all(_is_plain(one, depth - 1) for one in value.values())
    return value is None or isinstance(value, int | float | str)


def _restore(value: Any, before: Any) -> Any:
    """Give a value that others may refer to its earlier content, and return it."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, set | dict):
        value.clear()
        value.update(before)
    return value


def find_operations(run: Run, batch: Any) -> list[str]:
    """Return the operations in a training step that have no deterministic implementation on the run's device.

    Processes: collective; all get the same batch.
    """
    mode = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(record=True) as caught, measuring(run) as measure:
        warnings.simplefilter("always")
        torch.set_deterministic_debug_mode("warn")
        try:
            measure(batch, 1)
        finally:
            torch.set_deterministic_debug_mode(mode)
    said = (str(one.message).partition(_NOT_DETERMINISTIC) for one in caught)
    return list(dict.fromkeys(name for name, found, _ in said if found))


# ---- The samples of a step, one by one: as they were read, collated alone; and the step without some of them


class Sample(NamedTuple):
    """A sample of a step.

    Attributes:
        number: Its number.
        batch: A batch of this sample alone.
        text: What it is: its decoded text, or the kinds and shapes of its values.
        tokens: Its tokens; None where it has no length.
    """

    number: int
    batch: Any
    text: str
    tokens: int | None


class WatchedMaker:
    """Makes the windows of another maker, keeps what each was read from, and leaves some samples out.

    Args:
        maker: The maker of the run's loader.
        removed: Numbers of samples to leave out.
        places: The micro-batches in which they are left out.
    """

    def __init__(self, maker: Any, removed: Collection[int], places: Sequence[Place]) -> None:
        self._maker = maker
        self.removed = removed
        self.places = places
        self.read: list[MicroBatch] = []
        self.seen: set[int] = set()  # this process's samples in these places

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_maker"], name)

    def windows(self, source: Any, epoch: int, first: int) -> Iterator[Window]:
        windows: Iterator[Window] = self._maker.windows(_WatchedSource(source, self), epoch, first)
        return windows


class _WatchedSource:
    def __init__(self, source: Any, watched: WatchedMaker) -> None:
        self._source = source
        self._watched = watched
        self._epoch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_source"], name)

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        self._epoch, num_before = epoch, 0
        for micro_batch in self._source.micro_batches(epoch, first):
            if self._is_changed(micro_batch.index, micro_batch.index + 1):
                num_before += self._remove(epoch, micro_batch, num_before)
            self._watched.read.append(micro_batch)
            yield micro_batch

    def samples_in(self, first: int, last: int) -> int | None:
        planned: int | None = self._source.samples_in(first, last)
        if planned is None or not self._is_changed(first, last):
            return planned
        own = [self._source.samples_of(self._epoch, index) or [] for index in range(first, last)]
        removed = sum(number in self._watched.removed for numbers in own for number in numbers)
        return planned - sum(gather_from_data(removed))

    def _is_changed(self, first: int, last: int) -> bool:
        places = (place for place in self._watched.places if place[0] == self._epoch)
        return any(first < end and begin < last for _, begin, end in places)

    def _remove(self, epoch: int, micro_batch: MicroBatch, num_before: int) -> int:
        """Leave samples of a micro-batch out, and return how many it had over all processes."""
        numbers, size = number_samples(self._source, self._watched, epoch, micro_batch, num_before)
        kept = [place for place, number in enumerate(numbers) if number not in self._watched.removed]
        every = gather_from_data((len(numbers) - len(kept), not kept))
        self._watched.seen.update(numbers)
        micro_batch.is_partial = any(is_empty for _, is_empty in every)
        if micro_batch.num_samples is not None:
            micro_batch.num_samples -= sum(removed for removed, _ in every)
        if len(kept) == len(numbers):
            return size
        if not kept:
            micro_batch.batch = [] if not self._watched.keeps_batches else None
        elif not self._watched.keeps_batches:
            samples = unpack(micro_batch.batch)
            micro_batch.batch = [samples[place] for place in kept]
        else:
            fetched = self._source.read_again(epoch, micro_batch.index)
            if fetched is None:
                micro_batch.batch = rows(micro_batch.batch, len(numbers), kept)
            else:
                if fetched.seed is not None:
                    seed_generators(fetched.seed)
                collate = self._source.dataloader.collate_fn.collate
                micro_batch.batch = collate([fetched.samples[place] for place in kept])
        micro_batch.own_samples = len(kept)
        if micro_batch.indices is not None:
            micro_batch.indices = [numbers[place] for place in kept]
        return size


def number_samples(
    source: Any, maker: Any, epoch: int, micro_batch: MicroBatch, num_before: int
) -> tuple[list[int], int]:
    """Return the numbers of this process's samples in a micro-batch, and how many it has over all processes.

    Processes: collective for a stream.

    Args:
        num_before: Samples of the step in the micro-batches before it.
    """
    indices = source.samples_of(epoch, micro_batch.index)
    if indices is not None:
        skipped = {bad.index for bad in micro_batch.bad}
        return [index for index in indices if index not in skipped], 0
    batch = micro_batch.batch
    if batch is None:
        size = 0
    elif not maker.keeps_batches:
        size = len(unpack(batch))
    else:
        size = (first_dimension(batch) or 0) if micro_batch.own_samples is None else micro_batch.own_samples
    every = gather_from_data(size)
    first = num_before + sum(every[: data_index()])
    if micro_batch.unit is not None:  # where the samples of a unit begin: the main process has the first one of a step
        first = micro_batch.unit - gather_from_data((maker.read or [micro_batch])[0].unit)[0]
    return list(range(first, first + size)), sum(every)


def own_samples(run: Run, watched: WatchedMaker, epoch: int) -> list[Sample]:
    """Return this process's samples in the micro-batches that were read last, each collated alone.

    Processes: collective for a stream.
    """
    source, num_before, found = run.train_loader.source, 0, []
    tokenizer = find_tokenizer(run)
    for micro_batch in watched.read:
        numbers, size = number_samples(source, watched, epoch, micro_batch, num_before)
        num_before += size
        fetched: Fetched | None = None
        samples: Sequence[Any] | None = None
        if not watched.keeps_batches:
            samples, collate = unpack(micro_batch.batch), watched.collate
        elif (fetched := source.read_again(epoch, micro_batch.index)) is not None:
            samples, collate = fetched.samples, getattr(source.dataloader.collate_fn, "collate", None)
        for place, number in enumerate(numbers):
            seed_generators(derive_seed(run.seed, "collate alone", epoch, number))
            if samples is None:
                batch = rows(micro_batch.batch, len(numbers), [place])
                found.append(Sample(number, batch, describe(batch, tokenizer), _count_tokens(run, batch, batch)))
            else:
                batch = collate([samples[place]])
                text = describe(samples[place], tokenizer)
                found.append(Sample(number, batch, text, _count_tokens(run, batch, samples[place])))
    return found


def rows(value: Any, size: int, kept: Sequence[int]) -> Any:
    """Return some samples of a batch: rows of tensors and entries of lists."""
    if isinstance(value, torch.Tensor):
        return value[list(kept)] if value.shape[:1] == (size,) else value
    if isinstance(value, Mapping):
        parts = {name: rows(item, size, kept) for name, item in value.items()}
        try:
            return type(value)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(value, list | tuple):
        if len(value) == size and not any(_has_rows(item, size) for item in value):
            some = [value[place] for place in kept]
            return tuple(some) if isinstance(value, tuple) else some
        made = [rows(item, size, kept) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _has_rows(value: Any, size: int) -> bool:
    if isinstance(value, Mapping):
        return any(_has_rows(item, size) for item in value.values())
    return isinstance(value, torch.Tensor) and value.shape[:1] == (size,)


def find_tokenizer(run: Run) -> Any:
    """Return the tokenizer of the module or of the collate function; None if there is none."""
    collate = getattr(run.train_loader.maker, "collate", None) or run.train_loader.source.dataloader.collate_fn
    owners = [run.module, *getattr(collate, "functions", ()), collate, getattr(collate, "collate", None)]
    tokenizers = (getattr(owner, name, None) for owner in owners for name in ("tokenizer", "processing_class"))
    return next((one for one in tokenizers if hasattr(one, "decode")), None)


def describe(sample: Any, tokenizer: Any = None) -> str:
    """Return what a sample is: its text where it has tokens, otherwise the kinds and shapes of its values."""
    if isinstance(sample, tuple | list) and sample and isinstance(sample[0], Mapping):
        return ", ".join([describe(sample[0], tokenizer), *(_describe_value(one) for one in sample[1:])])
    if not isinstance(sample, Mapping):
        values = list(sample) if isinstance(sample, tuple | list) else [sample]
        return ", ".join(map(_describe_value, values))[:_LONGEST]
    if tokenizer is None or "input_ids" not in sample:
        return ", ".join(f"{name} {_describe_value(value)}" for name, value in sample.items())[:_LONGEST]
    ids, mask = sample["input_ids"], sample.get("attention_mask")
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple):  # of several answers
        ids, mask = [token for one in ids for token in one], None
    ids = torch.as_tensor(ids).reshape(-1)
    if mask is not None:
        ids = ids[torch.as_tensor(mask).reshape(-1).bool()]
    text = repr(tokenizer.decode(ids[: 2 * _LONGEST].tolist()))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    others = (f"{name} {_describe_value(value)}" for name, value in sample.items() if name not in _TEXT)
    return ", ".join([shown, *others])[: 2 * _LONGEST]


def _describe_value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        tensor = torch.as_tensor(value)
        if tensor.numel() <= _MOST_SHOWN:
            return str([float(f"{one:.4g}") for one in tensor.double().reshape(-1).tolist()])
        extent = f"{float(tensor.min()):.4g} to {float(tensor.max()):.4g}"
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} from {extent}"
    if isinstance(value, list) and len(value) > _MOST_SHOWN:
        return f"list of {len(value)}"
    return repr(value)[:_LONGEST]


def _count_tokens(run: Run, batch: Any, sample: Any) -> int | None:
    """Return the tokens of a sample: those that its batch does not mask, or its length."""
    batch = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("attention_mask", "input_ids") if name in batch), None)
        if isinstance(found, torch.Tensor):
            return int(found.sum()) if "attention_mask" in batch else found.numel()
    try:
        return find_length(sample, getattr(run.module, "length_of", None))
    except DataError:
        return None
