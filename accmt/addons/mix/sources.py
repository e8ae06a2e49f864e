"""The data sets of a mixture as one data set, which defines the order of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader

from accmt.addons.mix.interleaving import Array, whole_parts
from accmt.addons.mix.order import MixOrder, Stage
from accmt.addons.mix.section import MixSection
from accmt.data import is_stream
from accmt.data.lengths import find_length, known_lengths
from accmt.data.samplers import call_set_epoch
from accmt.data.seeding import preserve_generators
from accmt.errors import ArgumentError, DataError, explain
from accmt.messages import say_once
from accmt.module import defines
from accmt.options import HyperParameters, Settings

_WHERE = "the training data of several sources"
_EXAMPLE = "data: {mix: {news: 0.5, code: rest}}"
_MEASURED = 512
_IGNORED = -100


class Mixture(ConcatDataset[Any]):
    """The sources one after the other.

    Args:
        sources: The data sets, by name.
        section: How they are mixed.

    Attributes:
        names: The names of the sources.
    """

    def __init__(self, sources: Mapping[str, Any], section: MixSection) -> None:
        super().__init__(sources.values())
        self.names = list(sources)
        self._section = section
        if any(hasattr(source, "set_epoch") for source in self.datasets):
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch: int) -> None:
        for source in self.datasets:
            call_set_epoch(source, epoch)

    def sources_of(self, indices: Sequence[int]) -> Array:
        """Return the number of the source of each sample."""
        numbers: Array = np.searchsorted(self.cumulative_sizes, indices, side="right")
        return numbers

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples; those of one source are read together if it can do that."""
        samples: list[Any] = [None] * len(indices)
        numbers = self.sources_of(indices)
        for number in np.unique(numbers).tolist():
            source, places = self.datasets[number], np.flatnonzero(numbers == number).tolist()
            begin = self.cumulative_sizes[number - 1] if number else 0
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
        """
        data, section = settings.data, self._section
        if data.data_options.group_by_length:
            _reject("group_by_length", "leave it out, or use max_tokens, which keeps the order of samples")
        if data.sampler_of("train") is not None or data.data_options.batch_sampler is not None:
            _reject("a sampler or batch_sampler", "leave it out: the weights decide the order")
        max_steps = samples = None
        if section.stop == "repeat":
            max_steps = settings.hps.max_steps
            samples = None if module.uses_manual_optimization else settings.samples_per_step(num_shards)
            is_limited = all(name in section.epochs for weights in section.stages for name in _drawn(weights[1]))
            if max_steps is None and not is_limited:
                _reject("`stop: repeat` without max_steps", "set max_steps, for example max_steps: 1000")
            if max_steps is not None and samples is None:
                got = "a module with manual optimization, or a window maker, so that the samples of a step are unknown"
                _reject(got, "write `stop: first` in `data`")
        factors = self._mean_tokens(module) if section.unit == "tokens" else [Fraction(1)] * len(self.names)
        stages = [
            Stage(step, whole_parts([weights[name] / one for name, one in zip(self.names, factors, strict=True)]))
            for step, weights in section.stages
        ]
        return MixOrder(
            {name: len(source) for name, source in zip(self.names, self.datasets, strict=True)},  # type: ignore[arg-type]
            stages,
            epochs=section.epochs,
            stop=section.stop,
            max_steps=max_steps,
            samples_per_step=samples,
            seed=seed,
            shuffle=data.shuffle_train,
        )

    def _mean_tokens(self, module: Any) -> list[Fraction]:
        """Return the mean number of target tokens of a sample of each source, of up to 512 evenly spaced ones."""
        length_of = module.length_of if defines(module, "length_of") else None
        means = []
        with preserve_generators():
            for name, source in zip(self.names, self.datasets, strict=True):
                chosen = range(0, len(source), max(1, len(source) // _MEASURED))  # type: ignore[arg-type]
                counts = [_count_targets(source[index], length_of) for index in chosen]
                if not sum(counts):
                    got, do = f"no target tokens in {len(counts)} samples of {name!r}", "write `unit: samples`"
                    raise DataError(explain("`unit: tokens` in `data`", got, "samples with target tokens", do))
                means.append(Fraction(sum(counts), len(counts)))
        shown = ", ".join(f"{name} {float(mean):.1f}" for name, mean in zip(self.names, means, strict=True))
        say_once(f"target tokens per sample, measured on up to {_MEASURED} of each source: {shown}")
        return means


def mix_sources(sources: Any, hps: HyperParameters) -> Mixture:
    """Return several data sets as one, mixed as the hyper-parameters say.

    Raises:
        ArgumentError: The hyper-parameters have no weights, or those of other sources.
        DataError: There is one data set; or a source is empty, cannot be read by index, or has other columns.
    """
    if isinstance(sources, Mixture):
        return sources
    section: MixSection | None = hps.section("data")
    if not isinstance(sources, dict):
        names = ", ".join(section.names) if section else ""
        do = 'fit(module, {"news": ..., "code": ...}), or remove `data` from the hyper-parameters'
        expected = f"a dict with the sources of `data.mix`: {names}"
        raise DataError(explain(_WHERE, f"a {type(sources).__name__}", expected, do))
    if section is None or set(section.names) != set(sources):
        got = f"the sources {', '.join(map(str, sources))}"
        expected, do = "their weights in the hyper-parameters", f"write `{_EXAMPLE}`"
        if section is not None:
            expected, do = f"those of `data.mix`: {', '.join(section.names)}", "use the same names in both"
        raise ArgumentError(explain(_WHERE, got, expected, do))
    first: tuple[str, list[str]] | None = None
    for name in section.names:
        columns = _check_source(name, sources[name])
        if columns is None:
            continue
        first = first or (name, columns)
        if columns != first[1]:
            got = f"{', '.join(columns)} in {name!r}, but {', '.join(first[1])} in {first[0]!r}"
            do = "rename or remove columns, so that all sources have the same"
            raise DataError(explain(_WHERE, got, "samples with the same entries in all sources", do))
    return Mixture({name: sources[name] for name in section.names}, section)


def _check_source(name: str, source: Any) -> list[str] | None:
    """Return the entries of a source's samples; None if they are not dicts."""
    where = f"the source {name!r} of the training data"
    if isinstance(source, DataLoader) or is_stream(source):
        got, expected = f"a {type(source).__name__}", "a data set with __len__ and __getitem__"
        do = "pass its dataset" if isinstance(source, DataLoader) else "pass a data set that is read by index"
        raise DataError(explain(where, got, expected, do))
    if not len(source):
        raise DataError(explain(where, "no samples", "at least one sample", "check its path and filters"))
    with preserve_generators(), suppress(Exception):  # a sample that cannot be read is reported where it is needed
        sample = source[0]
        return sorted(map(str, sample)) if isinstance(sample, Mapping) else None
    return None


def _drawn(weights: Mapping[str, Fraction]) -> list[str]:
    return [name for name, weight in weights.items() if weight]


def _count_targets(sample: Any, length_of: Callable[[Any], Any] | None) -> int:
    labels = sample.get("labels") if isinstance(sample, Mapping) else None
    if labels is not None and np.ndim(labels) == 1:  # the first token has nothing before it to predict it from
        return sum(int(label) != _IGNORED for label in labels[1:])
    return find_length(sample, length_of)


def _reject(got: str, do: str) -> NoReturn:
    raise ArgumentError(explain("training on a mixture", got, "weights in `data.mix`, which decide the order", do))
