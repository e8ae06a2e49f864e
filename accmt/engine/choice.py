"""Chooses the engine of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accmt.engine.base import Alone, Engine
from accmt.engine.data_parallel import DataParallel
from accmt.engine.sharded import Sharded
from accmt.engine.shards import is_by_fsdp, is_sharded
from accmt.engine.tensor_parallel import ranks_of_batch, tensor_parallel_size
from accmt.errors import ArgumentError, fail
from accmt.options import Settings
from accmt.processes import share_batches
from accmt.registry import addon, find

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import AcceleratorModule


def choose_engine(module: AcceleratorModule, accelerator: Accelerator, settings: Settings) -> Engine:
    """Return the engine for a module's model, and let the processes of a split model share their batches.

    With `same_bits`, it computes in units that do not depend on the processes.

    Raises:
        ArgumentError: Each process has separate data although the model is split over several processes.
    """
    requested_size = tensor_parallel_size(accelerator)
    size = ranks_of_batch(module.model, requested_size)
    share_batches(size)
    # FSDP2 would shard each tensor over all processes, as if its parts were the whole.
    if size != requested_size and accelerator.is_fsdp2 and not is_by_fsdp(module.model):
        got = f"a model already split over {size} processes, and FSDP2 over all"
        do = f'Trainer(parallelism={{"tp": {size}}}): the other processes shard'
        raise fail(ArgumentError, "Trainer(parallelism=...)", got=got, expected="FSDP2 over the others", do=do)
    # Each process of a group would run the model's parts on other samples than its neighbors.
    if size > 1 and not settings.data.data_options.shard:
        got = f"separate data for each process, but groups of {size} processes must see the same: they hold one model"
        expected = "data that all processes share"
        do = "leave `shard` out: every process passes the same data, which accmt shards"
        raise fail(ArgumentError, 'Trainer(data_options={"shard": False})', got=got, expected=expected, do=do)
    if settings.running.parallelism and settings.running.parallelism.engine:
        added: type[Engine] = find("accmt.engines", settings.running.parallelism.engine)
        return added(module, accelerator)
    if size > 1:
        split: Engine = addon("tensor_parallel")(module, accelerator)
        return split
    kind: type[Engine] = DataParallel
    if accelerator.is_fsdp2 or is_sharded(module.model):
        kind = Sharded
    elif accelerator.distributed_type.value == "NO":  # a launcher may start a single process, which is wrapped
        kind = Alone
    if settings.optimization.same_bits is None:
        return kind(module, accelerator)
    in_units: Engine = addon("in_units")(kind)(module, accelerator, settings)
    return in_units
