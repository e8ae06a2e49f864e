"""Collects outputs of steps, and tensors of all processes, in callbacks and custom evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accmt.errors import ModuleContractError, fail
from accmt.metrics.gathering import to_cpu
from accmt.processes import gather_from_data

Outputs = list[Any] | dict[str, list[Any] | torch.Tensor]


class OutputCollector:
    """Collects outputs batch by batch, detached on the CPU, and joins them along their first dimension.

    Examples:
        >>> collector = OutputCollector()
        >>> for _ in range(2):
        ...     collector.collect(torch.zeros(2, 3))
        >>> [tensor.shape for tensor in collector.all_outputs]
        [torch.Size([4, 3])]
    """

    def __init__(self) -> None:
        self._batches: list[list[Any] | dict[str, Any]] = []

    def collect(self, outputs: Any) -> None:
        """Keep the outputs of one batch.

        Args:
            outputs: A tensor, a list or tuple of tensors and other values, or a dict of them by name. A tensor of shape
                `[]` is treated as one of shape `[1]`.

        Raises:
            ModuleContractError: The parts differ from those of the first batch.
        """
        if isinstance(outputs, Mapping):
            batch: list[Any] | dict[str, Any] = {str(name): to_cpu(value) for name, value in outputs.items()}
        else:
            batch = [to_cpu(value) for value in (outputs if isinstance(outputs, list | tuple) else [outputs])]
        if self._batches and _parts_of(batch) != _parts_of(self._batches[0]):
            got = f"the parts {_parts_of(batch)} after {_parts_of(self._batches[0])}"
            do = "return the same parts for every batch, or reset() in between"
            raise fail(ModuleContractError, "OutputCollector.collect", got=got, expected="the same parts", do=do)
        self._batches.append(batch)

    def reset(self) -> None:
        """Discard everything collected so far."""
        self._batches = []

    @property
    def all_outputs(self) -> Outputs:
        """Each part over all batches: tensors concatenated to `[samples, ...]`, other values in a list."""
        if not self._batches:
            return []
        first = self._batches[0]
        if isinstance(first, dict):
            return {name: _join_values([batch[name] for batch in self._batches]) for name in first}  # type: ignore[call-overload]
        return [_join_values([batch[part] for batch in self._batches]) for part in range(len(first))]  # type: ignore[index]


def _parts_of(batch: list[Any] | dict[str, Any]) -> list[str] | int:
    return sorted(batch) if isinstance(batch, dict) else len(batch)


def _join_values(values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])


def gather_on_cpu(tensor: torch.Tensor, *, chunk: int | None = None) -> torch.Tensor:
    """Concatenate the tensors of all processes on the CPU in rank order; their lengths may differ.

    Processes: collective; every process gets all rows.

    Args:
        tensor: Of shape `[rows, ...]` on any device; the shape of a row is the same on all processes.
        chunk: Rows of each process to send at a time, which bounds memory; None sends all at once.

    Returns:
        A tensor of shape `[rows of all processes, ...]`.
    """
    own = tensor.detach().cpu()
    parts = list(torch.split(own, chunk)) if chunk and len(own) else [own]
    num_parts = max(gather_from_data(len(parts)))
    gathered = [gather_from_data(parts[index] if index < len(parts) else own[:0]) for index in range(num_parts)]
    return torch.cat([part for of_process in zip(*gathered, strict=True) for part in of_process])
