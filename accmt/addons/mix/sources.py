"""The sources of a mixture as one data set, which defines the order of its samples, or as one stream."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader

from accmt.addons.mix.order import (
    Array,
    EpochCut,
    Interleaving,
    MixOrder,
    Stage,
    Stretch,
    files_of,
    methods_of,
    whole_parts,
)
from accmt.addons.mix.section import MixSection
from accmt.addons.token_batches.lengths import find_length, known_lengths
from accmt.data import is_stream
from accmt.data.fetching import only_holds
from accmt.data.samplers import call_set_epoch, draw_permutation
from accmt.data.seeding import derive_seed, preserve_generators, seed_parts_with_global
from accmt.errors import ArgumentError, DataError, fail, nearest
from accmt.messages import say_once
from accmt.module import defines
from accmt.options import HyperParameters, Settings

_WHERE = "the training data of several sources"
_EXAMPLE = "data: {mix: {news: 0.5, code: rest}}"
_MEASURED = 512
_IGNORED = -100
_LOSS_WEIGHTS = "loss_weights"  # of tokens, which only some samples have
_CHUNK = 4096
_END = object()
_FURTHER_PASSES = 1_000_003  # the epochs of a stream that begins again within an epoch are those of no other


class Mixture(ConcatDataset[Any]):
    """The sources one after the other.

    Args:
        sources: The data sets, by name.
        section: How they are mixed.

    Attributes:
        names: The names of the sources.
        only_holds_samples: Whether all sources only hold samples, so that their order of reading does not matter.
    """

    def __init__(self, sources: Mapping[str, Any], section: MixSection) -> None:
        super().__init__(sources.values())
        self.names = list(sources)
        self.only_holds_samples = all(map(only_holds, self.datasets))
        self._section = section
        self._ends = np.array(self.cumulative_sizes)
        self._begins = [0, *self.cumulative_sizes[:-1]]
        if any(hasattr(source, "set_epoch") for source in self.datasets):
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch: int) -> None:
        for source in self.datasets:
            call_set_epoch(source, epoch)

    def sources_of(self, indices: Sequence[int] | Array) -> Array:
        """Return the number of the source of each sample."""
        numbers: Array = self._ends.searchsorted(indices, side="right")
        return numbers

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples; those of one source are read together if it can do that."""
        datasets, begins, ends = self.datasets, self._begins, self.cumulative_sizes
        numbers = [bisect_right(ends, index) for index in indices]
        if self.only_holds_samples:
            return [datasets[number][index - begins[number]] for number, index in zip(numbers, indices, strict=True)]
        samples: list[Any] = [None] * len(indices)
        by_source: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_source.setdefault(number, []).append(place)
        for number, places in sorted(by_source.items()):
            source, begin = datasets[number], begins[number]
            own = [int(indices[place]) - begin for place in places]
            try:
                read = source.__getitems__(own) if hasattr(source, "__getitems__") else [source[index] for index in own]
            except Exception as error:
                error.add_note(f"This happened while reading {own} of the source {self.names[number]!r}.")
                raise
            for place, sample in zip(places, read, strict=True):
                samples[place] = sample
        return samples

    @property
    def lengths(self) -> Array | None:
        """The lengths of all samples in tokens; None if those of a source are unknown before they are read."""
        every = [known_lengths(source) for source in self.datasets]
        known = [one for one in every if one is not None]
        return np.concatenate(known) if len(known) == len(every) else None

    def order_run(self, module: Any, settings: Settings, *, num_shards: int, seed: int) -> MixOrder:
        """Return the order of all samples of a run.

        Args:
            module: The module that is trained.
            num_shards: The number of processes, or groups of processes, that train on different data.
            seed: The run's seed.

        Raises:
            ArgumentError: Something else sets the order too, or the run has no end.
            DataError: `unit: tokens`, and a source has no target tokens.
        """
        seed_parts_with_global(self, self.datasets)
        max_steps, samples = plan_steps(module, settings, self._section, num_shards)
        section = self._section
        factors = self._mean_tokens(module) if section.unit == "tokens" else [Fraction(1)] * len(self.names)
        stages = [
            Stage(step, whole_parts([weights[name] / one for name, one in zip(self.names, factors, strict=True)]))
            for step, weights in section.stages
        ]
        return MixOrder(
            {name: len(source) for name, source in zip(self.names, self.datasets, strict=True)},  # type: ignore[arg-type]
            stages,
            epochs=section.epochs,
            num_epochs=None if settings.hps.epochs < 0 or settings.hps.max_steps else settings.hps.epochs,
            stop=section.stop,
            max_steps=max_steps,
            samples_per_step=samples,
            seed=seed,
            shuffle=settings.data.shuffle_train,
            permute=methods_of(dict(zip(self.names, self.datasets, strict=True)), "shuffle_rows"),
            cut=EpochCut(
                settings.samples_per_batch(num_shards),
                settings.data.limits.train,
                settings.data.data_options.drop_last,
                bool(settings.data.overfit_batches),
            ),
        )

    def describe_files(self) -> dict[str, str]:
        """Return the descriptions of the sources' files, by the name of the source and the file."""
        return files_of(dict(zip(self.names, self.datasets, strict=True)))

    def _mean_tokens(self, module: Any) -> list[Fraction]:
        """Return the mean number of target tokens of a sample of each source, of up to 512 evenly spaced ones."""
        length_of = module.length_of if defines(module, "length_of") else None
        means = []
        with preserve_generators():
            for name, source in zip(self.names, self.datasets, strict=True):
                evenly = range(0, len(source), max(1, len(source) // _MEASURED))  # type: ignore[arg-type]
                chosen = source.spread(_MEASURED) if hasattr(source, "spread") else evenly
                counts = [_count_targets(source[index], length_of) for index in chosen]
                if not sum(counts):
                    got, do = f"no target tokens in {len(counts)} samples of {name!r}", "write `unit: samples`"
                    raise fail(
                        DataError, "`unit: tokens` in `data`", got=got, expected="samples with target tokens", do=do
                    )
                means.append(Fraction(sum(counts)) / len(counts))
        shown = ", ".join(f"{name} {float(mean):.1f}" for name, mean in zip(self.names, means, strict=True))
        say_once(f"target tokens per sample, measured on up to {_MEASURED} of each source: {shown}")
        return means


class MixedStream:
    """Sources of which at least one is a stream, interleaved while they are read.

    It is read from the start of each epoch, so every source begins again there.

    Args:
        sources: The data sets and streams, by name.
        section: How they are mixed.

    Attributes:
        names: The names of the sources.

    Raises:
        DataError: The section limits a source, or its unit is tokens.
    """

    def __init__(self, sources: Mapping[str, Any], section: MixSection) -> None:
        if section.epochs or section.unit == "tokens":
            got = "`epochs` of a source" if section.epochs else "`unit: tokens`"
            do = "leave it out, or pass data sets that are read by index"
            raise fail(
                DataError,
                "`data` for sources with streams",
                got=f"{got}, which needs lengths",
                expected="weights",
                do=do,
            )
        self.names = list(sources)
        self.sources = list(sources.values())
        self._section = section
        self._epoch = 0
        self._length: int | None = None
        self._shuffle = True
        self._seed = 0
        self._order: dict[str, Any] = {}
        self._interleaving = Interleaving([Stretch(0, (1,) * len(self.names))], [None] * len(self.names))

    def order_run(self, module: Any, settings: Settings, *, num_shards: int, seed: int) -> None:
        """Set the order of a run, which no sampler can; see `Mixture.order_run`."""
        max_steps, samples = plan_steps(module, settings, self._section, num_shards)
        self._seed, self._shuffle = seed, settings.data.shuffle_train
        self._length = None if max_steps is None or samples is None else max_steps * samples
        stretches = [
            Stretch(step * (samples or 0), whole_parts([weights[name] for name in self.names]))
            for step, weights in self._section.stages
        ]
        self._interleaving = Interleaving(stretches, [None] * len(self.names))
        shown = [[start, list(parts)] for start, parts in stretches]
        self._order = {"names": self.names, "stop": self._section.stop, "stretches": shown}

    def describe_order(self) -> dict[str, Any]:
        """Return the settings on which the order depends."""
        return self._order

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of a mixture of streams is unknown")
        return self._length

    def sources_of(self, positions: Sequence[int] | Array) -> Array:
        """Return the number of the source of each sample, by their positions in the epoch."""
        if not len(positions):
            return np.empty(0, np.int16)
        begin = min(positions)
        numbers: Array = self._interleaving.sources(begin, max(positions) + 1)[np.asarray(positions) - begin]
        return numbers

    def __iter__(self) -> Iterator[Any]:
        section = self._section
        drawn = {
            number for number, name in enumerate(self.names) if any(weights[name] for _, weights in section.stages)
        }
        passes, ended = dict.fromkeys(drawn, 0), set[int]()
        reading: dict[int, Iterator[Any]] = {}
        for begin in count(step=_CHUNK):
            end = begin + _CHUNK if self._length is None else min(begin + _CHUNK, self._length)
            for number in self._interleaving.sources(begin, end).tolist():
                if number not in reading:
                    reading[number] = self._begin_pass(number, 0)
                sample = next(reading[number], _END)
                if sample is _END:
                    ended.add(number)
                    if section.stop == "first" or (section.stop == "last" and ended == drawn):
                        return
                    passes[number] += 1
                    reading[number] = self._begin_pass(number, passes[number])
                    sample = next(reading[number], _END)
                    if sample is _END:
                        got = f"no samples in pass {passes[number] + 1} of this epoch over {self.names[number]!r}"
                        do = "pass an iterable instead of an iterator, check the source, or write `stop: first`"
                        raise fail(DataError, _WHERE, got=got, expected="a source that can be read again", do=do)
                yield sample
            if self._length is not None and end >= self._length:
                return

    def _begin_pass(self, number: int, index: int) -> Iterator[Any]:
        """Return the samples of a source in the order of one pass."""
        source = self.sources[number]
        if is_stream(source):
            call_set_epoch(source, self._epoch + index * _FURTHER_PASSES)
            return iter(source)
        call_set_epoch(source, self._epoch)
        if not self._shuffle:
            return (source[position] for position in range(len(source)))
        seed = derive_seed(self._seed, f"pass over {self.names[number]}", self._epoch, index)
        generator = torch.Generator().manual_seed(seed)
        order = draw_permutation(len(source), generator, getattr(source, "shuffle_rows", None))
        return (source[position] for position in order.tolist())


def plan_steps(module: Any, settings: Settings, section: MixSection, num_shards: int) -> tuple[int | None, int | None]:
    """Check that nothing else sets the order, and return the steps of the run and the samples of each, with `repeat`.

    Raises:
        ArgumentError: Something else sets the order too, or the run has no end.
    """
    data = settings.data
    if data.data_options.group_by_length:
        _reject("group_by_length", "leave it out, or use max_tokens, which keeps the order of samples")
    if data.sampler_of("train") is not None or data.data_options.batch_sampler is not None:
        _reject("a sampler or batch_sampler", "leave it out: the weights decide the order")
    if section.stop != "repeat":
        return None, None
    max_steps = settings.hps.max_steps
    samples = None if module.uses_manual_optimization else settings.samples_per_step(num_shards)
    drawn = {name for _, weights in section.stages for name, weight in weights.items() if weight}
    if max_steps is None and not drawn.issubset(section.epochs):
        got = "weights that change at steps, without" if len(section.stages) > 1 else "`stop: repeat` without"
        do = "set max_steps, for example max_steps: 1000"
        raise fail(
            ArgumentError,
            "training on a mixture",
            got=f"{got} max_steps",
            expected="the number of steps of the run",
            do=do,
        )
    if max_steps is not None and samples is None:
        got = "a module with manual optimization, or a window maker, so that the samples of a step are unknown"
        _reject(got, "write `stop: first` in `data`")
    return max_steps, samples


def mix_sources(sources: Any, hps: HyperParameters) -> Mixture | MixedStream:
    """Return several data sets as one, mixed as the hyper-parameters say.

    Raises:
        ArgumentError: The hyper-parameters have no weights, or those of other sources.
        DataError: There is one data set; or a source is a DataLoader, is empty, or has other columns.
    """
    if isinstance(sources, Mixture | MixedStream):
        return sources
    section: MixSection | None = hps.section("data")
    if not isinstance(sources, dict):
        names = ", ".join(section.names) if section else ""
        do = 'fit(module, {"news": ..., "code": ...}), or remove `data` from the hyper-parameters'
        expected = f"a dict with the sources of `data.mix`: {names}"
        raise fail(DataError, _WHERE, got=f"a {type(sources).__name__}", expected=expected, do=do)
    if section is None or set(section.names) != set(sources):
        got = f"the sources {', '.join(map(str, sources))}"
        expected, do = "their weights in the hyper-parameters", f"write `{_EXAMPLE}`"
        if "train" in sources:  # the sets of a `DatasetDict`
            do = f'pass the training set alone, data["train"]; to mix sources, {do}'
        if section is not None:
            expected, do = f"those of `data.mix`: {', '.join(section.names)}", _match(section.names, sources)
        raise fail(ArgumentError, _WHERE, got=got, expected=expected, do=do)
    first: tuple[str, list[str]] | None = None
    for name in section.names:
        columns = _check_source(name, sources[name])
        if columns is None:
            continue
        first = first or (name, columns)
        if columns != first[1]:
            got = f"{', '.join(columns)} in {name!r}, but {', '.join(first[1])} in {first[0]!r}"
            do = "change a source, so that the samples of all have the same"
            raise fail(DataError, _WHERE, got=got, expected="samples with the same entries in all sources", do=do)
    chosen = {name: sources[name] for name in section.names}
    return MixedStream(chosen, section) if any(map(is_stream, chosen.values())) else Mixture(chosen, section)


def _match(names: Sequence[str], sources: Mapping[Any, Any]) -> str:
    """Return what to do about weights of other names than those of the sources."""
    left, unknown, advice = [str(name) for name in sources if name not in names], [], []
    for name in names:
        meant = nearest(name, left)
        if name not in sources and meant is not None:
            left.remove(meant)
            advice.append(f"rename `{name}` in `data.mix` to `{meant}`")
        elif name not in sources:
            unknown.append(name)
    advice += [f"remove `{name}` from `data.mix`, or pass that source too" for name in unknown]
    advice += [f"add `{name}: 0.1` to `data.mix`, or `{name}: 0` to leave it out" for name in left]
    return "; and ".join(advice)


def _check_source(name: str, source: Any) -> list[str] | None:
    """Return the entries of a source's samples; None if they are neither dicts nor tuples."""
    where = f"the source {name!r} of the training data"
    if isinstance(source, DataLoader):
        raise fail(DataError, where, got="a DataLoader", expected="a data set or a stream", do="pass its dataset")
    if is_stream(source):
        return None
    if not len(source):
        raise fail(DataError, where, got="no samples", expected="at least one sample", do="check its path and filters")
    with preserve_generators(), suppress(Exception):  # a sample that cannot be read is reported where it is needed
        sample = source[0]
        if isinstance(sample, Mapping):
            return sorted(str(entry) for entry in sample if entry != _LOSS_WEIGHTS)
        return [f"tuples of {len(sample)}"] if isinstance(sample, tuple) else None
    return None


def _count_targets(sample: Any, length_of: Callable[[Any], Any] | None) -> int | Fraction:
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is not None and np.ndim(labels) == 1:  # the first token has nothing before it to predict it from
        weights = sample.get(_LOSS_WEIGHTS)
        if weights is not None:
            return Fraction(sum(weights[1:]))
        return sum(int(label) != _IGNORED for label in labels[1:])
    return find_length(sample, length_of)


def _reject(got: str, do: str) -> NoReturn:
    raise fail(
        ArgumentError, "training on a mixture", got=got, expected="weights in `data.mix`, which decide the order", do=do
    )
