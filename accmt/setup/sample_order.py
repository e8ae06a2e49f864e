"""The order of the training samples: a user's sampler, or the stages of a curriculum."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data import DataLoader

from accmt.data import Curriculum
from accmt.errors import ArgumentError, explain
from accmt.messages import warn
from accmt.module import AcceleratorModule, ExtendedAcceleratorModule
from accmt.settings import Settings


def find_sampler(module: AcceleratorModule, data: Any, settings: Settings, *, num_shares: int) -> Any:
    """Return what orders the training samples, or None.

    Args:
        module: The module.
        data: The training data.
        settings: What the Trainer was told.
        num_shares: Processes that share the data.

    Raises:
        ArgumentError: A curriculum stands beside what does not go with it.
        DataError: The stages of a curriculum end before the run.
    """
    if not isinstance(data, Curriculum):
        if isinstance(data, DataLoader) and isinstance(data.dataset, Curriculum):
            _refuse("a DataLoader around it", "fit(module, curriculum)")
        return settings.data.sampler
    _check_settings(module, settings)
    max_steps = settings.hps.max_steps
    if max_steps is None:
        _refuse("a run without max_steps", "max_steps: 1000 in the hyper-parameters, say; epochs may be left out")
    missed = [number for number, count in enumerate(data.updates(max_steps), 1) if count == 0]
    if missed:
        warn(f"max_steps={max_steps} leaves no update for stage {', '.join(map(str, missed))} of the curriculum")
    per_process = settings.hps.train_batch_size * settings.optimization.accumulation_at(0)
    return data.order(max_steps, samples_per_update=per_process * num_shares, shuffle=settings.data.shuffle_train)


def _check_settings(module: AcceleratorModule, settings: Settings) -> None:
    told = settings.data
    if isinstance(module, ExtendedAcceleratorModule):
        _refuse("a module that steps by itself", "accmt.AcceleratorModule, whose updates are known beforehand")
    if told.sampler is not None or told.batch_sampler is not None:
        _refuse("sampler= or batch_sampler=", "leave it out: a curriculum decides the order")
    is_limited = isinstance(told.limit_train_batches, int) or told.limit_train_batches < 1.0  # 1 is one batch
    if is_limited and not settings.running.fast_dev_run:
        _refuse("limit_train_batches= or overfit_batches=", "leave it out: max_steps says how long the run is")


def _refuse(got: str, do: str) -> NoReturn:
    raise ArgumentError(explain("training on a curriculum", got, "the curriculum alone, and max_steps", do))
