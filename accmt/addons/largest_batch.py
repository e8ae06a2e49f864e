"""The largest possible training micro-batch, which is tried before the first step."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader

from accmt.addons.token_batches.batcher import TokenBatcher, find_token_batcher
from accmt.addons.token_batches.lengths import find_largest, find_length, known_lengths
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.data import LargestBatch, Loader, is_stream
from accmt.data.collate import collate_or_explain
from accmt.errors import DataError
from accmt.loaders import find_collate
from accmt.module import AcceleratorModule, defines
from accmt.options import Settings
from accmt.processes import num_data_processes

_READ = 8


def make_largest_batch(module: AcceleratorModule, data: Any, settings: Settings, loader: Loader) -> LargestBatch | str:
    """Return the largest possible training micro-batch, or why it is unknown."""
    collate = find_collate(module, settings, data, "train")
    batcher = None
    if settings.hps.max_tokens is not None:
        options: dict[str, Any] = {"collate": collate, "seed": 0, "pins_memory": False, "kind": "training"}
        batcher = find_token_batcher(module, data, settings, **options)
    size: int | None = settings.hps.train_batch_size // loader.source.micro_batches_per_batch
    if isinstance(data, DataLoader):
        collate, size = data.collate_fn, data.batch_size
    if settings.data.data_options.batch_sampler is not None:
        size = None
    return _make_largest(module, data, settings, collate=collate, batcher=batcher, size=size)


def _make_largest(
    module: AcceleratorModule,
    data: Any,
    settings: Settings,
    *,
    collate: Any,
    batcher: TokenBatcher | None,
    size: int | None,
) -> LargestBatch | str:
    """Return the largest micro-batch, or why it is unknown. This reads additional samples.

    Args:
        module: The module.
        data: The training data, or a DataLoader.
        settings: The Trainer's settings.
        collate: The collate function; None uses torch's.
        batcher: The token batcher, if there is one.
        size: Samples of a micro-batch without a token budget; None if sizes vary.
    """
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if is_stream(dataset):
        return "the data are a stream"
    budget = None if batcher is None else batcher.training_budget
    collate = (collate or collate_or_explain) if batcher is None else batcher.training_options["collate"]
    if batcher is not None:
        size = settings.samples_per_step(num_data_processes()) or len(dataset)
    if size is None or len(dataset) == 0:
        return "batches vary in size"
    length_of = module.length_of if defines(module, "length_of") else None
    lengths = _known(dataset, length_of)
    if lengths is not None:
        indices = find_largest(lengths, size, budget, packs=isinstance(collate, DocumentPacker))
        return LargestBatch(collate([dataset[index] for index in indices]), len(indices), int(lengths[indices].max()))
    if budget is None:
        return "the lengths of samples are unknown before they are read"
    # Fill the budget with copies of one sample, the longest of the first few.
    samples = [dataset[index] for index in range(min(_READ, len(dataset)))]
    lengths = [find_length(sample, length_of) for sample in samples]
    longest = max(lengths)
    width = max(1, *budget.widths([longest]))
    number = max(1, min(budget.max_tokens // width, budget.max_samples, size))
    sample = samples[lengths.index(longest)]
    return LargestBatch(collate([copy.copy(sample) for _ in range(number)]), number, longest)


def _known(dataset: Any, length_of: Any) -> Any:
    try:
        return known_lengths(dataset, length_of)
    except DataError:  # samples without a length
        return None
