"""A table of a model's parts and their parameters."""

from __future__ import annotations

from torch import nn

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import say
from accmt.sharded_tensors import class_of


class ModelSummary(MainProcessCallback):
    """Says at the start what the model consists of.

    Args:
        max_depth: As in `summarize`.

    Processes: main only.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = max_depth

    def on_fit_start(self) -> None:
        say(summarize(self.module.unwrapped_model, self.max_depth))


def summarize(model: nn.Module, max_depth: int = 1) -> str:
    """Return a table of the model's parts: class, parameters, and those that are trained; then the sums.

    A parameter that parts share counts once in the sums.

    Args:
        model: The model.
        max_depth: 1 shows the direct parts, 2 their parts, too, and so on; -1 shows all.
    """
    parts = [
        (name, type(part).__name__, *_count(part))
        for name, part in model.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    rows = [*parts, ("", class_of(model).__name__, *_count(model))]
    table = [("part", "class", "parameters", "trained")]
    table += [(name, kind, f"{size:,}", f"{trained:,}") for name, kind, size, trained in rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {trained:>{widths[3]}}"
        for name, kind, size, trained in table
    ]
    size_mb = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()]) / 1e6
    return "\n".join([class_of(model).__name__, *lines, f"{size_mb:,.1f} MB of weights and buffers"])


def _count(module: nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
