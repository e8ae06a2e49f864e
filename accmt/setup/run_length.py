"""How many optimizer steps a run has, and the learning-rate scheduler that spans them."""

from __future__ import annotations

import sys
from typing import Any

import torch

from accmt.data import Source
from accmt.loop.cadence import Cadence, RunLength
from accmt.module import AcceleratorModule, defines
from accmt.optimization import build_scheduler
from accmt.options import Settings
from accmt.processes import num_data_processes
from accmt.setup.module_checks import call_get_scheduler, require_scheduler
from accmt.state import Counters


def measure_run(
    settings: Settings, cadence: Cadence, source: Source, micro_batches_per_epoch: int | None, counters: Counters
) -> RunLength:
    """Count what is done, what the current epoch still has, and the epochs after it."""

    def steps(epoch: int, micro_batches: int) -> int:
        return -(-micro_batches // (settings.optimization.accumulation_at(epoch) * source.micro_batches_per_batch))

    done = counters.global_step + counters.skipped_updates
    samples = settings.hps.train_batch_size * settings.optimization.accumulation_at(0) * num_data_processes()
    max_steps = cadence.max_steps
    if cadence.max_samples is not None:  # in full batches: the same number in a run that is resumed within an epoch
        max_steps = min(-(-cadence.max_samples // samples), max_steps or sys.maxsize)
    basis = [cadence.epochs, max_steps, samples]
    if micro_batches_per_epoch is None or source.num_micro_batches is None:
        return RunLength(max_steps, None, done, basis, cadence.epochs)
    per_epoch = steps(0, micro_batches_per_epoch)
    num_epochs = cadence.epochs
    if max_steps is not None:
        after_this = max_steps - done - steps(counters.epoch, source.num_micro_batches - counters.train_step)
        needed = counters.epoch + 1 - (-max(0, after_this) // per_epoch)
        num_epochs = needed if num_epochs is None else min(num_epochs, needed)
    if cadence.epochs is None:
        return RunLength(max_steps, per_epoch, done, basis, num_epochs)
    left = [micro_batches_per_epoch] * (cadence.epochs - counters.epoch)
    left[:1] = [source.num_micro_batches - counters.train_step] if left else []
    total = done + sum(steps(epoch, micro_batches) for epoch, micro_batches in enumerate(left, counters.epoch))
    total = total if max_steps is None else min(total, max_steps)
    return RunLength(total, per_epoch, done, basis, num_epochs)


def make_scheduler(
    module: AcceleratorModule, optimizer: torch.optim.Optimizer, settings: Settings, cadence: Cadence, length: RunLength
) -> Any:
    """Return the module's own scheduler, else that of the hyper-parameters, or None.

    A scheduler that starts again in a resumed run spans the steps that are left.
    """
    begins_late = length.total is not None and settings.checkpoints.reset_optimizer_on_resume
    total = max(1, (length.total or 0) - length.done) if begins_late else length.total
    if defines(module, "get_scheduler"):
        epochs = cadence.epochs or (-(-total // length.per_epoch) if total and length.per_epoch else 1)
        named = {"steps_per_epoch": length.per_epoch or total or 0, "epochs": epochs}
        own = call_get_scheduler(module, optimizer, named)
        if own is not None:
            return require_scheduler(module, own)
    num_epochs = None if begins_late else length.epochs
    return build_scheduler(
        settings.hps, optimizer, total_steps=total, steps_per_epoch=length.per_epoch, num_epochs=num_epochs
    )
