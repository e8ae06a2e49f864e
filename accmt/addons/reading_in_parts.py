"""Reads a transformers model in parts: each process only what it holds of a distributed model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.addons.pretrained import read_pretrained
from accmt.engine.meta_device import accelerator_to_build_for, as_wholes, device_of_shards, distribute_empty
from accmt.libraries.private_names import distributing_as_read, has_first_value
from accmt.processes import broadcast_object, gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator


def read_in_parts(model_class: Any, path: str, kwargs: dict[str, Any]) -> Any:
    """Let each process read only its own part of the weights, in a run that distributes its model.

    The model is built without values, then split and sharded like one built from scratch. So tied weights are in one
    group, and all FSDP2 settings apply. Missing values are initialized part by part, identically on all processes.

    Returns:
        None if no such run has started, or if the model cannot be read this way: it is quantized, transformers is older
        than 5.23, shapes do not match the files, or tied weights have different values in the files.

    Processes: collective in such a run.
    """
    accelerator = accelerator_to_build_for()
    if accelerator is None or kwargs.keys() & {"distributed_config", "device_map", "quantization_config"}:
        return None
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:  # before transformers 5.23
        return None
    if not hasattr(DistributedConfig, "fsdp_size"):  # before 5.23 it only shards experts
        return None
    own = {"distributed_config": DistributedConfig(), "device_map": {"": device_of_shards(accelerator)}}
    # A mismatched shape raises an error on some processes only, because others' shards may match by chance.
    own |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    reading = _ReadingInParts(accelerator)
    before = torch.get_rng_state()
    torch.set_rng_state(broadcast_object(before))
    try:
        with distributing_as_read(reading.distribute, reading.draw_part):
            model, report = read_pretrained(model_class, path, **{**kwargs, **own})
    except _MisfitsError:
        model, report = None, {}
    if model is None or any(gather_objects(bool(report["mismatched_keys"]) or reading.is_untied())):
        torch.set_rng_state(before)
        return None
    del model.config.distributed_config  # requested nothing, and would be saved
    return model


class _MisfitsError(Exception):
    """On some process the weights in the files do not match the model."""


class _ReadingInParts:
    """Distributes a model before its weights are read, and initializes what the files lack.

    Args:
        accelerator: The Accelerator of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._model: Any = None
        self._tied: set[str] = set()
        self._are_alike = False

    def distribute(self, model: Any) -> None:
        """Split and shard a model without values."""
        self._model = model
        model.tie_weights(recompute_mapping=False)
        self._tied = {*model.all_tied_weights_keys}
        distribute_empty(model, self._accelerator)

    @contextmanager
    def draw_part(self, part: nn.Module) -> Iterator[None]:
        """Initialize a part, if every process has read the same weights.

        Processes: collective.
        """
        if not self._are_alike:
            read = [name for name, own in self._model.named_parameters() if has_first_value(own)]
            if any(other != read for other in gather_objects(read)):
                raise _MisfitsError
            self._are_alike = True
        with as_wholes(part):
            yield

    def is_untied(self) -> bool:
        """Return whether the files have different values for tied weights, which transformers then unties."""
        return self._tied != {*self._model.all_tied_weights_keys}
