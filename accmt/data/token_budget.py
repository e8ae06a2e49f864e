"""Micro-batches of samples of like length: samples that another loader reads, cut by a budget of tokens.

Which samples make an optimizer step stays as planned. Only how they go through the model changes: they are sorted by
length and cut into micro-batches of at most `max_tokens` padded tokens (the longest sample times their number). The
weighted window makes the gradient independent of the cut.

Samples are read as planned, under the same seeds and by the same processes, and collated only after the cut. So every
sample is read once and has the randomness that it has without a budget, lengths need not be known beforehand, and a
resumed run cuts as before.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from accmt.data.batches import MicroBatch, WindowPart
from accmt.data.collate import Collate, keeps_number
from accmt.data.lengths import find_length
from accmt.data.options import Loader, WrappedLoader
from accmt.data.own_generators import call_first
from accmt.data.packing import DocumentPacker, count_targets, pack_by_tokens, packed_tokens
from accmt.data.seeding import derive_seed, seed_generators
from accmt.data.token_cut import Groups, TokenBudget, cut_by_tokens, padded_tokens
from accmt.data.windows import Window
from accmt.errors import DataError, explain
from accmt.libraries.private_names import pin_memory
from accmt.messages import warn_once
from accmt.processes import data_index, gather_from_data

_FIRST_WINDOW = 2
_SAMPLES_OF_WINDOW = 1024


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


class _BudgetLoader(WrappedLoader):
    """What the loaders below have in common.

    What is counted and planned stays the other loader's: the index of each micro-batch is that of the first batch of
    its window, and its `part` says which one of the window it is.

    Args:
        own: Yields the samples of batches instead of batches: its collate function is `keep_samples`.
        budget: What a micro-batch may hold.
        collate: Makes a batch of samples.
        length_of: What the module says is the length of a sample.
        seed: The run's.
        purpose: As in `LoaderOptions`.
        pins_memory: Whether batches are pinned.
        rejects_long: Whether a sample longer than the budget is an error.
    """

    def __init__(
        self,
        own: Loader,
        budget: TokenBudget,
        *,
        collate: Collate,
        length_of: Callable[[Any], Any] | None,
        seed: int,
        purpose: str,
        pins_memory: bool = False,
        rejects_long: bool = False,
    ) -> None:
        super().__init__(own)
        self._budget = budget
        self._collate = collate
        self._length_of = length_of
        self._seed = seed
        self._purpose = f"collate {purpose}"
        self._pins_memory = pins_memory
        self._rejects_long = rejects_long
        self._is_first = True

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return None  # the samples of a window are spread over its micro-batches

    def _fill(self, micro_batch: MicroBatch, epoch: int, samples: list[Any], lengths: list[int]) -> MicroBatch:
        """Set a micro-batch's batch, collated under a seed of its own."""
        if samples and micro_batch.part is not None:
            place = epoch, micro_batch.index, micro_batch.part.number, data_index()
            seed_generators(derive_seed(self._seed, self._purpose, *place))
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


