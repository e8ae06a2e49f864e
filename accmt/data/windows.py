"""Splits training data into accumulation windows, and evaluation data into micro-batches.

A source reads micro-batches as planned, of the requested size or smaller if memory requires it. A maker turns them into
windows: of a number of micro-batches, of as many as another package's function wants, or of samples that are split by a
token budget.

A token budget does not change the samples of an optimizer step, only how they are batched: they are sorted by length
and split into micro-batches of at most `max_tokens` padded tokens (the longest sample times their number), or packed
into rows of at most that many. The weighted window makes the gradient independent of the split.

Samples are read as planned, under the same seeds and by the same processes, and collated only after the split. So each
sample is read once with the same randomness as without a budget, lengths need not be known beforehand, and a resumed
run splits as before.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, get_worker_info

from accmt.data.base import Source
from accmt.data.batches import Cut, MicroBatch
from accmt.data.collate import Collate
from accmt.data.lengths import find_length
from accmt.data.packing import count_targets, pack_by_tokens, packed_tokens
from accmt.data.seeding import derive_seed, seed_generators
from accmt.data.token_budget import Groups, TokenBudget, cut_by_tokens, padded_tokens
from accmt.errors import DataError, explain
from accmt.libraries.private_names import pin_memory
from accmt.messages import warn_once
from accmt.processes import broadcast_object, data_index, each_once, gather_from_data, gather_objects, num_processes
from accmt.state import TrainingState

_FIRST_WINDOW = 2
_SAMPLES_OF_WINDOW = 1024


class Window(NamedTuple):
    """The accumulation window of one optimizer step on all processes.

    Attributes:
        units: Its micro-batches, equally many on every process; read lazily during iteration.
        num_units: Their maximum number.
        num_samples: Samples over all processes; None if only the batches show it.
    """

    units: Iterable[MicroBatch]
    num_units: int
    num_samples: int | None = None


class WindowMaker(Protocol):
    """Makes windows from a source.

    Attributes:
        keeps_batches: Whether micro-batches are those of the source.
    """

    keeps_batches: bool

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        """Yield the windows of an epoch, starting with that of micro-batch `first`.

        Processes: collective if samples are split.
        """


class Grouping(Protocol):
    """Decides which batches make an optimizer step."""

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step.

        Args:
            batches: The micro-batches of an epoch, or of the rest of it.
            epoch: The epoch.
            per_batch: Micro-batches that make one batch of the requested size.
        """


class Loader:
    """Training or evaluation data: a source and a maker of windows.

    Args:
        source: Reads micro-batches.
        maker: Makes windows of them; None makes one of each micro-batch.
        through: A function applied to the micro-batches of an evaluation.
    """

    def __init__(
        self,
        source: Source,
        maker: WindowMaker | None = None,
        *,
        through: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] | None = None,
    ) -> None:
        self.source = source
        self.maker = ByCount() if maker is None else maker
        self._through = through

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch, starting with that of micro-batch `first`; iterate each before the next.

        Processes: collective in a micro-batch that does not reach all of them.
        """
        windows = self.maker.windows(self.source, epoch, first)
        if num_processes() == 1:
            return windows
        return (window._replace(units=lend_batches(window.units)) for window in windows)

    def micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch.

        Processes: collective in a micro-batch that does not reach all of them.
        """
        if self.maker.keeps_batches:
            micro_batches = self.source.micro_batches(epoch)
            micro_batches = micro_batches if num_processes() == 1 else lend_batches(micro_batches)
        else:
            micro_batches = chain.from_iterable(window.units for window in self.windows(epoch))
        return micro_batches if self._through is None else self._through(micro_batches)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return this process's sample indices in a micro-batch of the current epoch; None if unknown."""
        return self.source.samples_of(epoch, index) if self.maker.keeps_batches else None


