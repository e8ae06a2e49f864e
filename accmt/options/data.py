"""Trainer arguments about data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from accmt.errors import ArgumentError, fail
from accmt.options.checks import Expected, Group, Off, Options, Range, raise_wrong_value, write_argument, write_place
from accmt.options.units import read_every

_FRACTION = "or a fraction of them as a float up to 1.0"
_AT_LEAST_1 = Expected(f"a whole number of batches, at least 1, {_FRACTION}", "1.0")
_AT_LEAST_0 = Expected(f"a whole number of batches, at least 0, {_FRACTION}", "1.0")

Limit: TypeAlias = Annotated[int, Range(ge=0)] | Annotated[float, Range(ge=0, le=1)]
"""A number of batches, or a fraction of them; 0 is none."""

PositiveLimit: TypeAlias = Annotated[int, Range(ge=1)] | Annotated[float, Range(gt=0, le=1)]
"""A number of batches, or a fraction of them."""


def _require_object(name: str, value: Any, example: str = "my_sampler") -> None:
    """Reject names: no sampler and no function is found by name."""
    if isinstance(value, str | bool | int | float):
        raise_wrong_value(name, value, "a Python object, not a name", write_argument(name, example))


def _require_by_phase(name: str, value: Any) -> None:
    example = "my_function" if name == "collate_fn" else "my_sampler"
    if not isinstance(value, Mapping):
        _require_object(name, value, example)
        return
    for phase, part in value.items():
        # Test and prediction data use the value of "val": a key "test" would be ignored.
        if phase not in ("train", "val"):
            do = f'{name}={{"train": {example}, "val": {example}}}'
            expected = 'the keys "train" and "val"'
            raise fail(ArgumentError, write_place(name), got=f"the key {phase!r}", expected=expected, do=do)
        _require_object(f"{name}.{phase}", part, example)


def _read_reload(name: str, value: Any) -> int:
    """Return the number of epochs between rebuilds of the loaders; 0 is never."""
    return 0 if value == 0 else int(read_every(name, value, ["epoch"], plain="epoch", also="; 0 means never").number)


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """Limits for `limit_batches`: numbers of batches, or fractions of them; 1.0 means all.

    Args:
        train: Batches per epoch.
        val: Batches per validation set; 0 turns validation off.
        test: Batches per test set.
        predict: Batches per prediction set.
    """

    train: Annotated[PositiveLimit, _AT_LEAST_1] = 1.0
    val: Annotated[Limit, _AT_LEAST_0] = 1.0
    test: Annotated[Limit, _AT_LEAST_0] = 1.0
    predict: Annotated[Limit, _AT_LEAST_0] = 1.0


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Further options for data loading.

    Args:
        batch_sampler: A torch batch sampler for training. Batch i goes to process i modulo the number of processes.
        group_by_length: Whether to sort shuffled samples by length, about 50 batches at a time. This changes which
            samples share a step; `max_tokens` in the hyper-parameters does not.
        drop_last: Whether to drop the last training batch if it is not full. Validation data are never dropped.
        persistent_workers: Whether workers stay alive between epochs; they then do not see changes to the dataset. This
            has no effect on streams or on a dataset with `set_epoch` or `state_dict`.
        shard: Whether to shard the data across processes. With False, every process sees all data.
        device_placement: Whether to move batches to the device before a step.
    """

    batch_sampler: Annotated[Any, _require_object] = None
    group_by_length: bool = False
    drop_last: bool = False
    persistent_workers: bool = False
    shard: bool = True
    device_placement: bool = True

    def check(self, name: str) -> None:
        """Reject two orders at once."""
        # Both decide the order, and one of them would be ignored.
        if self.group_by_length and self.batch_sampler is not None:
            got, do = (
                "group_by_length and batch_sampler",
                "leave `group_by_length` out: a batch sampler decides the order",
            )
            raise fail(ArgumentError, write_place(name), got=got, expected="one of the two", do=do)


@dataclass(frozen=True, kw_only=True)
class DataSettings(Group):
    """Data loading and batching.

    Args:
        shuffle_train: Whether to shuffle the training data every epoch, based on (seed, epoch). Ignored with a sampler.
        shuffle_validation: Whether to shuffle validation data. This does not affect results.
        sampler: The order of training samples: a torch `Sampler`, a function `(dataset) -> Sampler`, or a list of
            indices; `{"train": ..., "val": ...}` also sets the order of validation data.
        collate_fn: Function that turns a list of samples into a batch; in a list of functions, each is applied to the
            result of the previous one. `{"train": ..., "val": ...}` sets separate functions; "val" also applies to test
            and prediction data. A `collate_fn` method of the module takes precedence.
        dataloader_pin_memory: Whether to put batches into pinned memory, with an accelerator device.
        dataloader_num_workers: Data-loading processes per training process. 0 loads data in the training process.
        data_options: How data are batched, loaded and sharded: `DataOptions(drop_last=True)`, or a dict.
        reload_dataloaders_every_n_epochs: Rebuilds the loaders of the module or the datamodule at the start of every
            n-th epoch; 0 builds them once.
        limit_batches: Batches per training epoch, and per validation, test and prediction set: a number, or a fraction
            as a float (1.0 is all, 1 is one); `Limits(val=0.1)` limits only validation.
        overfit_batches: Trains and validates on this many training batches (or this fraction of them), unshuffled; 0
            is off.
    """

    shuffle_train: bool = True
    shuffle_validation: bool = False
    sampler: Annotated[Any, _require_by_phase] = None
    collate_fn: Annotated[Any, _require_by_phase, Off()] = None
    dataloader_pin_memory: bool = True
    dataloader_num_workers: Annotated[int, Range(ge=0)] = 0
    data_options: Annotated[DataOptions, Off()] = None  # type: ignore[assignment]  # set in __post_init__
    reload_dataloaders_every_n_epochs: Annotated[int | str, _read_reload, Off(0)] = 0
    limit_batches: Annotated[PositiveLimit | Limits | Mapping[str, int | float], _AT_LEAST_1, Off(1.0)] = 1.0
    overfit_batches: Annotated[Limit, _AT_LEAST_0, Off(0)] = 0.0

    def check(self, name: str) -> None:
        """Reject two orders at once."""
        options = self.data_options
        if self.sampler_of("train") is not None and (options.group_by_length or options.batch_sampler is not None):
            option = "group_by_length" if options.group_by_length else "batch_sampler"
            where = f'Trainer(sampler=..., data_options={{"{option}": ...}})'
            do = f"leave `{option}` out: both decide the order"
            raise fail(ArgumentError, where, got="both", expected="one of the two", do=do)

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
        return _read_reload("reload_dataloaders_every_n_epochs", self.reload_dataloaders_every_n_epochs)

    @property
    def limits(self) -> Limits:
        """The limit for each kind of batches."""
        limit: Any = self.limit_batches
        return limit if isinstance(limit, Limits) else Limits(train=limit, val=limit, test=limit, predict=limit)
