"""What a loader yields, and what is found in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from accmt.data.fetching import BadSample

_Array = torch.Tensor | np.ndarray


@dataclass(slots=True)
class Round:
    """One batch on every process.

    Attributes:
        index: The round, from 0 in its epoch.
        batch: This process's batch; None if it has no part in the round.
        num_samples: Samples over all processes; None where only the batches tell.
        own_samples: Samples of this process's batch; None where only the batch tells.
        is_last: Whether the epoch ends with this round.
        is_partial: Whether some process has no part in it; every process knows.
        position: Where the data are after it, noted at once where reading goes on; None where it can be computed.
        bad: Samples of this process that were left out of the batch, because they could not be read.
        num_bad: Those of all processes, in training.
    """

    index: int
    batch: Any
    num_samples: int | None = None
    own_samples: int | None = None
    is_last: bool = False
    is_partial: bool = False
    position: dict[str, Any] | None = None
    bad: tuple[BadSample, ...] = ()
    num_bad: int = 0


def find_batch_size(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in a batch, or the length of a list without any.

    Returns:
        The number of samples, or None where the batch holds neither.
    """
    if isinstance(batch, _Array):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        return _first_size(list(batch.values()))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        size = _first_size(batch)
        return size if size is not None else (len(batch) or None)
    return None


def _first_size(values: Sequence[Any]) -> int | None:
    sizes = (find_batch_size(value) for value in values if isinstance(value, _Array | Mapping | list | tuple))
    return next((size for size in sizes if size is not None), None)
