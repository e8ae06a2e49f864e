"""Training data as accumulation windows, and evaluation data: what goes through the model at once, and until when.

A source reads micro-batches as they are planned, of the size that was asked for or smaller ones where memory needs it.
A maker makes windows of them: of a number of micro-batches, or of samples that are cut by a budget of tokens.

Cut by tokens, the samples of an optimizer step stay as planned. Only how they go through the model changes: they are
sorted by length and cut into micro-batches of at most `max_tokens` padded tokens (the longest sample times their
number), or packed into rows of so many. The weighted window makes the gradient independent of the cut.

Such samples are read as planned, under the same seeds and by the same processes, and collated only after the cut. So
every sample is read once and has the randomness that it has without a budget, lengths need not be known beforehand, and
a resumed run cuts as before.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, get_worker_info

from accmt.data.base import Source
from accmt.data.batches import Cut, MicroBatch
from accmt.data.collate import Collate, keeps_number
from accmt.data.lengths import find_length
from accmt.data.packing import count_targets, pack_by_tokens, packed_tokens
from accmt.data.seeding import call_first, derive_seed, seed_generators
from accmt.data.token_budget import Groups, TokenBudget, cut_by_tokens, padded_tokens
from accmt.errors import DataError, explain
from accmt.libraries.private_names import pin_memory
from accmt.messages import warn_once
from accmt.processes import data_index, gather_from_data

_FIRST_WINDOW = 2
_SAMPLES_OF_WINDOW = 1024


class Window(NamedTuple):
    """What makes one optimizer step, on all processes.

    Attributes:
        micro_batches: Read one by one, while they are iterated.
        num_micro_batches: How many each process has at most.
        num_samples: Samples over all processes; None where only the batches show it.
    """

    micro_batches: Iterable[MicroBatch]
    num_micro_batches: int
    num_samples: int | None = None


class WindowMaker(Protocol):
    """Makes windows of what a source reads.

    Attributes:
        keeps_batches: Whether micro-batches are those that the source reads.
    """

    keeps_batches: bool

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        """Yield the windows of an epoch from that of micro-batch `first` on.

        Processes: collective where samples are cut.
        """


class Loader:
    """Training or evaluation data: what reads them, and what makes windows of them.

    Args:
        source: Reads micro-batches.
        maker: Makes windows of them; None where each micro-batch is taken by itself.
        through: What the micro-batches of an evaluation go through.
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
        """Yield the windows of an epoch from that of micro-batch `first` on; iterate each before the next one."""
        return self.maker.windows(self.source, epoch, first)

    def micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch."""
        if self.maker.keeps_batches:
            micro_batches = self.source.micro_batches(epoch)
        else:
            micro_batches = chain.from_iterable(window.micro_batches for window in self.windows(epoch))
        return micro_batches if self._through is None else self._through(micro_batches)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return this process's sample indices in a micro-batch of the current epoch; None where nobody knows."""
        return self.source.samples_of(epoch, index) if self.maker.keeps_batches else None

    def samples_in_batch(self, epoch: int, micro_batch: MicroBatch) -> list[int] | None:
        """Return the positions in the data of the samples in this process's batch; None where nobody knows."""
        if micro_batch.cut is not None:
            return micro_batch.cut.samples
        return _indices_of(micro_batch, self.samples_of(epoch, micro_batch.index))


def _indices_of(micro_batch: MicroBatch, planned: list[int] | None) -> list[int] | None:
    """Return the planned indices without those of samples that were skipped; None where there is no batch."""
    if planned is None or micro_batch.batch is None or not micro_batch.bad:
        return None if micro_batch.batch is None else planned
    skipped = {bad.index for bad in micro_batch.bad}
    return [index for index in planned if index not in skipped]


class ByCount:
    """Makes each window of a number of micro-batches.

    Args:
        batches_per_step: How many batches, of the size that was asked for, make an optimizer step in an epoch. None
            where each micro-batch is taken by itself.
    """

    keeps_batches = True

    def __init__(self, batches_per_step: Callable[[int], int] | None = None) -> None:
        self._batches_per_step = batches_per_step

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        batches_per_step = self._batches_per_step
        number = 1 if batches_per_step is None else batches_per_step(epoch) * source.micro_batches_per_batch
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


