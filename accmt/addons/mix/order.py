"""The order of the samples of a mixture, as a function of the seed, the weights and the position in the run.

At every position, the number of samples from each source is within one sample of its share. This is Tijdeman's
solution of the chairman assignment problem: of the sources that lag behind their share far enough, the one is taken
that would be the first to lag too far behind. The weights are whole parts of a period, after which the sequence starts
again, so that any position is found without computing those before it.

Source: R. Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32, theorem 1: with k sources, no
count differs from its share by more than 1 - 1 / (2 k - 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import torch

from accmt.data.samplers import Permute, ResumableSampler, draw_permutation
from accmt.data.seeding import derive_seed
from accmt.errors import DataError, fail
from accmt.messages import say

_WHERE = "the sources of a mixture in a resumed run"
_LIMITED = "a mixture whose sources are all limited"

# ---- Which source each position is taken from: pure functions of the weights.


_LONGEST_PERIOD = 100_000

Array = np.ndarray[Any, Any]


def whole_parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return weights as whole parts of their sum: exact if a sum of up to 100,000 allows it, else rounded to that."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    parts = [max(int(share * _LONGEST_PERIOD), share > 0) for share in shares]
    # What rounding down left over goes to those that lost the most; a tiny share that got a part takes it from them.
    by_loss = sorted(range(len(shares)), key=lambda index: parts[index] - shares[index] * _LONGEST_PERIOD)
    missing = _LONGEST_PERIOD - sum(parts)
    for index in by_loss[:missing] if missing > 0 else ():
        parts[index] += 1
    parts[max(range(len(parts)), key=parts.__getitem__)] += min(missing, 0)
    return tuple(parts)


@lru_cache(maxsize=128)  # one for each time that weights change or a source is exhausted
def spread(parts: tuple[int, ...]) -> Array:
    """Return the source of each position of a period, as evenly spread as possible."""
    drawn = [(source, part) for source, part in enumerate(parts) if part]
    if len(drawn) == 1:
        return np.array([drawn[0][0]], np.int16)
    period, scale = sum(parts), 2 * (len(drawn) - 1)
    pattern = np.empty(period, np.int16)
    lag = [0] * len(parts)  # of each source behind its share, in 1 / (period * scale) of a sample
    for position in range(period):
        chosen, earliest = -1, period * scale
        for source, part in drawn:
            lag[source] += part * scale
            if lag[source] >= period:
                deadline = ((scale - 1) * period - lag[source]) // (part * scale)
                if deadline < earliest:
                    chosen, earliest = source, deadline
        lag[chosen] -= period * scale
        pattern[position] = chosen
    return pattern


class Stretch(NamedTuple):
    """Positions with the same weights, up to the next stretch."""

    start: int
    parts: tuple[int, ...]


class Interleaving:
    """The sources of all positions of a run.

    Args:
        stretches: The weights, by the position from which they apply.
        limits: The number of samples after which a source is exhausted; None for no limit. The others then share its
            part.
        limited_from: The start of the stretch from which the limits apply: earlier samples were trained on already.

    Attributes:
        end: The position at which all sources are exhausted; None if that never happens.
        stretches: The weights without those of exhausted sources.
    """

    def __init__(self, stretches: Sequence[Stretch], limits: Sequence[int | None], *, limited_from: int = 0) -> None:
        self.end: int | None = None
        self.stretches: list[Stretch] = []
        self._counts: list[Array] = []  # before each stretch
        waiting = list(stretches)
        while waiting:
            start, parts = waiting.pop(0)
            counts = self.counts(start) if self.stretches else np.zeros(len(limits), np.int64)
            if start >= limited_from:
                is_left = [limit is None or limit > count for limit, count in zip(limits, counts, strict=True)]
                parts = tuple(part if left else 0 for part, left in zip(parts, is_left, strict=True))
            if not any(parts):
                self.end = start
                return
            self.stretches.append(Stretch(start, parts))
            self._counts.append(counts)
            if start < limited_from:
                continue
            found = (self.position_of(source, limit) for source, limit in enumerate(limits) if limit and parts[source])
            exhausted = min((end for end in found if end is not None), default=None)
            if exhausted is not None and (not waiting or exhausted < waiting[0].start):
                waiting.insert(0, Stretch(exhausted, parts))

    def counts(self, position: int) -> Array:
        """Return the number of samples from each source before a position."""
        index = self._at(position)
        start, parts = self.stretches[index]
        pattern = spread(parts)
        periods, rest = divmod(position - start, len(pattern))
        of_period, of_rest = (np.bincount(part, minlength=len(parts)) for part in (pattern, pattern[:rest]))
        counts: Array = self._counts[index] + periods * of_period + of_rest
        return counts

    def sources(self, begin: int, end: int) -> Array:
        """Return the source of each position in [begin, end)."""
        found = []
        while begin < end:
            index = self._at(begin)
            stop = min([end, *(stretch.start for stretch in self.stretches[index + 1 : index + 2])])
            start, parts = self.stretches[index]
            pattern = spread(parts)
            first = (begin - start) % len(pattern)
            periods = -(-(first + stop - begin) // len(pattern))
            found.append(np.tile(pattern, periods)[first : first + stop - begin])
            begin = stop
        return np.concatenate(found) if found else np.empty(0, np.int16)

    def share_of(self, source: int, count: int) -> int:
        """Return the first position at which the share of a source amounts to `count` samples, or the end."""
        for index, (start, parts) in enumerate(self.stretches):
            missing = count - int(self._counts[index][source])
            if parts[source]:
                position = start + max(0, -(-missing * sum(parts) // parts[source]))
                if index + 1 == len(self.stretches) or position <= self.stretches[index + 1].start:
                    return position if self.end is None else min(position, self.end)
        return self.stretches[-1].start if self.end is None else self.end

    def position_of(self, source: int, count: int) -> int | None:
        """Return the first position before which there are `count` samples from a source; None if there never are."""
        for index, (start, parts) in enumerate(self.stretches):
            before = int(self._counts[index][source])
            if count <= before:
                return start
            if not parts[source]:
                continue
            pattern = spread(parts)
            places = np.flatnonzero(pattern == source)
            periods, rest = divmod(count - before - 1, len(places))
            position = start + periods * len(pattern) + int(places[rest]) + 1
            if index + 1 == len(self.stretches) or position <= self.stretches[index + 1].start:
                return position
        return None

    def _at(self, position: int) -> int:
        """Return the index of the stretch that a position is in."""
        return max(index for index, stretch in enumerate(self.stretches) if stretch.start <= position)


# ---- The order of the samples


def methods_of(sources: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a method of the sources that have it, by their name."""
    return {name: getattr(source, method) for name, source in sources.items() if hasattr(source, method)}


