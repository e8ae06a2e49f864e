"""Batches whose padded length is a multiple, so that a compiled model sees few of them."""

from __future__ import annotations

import copy
from typing import Any

from accmt.data.collate import Collate, CollateChain
from accmt.errors import ArgumentError, explain


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
