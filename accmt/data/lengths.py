"""How long a sample is, in tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from accmt.errors import DataError, explain


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
