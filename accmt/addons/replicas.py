"""Compares replicas: if their weights diverge, each process continues to train a different model.

Nothing else reveals it: gradients are averaged over different models, the loss falls, and process 0's weights are
saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from accmt.checkpoint.frozen import checksum
from accmt.errors import ReplicasDifferError, fail
from accmt.messages import warn_once
from accmt.options.optimizer_and_scheduler_arguments import state_of
from accmt.precisions import WITH_STATISTICS
from accmt.processes import gather_objects, num_data_processes, num_processes
from accmt.sharded_tensors import is_dtensor

_SHOWN = 3
_CAUSES = (
    "look for differences between processes: weights or gradients changed by random numbers in a "
    "training step, in on_after_backward or in a hook of the optimizer itself (use on_before_optimizer_step instead); "
    "weights changed in a forward pass, or on one process only; a second backward in a training step; loss.backward() "
    "instead of self.backward(loss); a loss that "
    'does not depend on all trained parameters in some steps (parallelism={"ddp": {"find_unused_parameters": True}})'
)

Replica = dict[str, dict[str, object]]
"""Checksums by name, for each part of the model by its position among the shards."""


class Replicas:
    """The parts of a run's weights and optimizer state that other processes hold too.

    Compares parameters, the optimizer's state, and its settings such as learning rates. With data parallelism these are
    equal on all processes, with hybrid sharding those of the shards at the same position, with tensor parallelism those
    that are not split. Buffers may differ: each process's batches change them (the running statistics of batch norm),
    and the main process's are evaluated and saved. The first comparison names them.

    Args:
        model: The bare model.
        optimizer: The optimizer.
        first_step: The number of completed optimizer steps.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, first_step: int = 0) -> None:
        self._model = model
        self._optimizer = optimizer
        self._first_step = first_step
        self._equal_at = first_step
        self._knows_buffers = False

    @property
    def is_new(self) -> bool:
        """Whether fewer than two optimizer steps have been compared, where most errors appear."""
        return self._equal_at < self._first_step + 2

    def require_equal(self, step: int) -> None:
        """Compare the replicas with one small message per process.

        Processes: collective.

        Args:
            step: The number of completed optimizer steps.

        Raises:
            ReplicasDifferError: They differ.
        """
        # After the first step, because a forward pass may have changed them only then.
        if not self._knows_buffers and step > self._first_step:
            self._knows_buffers = True
            self._name_buffers()
        differences = _compare(self._describe())
        if differences:
            self._react(differences, step)
        else:
            self._equal_at = step

    def _name_buffers(self) -> None:
        """Warn about buffers that differ after a step: only the main process's updates count, without a trace of it.

        Those of batch norm do so by design, as in every DistributedDataParallel.

        Processes: collective.
        """
        if num_data_processes() == 1:
            return
        replica: Replica = {}
        for path, layer in self._model.named_modules():
            if not isinstance(layer, WITH_STATISTICS):
                for name, buffer in layer.named_buffers(path, recurse=False):
                    _add(replica, name, buffer)
        names = list(_compare(replica))
        if names:
            more = ""
            if names[_SHOWN:]:
                more = f", and {len(names) - _SHOWN} more"
            warn_once(
                f"buffers differ between processes after a training step: {', '.join(names[:_SHOWN])}{more}. Those of "
                "process 0 are used, so what other processes' batches have changed is lost. If forward updates them, "
                "use the samples of all processes: rows, _ = accmt.gather_with_gradients(x.detach())",
                about="buffers that differ",
            )

    def _react(self, differences: dict[str, tuple[int, int]], step: int) -> None:
        names = list(differences)
        first, second = differences[names[0]]
        more = ""
        if names[1:]:
            more = f", and {len(names) - 1} more: {', '.join(names[1 : 1 + _SHOWN])}"
        since = f"at step {step}"
        if self._equal_at < step:
            since = f"between step {self._equal_at} and step {step}"
        got = f"{names[0]} differs between process {first} and process {second} since {since}{more}"
        expected = "the same weights and optimizer state on every process that holds them"
        error = fail(ReplicasDifferError, "replicas of the model", got=got, expected=expected, do=_CAUSES)
        ranks_per_batch = num_processes() // num_data_processes()
        shares_batch = all(a // ranks_per_batch == b // ranks_per_batch for a, b in differences.values())
        on_cpu = next(self._model.parameters()).device.type == "cpu"
        if shares_batch and not (on_cpu or torch.are_deterministic_algorithms_enabled()):
            # Each process computes the gradient itself, and kernels with an undefined order of summation round
            # differently.
            warn_once(str(error), about="replicas")
            return
        raise error

    def _describe(self) -> Replica:
        replica: Replica = {}
        names: dict[Tensor, str] = {}
        for name, weight in self._model.named_parameters():
            names[weight] = name
            _add(replica, name, weight)
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":  # the weights, which have been added by name
                    _add(replica, f"{key} of the optimizer's group {number}", value)
        for number, (owner, state) in enumerate(state_of(self._optimizer).items()):
            for key, value in _flatten(state):
                _add(replica, f"the optimizer's {key} of {names.get(owner, f'parameter {number}')}", value)
        return replica


def _add(replica: Replica, name: str, value: Any) -> None:
    match value:
        case Tensor():
            place = _place_of(value)
            if place is not None:
                replica.setdefault(place, {})[name] = checksum(value)
        case bool() | int() | float() | str() | tuple():
            replica.setdefault("", {})[name] = repr(value)


def _place_of(tensor: Tensor) -> str | None:
    """Return which part of a tensor this process holds; None if no other process holds the same part."""
    if not is_dtensor(tensor):
        return ""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    is_shard = [not placement.is_replicate() for placement in tensor.placements]  # FSDP2's strided shards included
    # Every process has another shard; on a mesh of fewer processes, some have the same.
    if all(is_shard) and mesh.size() == num_processes():
        return None
    position = []
    for dimension, name in enumerate(mesh.mesh_dim_names or range(mesh.ndim)):
        if is_shard[dimension]:
            position.append(f"{name}={coordinate[dimension]}")
    return " ".join(position)


def _flatten(state: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    match state:
        case Mapping():
            for key, value in state.items():
                yield from _flatten(value, str(key))
        case list():
            for number, value in enumerate(state):
                yield from _flatten(value, f"{path}[{number}]")
        case _:
            yield path, state


def _compare(replica: Replica) -> dict[str, tuple[int, int]]:
    """Return the differences between the replicas of all processes, as `_find_differences` does.

    Processes: collective.
    """
    totals = {place: xxhash.xxh3_64_hexdigest(repr(entries).encode()) for place, entries in replica.items()}
    if not _find_differences(gather_objects(totals)):
        return {}
    # Only where they differ are all checksums sent: a large model has thousands. There may be none for an optimizer
    # that keeps part of its state on each process.
    return _find_differences(gather_objects(replica))


def _find_differences(replicas: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the differences by name, with the first two processes that differ.

    Args:
        replicas: The same structure of dicts for each process; only common entries are compared.
    """
    differences: dict[str, tuple[int, int]] = {}
    first: dict[tuple[str, str], tuple[int, object]] = {}
    for rank, replica in enumerate(replicas):
        for place, entries in replica.items():
            # A place has checksums by name, or one digest of all of them.
            values = {place: entries}
            if isinstance(entries, dict):
                values = entries
            for name, value in values.items():
                holder, theirs = first.setdefault((place, name), (rank, value))
                if theirs != value:
                    differences.setdefault(name, (holder, rank))
    return differences