def lend_batches(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Lend each process without a batch that of the first process with one, so that every process runs every step.

    If no process has a batch, because none of its samples could be read, none gets one.

    Processes: collective in a micro-batch that does not reach all of them.
    """
    for micro_batch in micro_batches:
        if micro_batch.is_partial:
            has_batch = gather_objects(micro_batch.batch is not None)
            micro_batch.num_lenders = sum(each_once(has_batch))
            if any(has_batch):
                lent = broadcast_object(micro_batch, source=has_batch.index(True))
                micro_batch.borrowed = lent if micro_batch.batch is None else None
        yield micro_batch


class ByCount:
    """Makes windows of a fixed number of micro-batches.

    Args:
        batches_per_step: Returns the batches of the requested size per optimizer step, by epoch. None makes a window of
            each micro-batch.
    """

    keeps_batches = True

    def __init__(self, batches_per_step: Callable[[int], int | None] | None = None) -> None:
        self._batches_per_step = batches_per_step

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        number = self._micro_batches_per_step(epoch, source.micro_batches_per_batch)
        micro_batches = source.micro_batches(epoch, first)
        for begin in micro_batches:
            end = begin.index + number
            if source.num_micro_batches is not None:
                end = min(end, source.num_micro_batches)
            if number == 1 and begin.num_samples is not None:
                yield Window((begin,), 1, begin.num_samples)
            else:
                count = end - begin.index
                yield Window(_until_full(begin, micro_batches, count), count, source.samples_in(begin.index, end))

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        number = self._micro_batches_per_step(epoch, per_batch)
        group: list[MicroBatch] = []
        for batch in batches:
            group.append(batch)
            if batch.is_last or len(group) == number:
                yield group
                group = []

    def _micro_batches_per_step(self, epoch: int, per_batch: int) -> int:
        return 1 if self._batches_per_step is None else (self._batches_per_step(epoch) or 1) * per_batch


def _until_full(begin: MicroBatch, others: Iterator[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window; nothing is read after its last one, or the epoch's."""
    yield begin
    if begin.is_last:
        return
    for micro_batch in islice(others, number - 1):
        yield micro_batch
        if micro_batch.is_last:
            return


class WindowSoFar(NamedTuple):
    """What a window maker of another package sees of an accumulation window; the same on every process.

    Attributes:
        num_batches: Batches of the requested size that each process has read for it.
        num_samples: Samples in them, over all processes; None if a custom collate function may change their number.
        num_tokens: Tokens in them, over all processes, without padding: those of `input_ids` that `attention_mask` does
            not mask, or with `max_tokens` the lengths of the samples. None for data without `input_ids`.
    """

    num_batches: int
    num_samples: int | None
    num_tokens: int | None


IsFull: TypeAlias = Callable[[WindowSoFar, TrainingState], bool]
"""A window maker of another package: returns whether the window is complete, given the state before it."""


class ByFunction:
    """Makes windows that end where a function of another package says, which is asked after each batch.

    A window is read whole before the first of its micro-batches is trained on. So its number of samples is known, the
    last micro-batch is known to be the last, and the function depends on nothing that training on the window changes.

    Args:
        name: The name under which the package registered the function.
        is_full: The function.
        state: The run's state.
        count_tokens: Counts the tokens of this process's batch; None if it shows none.
    """

    keeps_batches = True

    def __init__(
        self, name: str, is_full: IsFull, state: TrainingState, count_tokens: Callable[[Any], int | None] | None = None
    ) -> None:
        self._name = name
        self._is_full = is_full
        self._state = state
        self._count_tokens = count_tokens or _tokens_in

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        per_batch = source.micro_batches_per_batch
        for group in self.groups(source.micro_batches(epoch, first), epoch, per_batch=per_batch):
            yield Window(group, len(group), _samples_in(group))

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step.

        Processes: collective.
        """
        group: list[MicroBatch] = []
        num_tokens: int | None = None
        for batch in batches:
            group.append(batch)
            own = None if batch.batch is None else self._count_tokens(batch.batch)
            found = [tokens for tokens in self._exchange(group, own, is_end=False) if tokens is not None]
            num_tokens = sum(found, num_tokens or 0) if found else num_tokens
            if not batch.is_last:
                if len(group) % per_batch:
                    continue  # a part of a batch: windows are the same with smaller micro-batches
                if not self._is_full(WindowSoFar(len(group) // per_batch, _samples_in(group), num_tokens), self._state):
                    continue
            self._exchange(group, None, is_end=True)
            yield group
            group, num_tokens = [], None

    def _exchange(self, group: list[MicroBatch], own_tokens: int | None, *, is_end: bool) -> list[int | None]:
        """Return the tokens in each process's batch, and check that the window has the same end on all processes.

        Processes: collective.

        Raises:
            DataError: It has ended on some processes only.
        """
        every = gather_objects((is_end, len(group) - 1 + is_end, own_tokens))
        numbers = [number for has_ended, number, _ in every if has_ended]
        if numbers and len(numbers) < len(every):
            here = [index for index, (has_ended, _, _) in enumerate(every) if has_ended]
            got = f"a window that ends after {min(numbers)} micro-batches on process {here[0]}, but not on all others"
            expected = "the same decision on every process"
            do = "decide from the arguments alone, which are the same on every process: not from random numbers, time, "
            do += "or anything that only this process has"
            raise DataError(explain(f"the window maker {self._name!r}", got, expected, do))
        return each_once([tokens for _, _, tokens in every])


def _samples_in(group: Iterable[MicroBatch]) -> int | None:
    total = 0
    for micro_batch in group:
        if micro_batch.num_samples is None:
            return None
        total += micro_batch.num_samples
    return total


def _tokens_in(batch: Any) -> int | None:
    ids, mask = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "attention_mask"))
    if not isinstance(ids, torch.Tensor):
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else ids.numel()


class _TokenCut:
    """Base of makers that batch the samples of a source by tokens.

    The index of each micro-batch is that of the first batch of its window.

    Args:
        budget: The limits of a micro-batch.
        collate: The collate function.
        length_of: The module's `length_of`.
        seed: The run's seed.
        purpose: As in `SourceOptions`.
        pins_memory: Whether batches are pinned.
        rejects_long: Whether a sample longer than the budget is an error.
    """

    keeps_batches = False

    def __init__(
        self,
        budget: TokenBudget,
        *,
        collate: Collate,
        length_of: Callable[[Any], Any] | None,
        seed: int,
        purpose: str,
        pins_memory: bool = False,
        rejects_long: bool = False,
    ) -> None:
        self._budget = budget
        self.collate = collate
        self._length_of = length_of
        self._seed = seed
        self._purpose = f"collate {purpose}"
        self._pins_memory = pins_memory
        self._rejects_long = rejects_long

    def _fill(self, micro_batch: MicroBatch, epoch: int, samples: list[Any], lengths: list[int]) -> MicroBatch:
        """Set a micro-batch's batch, collated under its own seed."""
        if not samples:
            return micro_batch
        seed_generators(derive_seed(self._seed, self._purpose, epoch, *micro_batch.place, data_index()))
        longest = max(lengths)
        try:
            batch = self.collate(samples)
        except Exception as error:
            error.add_note(f"This happened while collating {len(samples)} samples of up to {longest} tokens.")
            raise
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.numel() > max(
            self._budget.max_tokens, *self._budget.widths([longest])
        ):
            warn_once(
                f"a batch has {' x '.join(map(str, ids.shape))} input_ids, more than max_tokens: "
                f"{self._budget.max_tokens}, although the length of its longest sample is {longest}: correct the "
                "lengths, or include what the collate function adds",
                about="wrong sample lengths",
            )
        micro_batch.batch = pin_memory(batch) if self._pins_memory else batch  # type: ignore[no-untyped-call]
        return micro_batch

    def _check_longest(self, lengths: list[int]) -> None:
        longest, max_tokens = max(lengths, default=0), self._budget.max_tokens
        if longest <= max_tokens:
            return
        number = sum(length > max_tokens for length in lengths)
        which = f"{number} of {len(lengths)} samples of a window"
        if self._rejects_long:
            where, got = f"max_tokens: {max_tokens}", f"{which} are longer, up to {longest} tokens"
            do = f"tokenizer(..., truncation=True, max_length={max_tokens}), filter them, or increase max_tokens"
            expected = f'at most {max_tokens} tokens per sample, because of failures={{"on_long_sample": "raise"}}'
            raise DataError(explain(where, got, expected, do))
        warn_once(
            f"{which} are longer than max_tokens: {max_tokens} (up to {longest} tokens); each such sample gets a "
            "separate micro-batch",
            about="samples longer than max_tokens",
        )


class ByTokens(_TokenCut):
    """Splits the samples of each optimizer step, over all processes, into micro-batches of similar length.

    Args:
        budget: As for the base, like all others.
        grouping: Decides which batches make an optimizer step.
        collate: The collate function.

    Attributes:
        real_tokens: Tokens in the steps begun so far, over all processes, by the lengths of their samples.
        padded_tokens: The same, including padding.
    """

    def __init__(self, budget: TokenBudget, *, collate: Collate, grouping: Grouping, **others: Any) -> None:
        super().__init__(budget, collate=collate, purpose="train", **others)
        self.real_tokens = self.padded_tokens = 0
        self._grouping = grouping

    cut = staticmethod(cut_by_tokens)
    tokens_of = staticmethod(padded_tokens)

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        for batches in self._grouping.groups(_unpacked(source.micro_batches(epoch, first)), epoch):
            yield self._make_window(source, epoch, batches)

    def _make_window(self, source: Source, epoch: int, batches: list[MicroBatch]) -> Window:
        samples, own_indices = _read_window(batches)
        own_lengths = [find_length(sample, self._length_of) for sample in samples]
        gathered = gather_from_data((own_lengths, own_indices))
        every = [of_one for of_one, _ in gathered]
        lengths, indices = list(chain(*every)), list(chain(*(of_one for _, of_one in gathered)))
        self._check_longest(lengths)
        widths = self._budget.widths(lengths)
        cut = self.cut(widths, self._budget, len(every))
        self.real_tokens += sum(lengths)
        self.padded_tokens += sum(self.tokens_of(group, widths) for own in cut for group in own)
        groups = _exchange(samples, sum(map(len, every[: data_index()])), cut)
        num_parts = max(1, *map(len, cut))

        def make_micro_batches() -> Iterator[MicroBatch]:
            for number in range(num_parts):
                sizes = [len(own[number]) if number < len(own) else 0 for own in cut]
                positions = cut[data_index()][number] if sizes[data_index()] else []
                known = [index for position in positions if (index := indices[position]) is not None]
                micro_batch = _make_micro_batch(batches, number, num_parts, samples=known or None)
                micro_batch.num_samples = sum(sizes)
                micro_batch.own_samples = len(positions)
                micro_batch.is_partial = 0 in sizes
                own_samples = groups[number] if positions else []
                yield self._fill(micro_batch, epoch, own_samples, [lengths[position] for position in positions])

        return Window(make_micro_batches(), num_parts, len(lengths))


class ByPackedRows(ByTokens):
    """Packs the samples of each optimizer step, over all processes, into rows; its collate function returns a row."""

    cut = staticmethod(pack_by_tokens)
    tokens_of = staticmethod(packed_tokens)

    def _fill(self, micro_batch: MicroBatch, epoch: int, samples: list[Any], lengths: list[int]) -> MicroBatch:
        micro_batch = super()._fill(micro_batch, epoch, samples, lengths)
        if micro_batch.batch is not None and micro_batch.cut is not None:
            micro_batch.cut = micro_batch.cut._replace(num_targets=count_targets(micro_batch.batch))
        return micro_batch


class ByTokensInEvaluation(_TokenCut):
    """Splits the samples of an evaluation, about a thousand at a time; each process splits those that it reads.

    All processes get equally many micro-batches per window, some without a batch. Each sample keeps its position, so
    that results can be put back in order. The first windows are small, because a trial before training needs only a few
    batches.

    Args:
        budget: As for the base, like all others.
        batch_size: Samples per batch as loaded.
    """

    def __init__(self, budget: TokenBudget, *, batch_size: int, **others: Any) -> None:
        super().__init__(budget, **others)
        self._largest_window = max(1, _SAMPLES_OF_WINDOW // batch_size)

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        batches: list[MicroBatch] = []
        num_batches = min(_FIRST_WINDOW, self._largest_window)
        for batch in _unpacked(source.micro_batches(epoch, first)):
            batches.append(batch)
            if batch.is_last or len(batches) == num_batches:
                yield self._make_window(source, epoch, batches)
                batches, num_batches = [], min(2 * num_batches, self._largest_window)

    def _make_window(self, source: Source, epoch: int, batches: list[MicroBatch]) -> Window:
        samples, indices = _read_window(batches)
        places = [(batch.index, place) for batch in batches for place in range(len(batch.batch))]
        lengths = [find_length(sample, self._length_of) for sample in samples]
        self._check_longest(lengths)
        [groups] = cut_by_tokens(self._budget.widths(lengths), self._budget)
        every = gather_from_data(len(groups))
        num_parts = max(1, *every)

        def make_micro_batches() -> Iterator[MicroBatch]:
            for number in range(num_parts):
                positions = groups[number] if number < len(groups) else []
                own_places = [places[position] for position in positions]
                own_indices = [index for position in positions if (index := indices[position]) is not None]
                micro_batch = _make_micro_batch(batches, number, num_parts, own_places, own_indices or None)
                micro_batch.own_samples = len(positions)
                micro_batch.is_partial = number >= min(every)
                chosen = [samples[position] for position in positions]
                yield self._fill(micro_batch, epoch, chosen, [lengths[position] for position in positions])

        return Window(make_micro_batches(), num_parts)


def _read_window(batches: list[MicroBatch]) -> tuple[list[Any], list[int | None]]:
    """Return this process's samples in some uncollated batches, and the position of each in the data, or None."""
    samples: list[Any] = []
    indices: list[int | None] = []
    for batch in batches:
        read = batch.batch
        samples += read
        found = batch.samples
        indices += [None] * len(read) if found is None or len(found) != len(read) else map(int, found)
    return samples, indices


def _make_micro_batch(
    batches: list[MicroBatch],
    number: int,
    num_parts: int,
    places: list[tuple[int, int]] | None = None,
    samples: list[int] | None = None,
) -> MicroBatch:
    """Return a part of some batches, without its batch yet; the first part lists their skipped samples."""
    is_end = number == num_parts - 1
    cut = Cut(number, len(batches) if is_end else 0, places, samples=samples)
    micro_batch = MicroBatch(batches[0].index, None, is_last=batches[-1].is_last and is_end, cut=cut)
    if number == 0:
        micro_batch.bad = tuple(chain(*(batch.bad for batch in batches)))
        micro_batch.num_bad = sum(batch.num_bad for batch in batches)
    return micro_batch


def keep_samples(samples: list[Any]) -> Any:
    """Return the samples uncollated; in a worker, as bytes, because each tensor sent would use a file descriptor."""
    return samples if get_worker_info() is None else pickle.dumps(samples)


def take_apart(user_loader: DataLoader[Any]) -> tuple[DataLoader[Any], Collate] | None:
    """Return a copy of a user's DataLoader that yields uncollated samples, and its collate function.

    Returns:
        The two; None for a loader with a custom `__iter__` or state, or one that does not batch samples.
    """
    is_plain = type(user_loader).__iter__ is DataLoader.__iter__ and not hasattr(user_loader, "state_dict")
    if not is_plain or user_loader.batch_sampler is None and user_loader.batch_size is None:
        return None
    reader = copy.copy(user_loader)
    # Through vars: DataLoader.__setattr__ rejects changes after construction.
    vars(reader).update(collate_fn=keep_samples, pin_memory=False, _iterator=None)
    return reader, user_loader.collate_fn


def _unpacked(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield batches of uncollated samples as lists, also those that a worker has sent as bytes."""
    for batch in batches:
        batch.batch = unpack(batch.batch)
        yield batch


def unpack(batch: Any) -> list[Any]:
    """Return the samples of a batch that was read uncollated."""
    samples: list[Any] = pickle.loads(batch) if isinstance(batch, bytes) else batch or []  # noqa: S301 - a worker's
    return samples


def _exchange(samples: list[Any], first: int, cut: list[Groups]) -> list[list[Any]]:
    """Return the samples of this process's micro-batches; those read by another process are sent, once.

    Args:
        samples: The samples read by this process.
        first: The position of the first of them.
        cut: The result of `cut_by_tokens`, the same on all processes.
    """
    wanted = cut[data_index()]
    held = dict(enumerate(samples, first))
    if len(cut) > 1:
        leaving = {p: held[p] for p in held.keys() - set(chain(*wanted))}
        for received in gather_from_data(leaving):
            held |= received
    return [[held[position] for position in group] for group in wanted]
