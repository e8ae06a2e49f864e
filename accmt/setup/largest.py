"""Makes the largest micro-batch that the training data can bring, to try it before the first step."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accmt.data import TokenBudget, known_lengths
from accmt.data.collate import collate_or_explain
from accmt.data.largest import LargestBatch, find_largest
from accmt.data.lengths import find_length
from accmt.data.packing import DocumentPacker
from accmt.errors import DataError
from accmt.module import AcceleratorModule, defines
from accmt.options import Settings
from accmt.processes import num_data_processes
from accmt.setup.cutting import Cutting

_READ = 8


def make_largest(
    module: AcceleratorModule, data: Any, settings: Settings, *, collate: Any, cutting: Cutting | None, size: int | None
) -> LargestBatch | str:
    """Return the largest micro-batch, or why it is not known.

    Samples are read for it, besides those that training reads.

    Args:
        module: The module.
        data: The training data, or a DataLoader of them.
        settings: The Trainer's settings.
        collate: Makes a batch of samples; None is torch's.
        cutting: How the samples of a step are cut by tokens; None if they are not.
        size: Samples of a micro-batch that is not cut; None if batches have no common size.
    """
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    has_samples = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not has_samples:
        return "the data are a stream"
    budget = None if cutting is None else cutting.training_budget
    collate = (collate or collate_or_explain) if cutting is None else cutting.training_options["collate"]
    if cutting is not None:
        size = settings.hps.train_batch_size * settings.optimization.accumulation_at(0) * num_data_processes()
    if size is None or len(dataset) == 0:
        return "batches have no common size"
    length_of = module.length_of if defines(module, "length_of") else None
    lengths = _known(dataset, length_of)
    if lengths is not None:
        indices = find_largest(lengths, size, budget, packs=isinstance(collate, DocumentPacker))
        return LargestBatch(collate([dataset[index] for index in indices]), len(indices), int(lengths[indices].max()))
    if budget is None:
        return "the lengths of samples are unknown before they are read"
    return _fill_budget(dataset, length_of, collate, budget, size)


def _known(dataset: Any, length_of: Any) -> Any:
    try:
        return known_lengths(dataset, length_of)
    except DataError:  # a list of samples that have none
        return None


def _fill_budget(dataset: Any, length_of: Any, collate: Any, budget: TokenBudget, size: int) -> LargestBatch:
    """Make a micro-batch as large as the budget of one sample, the longest of the first ones."""
    samples = [dataset[index] for index in range(min(_READ, len(dataset)))]
    lengths = [find_length(sample, length_of) for sample in samples]
    longest = max(lengths)
    width = max(1, *budget.widths([longest]))
    number = max(1, min(budget.max_tokens // width, budget.max_samples, size))
    sample = samples[lengths.index(longest)]
    return LargestBatch(collate([copy.copy(sample) for _ in range(number)]), number, longest)