def _until_full(begin: MicroBatch, others: Iterator[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window; after its last, or the epoch's, nothing is read."""
    yield begin
    if begin.is_last:
        return
    for micro_batch in islice(others, number - 1):
        yield micro_batch
        if micro_batch.is_last:
            return


class _TokenCut:
    """What the makers below have in common: their sources read samples, which they make batches of.

    The index of each micro-batch is that of the first batch of its window.

    Args:
        budget: What a micro-batch may hold.
        collate: Makes a batch of samples.
        length_of: What the module says is the length of a sample.
        seed: The run's.
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
        self._collate = collate
        self._length_of = length_of
        self._seed = seed
        self._purpose = f"collate {purpose}"
        self._pins_memory = pins_memory
        self._rejects_long = rejects_long
        self._is_first = True

    def _fill(self, micro_batch: MicroBatch, epoch: int, samples: list[Any], lengths: list[int]) -> MicroBatch:
        """Set a micro-batch's batch, collated under a seed of its own."""
        if samples:
            seed_generators(derive_seed(self._seed, self._purpose, epoch, *micro_batch.place, data_index()))
            micro_batch.batch = self._make_batch(samples, lengths)
        return micro_batch

    def _make_batch(self, samples: list[Any], lengths: list[int]) -> Any:
        longest = max(lengths)
        try:
            is_first, self._is_first = self._is_first, False
            batch = call_first(self._collate, samples, self._collate) if is_first else self._collate(samples)
        except Exception as error:
            error.add_note(f"This was raised while making a batch of {len(samples)} samples of up to {longest} tokens.")
            raise
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.numel() > max(
            self._budget.max_tokens, *self._budget.widths([longest])
        ):
            warn_once(
                f"a batch has {' x '.join(map(str, ids.shape))} input_ids, more than max_tokens: "
                f"{self._budget.max_tokens}, though its longest sample is said to have {longest} tokens: correct the "
                "lengths, or count what the collate function adds",
                about="lengths of samples that are not true",
            )
        return pin_memory(batch) if self._pins_memory else batch

    def _check_longest(self, lengths: list[int]) -> None:
        longest, max_tokens = max(lengths, default=0), self._budget.max_tokens
        if longest <= max_tokens:
            return
        number = sum(length > max_tokens for length in lengths)
        which = f"{number} of {len(lengths)} samples that are cut together"
        if self._rejects_long:
            where, got = f"max_tokens: {max_tokens}", f"{which} are longer, up to {longest} tokens"
            do = f"tokenizer(..., truncation=True, max_length={max_tokens}), filter them, or raise max_tokens"
            expected = 'none, because of Trainer(failures={"on_long_sample": "raise"})'
            raise DataError(explain(where, got, expected, do))
        warn_once(
            f"{which} are longer than max_tokens: {max_tokens} (up to {longest} tokens); each such sample is a "
            "micro-batch of its own",
            about="samples longer than max_tokens",
        )


class ByTokens(_TokenCut):
    """Cuts the samples of each optimizer step, over all processes, into micro-batches of like length.

    Args:
        budget: As for the base, and so are all others.
        batches_per_step: How many batches make an optimizer step in an epoch.
        collate: Makes a batch of samples.

    Attributes:
        real_tokens: Tokens of the steps begun so far, over all processes, by the lengths of their samples.
        padded_tokens: The same with padding.
    """

    def __init__(
        self, budget: TokenBudget, *, collate: Collate, batches_per_step: Callable[[int], int], **others: Any
    ) -> None:
        super().__init__(budget, collate=collate, purpose="train", **others)
        self.real_tokens = self.padded_tokens = 0
        self._knows_samples = keeps_number(collate)
        self._batches_per_step = batches_per_step

    cut = staticmethod(cut_by_tokens)
    tokens_of = staticmethod(padded_tokens)

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        batches_per_step = self._batches_per_step(epoch)
        batches: list[MicroBatch] = []
        for batch in source.micro_batches(epoch, first):
            batches.append(batch)
            if batch.is_last or len(batches) == batches_per_step:
                yield self._make_window(epoch, batches)
                batches = []

    def _make_window(self, epoch: int, batches: list[MicroBatch]) -> Window:
        samples = [sample for batch in batches for sample in _unpack(batch.batch)]
        every = gather_from_data([find_length(sample, self._length_of) for sample in samples])
        lengths = list(chain(*every))
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
                micro_batch = _make_micro_batch(batches, number, num_parts)
                micro_batch.num_samples = sum(sizes) if self._knows_samples else None
                micro_batch.own_samples = len(positions)
                micro_batch.is_partial = 0 in sizes
                own_samples = groups[number] if positions else []
                yield self._fill(micro_batch, epoch, own_samples, [lengths[position] for position in positions])

        return Window(make_micro_batches(), num_parts, len(lengths) if self._knows_samples else None)


class ByPackedRows(ByTokens):
    """Packs the samples of each optimizer step, over all processes, into rows; its collate function makes a row."""

    cut = staticmethod(pack_by_tokens)
    tokens_of = staticmethod(packed_tokens)

    def _fill(self, micro_batch: MicroBatch, epoch: int, samples: list[Any], lengths: list[int]) -> MicroBatch:
        micro_batch = super()._fill(micro_batch, epoch, samples, lengths)
        if micro_batch.batch is not None and micro_batch.cut is not None:
            micro_batch.cut = micro_batch.cut._replace(num_targets=count_targets(micro_batch.batch))
        return micro_batch


class ByTokensInEvaluation(_TokenCut):
    """Cuts the samples of an evaluation, about a thousand at a time; each process cuts those that it reads.

    Of a window every process gets equally many micro-batches, some without a batch. Each sample keeps its place, by
    which results get their order back. The first windows are small, because a trial before training wants a few
    batches only.

    Args:
        budget: As for the base, and so are all others.
        batch_size: Samples of a batch as it is read.
    """

    def __init__(self, budget: TokenBudget, *, batch_size: int, **others: Any) -> None:
        super().__init__(budget, **others)
        self._largest_window = max(1, _SAMPLES_OF_WINDOW // batch_size)

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        batches: list[MicroBatch] = []
        num_batches = min(_FIRST_WINDOW, self._largest_window)
        for batch in source.micro_batches(epoch, first):
            batches.append(batch)
            if batch.is_last or len(batches) == num_batches:
                yield self._make_window(source, epoch, batches)
                batches, num_batches = [], min(2 * num_batches, self._largest_window)

    def _make_window(self, source: Source, epoch: int, batches: list[MicroBatch]) -> Window:
        samples: list[Any] = []
        places: list[tuple[int, int]] = []
        indices: list[int | None] = []
        for batch in batches:
            read = _unpack(batch.batch)
            samples += read
            found = _indices_of(batch, source.samples_of(epoch, batch.index))
            indices += [None] * len(read) if found is None or len(found) != len(read) else found
            places += [(batch.index, place) for place in range(len(read))]
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


def _make_micro_batch(
    batches: list[MicroBatch],
    number: int,
    num_parts: int,
    places: list[tuple[int, int]] | None = None,
    samples: list[int] | None = None,
) -> MicroBatch:
    """Return a part of some batches, as yet without a batch; the first says which of their samples were skipped."""
    is_end = number == num_parts - 1
    cut = Cut(number, len(batches) if is_end else 0, places, samples=samples)
    micro_batch = MicroBatch(batches[0].index, None, is_last=batches[-1].is_last and is_end, cut=cut)
    if number == 0:
        micro_batch.bad = tuple(chain(*(batch.bad for batch in batches)))
        micro_batch.num_bad = sum(batch.num_bad for batch in batches)
    return micro_batch


def keep_samples(samples: list[Any]) -> Any:
    """Collate nothing: return the samples themselves, out of a worker as bytes.

    A tensor that leaves a worker by itself takes a file descriptor.
    """
    return samples if get_worker_info() is None else pickle.dumps(samples)


def take_apart(user_loader: DataLoader[Any]) -> tuple[DataLoader[Any], Collate] | None:
    """Return a copy of a user's DataLoader that yields the samples of its batches, and what collates these.

    Returns:
        The two; None for a loader with an `__iter__` or a state of its own, or one that makes no batches of samples.
    """
    is_plain = type(user_loader).__iter__ is DataLoader.__iter__ and not hasattr(user_loader, "state_dict")
    if not is_plain or user_loader.batch_sampler is None and user_loader.batch_size is None:
        return None
    reader = copy.copy(user_loader)
    # Through vars: DataLoader.__setattr__ rejects changes after construction.
    vars(reader).update(collate_fn=keep_samples, pin_memory=False, _iterator=None)
    return reader, user_loader.collate_fn


def _unpack(batch: Any) -> list[Any]:
    samples: list[Any] = pickle.loads(batch) if isinstance(batch, bytes) else batch or []  # noqa: S301 - a worker's
    return samples


def _exchange(samples: list[Any], first: int, cut: list[Groups]) -> list[list[Any]]:
    """Return the samples of this process's micro-batches; those that another process has read are sent, once.

    Args:
        samples: What this process has read.
        first: The position of the first of them.
        cut: What `cut_by_tokens` returned, the same on all processes.
    """
    wanted = cut[data_index()]
    held = dict(enumerate(samples, first))
    if len(cut) > 1:
        leaving = {p: held[p] for p in held.keys() - set(chain(*wanted))}
        for received in gather_from_data(leaving):
            held |= received
    return [[held[position] for position in group] for group in wanted]
