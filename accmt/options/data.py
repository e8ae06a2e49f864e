"""The Trainer's arguments about data."""

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
    """What `limit_batches` may limit, each to a number of batches or a fraction of them; 1.0 is all.

    Args:
        train: Batches of an epoch.
        val: Batches of each validation set; 0 turns validation off.
        test: Batches of each test set.
        predict: Batches of each set that is predicted.
    """

    train: Annotated[int | float, partial(require_limit, at_least=1)] = 1.0
    val: Annotated[int | float, require_limit] = 1.0
    test: Annotated[int | float, require_limit] = 1.0
    predict: Annotated[int | float, require_limit] = 1.0


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How batches are made.

    Args:
        shuffle_train: Whether each epoch has an order of its own, drawn from (seed, epoch). Ignored with a sampler.
        shuffle_validation: Whether validation data are shuffled; results do not depend on it.
        sampler: Order of the training samples: a torch `Sampler`, a function `(dataset) -> Sampler`, or a list of
            indices.
        sampler_val: The same for validation data.
        batch_sampler: Batches of the training samples: a torch batch sampler. Batch i goes to process i mod processes.
        collate_fn: Makes a batch of a list of samples, for all data; a list of functions is applied one after the
            other. None is torch's own. A module that defines `collate_fn` wins over it.
        collate_fn_train: As `collate_fn`, for training data only, and stronger than it.
        collate_fn_val: As `collate_fn`, for validation data only, and stronger than it.
        dataloader_pin_memory: Whether batches are put into pinned memory; has no effect without an accelerator device.
        dataloader_num_workers: Processes that load data beside each training process; 0 loads in the training process.
        dataloader_persistent_workers: Whether those processes outlive an epoch, which saves starting them. Their copies
            of the dataset then do not hear of what changes in it between epochs. Has no effect on streams, nor on a
            dataset with `set_epoch`.
        dataloader_drop_last: Whether a last training batch that is not full is left out. Validation data are never
            dropped.
        shard_dataloaders: Whether the processes share the data. False: every process sees all of it.
        reload_dataloaders_every_n_epochs: Asks the module (`get_train_dataloader`, `get_validation_dataloader`) or the
            datamodule for data again at the beginning of every so many epochs: a number, or text such as "2 epochs"; 0
            asks once.
        limit_batches: Batches of an epoch, of each validation set, of testing and of predicting: a whole number, or a
            fraction of them as a float (1.0 is all, 1 is one); `Limits(val=0.1)` limits those alone that it names,
            of train, val, test and predict. 0 for val turns validation off.
        overfit_batches: Trains and validates on so many (or this fraction of the) training batches, unshuffled; 0 is
            off.
        batch_device_placement: Whether batches are moved to the device before a step sees them.
        group_by_length: Whether training batches are made of samples of like length: some 50 batches of neighbours in
            the random order are sorted by length. It changes which samples meet in a step; `max_tokens` in the
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
        self.reload_epochs  # noqa: B018 - raises what is wrong with it
        require_limit("overfit_batches", self.overfit_batches)
        if isinstance(self.limit_batches, Mapping | Limits):
            set_field(self, "limit_batches", Limits.read("limit_batches", self.limit_batches))
        else:
            require_limit("limit_batches", self.limit_batches, at_least=1)
        for name in ("sampler", "sampler_val", "batch_sampler", "collate_fn", "collate_fn_train", "collate_fn_val"):
            if isinstance(getattr(self, name), str | bool | int | float):
                do = f"{name}={'my_function' if 'collate' in name else 'my_sampler'}"
                raise_wrong_value(name, getattr(self, name), "an object of the program, not a name", do)
        if self.group_by_length and (self.sampler is not None or self.batch_sampler is not None):
            got = "a sampler beside it, which decides the order"
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
        """Epochs after which data are asked for again; 0 is never."""
        every = self.reload_dataloaders_every_n_epochs
        if every == 0 and not isinstance(every, bool):
            return 0
        name, also = "reload_dataloaders_every_n_epochs", "; 0 is never"
        return int(read_every(name, every, ["epoch"], plain="epoch", also=also).number)

    @property
    def limits(self) -> Limits:
        """The limit of each kind of batches."""
        limit: Any = self.limit_batches
        return limit if isinstance(limit, Limits) else Limits(train=limit, val=limit, test=limit, predict=limit)
