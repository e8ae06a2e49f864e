"""Micro-batches of samples of like length: the samples of one optimizer step, cut by a budget of tokens.

Which samples make an optimizer step stays as planned. Only how they go through the model changes: they are sorted by
length and cut into micro-batches of at most `max_tokens` padded tokens (the longest sample times their number). The
weighted window makes the gradient independent of the cut.

Samples are read as planned, under the same seeds and by the same processes, and collated only after the cut. So every
sample is read once and has the randomness that it has without a budget, lengths need not be known beforehand, and a
resumed run cuts as before.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from accmt.data.batches import MicroBatch, WindowPart
from accmt.data.collate import Collate, keeps_number
from accmt.data.options import Loader
from accmt.data.seeding import derive_seed, seed_generators
from accmt.errors import DataError, explain
from accmt.messages import warn_once
from accmt.processes import gather_objects, process_index

Groups = list[list[int]]
"""Micro-batches of one process, each as positions of its samples."""

_SWEEPS = 8


@dataclass(frozen=True)
class TokenBudget:
    """What a micro-batch may hold at most.

    Attributes:
        max_tokens: Padded tokens: the length of the longest sample times their number.
        max_samples: Samples.
    """

    max_tokens: int
    max_samples: int


def padded_tokens(group: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch with its padding."""
    return max((lengths[position] for position in group), default=0) * len(group)


