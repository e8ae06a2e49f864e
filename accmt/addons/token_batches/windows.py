"""Micro-batches by a token budget.

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
from itertools import accumulate, chain, pairwise, product
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from accmt.addons.same_bits.units import ByUnits
from accmt.addons.token_batches.budget import Groups, TokenBudget, cut_by_tokens, padded_tokens
from accmt.addons.token_batches.lengths import find_length
from accmt.addons.token_batches.packing import count_targets, pack_by_tokens, packed_tokens
from accmt.data import Grouping, MicroBatch, Source, Window, derive_seed, seed_generators
from accmt.data.batches import Cut
from accmt.data.collate import Collate
from accmt.errors import DataError, fail
from accmt.libraries.private_names import pin_memory
from accmt.messages import warn_once
from accmt.processes import data_index, gather_from_data, num_data_processes

_FIRST_WINDOW = 2
_SAMPLES_OF_WINDOW = 1024


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
    _has_units = False  # which are the same on any number of processes

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
        seed_generators(micro_batch.seed_of_step(self._seed, self._purpose, epoch, data_index=data_index()))
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
            raise fail(DataError, where, got=got, expected=expected, do=do)
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
        # For each round, the part of the samples that each process trains on.
        self._rounds = [list(range(num_data_processes()))]
        self._has_units = isinstance(grouping, ByUnits)
        if isinstance(grouping, ByUnits):
            self._rounds = grouping.units_of_rounds()

    cut = staticmethod(cut_by_tokens)
    tokens_of = staticmethod(padded_tokens)

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        for batches in self._grouping.groups(_unpacked(source.micro_batches(epoch, first)), epoch):
            yield self._make_window(source, epoch, batches)

    def _make_window(self, source: Source, epoch: int, batches: list[MicroBatch]) -> Window:
        samples, own_indices, own_places = _read_window(batches)
        own_lengths = [find_length(sample, self._length_of) for sample in samples]
        gathered = gather_from_data((own_lengths, own_indices, own_places))
        lengths, indices, places = (list(chain(*column)) for column in zip(*gathered, strict=True))
        if self._has_units:  # in the order of the data, whoever has read what
            order = sorted(range(len(places)), key=places.__getitem__)
            lengths, indices, places = ([column[at] for at in order] for column in (lengths, indices, places))
        self._check_longest(lengths)
        widths, rank = self._budget.widths(lengths), data_index()
        cut = self.cut(widths, self._budget, sum(map(len, self._rounds)))
        self.real_tokens += sum(lengths)
        self.padded_tokens += sum(self.tokens_of(group, widths) for own in cut for group in own)
        position_of = {place: position for position, place in enumerate(places)}
        held = {position_of[place]: sample for place, sample in zip(own_places, samples, strict=True)}
        held = _exchange(held, chain(*chain(*(cut[parts[rank]] for parts in self._rounds))))
        num_layers = max(1, *map(len, cut))
        num_parts = num_layers * len(self._rounds)

        def make_micro_batches() -> Iterator[MicroBatch]:
            for number, (layer, parts) in enumerate(product(range(num_layers), self._rounds)):
                groups = [cut[part][layer] if layer < len(cut[part]) else [] for part in parts]
                positions = groups[rank]
                known = [index for position in positions if (index := indices[position]) is not None]
                micro_batch = _make_micro_batch(batches, number, num_parts, samples=known or None)
                micro_batch.num_samples = sum(map(len, groups))
                micro_batch.own_samples = len(positions)
                micro_batch.is_partial = [] in groups
                if self._has_units:
                    micro_batch.unit = derive_seed(batches[0].index, "unit", layer, parts[rank])
                    micro_batch.ends_batch = parts is self._rounds[-1]
                own_samples = [held[position] for position in positions]
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
            if len(batches) == num_batches or batch.is_last:
                yield self._make_window(source, epoch, batches)
                batches, num_batches = [], min(2 * num_batches, self._largest_window)

    def _make_window(self, source: Source, epoch: int, batches: list[MicroBatch]) -> Window:
        samples, indices, _ = _read_window(batches)
        places: list[tuple[int, int]] = []
        for batch in batches:
            begin = batch.index if batch.unit is None else batch.unit
            places += [(begin, place) for place in range(len(batch.batch))]
        lengths = [find_length(sample, self._length_of) for sample in samples]
        self._check_longest(lengths)
        groups = self._cut(batches, self._budget.widths(lengths))
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
                if self._has_units and positions:
                    micro_batch.unit = derive_seed(0, "unit", *own_places[0])
                chosen = [samples[position] for position in positions]
                yield self._fill(micro_batch, epoch, chosen, [lengths[position] for position in positions])

        return Window(make_micro_batches(), num_parts)

    def _cut(self, batches: list[MicroBatch], widths: list[int]) -> Groups:
        """Return the positions of the samples of each micro-batch.

        Units are split one by one: which of them a process reads together depends on the number of processes.
        """
        self._has_units = batches[0].unit is not None
        ends = [len(widths)]
        if self._has_units:
            ends = list(accumulate(len(batch.batch) for batch in batches))
        groups: Groups = []
        for begin, end in pairwise([0, *ends]):
            [of_part] = cut_by_tokens(widths[begin:end], self._budget)
            groups += [[begin + position for position in group] for group in of_part]
        return groups


def _read_window(batches: list[MicroBatch]) -> tuple[list[Any], list[int | None], list[tuple[int, int]]]:
    """Return this process's samples in some uncollated batches, their indices in the data, or None, and their places.

    The places of all samples of all processes differ; those of units are in the order of the data.
    """
    samples: list[Any] = []
    indices: list[int | None] = []
    places: list[tuple[int, int]] = []
    for batch in batches:
        read = batch.batch
        begin, process = (len(samples), data_index()) if batch.unit is None else (batch.unit, 0)
        places += [(process, begin + number) for number in range(len(read))]
        samples += read
        found = batch.samples
        indices += [None] * len(read) if found is None or len(found) != len(read) else map(int, found)
    return samples, indices, places


def _make_micro_batch(
    batches: list[MicroBatch],
    number: int,
    num_parts: int,
    places: list[tuple[int, int]] | None = None,
    samples: list[int] | None = None,
) -> MicroBatch:
    """Return a part of some batches, without its batch yet; the first part lists their skipped samples."""
    is_end = number == num_parts - 1
    cut = Cut(number, places, samples=samples)
    micro_batch = MicroBatch(batches[0].index, None, ending=is_end and batches[-1].is_last, cut=cut)
    micro_batch.num_finished = sum(batch.num_finished for batch in batches) if is_end else 0
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


def _exchange(held: dict[int, Any], wanted: Iterable[int]) -> dict[int, Any]:
    """Return the samples of this process's micro-batches; those read by another process are sent, once.

    Processes: collective.

    Args:
        held: The samples read by this process, by their position in the window.
        wanted: The positions of those that it trains on.
    """
    if num_data_processes() > 1:
        leaving = {position: held[position] for position in held.keys() - set(wanted)}
        for received in gather_from_data(leaving):
            held |= received
    return held
