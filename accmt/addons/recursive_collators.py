"""Collators of transformers for samples in tuples, lists and dicts, with the names of the original accmt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.utils.data import default_collate

COLLATORS = (
    "DataCollatorForLanguageModeling",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithPadding",
)


class RecursiveCollator:
    """Collates what a tokenizer returns, wherever it is in a sample: in a tuple, a list or a dict.

    Args:
        collator: Collates a list of mappings with `input_ids`, such as a collator of transformers. torch's default
            collates the rest.

    Examples:
        >>> from torch.nn.utils.rnn import pad_sequence
        >>> collate = RecursiveCollator(lambda rows: pad_sequence([torch.tensor(row["input_ids"]) for row in rows]))
        >>> import torch
        >>> collate([({"input_ids": [1, 2]}, 0), ({"input_ids": [3]}, 1)])[1]
        tensor([0, 1])
    """

    def __init__(self, collator: Callable[[list[Any]], Any]) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch, with the structure of a sample."""
        first = samples[0]
        if isinstance(first, Mapping):
            if "input_ids" in first:
                return self.collator(samples)
            return {key: self([sample[key] for sample in samples]) for key in first}
        if isinstance(first, list | tuple):
            return type(first)([self(list(part)) for part in zip(*samples, strict=True)])
        return default_collate(samples)


def _build(name: str, *args: Any, **kwargs: Any) -> RecursiveCollator:
    import transformers

    return RecursiveCollator(getattr(transformers, name)(*args, **kwargs))


def __getattr__(name: str) -> Any:
    if name in COLLATORS:
        return partial(_build, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name)
