"""Curricula: train on one dataset after another. A curriculum is a mixture whose weights are 0 but for one source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NoReturn

from torch.utils.data import ConcatDataset, IterableDataset

from accmt.addons.mix.order import MixOrder, Stage, files_of, methods_of
from accmt.errors import ArgumentError, DataError, fail
from accmt.messages import warn
from accmt.options import Settings

_REST = -1


class Curriculum(ConcatDataset[Any]):
    """The datasets of all stages with their lengths; subclasses define the unit, and check the lengths.

    Args:
        stages: Pairs of a length and a dataset.

    Raises:
        DataError: There are no stages, a length is invalid, or a dataset cannot be indexed.
    """

    _EXAMPLE: ClassVar[str] = "[(length, dataset), ...]"

    def __init__(self, stages: Sequence[tuple[Any, Any]] = ()) -> None:
        self._where = type(self).__name__
        if isinstance(stages, Mapping | str) or not isinstance(stages, Iterable):
            got = f"an object of type {type(stages).__name__}"
            raise self._wrong(got, "a list of (length, dataset) pairs", self._example)
        pairs: list[Any] = list(stages)
        for number, stage in enumerate(pairs, 1):
            if not isinstance(stage, tuple | list) or len(stage) != 2:
                expected = "a (length, dataset) pair"
                raise self._wrong(f"stage {number} is a {type(stage).__name__}", expected, self._example)
            dataset = stage[1]
            is_stream = isinstance(dataset, IterableDataset)
            is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_stream
            if not is_indexed or len(dataset) == 0:
                kind = "None" if dataset is None else f"{'an empty' if is_indexed else 'a'} {type(dataset).__name__}"
                do = f"pass the dataset itself after its length: {self._example}"
                raise self._wrong(f"stage {number} has {kind}", "a non-empty dataset with __len__ and __getitem__", do)
        if not pairs:
            raise self._wrong("no stages", "at least one (length, dataset) pair", self._example)
        self._lengths = [length for length, _ in pairs]
        super().__init__([dataset for _, dataset in pairs])

    def updates(self, max_steps: int) -> list[int]:
        """Return the number of optimizer steps of each stage; they sum to `max_steps`.

        Raises:
            DataError: The stages end before the run.
        """
        ends = self._ends(max_steps)
        if ends[-1] < max_steps:
            got, do = f"stages with {ends[-1]} steps in total", "extend the last stage, or reduce max_steps"
            raise self._wrong(got, f"{max_steps} steps (max_steps)", do)
        return [min(end, max_steps) - min(begin, max_steps) for begin, end in pairwise([0, *ends])]

    def order_run(self, module: Any, settings: Settings, *, num_shards: int, seed: int) -> MixOrder:
        """Return the order of all samples of a run.

        Args:
            module: The module that is trained.
            num_shards: The number of processes, or groups of processes, that train on different data.
            seed: The run's seed.

        Raises:
            ArgumentError: The run has no `max_steps`, uses manual optimization, or sets another order.
            DataError: The stages end before the run.
        """
        data = settings.data
        if module.uses_manual_optimization:
            _reject("a module with manual optimization", "use an accmt.AcceleratorModule with automatic optimization")
        if data.data_options.group_by_length:
            _reject("group_by_length", "leave it out: a curriculum decides the order")
        if data.sampler_of("train") is not None or data.data_options.batch_sampler is not None:
            _reject("a sampler or batch_sampler", "leave it out: a curriculum decides the order")
        is_limited = isinstance(data.limits.train, int) or data.limits.train < 1.0  # 1 is one batch
        if is_limited and not settings.running.fast_dev_run:
            _reject("limit_batches= or overfit_batches=", "leave it out: max_steps sets the length of the run")
        max_steps = settings.hps.max_steps
        if max_steps is None:
            _reject("a run without max_steps", "set max_steps, for example max_steps: 1000; epochs is then optional")
        missed = [str(number) for number, count in enumerate(self.updates(max_steps), 1) if count == 0]
        if missed:
            warn(f"max_steps={max_steps} leaves no steps for stage {', '.join(missed)} of the curriculum")
        samples = settings.samples_per_step(num_shards)
        if samples is None:
            _reject("a window maker, so the samples of a step are unknown", "set a number: grad_accumulation_steps=4")
        return self.order(max_steps, samples_per_step=samples, seed=seed, shuffle=settings.data.shuffle_train)

    def order(self, max_steps: int, *, samples_per_step: int, seed: int, shuffle: bool) -> MixOrder:
        """Return the order of all samples of a run, stage by stage.

        If some steps of the first epoch were skipped, the run makes up for them with data of the last stage.
        """
        counts = self.updates(max_steps)
        every = range(len(counts))
        stages = [
            Stage(start, tuple(int(stage == other) for other in every))
            for stage, start, count in zip(every, accumulate([0, *counts]), counts, strict=False)
            if count
        ]
        return MixOrder(
            {name: len(dataset) for name, dataset in self._named.items()},
            stages,
            epochs={},
            stop="repeat",
            max_steps=max_steps,
            samples_per_step=samples_per_step,
            seed=seed,
            shuffle=shuffle,
            permute=methods_of(self._named, "shuffle_rows"),
        )

    def describe_files(self) -> dict[str, str]:
        """Return the descriptions of the stages' files, by the stage and the file."""
        return files_of(self._named)

    @property
    def _named(self) -> dict[str, Any]:
        return {f"stage {number}": dataset for number, dataset in enumerate(self.datasets, 1)}

    def _ends(self, max_steps: int) -> list[int]:
        """Return the step at which each stage ends (exclusive)."""
        raise NotImplementedError

    @property
    def _example(self) -> str:
        return f"{self._where}({self._EXAMPLE})"

    def _wrong(self, got: str, expected: str, do: str) -> DataError:
        return fail(DataError, self._where, got=got, expected=expected, do=do)


