"""Trainer arguments about data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from accmt.errors import ArgumentError, explain
from accmt.options.checks import (
    Options,
    raise_wrong_value,
    require_flags,
    require_int,
    set_field,
    write_argument,
)
from accmt.options.units import read_every


def require_limit(name: str, value: Any, at_least: int = 0) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0 and (value > 0.0 or at_least == 0)
    if not (is_count or is_fraction):
        expected = f"a whole number of batches from {at_least}, or a fraction of them as a float up to 1.0"
        raise_wrong_value(name, value, expected, f"{write_argument(name, '1.0')} for all")


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """Limits for `limit_batches`: numbers of batches, or fractions of them; 1.0 means all.

    Args:
        train: Batches per epoch.
        val: Batches per validation set; 0 turns validation off.
        test: Batches per test set.
        predict: Batches per prediction set.
    """

    train: Annotated[int | float, partial(require_limit, at_least=1)] = 1.0
    val: Annotated[int | float, require_limit] = 1.0
    test: Annotated[int | float, require_limit] = 1.0
    predict: Annotated[int | float, require_limit] = 1.0


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Data loading and batching.

    Args:
        shuffle_train: Whether to shuffle the training data every epoch, based on (seed, epoch). Ignored with a sampler.
        shuffle_validation: Whether to shuffle validation data; results do not depend on it.
        sampler: The order of training samples: a torch `Sampler`, a function `(dataset) -> Sampler`, or a list of
            indices.
        sampler_val: The same for validation data.
        batch_sampler: A torch batch sampler for training. Batch i goes to process i modulo the number of processes.
        collate_fn: Turns a list of samples into a batch, for all data; a list of functions is applied one after the
            other. None uses torch's default. A `collate_fn` method of the module takes precedence.
        collate_fn_train: Like `collate_fn`, but for training data only; takes precedence over it.
        collate_fn_val: Like `collate_fn`, but for validation data only; takes precedence over it.
        dataloader_pin_memory: Whether to put batches into pinned memory; no effect without an accelerator device.
        dataloader_num_workers: Number of data-loading processes per training process; 0 loads in the training process.
        dataloader_persistent_workers: Whether workers stay alive between epochs, which saves restarting them. Their
            copies of the dataset then do not see changes made between epochs. No effect on streams or on a dataset
            with `set_epoch`.
        dataloader_drop_last: Whether to drop the last training batch if it is not full. Validation data are never
            dropped.
        shard_dataloaders: Whether to shard the data across processes. False: every process sees all of it.
        reload_dataloaders_every_n_epochs: Rebuilds the loaders from the module (`get_train_dataloader`,
            `get_validation_dataloader`) or the datamodule at the start of every n-th epoch: a number, or a string
            such as "2 epochs"; 0 builds them once.
        limit_batches: Batches per training epoch, and per validation, test and prediction set: a number, or a fraction
            as a float (1.0 is all, 1 is one); `Limits(val=0.1)` sets only some of train, val, test and predict. 0 for
            val turns validation off.
        overfit_batches: Trains and validates on this many training batches (or this fraction of them), unshuffled; 0
            is off.
        batch_device_placement: Whether to move batches to the device before a step.
        group_by_length: Whether to build training batches from samples of similar length: about 50 batches at a time
            of shuffled samples are sorted by length. This changes which samples share a step; `max_tokens` in the
            hyper-parameters does not.
    """

    shuffle_train: bool = True
    shuffle_validation: bool = False
    sampler: Any = None
    sampler_val: Any = None
    batch_sampler: Any = None
    collate_fn: Any = None
    collate_fn_train: Any = None
    collate_fn_val: Any = None
    dataloader_pin_memory: bool = True
    dataloader_num_workers: int = 0
    dataloader_persistent_workers: bool = False
    dataloader_drop_last: bool = False
    shard_dataloaders: bool = True
    reload_dataloaders_every_n_epochs: int | str = 0
    limit_batches: int | float | Limits | Mapping[str, int | float] = 1.0
    overfit_batches: int | float = 0.0
    batch_device_placement: bool = True
    group_by_length: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        require_int("dataloader_num_workers", self.dataloader_num_workers, at_least=0)
        self.reload_epochs  # noqa: B018 - raises if invalid
        require_limit("overfit_batches", self.overfit_batches)
        if isinstance(self.limit_batches, Mapping | Limits):
            set_field(self, "limit_batches", Limits.read("limit_batches", self.limit_batches))
        else:
            require_limit("limit_batches", self.limit_batches, at_least=1)
        for name in ("sampler", "sampler_val", "batch_sampler", "collate_fn", "collate_fn_train", "collate_fn_val"):
            if isinstance(getattr(self, name), str | bool | int | float):
                do = f"{name}={'my_function' if 'collate' in name else 'my_sampler'}"
                raise_wrong_value(name, getattr(self, name), "a Python object, not a name", do)
        if self.group_by_length and (self.sampler is not None or self.batch_sampler is not None):
            got = "a sampler, which already decides the order"
            raise ArgumentError(explain("Trainer(group_by_length=True)", got, "one of the two", "drop one of them"))
        if self.sampler is not None and self.batch_sampler is not None:
            raise ArgumentError(
                explain(
                    "Trainer(sampler=..., batch_sampler=...)",
                    "both",
                    "one of them",
                    "drop `sampler`: a batch sampler decides the order",
                )
            )

    @property
    def reload_epochs(self) -> int:
        """Epochs between rebuilds of the loaders; 0 means never."""
        every = self.reload_dataloaders_every_n_epochs
        if every == 0 and not isinstance(every, bool):
            return 0
        name, also = "reload_dataloaders_every_n_epochs", "; 0 means never"
        return int(read_every(name, every, ["epoch"], plain="epoch", also=also).number)

    @property
    def limits(self) -> Limits:
        """The limit for each kind of batches."""
        limit: Any = self.limit_batches
        return limit if isinstance(limit, Limits) else Limits(train=limit, val=limit, test=limit, predict=limit)
