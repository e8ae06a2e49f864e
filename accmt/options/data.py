"""Trainer arguments about data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from accmt.errors import ArgumentError, fail
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
        expected = f"a whole number of batches, at least {at_least}, or a fraction of them as a float up to 1.0"
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
class DataOptions(Options):
    """Further options for data loading.

    Args:
        batch_sampler: A torch batch sampler for training. Batch i goes to process i modulo the number of processes.
        group_by_length: Whether to build training batches from samples of similar length: shuffled samples are sorted
            by length, about 50 batches at a time. This changes which samples share a step; `max_tokens` in the
            hyper-parameters does not.
        drop_last: Whether to drop the last training batch if it is not full. Validation data are never dropped.
        persistent_workers: Whether workers stay alive between epochs, so that they need not be restarted. Changes that
            you make to the dataset between epochs then do not reach the workers. This has no effect on streams or on a
            dataset with `set_epoch` or `state_dict`.
        shard: Whether to shard the data across processes. With False, every process sees all data.
        device_placement: Whether to move batches to the device before a step.
    """

    batch_sampler: Any = None
    group_by_length: bool = False
    drop_last: bool = False
    persistent_workers: bool = False
    shard: bool = True
    device_placement: bool = True

    def check(self, name: str) -> None:
        """Check the batch sampler."""
        _require_object(f"{name}.batch_sampler", self.batch_sampler, "my_sampler")
        if self.group_by_length and self.batch_sampler is not None:
            do = "drop one of them: a batch sampler decides the order"
            raise_wrong_value(name, "group_by_length and batch_sampler", "one of the two", do)


def _require_object(name: str, value: Any, example: str) -> None:
    if isinstance(value, str | bool | int | float):
        raise_wrong_value(name, value, "a Python object, not a name", write_argument(name, example))


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Data loading and batching.

    Args:
        shuffle_train: Whether to shuffle the training data every epoch, based on (seed, epoch). Ignored with a sampler.
        shuffle_validation: Whether to shuffle validation data. This does not affect results.
        sampler: The order of training samples: a torch `Sampler`, a function `(dataset) -> Sampler`, or a list of
            indices; `{"train": ..., "val": ...}` also sets the order of validation data.
        collate_fn: Function that turns a list of samples into a batch. In a list of functions, each is applied to the
            result of the previous one. `{"train": ..., "val": ...}` sets separate functions; "val" also applies to test
            and prediction data. None uses torch's default. A `collate_fn` method of the module takes precedence.
        dataloader_pin_memory: Whether to put batches into pinned memory. This has no effect without an accelerator
            device.
        dataloader_num_workers: Number of data-loading processes per training process. 0 loads data in the training
            process.
        data_options: How data are batched, loaded and sharded: `DataOptions(drop_last=True)`, or a dict of its
            arguments.
        reload_dataloaders_every_n_epochs: Rebuilds the loaders from the module (`get_train_dataloader`,
            `get_validation_dataloader`) or the datamodule at the start of every n-th epoch: a number, or a string
            such as "2 epochs"; 0 builds them once.
        limit_batches: Batches per training epoch, and per validation, test and prediction set: a number, or a fraction
            as a float (1.0 is all, 1 is one); `Limits(val=0.1)` limits only validation.
        overfit_batches: Trains and validates on this many training batches (or this fraction of them), unshuffled; 0
            is off.
    """

    shuffle_train: bool = True
    shuffle_validation: bool = False
    sampler: Any = None
    collate_fn: Any = None
    dataloader_pin_memory: bool = True
    dataloader_num_workers: int = 0
    data_options: DataOptions = None  # type: ignore[assignment]  # set in __post_init__
    reload_dataloaders_every_n_epochs: int | str = 0
    limit_batches: int | float | Limits | Mapping[str, int | float] = 1.0
    overfit_batches: int | float = 0.0

    def __post_init__(self) -> None:
        require_flags(self)
        require_int("dataloader_num_workers", self.dataloader_num_workers, at_least=0)
        self.reload_epochs  # noqa: B018 - raises if invalid
        require_limit("overfit_batches", self.overfit_batches)
        if isinstance(self.limit_batches, Mapping | Limits):
            set_field(self, "limit_batches", Limits.read("limit_batches", self.limit_batches))
        else:
            require_limit("limit_batches", self.limit_batches, at_least=1)
        set_field(self, "data_options", DataOptions.read("data_options", self.data_options))
        for name, example in (("sampler", "my_sampler"), ("collate_fn", "my_function")):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                _require_object(name, value, example)
                continue
            for phase, one in value.items():
                if phase not in ("train", "val"):
                    do = f'{name}={{"train": {example}, "val": {example}}}'
                    raise_wrong_value(name, f"the key {phase!r}", 'the keys "train" and "val"', do)
                _require_object(f"{name}.{phase}", one, example)
        options = self.data_options
        if self.sampler_of("train") is not None and (options.group_by_length or options.batch_sampler is not None):
            other = "group_by_length" if options.group_by_length else "batch_sampler"
            where = f'Trainer(sampler=..., data_options={{"{other}": ...}})'
            raise fail(
                ArgumentError,
                where,
                got="both",
                expected="one of the two",
                do="drop one of them: both decide the order",
            )

    def sampler_of(self, phase: Literal["train", "val"]) -> Any:
        """Return the order of the samples of a phase; one that is not in a dict is that of training."""
        by_phase = self.sampler if isinstance(self.sampler, Mapping) else {"train": self.sampler}
        return by_phase.get(phase)

    def collate_fn_of(self, phase: Literal["train", "val"]) -> Any:
        """Return the collate function of a phase; one that is not in a dict is that of all data."""
        return self.collate_fn.get(phase) if isinstance(self.collate_fn, Mapping) else self.collate_fn

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
