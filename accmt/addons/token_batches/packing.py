"""Packing without padding: documents fill rows of a maximum number of tokens."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accmt.addons.token_batches.budget import Groups, TokenBudget
from accmt.errors import DataError, fail

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
            raise fail(DataError, _WHERE, got="a row with only empty samples", expected="samples with tokens", do=do)
        first = documents[0]
        for other in documents[1:]:
            if first.keys() != other.keys():
                got = f"samples with {sorted(first)} and with {sorted(other)}"
                do = "give labels to all samples or to none"
                raise fail(DataError, _WHERE, got=got, expected="the same entries in all samples", do=do)
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
        raise fail(DataError, _WHERE, got=got, expected=expected, do='return {"input_ids": ids} from the dataset')
    ids = _as_tensor("input_ids", sample["input_ids"], None)
    if not all(sample.get("attention_mask", ())):
        do = "tokenizer(..., padding=False): packing needs no padding"
        raise fail(DataError, _WHERE, got="a padded sample: its attention_mask has zeros", expected="no padding", do=do)
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
        raise fail(DataError, _WHERE, got=got, expected="samples of one sequence of tokens", do=do)
    shape = getattr(values, "shape", None)
    got = f"{name!r}: a {type(values).__name__}" + ("" if shape is None else f" of shape {list(shape)}")
    got += "" if length is None else f", in a sample of {length} tokens"
    do = f"remove {name!r} from the samples, for example with dataset.remove_columns({name!r}); or disable packing"
    raise fail(DataError, _WHERE, got=got, expected="one value per token in every entry of a sample", do=do)
