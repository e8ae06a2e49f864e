"""What the data of supervised fine-tuning are, before a model is built: lengths, shares, and the first batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from accmt.addons.mix.sources import Mixture, mix_sources
from accmt.addons.sft.chat import IGNORED
from accmt.addons.sft.rows import TokenizedRows
from accmt.data.samplers import Order
from accmt.options import Settings

_HEAD = ("source", "rows", "tokens: mean", "95 %", "longest", "trained", "weights", "first epoch", "passes")


def describe_data(module: Any, data: Any, settings: Settings, *, num_batches: int, seed: int) -> Iterator[str]:
    """Yield lines about training rows, and the first batches of a run on one process.

    Args:
        module: The module, without its model.
        data: The rows, or several sources by name.
        settings: The settings of the run.
        num_batches: The number of batches to show.
        seed: The seed of the run.
    """
    sources = data if isinstance(data, Mapping) else {"": data}
    rows: dict[str, TokenizedRows] = {name: module.make_samples(own) for name, own in sources.items()}
    samples: Any = next(iter(rows.values()))
    sampler = None
    if isinstance(data, Mapping):
        samples = mix_sources(rows, settings.hps)
        rows = {name: rows[name] for name in samples.names}
        sampler = samples.order_run(module, settings, num_shards=1, seed=seed)
    drawn = Order(len(samples), seed, shuffle=settings.data.shuffle_train, sampler=sampler).at(0).tolist()
    numbers = samples.sources_of(drawn) if isinstance(samples, Mixture) else np.zeros(len(drawn), np.int64)
    used = np.bincount(numbers, minlength=len(rows)).tolist()
    yield from _table(rows, used)
    names, begins = list(rows), np.cumsum([0, *map(len, rows.values())]).tolist()
    size = settings.hps.train_batch_size
    for batch in range(min(num_batches, -(-len(drawn) // size))):
        yield f"\nbatch {batch + 1}, with the trained text between ⟦ and ⟧"
        for index, number in zip(drawn[batch * size :][:size], numbers[batch * size :][:size], strict=True):
            place = index - begins[number]
            row = rows[names[number]].read(place)
            yield f"\n{f'{names[number]}, ' if names[number] else ''}row {place}:\n{row.show(module.tokenizer)}"


def _table(rows: Mapping[str, TokenizedRows], used: list[int]) -> Iterator[str]:
    """Yield the table of the sources, and the problems of their rows."""
    table, problems = [_HEAD], []
    for (name, own), number in zip(rows.items(), used, strict=True):
        read = list(own.sample())
        lengths = np.array([len(row.labels) for _, row in read])
        weights = {weight for _, row in read for weight in row.weights or ([1.0] if row.has_target else [])} - {0.0}
        targets = sum(label != IGNORED for _, row in read for label in row.labels[1:])
        table.append(
            (
                name or "all",
                f"{len(own):,}",
                f"{lengths.mean():.0f}",
                f"{np.percentile(lengths, 95):.0f}",
                f"{lengths.max()}",
                f"{targets / max(1, lengths.sum()):.0%}",
                f"{min(weights):g}-{max(weights):g}" if len(weights) > 1 else f"{weights.pop():g}" if weights else "",
                f"{number:,}",
                f"{number / len(own):.2f}",
            )
        )
        kinds = Counter(kind for _, row in read for kind in {problem.kind for problem in row.problems})
        problems += [f"{name or 'all'}: {count} of {len(read)} rows {kind}" for kind, count in kinds.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    yield from problems
