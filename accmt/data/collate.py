"""Collate functions: how one is chosen, combined, and padded to a multiple."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from accmt.errors import ArgumentError, DataError, fail
from accmt.libraries.versions import require
from accmt.messages import warn_once

Collate = Callable[[Any], Any]


class CollateChain:
    """Applies several collate functions in order, each to the result of the previous one."""

    def __init__(self, functions: Sequence[Collate]) -> None:
        self.functions = tuple(functions)

    def __call__(self, samples: Any) -> Any:
        for function in self.functions:
            samples = function(samples)
        return samples


class DataCollatorForLongestSequence:
    """Pads inputs to the longest of the batch, and stacks the targets.

    A sample is a pair `(inputs, target)`, or just the inputs. Inputs are token ids, or a dict with "input_ids", as a
    tokenizer returns. transformers' collate functions expect the target among the inputs instead.

    Shapes:
        `input_ids` and `attention_mask` `[samples, longest]`; targets `[samples, ...]`.

    Args:
        tokenizer: Defines the padding token and the padding side.
        torch_stack: Whether targets are stacked into tensors, which requires one shape; otherwise they stay a list.
    """

    def __init__(self, tokenizer: Any, *, torch_stack: bool = True) -> None:
        require("transformers", type(self).__name__)
        from transformers import DataCollatorWithPadding

        self.pad_to_multiple_of: int | None = None
        self._pad = DataCollatorWithPadding(tokenizer)
        self._stack = torch_stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return `(inputs, targets)`, or just the inputs if the samples have no targets."""
        self._pad.pad_to_multiple_of = self.pad_to_multiple_of
        if not isinstance(samples[0], tuple):
            return self._pad(list(map(_as_named, samples)))
        inputs, targets = map(list, zip(*samples, strict=True))
        padded = self._pad(list(map(_as_named, inputs)))
        if self._stack:
            targets = default_collate(targets)
        return padded, targets


def _as_named(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {"input_ids": inputs}


def build_collate(value: Any) -> Collate | None:
    """Return the collate function for the user's value: None, a function, or a list of functions."""
    if value is None:
        return None
    functions = [value]
    if isinstance(value, list | tuple):
        functions = list(value)
    if not functions or not all(map(callable, functions)):
        expected = "a function that takes a list of samples, or a list of such functions"
        raise fail(
            ArgumentError, "Trainer(collate_fn=...)", got=repr(value), expected=expected, do="collate_fn=my_function"
        )
    if len(functions) > 1:
        return CollateChain(functions)
    function: Collate = functions[0]
    return function


def collate_or_explain(samples: list[Any]) -> Any:
    """Stack samples as torch does, with a helpful error if their lengths differ."""
    try:
        stacked = stack_tuples(samples)
        if stacked is None:
            stacked = default_collate(samples)
            _warn_of_dropped_keys(samples)
        return stacked
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        expected = "samples of equal shape, or a collate function that pads them"
        # Samples with a label for each token need a function that pads the labels too.
        labels = None
        if isinstance(samples[0], Mapping):
            labels = samples[0].get("labels")
        collator = "DataCollatorWithPadding"
        if isinstance(labels, list) or getattr(labels, "ndim", 0) > 0:
            collator = "DataCollatorForSeq2Seq"
        do = f"Trainer(collate_fn={collator}(tokenizer)) for text, or your own function"
        raise fail(DataError, "making a batch", got=str(error), expected=expected, do=do) from error


def _warn_of_dropped_keys(samples: list[Any]) -> None:
    """Warn about keys that the first sample lacks, which `default_collate` drops; the others have its keys."""
    first = samples[0]
    # The number of keys is enough: a sample without a key of the first raised a KeyError.
    if not isinstance(first, Mapping) or set(map(len, samples)) == {len(first)}:
        return
    dropped: set[str] = set()
    for sample in samples:
        dropped.update(str(key) for key in sample if key not in first)
    names = sorted(dropped)
    warn_once(
        f"the first sample of a batch has no {', '.join(names)}, which others have: torch's default_collate drops them "
        "for the whole batch; give every sample the same keys, or pass a collate_fn",
        about=f"dropped keys: {names}",
    )


def stack_tuples(samples: list[Any]) -> list[torch.Tensor] | None:
    """Do what `default_collate` does with tuples of plain tensors, without inspecting each sample.

    Returns:
        The stacked tensors; None for other samples, or if a worker stacks them in shared memory.
    """
    if set(map(type, samples)) != {tuple} or len(set(map(len, samples))) != 1 or get_worker_info() is not None:
        return None
    columns = list(zip(*samples, strict=True))
    for column in columns:
        if set(map(type, column)) != {torch.Tensor} or column[0].layout is not torch.strided or column[0].is_nested:
            return None
    try:
        return list(map(torch.stack, columns))
    except RuntimeError:  # e.g. unequal shapes: `default_collate` raises it again, with an explanation
        return None


# ---- Padding to a multiple, so that a compiled model sees few different lengths


def in_buckets(collate: Any, bucket: int) -> Collate:
    """Return a copy of a collate function that pads to multiples of a length.

    Args:
        collate: The user's function, with an attribute `pad_to_multiple_of`, as in transformers. None is torch's.
        bucket: The length.

    Raises:
        ArgumentError: It has no such attribute, or a different length.
    """
    if isinstance(collate, CollateChain):
        functions = list(collate.functions)
        for position, function in enumerate(functions):
            if hasattr(function, "pad_to_multiple_of"):  # only the first pads; others get its batch
                functions[position] = in_buckets(function, bucket)
                return CollateChain(functions)
        raise _no_buckets("functions without `pad_to_multiple_of`", bucket)
    if not hasattr(collate, "pad_to_multiple_of"):
        name = "none"
        if collate is not None:
            name = getattr(collate, "__qualname__", type(collate).__name__)
        raise _no_buckets(f"{name}, which has no `pad_to_multiple_of`", bucket)
    if collate.pad_to_multiple_of not in (None, bucket):
        raise _no_buckets(f"pad_to_multiple_of={collate.pad_to_multiple_of}", bucket)
    rounding = copy.copy(collate)  # the user's object may collate other data, too
    rounding.pad_to_multiple_of = bucket
    rounding_collate: Collate = rounding
    return rounding_collate


def _no_buckets(got: str, bucket: int) -> ArgumentError:
    return fail(
        ArgumentError,
        f'Trainer(compile={{"buckets": {bucket}}}): the collate function',
        got=got,
        expected="one that pads to a multiple",
        do="for example, collate_fn=DataCollatorWithPadding(tokenizer)",
    )