class StepsCurriculum(Curriculum):
    """Trains on one dataset after another, each for a number of optimizer steps: `[(300, easy), (-1, hard)]`.

    Args:
        stages: Pairs of a number of steps and a dataset; -1 for the last one means the rest of the run.

    Raises:
        DataError: See `Curriculum`.
    """

    _EXAMPLE = "[(300, easy), (-1, hard)]"

    def __init__(self, stages: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(stages)
        for number, length in enumerate(self._lengths, 1):
            is_rest = length == _REST and number == len(self._lengths)
            if type(length) is not int or (length < 1 and not is_rest):
                expected = "a number of steps >= 1, or -1 in the last stage for the rest of the run"
                raise self._wrong(f"stage {number} has {length!r} steps", expected, self._example)

    def _ends(self, max_steps: int) -> list[int]:
        *first, last = self._lengths
        return list(accumulate([*first, max(0, max_steps - sum(first)) if last == _REST else last]))


class RatioCurriculum(Curriculum):
    """Trains on one dataset after another, each for a fraction of the run: `[(0.3, easy), (0.7, hard)]`.

    Stages end at the nearest optimizer step.

    Args:
        stages: Pairs of a ratio and a dataset; the ratios sum to 1, and -1 for the last one means the rest.

    Raises:
        DataError: See `Curriculum`.
    """

    _EXAMPLE = "[(0.3, easy), (0.7, hard)]"

    def __init__(self, stages: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(stages)
        *first, last = self._lengths
        for number, ratio in enumerate(first if last == _REST else self._lengths, 1):
            if type(ratio) not in (int, float) or not 0 < ratio <= 1:
                raise self._wrong(
                    f"stage {number} has the ratio {ratio!r}", "a number above 0 and at most 1", "(0.3, easy)"
                )
        total = sum(first) + (max(0, 1 - sum(first)) if last == _REST else last)
        if abs(total - 1) > 1e-6:
            do = "RatioCurriculum([(0.3, easy), (-1, hard)]): -1 is the rest"
            raise self._wrong(f"ratios that sum to {total:g}", "a sum of 1", do)

    def _ends(self, max_steps: int) -> list[int]:
        return [*(round(end * max_steps) for end in accumulate(self._lengths[:-1])), max_steps]


class RangeCurriculum(Curriculum):
    """Trains on one dataset after another, each in a range of optimizer steps.

    For example `[(range(0, 300), easy), (range(300, 900), hard)]`.

    Args:
        stages: Pairs of a range and a dataset; each range starts where the previous one ends, the first at 0.

    Raises:
        DataError: See `Curriculum`.
    """

    _EXAMPLE = "[(range(0, 300), easy), (range(300, 900), hard)]"

    def __init__(self, stages: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__(stages)
        begin = 0
        for number, length in enumerate(self._lengths, 1):
            if not isinstance(length, range) or length.step != 1 or length.start != begin or not length:
                expected = f"a range of steps that starts at {begin}"
                raise self._wrong(f"stage {number} has {length!r}", expected, f"range({begin}, {begin + 300})")
            begin = length.stop

    def _ends(self, max_steps: int) -> list[int]:
        return [length.stop for length in self._lengths]


def _reject(got: str, do: str) -> NoReturn:
    raise fail(ArgumentError, "training on a curriculum", got=got, expected="only the curriculum and max_steps", do=do)