def files_of(sources: Mapping[str, Any]) -> dict[str, str]:
    """Return the descriptions of files, by the name of the source and the file."""
    described = {name: describe() for name, describe in methods_of(sources, "describe_files").items()}
    return {f"{name}: {file}": digest for name, files in described.items() for file, digest in files.items()}


class Stage(NamedTuple):
    """The weights of the sources from a step on, as whole parts of their sum."""

    step: int
    parts: tuple[int, ...]


class EpochCut(NamedTuple):
    """What is left out at the end of each epoch, so that the next epoch continues there.

    Attributes:
        batch_size: The samples of a batch of all processes.
        limit: The number of batches of an epoch, or a fraction of them as a float.
        drops_last: Whether an incomplete last batch is left out.
        repeats: Whether each epoch begins like the first, as for `overfit_batches`.
    """

    batch_size: int = 1
    limit: int | float = 1.0
    drops_last: bool = False
    repeats: bool = False

    def trained(self, samples: int, consumed: int = 0) -> int:
        """Return how many samples of an epoch are trained on, `consumed` of them with other settings."""
        multiple = self.batch_size if self.drops_last else 1
        number = samples - samples % multiple
        batches = -(-number // self.batch_size)
        limit = self.limit if isinstance(self.limit, int) else max(1, int(round(batches * self.limit, 6)))
        left = max(0, min(number, limit * self.batch_size) - consumed)
        return consumed + left - (left % multiple if consumed % self.batch_size else 0)


_NOTHING = EpochCut()


class _Base(NamedTuple):
    """The epoch in which a run began, or resumed: later ones follow from it.

    Attributes:
        epoch: Its index.
        begin: Its first position in the run.
        length: Its number of samples, before those that are left out at its end.
        end_step: With "repeat", the steps of the run at its end, if none are left out.
        trained: The number of its samples that are trained on.
    """

    epoch: int
    begin: int
    length: int
    end_step: int
    trained: int


class MixOrder(ResumableSampler):
    """The samples of each epoch: sources interleaved by their weights, each in a separate order.

    A source continues in the next epoch where it stopped, and has another order in each pass over it. All of this
    follows from the position in the run; only a run that resumes with other weights has to know its earlier ones.

    Args:
        sizes: The number of samples of each source, by name.
        stages: The weights; several only with "repeat".
        epochs: The number of passes after which a source is exhausted, by name.
        num_epochs: The epochs of the run; None if something else ends it.
        stop: What ends an epoch: "first", "last" or "repeat".
        max_steps: With "repeat", the steps of the run; None if it ends when all sources are exhausted.
        samples_per_step: The samples of an optimizer step, if `max_steps` is set.
        seed: The run's seed.
        shuffle: Whether each pass is shuffled.
        permute: Draws the order of a source, by name; those without are shuffled as a whole.
        cut: What is left out at the end of each epoch.

    Raises:
        DataError: All sources are exhausted before the run ends.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        stages: Sequence[Stage],
        *,
        epochs: Mapping[str, int],
        num_epochs: int | None = None,
        stop: str,
        max_steps: int | None,
        samples_per_step: int | None,
        seed: int,
        shuffle: bool,
        permute: Mapping[str, Permute] | None = None,
        cut: EpochCut = _NOTHING,
    ) -> None:
        self._sizes = dict(sizes)
        self._permute = permute or {}
        self._cut = cut
        self._seed = seed
        self._shuffle = shuffle
        self._limits = [size * epochs[name] if name in epochs else None for name, size in sizes.items()]
        self._settings: dict[str, Any] = {
            "stop": stop,
            "stages": [[step, list(parts)] for step, parts in stages],
            "limits": self._limits,
            "max_steps": max_steps,
            "samples_per_step": samples_per_step,
            "cut": list(cut),
        }
        self._stages = tuple(stages)
        self._stop = stop
        self._max_steps = max_steps
        self._samples_per_step = samples_per_step or 0
        self._begin_with([Stretch(step * self._samples_per_step, parts) for step, parts in stages])
        self._length = self._measure()
        self._base = _Base(0, 0, self._length, self._steps_of(self._length), cut.trained(self._length))
        self._loaded: Mapping[str, Any] = {}
        self._epoch = 0
        self._num_epochs = num_epochs
        self._require_samples()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._positions(self._epoch))

    def draw(self) -> torch.Tensor:
        """Return the indices of the epoch, counted through all sources in their order."""
        positions = self._positions(self._epoch)
        before = self._interleaving.counts(positions.start)
        sources = torch.from_numpy(self._interleaving.sources(positions.start, positions.stop))
        drawn = torch.empty(len(positions), dtype=torch.long)
        offset = 0
        for number, (name, size) in enumerate(self._sizes.items()):
            places = (sources == number).nonzero().squeeze(1)
            if len(places):
                drawn[places] = offset + self._take(name, size, int(before[number]), len(places))
            offset += size
        return drawn

    def _take(self, name: str, size: int, first: int, count: int) -> torch.Tensor:
        """Return `count` samples of a source, after the `first` that were taken before."""
        if not self._shuffle:
            return torch.arange(first, first + count) % size
        begin, end = first // size, -(-(first + count) // size)
        passes = []
        for number in range(begin, end):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, f"pass over {name}", number))
            passes.append(draw_permutation(size, generator, self._permute.get(name)))
        return torch.cat(passes)[first - begin * size :][:count]

    def _positions(self, epoch: int) -> range:
        """Return the positions of an epoch in the run."""
        begin, length = self._planned(epoch)
        end = self._interleaving.end
        if self._is_exhausted(epoch):
            got = f"epoch {epoch + 1}, but all sources are exhausted after {end} samples"
            do = "reduce `epochs` of the run, or increase `epochs` of a source in `data.mix`"
            raise fail(DataError, _LIMITED, got=got, expected="samples in every epoch", do=do)
        return range(begin, begin + length if end is None else min(begin + length, end))

    def _is_exhausted(self, epoch: int) -> bool:
        end = self._interleaving.end
        return end is not None and end <= self._planned(epoch)[0]

    def _require_samples(self, cut: int = 0, done: int = 0) -> None:
        """Reject a run that the sources are known not to suffice for.

        Args:
            cut: The position from which the run continues.
            done: With "repeat", the steps before it.
        """
        end, steps = self._interleaving.end, self._max_steps
        is_complete = steps is not None and done >= steps
        if end is not None and end <= cut and not is_complete:
            counts = zip(self._sizes, self._interleaving.counts(cut), self._limits, strict=True)
            read = ", ".join(f"{name}: {count} of {limit}" for name, count, limit in counts if limit)
            got = f"{cut} samples of a mixture, after which no source has any left by its `epochs` ({read})"
            do = "increase `epochs` of a source, or keep the weights and `epochs` of before"
            raise fail(DataError, _WHERE, got=got, expected="samples for the rest of the run", do=do)
        if self._num_epochs is not None and self._num_epochs > self._base.epoch:
            self._positions(self._num_epochs - 1)
        if end is None or steps is None:
            return
        possible = done + self._steps_of(end - cut)
        if possible < steps:
            got = f"max_steps: {steps}, but all sources are exhausted after {end} samples, in step {possible}"
            do = f"write `max_steps: {possible}`, or increase `epochs` of a source"
            raise fail(DataError, _LIMITED, got=got, expected="samples in every step", do=do)

    def _steps_of(self, samples: int) -> int:
        """Return the number of steps for samples, the last of which may be a smaller one; 0 if it is unknown."""
        return -(-samples // self._samples_per_step) if self._samples_per_step else 0

    def _planned(self, epoch: int) -> tuple[int, int]:
        """Return the first position of an epoch, and its length if its sources are not exhausted before."""
        base = self._base
        if epoch == base.epoch:
            return base.begin, base.length
        if self._cut.repeats:
            return base.begin, self._length
        trained = base.trained + (epoch - base.epoch - 1) * self._cut.trained(self._length)
        return base.begin + trained, self._length

    def _begin_with(self, stretches: Sequence[Stretch], *, limited_from: int = 0) -> None:
        self._stretches, self._limited_from = tuple(stretches), limited_from
        self._interleaving = Interleaving(self._stretches, self._limits, limited_from=limited_from)

    def _measure(self) -> int:
        """Return the samples of an epoch that begins the run."""
        if self._stop == "repeat":
            end = self._interleaving.end
            return end or 0 if self._max_steps is None else self._max_steps * self._samples_per_step
        drawn = [number for number, part in enumerate(self._stages[0].parts) if part]
        sizes = list(self._sizes.values())
        ends = [self._interleaving.share_of(number, sizes[number]) for number in drawn]
        return min(ends) if self._stop == "first" else max(ends)

    # ---- Resuming, possibly with other weights

    def state_at(self, epoch: int) -> dict[str, Any]:
        base, (begin, length) = self._base, self._planned(epoch)
        end_step = base.end_step + self._steps_of(begin + length - base.begin - base.length)
        trained = base.trained if epoch == base.epoch else self._cut.trained(length)
        return {
            "sizes": [list(size) for size in self._sizes.items()],
            "stretches": [[start, list(parts)] for start, parts in self._stretches],
            "limited_from": self._limited_from,
            "epoch": [epoch, begin, length, end_step, trained],
            **self._settings,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        own = [list(size) for size in self._sizes.items()]
        if state["sizes"] != own:
            got, expected = (
                ", ".join(f"{name}: {size} samples" for name, size in one) for one in (own, state["sizes"])
            )
            do = "pass the same sources in the same order (a weight of 0 leaves one out), or start a new run with "
            do += "resume=False"
            pairs = [(now[0], then[0]) for now, then in zip(own, state["sizes"], strict=False) if now != then]
            if [size for _, size in own] == [size for _, size in state["sizes"]] and len(pairs) == 1:
                do = f"rename `{pairs[0][0]}` to `{pairs[0][1]}`, its name before"
            raise fail(DataError, _WHERE, got=got, expected=expected, do=do)
        self._loaded, self._limits = state, list(state["limits"])
        self._base = _Base(*state["epoch"])
        stretches = [Stretch(start, tuple(parts)) for start, parts in state["stretches"]]
        self._begin_with(stretches, limited_from=state["limited_from"])
        if self._is_exhausted(self._base.epoch):
            self.continue_after(0)  # this run's limits may be higher

    def continue_after(self, consumed: int) -> None:
        before, self._loaded = self._loaded, {}
        if not before or all(before[name] == value for name, value in self._settings.items()):
            return
        base = self._base
        if before["stop"] != self._stop and "repeat" in (before["stop"], self._stop):
            do = f"write `stop: {before['stop']}`, or start a new run with resume=False"
            raise fail(
                DataError, _WHERE, got=f"stop: {self._stop}", expected=f"stop: {before['stop']}, as before", do=do
            )
        cut, done = base.begin + consumed, 0
        if before["samples_per_step"]:  # from the end, because an earlier part of the epoch may have had other steps
            done = max(0, base.end_step + (consumed - base.length) // before["samples_per_step"])
        stretches = [stretch for stretch in self._stretches if stretch.start < cut]
        in_force = max(stage for stage in self._stages if stage.step <= done)
        has_other_limits = before["limits"] != self._settings["limits"]
        changed = ["weights"] if not stretches or stretches[-1].parts != in_force.parts else []
        changed += ["`epochs`"] if has_other_limits else []
        limited_from = self._limited_from
        if has_other_limits:  # which do not change what was trained on
            stretches = [stretch for stretch in self._interleaving.stretches if stretch.start < cut]
            limited_from = cut
        if changed:
            stretches.append(Stretch(cut, in_force.parts))
            say(f"from here on, after {cut} samples of the mixture, its sources have other {' and '.join(changed)}")
        later = (stage for stage in self._stages if stage.step > done)
        stretches += [Stretch(cut + (stage.step - done) * self._samples_per_step, stage.parts) for stage in later]
        self._limits = self._settings["limits"]
        self._begin_with(stretches, limited_from=limited_from)
        if self._stop != "repeat":
            length = base.length if consumed else self._length
        elif self._max_steps is None:
            length = (self._interleaving.end or base.begin) - base.begin
        else:
            length = consumed + max(self._max_steps - done, 1) * self._samples_per_step
        end_step, trained = done + self._steps_of(length - consumed), self._cut.trained(length, consumed)
        self._base = base._replace(length=length, end_step=end_step, trained=trained)
        self._require_samples(cut, done)
