"""Which collate function makes a batch, and one that transformers lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

from accmt.errors import ArgumentError, DataError, explain
from accmt.libraries.private_names import stacks_tensors_as_torch
from accmt.libraries.versions import require

Collate = Callable[[Any], Any]


class CollateChain:
    """Several collate functions, each applied to what the one before returned."""

    def __init__(self, functions: Sequence[Collate]) -> None:
        self.functions = tuple(functions)

    def __call__(self, samples: Any) -> Any:
        for function in self.functions:
            samples = function(samples)
        return samples


class DataCollatorForLongestSequence:
    """Pads inputs of unequal length to the longest of the batch, and stacks the targets beside them.

    A sample is a pair `(inputs, target)`, or the inputs alone. Inputs are token ids, or a dict that holds them under
    "input_ids", as a tokenizer returns it. transformers' own collate functions want the target among the inputs.

    Shapes:
        `input_ids` and `attention_mask` `[samples, longest]`; targets `[samples, ...]`.

    Args:
        tokenizer: Knows with what and on which side inputs are padded.
        torch_stack: Whether targets, which then need one shape, become tensors; else they stay a list.
    """

    def __init__(self, tokenizer: Any, *, torch_stack: bool = True) -> None:
        require("transformers", type(self).__name__)
        from transformers import DataCollatorWithPadding

        self.pad_to_multiple_of: int | None = None
        self._pad = DataCollatorWithPadding(tokenizer)
        self._stack = torch_stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Make a batch: `(inputs, targets)`, or the inputs alone where the samples are inputs alone."""
        self._pad.pad_to_multiple_of = self.pad_to_multiple_of
        if not isinstance(samples[0], tuple):
            return self._pad([_as_named(one) for one in samples])
        inputs, targets = map(list, zip(*samples, strict=True))
        return self._pad([_as_named(one) for one in inputs]), default_collate(targets) if self._stack else targets


def _as_named(inputs: Any) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}


def keeps_number(collate: Collate) -> bool:
    """Return whether a collate function is known to make a batch of as many samples as it gets.

    Those of torch and transformers are, except for the one that packs samples into one row. A user's may drop samples,
    or cut them into several.
    """
    if isinstance(collate, partial):
        return keeps_number(collate.func)
    if isinstance(collate, CollateChain):
        return all(map(keeps_number, collate.functions))
    kind = collate if isinstance(collate, FunctionType) else type(collate)
    is_known = kind.__module__.partition(".")[0] in ("torch", "transformers", "accmt")
    return is_known and kind.__name__ != "DataCollatorWithFlattening"


def build_collate(value: Any, argument: str) -> Collate | None:
    """Return one collate function for the user's value: None, a function, or a list of functions."""
    if value is None:
        return None
    functions = list(value) if isinstance(value, list | tuple) else [value]
    if not functions or not all(callable(function) for function in functions):
        expected = "a function of a list of samples, or a list of such functions"
        raise ArgumentError(explain(f"Trainer({argument}=...)", repr(value), expected, f"{argument}=my_function"))
    return functions[0] if len(functions) == 1 else CollateChain(functions)


def collate_or_explain(samples: list[Any]) -> Any:
    """Stack samples as torch does, and say what to do where they have unequal lengths."""
    try:
        stacked = stack_tuples(samples)
        return default_collate(samples) if stacked is None else stacked
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        expected = "samples of equal shapes, or a collate function that pads them"
        collator = "DataCollatorForSeq2Seq" if _has_label_lists(samples) else "DataCollatorWithPadding"
        do = f"Trainer(collate_fn={collator}(tokenizer)) for text, or your own function"
        raise DataError(explain("making a batch", str(error), expected, do)) from error


def _has_label_lists(samples: list[Any]) -> bool:
    """Return whether each sample has a label for each token, which have to be padded with the tokens."""
    labels = samples[0].get("labels") if isinstance(samples[0], Mapping) else None
    return isinstance(labels, list) or getattr(labels, "ndim", 0) > 0


def stack_tuples(samples: list[Any]) -> list[torch.Tensor] | None:
    """Do what `default_collate` does with tuples of plain tensors, without looking into each sample in turn.

    Returns:
        The stacked tensors; None where the samples are others, or where a worker stacks them in shared memory.
    """
    if set(map(type, samples)) != {tuple} or len(set(map(len, samples))) != 1 or get_worker_info() is not None:
        return None
    if not stacks_tensors_as_torch():
        return None
    columns = list(zip(*samples, strict=True))
    for column in columns:
        if set(map(type, column)) != {torch.Tensor} or column[0].layout is not torch.strided or column[0].is_nested:
            return None
    try:
        return [torch.stack(column) for column in columns]
    except RuntimeError:  # of unequal shapes, say: `default_collate` raises it again, and it is explained
        return None


# ---- Batches whose padded length is a multiple, so that a compiled model sees few of them.


def in_buckets(collate: Any, bucket: int) -> Collate:
    """Return a collate function that pads to multiples of a length: a copy of one that knows how to.

    Args:
        collate: The user's; it has an attribute `pad_to_multiple_of`, as those of transformers have. None is torch's.
        bucket: The length.

    Raises:
        ArgumentError: It has no such attribute, or says another length.
    """
    if isinstance(collate, CollateChain):
        able = [one for one in collate.functions if hasattr(one, "pad_to_multiple_of")][:1]
        functions = [in_buckets(one, bucket) if one in able else one for one in collate.functions]
        return CollateChain(functions) if able else _reject("functions without it", bucket)
    if not hasattr(collate, "pad_to_multiple_of"):
        name = "none" if collate is None else getattr(collate, "__qualname__", type(collate).__name__)
        return _reject(f"{name}, which has no `pad_to_multiple_of`", bucket)
    if collate.pad_to_multiple_of not in (None, bucket):
        return _reject(f"pad_to_multiple_of={collate.pad_to_multiple_of}", bucket)
    changed = copy.copy(collate)
    changed.pad_to_multiple_of = bucket
    rounded: Collate = changed
    return rounded


def _reject(got: str, bucket: int) -> Collate:
    where, expected = f'Trainer(compile={{"buckets": {bucket}}}): the collate function', "one that pads to a multiple"
    raise ArgumentError(explain(where, got, expected, "collate_fn=DataCollatorWithPadding(tokenizer), say"))