def cut_by_tokens(lengths: Sequence[int], budget: TokenBudget, num_processes: int = 1) -> list[Groups]:
    """Cut the samples of one optimizer step into the micro-batches of each process.

    Each process gets as many micro-batches as the others, if there are samples enough, and as few as the budget allows;
    all are made as even as possible. A sample longer than the budget is a micro-batch of its own.

    Args:
        lengths: The length of each sample.
        budget: What a micro-batch may hold.
        num_processes: Processes that share the samples.

    Returns:
        For each process its micro-batches, those with most tokens first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    groups = _cut_evenly(order, lengths, budget, multiple=num_processes)
    shared = [groups, _with_less_padding(groups, lengths, budget)]
    cuts = [_share(groups, lengths, num_processes) for groups in shared]
    if num_processes > 1:
        hands = _deal_and_cut(order, lengths, budget, num_processes)
        cuts += [hands, [_with_less_padding(hand, lengths, budget) for hand in hands]]

    def busiest(cut: list[Groups]) -> int:
        return max(sum(padded_tokens(group, lengths) for group in own) for own in cut)

    return min(cuts, key=busiest)


def _cut_evenly(
    order: list[int], lengths: Sequence[int], budget: TokenBudget, *, multiple: int = 1, fewest: int = 0
) -> Groups:
    """Cut sorted samples into groups of neighbours whose largest is as small as possible.

    Args:
        order: Positions of samples, the longest first.
        multiple: Their number is one of its multiples, if there are samples enough.
        fewest: Groups at least.
    """
    widths = [max(lengths[position], 1) for position in order]
    fewest = max(fewest, len(_fill(widths, budget.max_tokens, budget.max_samples)))
    wanted = min(-(-fewest // multiple) * multiple, len(order))
    # The fewest groups that a smaller budget needs only become more, so the smallest one that suffices can be bisected.
    smallest = 1 + bisect_left(
        range(1, budget.max_tokens),
        True,  # noqa: FBT003 - the value that is looked for
        key=lambda tokens: len(_fill(widths, tokens, budget.max_samples)) <= wanted,
    )
    groups = [order[part.start : part.stop] for part in _fill(widths, smallest, budget.max_samples)]
    while len(groups) < wanted:
        largest = max((g for g in groups if len(g) > 1), key=lambda group: padded_tokens(group, lengths))
        at, middle = groups.index(largest), len(largest) // 2
        groups[at : at + 1] = [largest[:middle], largest[middle:]]
    return groups


def _fill(widths: list[int], max_tokens: int, max_samples: int) -> list[range]:
    """Cut samples, the longest first, into as few groups of neighbours as hold so much at most."""
    groups, start = [], 0
    while start < len(widths):
        count = max(1, min(max_tokens // widths[start], max_samples))
        groups.append(range(start, min(start + count, len(widths))))
        start += count
    return groups


def _share(groups: Groups, lengths: Sequence[int], num_processes: int) -> list[Groups]:
    """Give each group, the largest first, to the process that has least and still has room."""
    room = -(-len(groups) // num_processes)
    cut: list[Groups] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    for group in sorted(groups, key=lambda group: -padded_tokens(group, lengths)):
        process = min((p for p in range(num_processes) if len(cut[p]) < room), key=tokens.__getitem__)
        cut[process].append(group)
        tokens[process] += padded_tokens(group, lengths)
    return cut


def _deal_and_cut(order: list[int], lengths: Sequence[int], budget: TokenBudget, num_processes: int) -> list[Groups]:
    """Deal sorted samples to the processes, so that all have like ones, and cut those of each.

    Where groups are few and large this is more even than sharing them.
    """
    hands: Groups = [[] for _ in range(num_processes)]
    for start in range(0, len(order), num_processes):
        hands.sort(key=lambda hand: sum(lengths[position] for position in hand))  # who has least gets the longest
        for hand, position in zip(hands, order[start : start + num_processes], strict=False):
            hand.append(position)
    most = max(len(_cut_evenly(hand, lengths, budget)) for hand in hands)
    return [_cut_evenly(hand, lengths, budget, fewest=most) for hand in hands]


def _with_less_padding(groups: Groups, lengths: Sequence[int], budget: TokenBudget) -> Groups:
    """Move the bounds between groups of sorted samples, each to where it is best while the others stay."""
    groups = list(groups)
    for _ in range(_SWEEPS):
        before = list(groups)
        for first in range(len(groups) - 1):
            both = groups[first] + groups[first + 1]
            middle = _best_bound(both, lengths, budget)
            groups[first : first + 2] = [both[:middle], both[middle:]]
        if groups == before:
            break
    return groups


def _best_bound(both: list[int], lengths: Sequence[int], budget: TokenBudget) -> int:
    """Return how many of sorted samples the first of two groups has for the least padding; one bound must fit."""
    widest, number, best, best_tokens = max(lengths[both[0]], 1), len(both), 0, 0
    most = max(1, min(budget.max_tokens // widest, budget.max_samples, number - 1))
    for middle in range(1, most + 1):
        width, rest = max(lengths[both[middle]], 1), number - middle
        tokens = widest * middle + width * rest
        fits = rest == 1 or (rest <= budget.max_samples and width * rest <= budget.max_tokens)
        if fits and (best == 0 or tokens < best_tokens):
            best, best_tokens = middle, tokens
    return best


def keep_samples(samples: list[Any]) -> Any:
    """Collate nothing: return the samples themselves, out of a worker as bytes.

    A tensor that leaves a worker by itself takes a file descriptor.
    """
    return samples if get_worker_info() is None else pickle.dumps(samples)


def find_length(sample: Any, length_of: Callable[[Any], Any] | None = None) -> int:
    """Return the length of a sample: what `length_of` says, if anything; else its "length", or that of its "input_ids".

    Raises:
        DataError: It has none, or one that is no whole number from 0.
    """
    length = None if length_of is None else length_of(sample)
    length = _look_up(sample) if length is None else length
    if isinstance(length, torch.Tensor) and length.ndim == 0:
        length = length.item()
    if isinstance(length, int | np.integer) and not isinstance(length, bool) and length >= 0:
        return int(length)
    where = "max_tokens in the hyper-parameters: the length of a sample"
    do = 'def length_of(self, sample): return len(sample["tokens"]) in the module, say; or leave max_tokens out'
    if length is not None:
        raise DataError(explain(where, f"{length!r}", "a whole number from 0", do))
    held = f"the entries {list(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
    expected = '"length" or "input_ids" in each sample, or a method length_of in the module'
    raise DataError(explain(where, f"{held}, which do not say it", expected, do))


def _look_up(sample: Any) -> Any:
    if isinstance(sample, tuple) and sample:  # inputs and target
        return _look_up(sample[0])
    if not isinstance(sample, Mapping):
        return None
    if "length" in sample:
        return sample["length"]
    ids = sample.get("input_ids")
    if ids is None:
        return None
    return ids.shape[-1] if isinstance(ids, torch.Tensor | np.ndarray) else len(ids)


class TokenBudgetLoader:
    """Cuts the samples of each optimizer step, which another loader reads, into micro-batches by a budget of tokens.

    What is counted and planned stays the other loader's: the index of each micro-batch is that of the first batch of
    its optimizer step, and its `part` says which one it is.

    Args:
        own: Yields the samples of batches instead of batches: its collate function is `keep_samples`.
        budget: What a micro-batch may hold.
        collate: Makes a batch of samples.
        length_of: What the module says is the length of a sample.
        seed: The run's.
        batches_per_step: How many batches make an optimizer step in an epoch.

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
        length_of: Callable[[Any], Any] | None,
        seed: int,
        batches_per_step: Callable[[int], int],
    ) -> None:
        self.own = own
        self.dataloader: DataLoader[Any] = own.dataloader
        self.micro_batches_per_batch = own.micro_batches_per_batch
        self.shard = own.shard
        self.samples_in = own.samples_in
        self.set_epoch_again = own.set_epoch_again
        self.end_workers = own.end_workers
        self.position = own.position
        self.resume_from = own.resume_from
        self.real_tokens = self.padded_tokens = 0
        self._budget = budget
        self._collate = collate
        self._knows_samples = keeps_number(collate)
        self._length_of = length_of
        self._seed = seed
        self._batches_per_step = batches_per_step

    @property
    def num_micro_batches(self) -> int | None:
        return self.own.num_micro_batches

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return None  # the samples of an optimizer step are spread over its micro-batches

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from that of batch `first` on.

        Processes: collective for each optimizer step.
        """
        batches_per_step = self._batches_per_step(epoch)
        step: list[MicroBatch] = []
        for batch in self.own.micro_batches(epoch, first):
            step.append(batch)
            if batch.is_last or len(step) == batches_per_step:
                yield from self._cut(epoch, step)
                step = []

    def _cut(self, epoch: int, step: list[MicroBatch]) -> Iterator[MicroBatch]:
        samples = [sample for batch in step for sample in _unpack(batch.batch)]
        every = gather_objects([find_length(sample, self._length_of) for sample in samples])
        lengths = list(chain(*every))
        self._warn_of_long(lengths)
        cut = cut_by_tokens(lengths, self._budget, len(every))
        self.real_tokens += sum(lengths)
        self.padded_tokens += sum(padded_tokens(group, lengths) for own in cut for group in own)
        first_own = sum(map(len, every[: process_index()]))
        groups = _exchange(samples, first_own, cut)
        num_parts = max(1, *map(len, cut))
        known_samples = len(lengths) if self._knows_samples else None
        for number in range(num_parts):
            sizes = [len(own[number]) if number < len(own) else 0 for own in cut]
            positions = cut[process_index()][number] if sizes[process_index()] else []
            part = WindowPart(number, num_parts, len(step), known_samples)
            micro_batch = MicroBatch(
                index=step[0].index,
                batch=None,
                num_samples=sum(sizes) if self._knows_samples else None,
                own_samples=len(positions),
                is_last=step[-1].is_last and number == num_parts - 1,
                is_partial=0 in sizes,
                position=step[-1].position,
                part=part,
            )
            if number == 0:
                micro_batch.bad = tuple(chain(*(batch.bad for batch in step)))
                micro_batch.num_bad = sum(batch.num_bad for batch in step)
            if positions:
                seed_generators(derive_seed(self._seed, "collate", epoch, step[0].index, number, process_index()))
                micro_batch.batch = self._make_batch(groups[number], [lengths[position] for position in positions])
            yield micro_batch

    def _make_batch(self, samples: list[Any], lengths: list[int]) -> Any:
        longest = max(lengths)
        try:
            batch = self._collate(samples)
        except Exception as error:
            error.add_note(f"This was raised while making a batch of {len(samples)} samples of up to {longest} tokens.")
            raise
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.numel() > max(self._budget.max_tokens, longest):
            warn_once(
                f"a batch has {' x '.join(map(str, ids.shape))} input_ids, more than max_tokens: "
                f"{self._budget.max_tokens}, though its longest sample is said to have {longest} tokens: correct the "
                "lengths, or count what the collate function adds",
                about="lengths of samples that are not true",
            )
        return batch

    def _warn_of_long(self, lengths: list[int]) -> None:
        longest = max(lengths, default=0)
        if longest > self._budget.max_tokens:
            number = sum(length > self._budget.max_tokens for length in lengths)
            warn_once(
                f"{number} of the {len(lengths)} samples of an optimizer step are longer than max_tokens: "
                f"{self._budget.max_tokens} (up to {longest} tokens); each such sample is a micro-batch of its own",
                about="samples longer than max_tokens",
            )


def reader_of(loader: Loader) -> Loader:
    """Return the loader that reads the data."""
    return loader.own if isinstance(loader, TokenBudgetLoader) else loader


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
    wanted = cut[process_index()]
    held = dict(enumerate(samples, first))
    if len(cut) > 1:
        leaving = {p: held[p] for p in held.keys() - set(chain(*wanted))}
        for received in gather_objects(leaving):
            held |= received
    return [[held[position] for position in group] for group in wanted]