class TokenBudgetLoader(_BudgetLoader):
    """Cuts the samples of each optimizer step, over all processes.

    Args:
        own: As for the base, and so are all others.
        batches_per_step: How many batches make an optimizer step in an epoch.
        collate: Makes a batch of samples. With a `DocumentPacker` they are packed into rows instead of padded.

    Attributes:
        real_tokens: Tokens of the steps begun so far, over all processes, by the lengths of their samples.
        padded_tokens: The same with padding.
    """

    def __init__(
        self,
        own: Loader,
        budget: TokenBudget,
        *,
        collate: Collate,
        batches_per_step: Callable[[int], int],
        **others: Any,
    ) -> None:
        super().__init__(own, budget, collate=collate, purpose="train", **others)
        self.real_tokens = self.padded_tokens = 0
        self._knows_samples = keeps_number(collate)
        self._packs = isinstance(collate, DocumentPacker)
        self._batches_per_step = batches_per_step

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch from that of batch `first` on.

        Processes: collective for each.
        """
        batches_per_step = self._batches_per_step(epoch)
        step: list[MicroBatch] = []
        for batch in self.own.micro_batches(epoch, first):
            step.append(batch)
            if batch.is_last or len(step) == batches_per_step:
                yield self._cut(epoch, step)
                step = []

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        return chain.from_iterable(window.micro_batches for window in self.windows(epoch, first))

    def _cut(self, epoch: int, step: list[MicroBatch]) -> Window:
        samples = [sample for batch in step for sample in _unpack(batch.batch)]
        every = gather_from_data([find_length(sample, self._length_of) for sample in samples])
        lengths = list(chain(*every))
        self._check_longest(lengths)
        cut_up, tokens_of = (pack_by_tokens, packed_tokens) if self._packs else (cut_by_tokens, padded_tokens)
        widths = self._budget.widths(lengths)
        cut = cut_up(widths, self._budget, len(every))
        self.real_tokens += sum(lengths)
        self.padded_tokens += sum(tokens_of(group, widths) for own in cut for group in own)
        first_own = sum(map(len, every[: data_index()]))
        groups = _exchange(samples, first_own, cut)
        num_parts = max(1, *map(len, cut))
        return Window(
            self._make_micro_batches(epoch, step, lengths, cut, groups, num_parts),
            num_parts,
            len(lengths) if self._knows_samples else None,
        )

    def _make_micro_batches(
        self,
        epoch: int,
        step: list[MicroBatch],
        lengths: list[int],
        cut: list[Groups],
        groups: list[list[Any]],
        num_parts: int,
    ) -> Iterator[MicroBatch]:
        for number in range(num_parts):
            sizes = [len(own[number]) if number < len(own) else 0 for own in cut]
            positions = cut[data_index()][number] if sizes[data_index()] else []
            micro_batch = MicroBatch(
                index=step[0].index,
                batch=None,
                num_samples=sum(sizes) if self._knows_samples else None,
                own_samples=len(positions),
                is_last=step[-1].is_last and number == num_parts - 1,
                is_partial=0 in sizes,
                position=step[-1].position,
                part=WindowPart(number, num_parts, len(step)),
            )
            if number == 0:
                _add_bad(micro_batch, step)
            own_samples = groups[number] if positions else []
            self._fill(micro_batch, epoch, own_samples, [lengths[position] for position in positions])
            if self._packs and micro_batch.batch is not None:
                micro_batch.num_targets = count_targets(micro_batch.batch)
            yield micro_batch


class EvaluationBudgetLoader(_BudgetLoader):
    """Cuts the samples of an evaluation, about a thousand at a time; each process cuts those that it reads.

    Of a window every process gets equally many micro-batches, some without a batch. Each sample keeps its place, by
    which results get their order back. The first windows are small, because a trial before training wants a few
    batches only.

    Args:
        own: As for the base, and so are all others.
        batch_size: Samples of a batch of `own`.
    """

    def __init__(self, own: Loader, budget: TokenBudget, *, batch_size: int, **others: Any) -> None:
        super().__init__(own, budget, **others)
        self._largest_window = max(1, _SAMPLES_OF_WINDOW // batch_size)

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from that of batch `first` on.

        Processes: collective for each window.
        """
        window: list[MicroBatch] = []
        num_batches = min(_FIRST_WINDOW, self._largest_window)
        for batch in self.own.micro_batches(epoch, first):
            window.append(batch)
            if batch.is_last or len(window) == num_batches:
                yield from self._cut(epoch, window)
                window, num_batches = [], min(2 * num_batches, self._largest_window)

    def _cut(self, epoch: int, window: list[MicroBatch]) -> Iterator[MicroBatch]:
        samples: list[Any] = []
        places: list[tuple[int, int]] = []
        for batch in window:
            read = _unpack(batch.batch)
            samples += read
            places += [(batch.index, place) for place in range(len(read))]
        lengths = [find_length(sample, self._length_of) for sample in samples]
        self._check_longest(lengths)
        [groups] = cut_by_tokens(self._budget.widths(lengths), self._budget)
        every = gather_from_data(len(groups))
        num_parts = max(1, *every)
        for number in range(num_parts):
            positions = groups[number] if number < len(groups) else []
            micro_batch = MicroBatch(
                index=window[0].index,
                batch=None,
                own_samples=len(positions),
                is_last=window[-1].is_last and number == num_parts - 1,
                is_partial=number >= min(every),
                part=WindowPart(number, num_parts, len(window)),
                places=[places[position] for position in positions],
            )
            if number == 0:
                _add_bad(micro_batch, window)
            chosen = [samples[position] for position in positions]
            yield self._fill(micro_batch, epoch, chosen, [lengths[position] for position in positions])


def _add_bad(micro_batch: MicroBatch, window: list[MicroBatch]) -> None:
    """Let the first micro-batch of a window say which of its samples were skipped."""
    micro_batch.bad = tuple(chain(*(batch.bad for batch in window)))
    micro_batch.num_bad = sum(batch.num_bad for batch in window)


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
