"""Splits the samples of an optimizer step by a token budget: into micro-batches of similar length, or packed rows."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from accmt.errors import DataError, explain

Groups = list[list[int]]
"""Micro-batches of one process, each as positions of its samples."""

_SWEEPS = 8
_EXCHANGES = 16
_UNBALANCED = 0.05  # of the tokens of the busiest process
_AS_GOOD = 0.02


@dataclass(frozen=True)
class TokenBudget:
    """The limits of a micro-batch.

    Attributes:
        max_tokens: Maximum padded tokens: the length of the longest sample times the number of samples.
        max_samples: Maximum samples.
        bucket: Batches are padded to a multiple of this length.
    """

    max_tokens: int
    max_samples: int
    bucket: int = 1

    def widths(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of samples after padding to a multiple."""
        return list(lengths) if self.bucket == 1 else [-(-length // self.bucket) * self.bucket for length in lengths]


def padded_tokens(group: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch, including padding."""
    return max((lengths[position] for position in group), default=0) * len(group)


def cut_by_tokens(lengths: Sequence[int], budget: TokenBudget, num_processes: int = 1) -> list[Groups]:
    """Split the samples of one optimizer step into the micro-batches of each process.

    All processes get equally many micro-batches, if there are enough samples, and as few as the budget allows; their
    sizes are as even as possible. A sample longer than the budget gets a separate micro-batch.

    Args:
        lengths: The length of each sample.
        budget: The limits of a micro-batch.
        num_processes: Processes that share the samples.

    Returns:
        The micro-batches of each process, those with the most tokens first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    even = _cut_evenly(order, lengths, budget, multiple=num_processes)
    room = -(-len(even) // num_processes)
    cuts: list[list[Groups]] = []
    for groups in (even, _with_less_padding(even, lengths, budget)):
        # Each group, the largest first, goes to the process with the fewest tokens and a free slot.
        assigned: list[Groups] = [[] for _ in range(num_processes)]
        tokens = [0] * num_processes
        for group in sorted(groups, key=lambda group: -padded_tokens(group, lengths)):
            process = min((p for p in range(num_processes) if len(assigned[p]) < room), key=tokens.__getitem__)
            assigned[process].append(group)
            tokens[process] += padded_tokens(group, lengths)
        cuts.append(assigned)
    if num_processes > 1:
        # Distribute the samples instead, and split those of each process: more even with few, large groups.
        shards: Groups = [[] for _ in range(num_processes)]
        for start in range(0, len(order), num_processes):
            shards.sort(key=lambda shard: sum(lengths[position] for position in shard))  # the smallest gets the longest
            for shard, position in zip(shards, order[start : start + num_processes], strict=False):
                shard.append(position)
        most = max(len(_cut_evenly(shard, lengths, budget)) for shard in shards)
        split = [_cut_evenly(shard, lengths, budget, fewest=most) for shard in shards]
        cuts += [split, [_with_less_padding(groups, lengths, budget) for groups in split]]

    for cut in cuts:
        _balance(cut, lengths, budget)
    best = _choose([_tokens_of(cut, lengths) for cut in cuts])
    return [sorted(own, key=lambda group: -padded_tokens(group, lengths)) for own in cuts[best]]


def _choose(tokens: list[list[int]]) -> int:
    """Return the split with the least work for the busiest process; among similar ones, prefer a balanced one."""
    busiest = [max(of_cut) for of_cut in tokens]
    good = [cut for cut, most in enumerate(busiest) if most <= (1 + _AS_GOOD) * min(busiest)]
    return min(good, key=lambda cut: (not _is_balanced(tokens[cut]), busiest[cut]))


def _is_balanced(tokens: list[int]) -> bool:
    return max(tokens) - min(tokens) <= _UNBALANCED * max(tokens)


def _tokens_of(cut: list[Groups], lengths: Sequence[int]) -> list[int]:
    return [sum(padded_tokens(group, lengths) for group in own) for own in cut]


def _cut_evenly(
    order: list[int], lengths: Sequence[int], budget: TokenBudget, *, multiple: int = 1, fewest: int = 0
) -> Groups:
    """Split sorted samples into groups of neighbors, with the largest group as small as possible.

    Args:
        order: Positions of samples, the longest first.
        multiple: The number of groups is a multiple of this, if there are enough samples.
        fewest: Minimum number of groups.
    """
    widths = [max(lengths[position], 1) for position in order]
    fewest = max(fewest, len(_fill(widths, budget.max_tokens, budget.max_samples)))
    wanted = min(-(-fewest // multiple) * multiple, len(order))
    # A smaller budget never needs fewer groups, so the smallest sufficient budget can be found by bisection.
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
    """Split samples, the longest first, into the fewest groups of neighbors within the limits."""
    groups, start = [], 0
    while start < len(widths):
        count = max(1, min(max_tokens // widths[start], max_samples))
        groups.append(range(start, min(start + count, len(widths))))
        start += count
    return groups


def _balance(cut: list[Groups], lengths: Sequence[int], budget: TokenBudget) -> None:
    """Exchange samples between the process with the most tokens and others until all are about equal."""
    for _ in range(_EXCHANGES):
        tokens = _tokens_of(cut, lengths)
        if _is_balanced(tokens):
            return
        most = max(tokens)
        donor = cut[tokens.index(most)]
        for process in sorted(range(len(cut)), key=tokens.__getitem__)[:-1]:
            receiver = cut[process]
            found = _best_exchange(donor, receiver, lengths, budget, most=most, least=tokens[process])
            if found is not None:
                a, b, given, taken = found
                donor[a], receiver[b] = (
                    _replace(donor[a], given, taken, lengths),
                    _replace(receiver[b], taken, given, lengths),
                )
                break
        else:
            return


def _best_exchange(
    donor: Groups, receiver: Groups, lengths: Sequence[int], budget: TokenBudget, *, most: int, least: int
) -> tuple[int, int, int | None, int | None] | None:
    """Find the exchange that leaves the busier of two processes with the fewest tokens.

    A micro-batch exchanges its longest or its shortest sample for one of another micro-batch or for nothing.

    Returns:
        The two micro-batches, and the sample that each loses; None if no exchange helps.
    """
    best, found = most, None
    for (a, one), (b, other) in product(enumerate(donor), enumerate(receiver)):
        rest_one, rest_other = most - padded_tokens(one, lengths), least - padded_tokens(other, lengths)
        for given, taken in product((None, *_ends(one)), (None, *_ends(other))):
            new_one = _tokens_after(one, given, taken, lengths, budget)
            new_other = _tokens_after(other, taken, given, lengths, budget)
            if new_one is None or new_other is None:
                continue
            busier = max(rest_one + new_one, rest_other + new_other)
            if busier < best:
                best, found = busier, (a, b, given, taken)
    return found


def _ends(group: list[int]) -> list[int]:
    return group if len(group) == 1 else [group[0], group[-1]]


def _tokens_after(
    group: list[int], gone: int | None, come: int | None, lengths: Sequence[int], budget: TokenBudget
) -> int | None:
    """Return the padded tokens of a micro-batch after an exchange; None if it would be empty or too large."""
    count = len(group) - (gone is not None) + (come is not None)
    kept = group[1:2] if group[0] == gone else group[:1]
    width = max(lengths[kept[0]] if kept else 0, 0 if come is None else lengths[come])
    fits = count == 1 or (1 < count <= budget.max_samples and max(width, 1) * count <= budget.max_tokens)
    return width * count if fits else None


def _replace(group: list[int], gone: int | None, come: int | None, lengths: Sequence[int]) -> list[int]:
    kept = [position for position in group if position != gone]
    return sorted(kept if come is None else [*kept, come], key=lambda position: (-lengths[position], position))


def _with_less_padding(groups: Groups, lengths: Sequence[int], budget: TokenBudget) -> Groups:
    """Move the bounds between groups of sorted samples, each to its optimum while the others stay."""
    groups = list(groups)
    for _ in range(_SWEEPS):
        before = list(groups)
        for first in range(len(groups) - 1):
            both = groups[first] + groups[first + 1]
            widest, number, best, best_tokens = max(lengths[both[0]], 1), len(both), 0, 0
            most = max(1, min(budget.max_tokens // widest, budget.max_samples, number - 1))
            for middle in range(1, most + 1):  # at least one of which fits
                width, rest = max(lengths[both[middle]], 1), number - middle
                tokens = widest * middle + width * rest
                fits = rest == 1 or (rest <= budget.max_samples and width * rest <= budget.max_tokens)
                if fits and (best == 0 or tokens < best_tokens):
                    best, best_tokens = middle, tokens
            groups[first : first + 2] = [both[:best], both[best:]]
        if groups == before:
            break
    return groups


# ---- Without padding: documents are packed into rows of a maximum number of tokens.


IGNORED = -100
"""The label of tokens that are not targets."""

_WHERE = "packing in the hyper-parameters"
_MADE_HERE = ("attention_mask", "length")


def packed_tokens(group: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the number of tokens in a row."""
    return sum(lengths[position] for position in group)


def pack_by_tokens(lengths: Sequence[int], budget: TokenBudget, num_processes: int = 1) -> list[Groups]:
    """Pack the samples of one optimizer step into the rows of each process.

    All processes get equally many rows, if there are enough samples, and about equally many tokens. A sample longer
    than the budget gets a separate row.

    Args:
        lengths: The length of each sample.
        budget: The limits of a row.
        num_processes: Processes that share the samples.

    Returns:
        The rows of each process, those with the most tokens first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    fewest = _fill_rows(order, lengths, budget)
    number = min(-(-len(fewest) // num_processes) * num_processes, len(order))
    rows = _spread(order, lengths, budget, number) or _split(fewest, lengths, number)
    rows.sort(key=lambda row: -packed_tokens(row, lengths))
    each, further = divmod(len(rows), num_processes)
    cut: list[Groups] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    for row in rows:
        room = each + (sum(len(own) > each for own in cut) < further)
        process = min((p for p in range(num_processes) if len(cut[p]) < room), key=tokens.__getitem__)
        cut[process].append(sorted(row))
        tokens[process] += packed_tokens(row, lengths)
    return cut


def _fill_rows(order: list[int], lengths: Sequence[int], budget: TokenBudget) -> Groups:
    """Put each sample, the longest first, into the row that it fills best (best fit)."""
    rows: Groups = []
    room: list[tuple[int, int]] = []  # tokens left in a row, and the row: in ascending order
    for position in order:
        length = max(lengths[position], 1)
        best = bisect_left(room, (length, -1))
        if best == len(room):
            left, row = max(budget.max_tokens - length, 0), len(rows)
            rows.append([position])
        else:
            left, row = room.pop(best)
            left -= length
            rows[row].append(position)
        if left and len(rows[row]) < budget.max_samples:
            insort(room, (left, row))
    return rows


def _spread(order: list[int], lengths: Sequence[int], budget: TokenBudget, number: int) -> Groups | None:
    """Put each sample, the longest first, into the emptiest of `number` rows; None if the budget does not suffice."""
    rows: Groups = [[] for _ in range(number)]
    emptiest = [(0, row) for row in range(number)]
    for position in order:
        if not emptiest:
            return None
        tokens, row = heapq.heappop(emptiest)
        if rows[row] and tokens + max(lengths[position], 1) > budget.max_tokens:
            return None
        rows[row].append(position)
        if len(rows[row]) < budget.max_samples:
            heapq.heappush(emptiest, (tokens + max(lengths[position], 1), row))
    return rows


def _split(rows: Groups, lengths: Sequence[int], number: int) -> Groups:
    """Split the fullest rows in two until there are `number` rows."""
    while len(rows) < number:
        largest = max((row for row in rows if len(row) > 1), key=lambda row: packed_tokens(row, lengths))
        rows.remove(largest)
        rows += [largest[::2], largest[1::2]]
    return rows


class DocumentPacker:
    """Concatenates samples into one row; positions start again with each sample.

    The first token of a sample has no label, because the token before it belongs to another sample. For samples without
    labels, the input ids are the labels.

    Shapes:
        All entries `[1, tokens]`; `cu_seq_lens_q` and `cu_seq_lens_k` `[documents + 1]`.

    Args:
        gives_bounds: Whether to add document bounds, for attention kernels that use them.
    """

    def __init__(self, *, gives_bounds: bool = False) -> None:
        self._gives_bounds = gives_bounds

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a row.

        Raises:
            DataError: A sample is not a dict with `input_ids`, is padded, or has an entry without one value per token.
        """
        documents = [document for document in map(_read, samples) if len(document["input_ids"])]
        if not documents:
            do = "remove samples without tokens from the data"
            raise DataError(explain(_WHERE, "a row with only empty samples", "samples with tokens", do))
        first = documents[0]
        for other in documents[1:]:
            if first.keys() != other.keys():
                got = f"samples with {sorted(first)} and with {sorted(other)}"
                do = "give labels to all samples or to none"
                raise DataError(explain(_WHERE, got, "the same entries in all samples", do))
        row: dict[str, Any] = {name: torch.cat([one[name] for one in documents])[None] for name in first}
        if self._gives_bounds:
            lengths = torch.tensor([0, *(len(document["input_ids"]) for document in documents)])
            bounds, longest = lengths.cumsum(0).to(torch.int32), int(lengths.max())
            row |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        return row


def count_targets(row: Mapping[str, Any]) -> int:
    """Return the number of labeled tokens in a row."""
    return int((row["labels"] != IGNORED).sum())


def _read(sample: Any) -> dict[str, torch.Tensor]:
    """Return the entries of a sample, one value per token."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        got = f"a sample with the entries {list(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
        expected = 'dicts with "input_ids"'
        raise DataError(explain(_WHERE, got, expected, 'return {"input_ids": ids} from the dataset'))
    ids = _as_tensor("input_ids", sample["input_ids"], None)
    if not all(sample.get("attention_mask", ())):
        do = "tokenizer(..., padding=False): packing needs no padding"
        raise DataError(explain(_WHERE, "a padded sample: its attention_mask has zeros", "no padding", do))
    document = {"input_ids": ids}
    for name in (name for name in sample if name not in (*_MADE_HERE, "input_ids")):
        document[name] = _as_tensor(name, sample[name], len(ids))
    document["labels"] = document.get("labels", ids).clone()
    document["labels"][:1] = IGNORED
    document.setdefault("position_ids", torch.arange(len(ids)))
    return document


def _as_tensor(name: str, values: Any, length: int | None) -> torch.Tensor:
    """Return an entry of a sample as a tensor `[tokens]`."""
    if isinstance(values, list | tuple | np.ndarray | torch.Tensor):
        try:
            tensor = torch.as_tensor(values if len(values) else np.empty(0, np.int64))
        except (TypeError, ValueError):
            tensor = None
        if tensor is not None and tensor.ndim == 1 and length in (None, len(tensor)):
            return tensor
    if name == "input_ids" and len(values) and isinstance(values[0], list | tuple):
        got, do = (
            "samples of several sequences, such as two answers",
            "disable packing; max_tokens alone splits batches",
        )
        raise DataError(explain(_WHERE, got, "samples of one sequence of tokens", do))
    shape = getattr(values, "shape", None)
    got = f"{name!r}: a {type(values).__name__}" + ("" if shape is None else f" of shape {list(shape)}")
    got += "" if length is None else f", in a sample of {length} tokens"
    do = f"remove {name!r} from the samples, for example with dataset.remove_columns({name!r}); or disable packing"
    raise DataError(explain(_WHERE, got, "one value per token in every entry of a sample", do))
