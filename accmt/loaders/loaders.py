"""The loaders of a training run, and how they are rebuilt at the start of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accmt.cadence import Cadence
from accmt.data import (
    LargestBatch,
    Loader,
    MicroBatch,
)
from accmt.engine.base import Engine
from accmt.errors import ArgumentError, DataError, fail
from accmt.messages import warn
from accmt.module import AcceleratorModule, defines
from accmt.options import DataSettings
from accmt.processes import num_data_processes
from accmt.registry import addon
from accmt.state import TrainingState

if TYPE_CHECKING:
    from accmt import Trainer


from accmt.loaders.building import build_evaluation_loader, build_train_loader, end_workers
from accmt.loaders.user_data import UserData


class Loaders:
    """The loaders of a run.

    Args:
        trainer: The Trainer.
        module: The module, whose data take precedence.
        user_data: The data passed to `fit`.
        lessons: What is known from earlier attempts, by feature, such as the batch size that fits in memory.
        engine: The engine.
        seed: The seed of the run.
        through: A function applied to the micro-batches of a validation.

    Attributes:
        train: The training loader.
        train_data: The training data.
        validation: The validation loaders, by name.
    """

    train: Loader

    def __init__(
        self,
        trainer: Trainer,
        module: AcceleratorModule,
        user_data: UserData,
        lessons: Mapping[str, Any],
        engine: Engine,
        *,
        seed: int,
        through: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]],
    ) -> None:
        self.validation: dict[str, Loader] = {}
        self.train_data: Any = None
        self._also_read: list[Any] = []
        self._trainer = trainer
        self._module = module
        self._user_data = user_data
        self._seed = seed
        self._engine = engine
        self._lessons = lessons
        self._through = through
        self._built_for = _epoch_of_building(trainer.state.epoch, trainer.settings.data)

    @property
    def takes_user_batches(self) -> bool:
        """Whether the training data is a DataLoader, whose batches are used as they are."""
        return isinstance(self.train_data, DataLoader)

    @property
    def user_batch_size(self) -> int | None:
        """The batch size of that DataLoader; None if its sampler decides."""
        return self.train_data.batch_size if self.takes_user_batches else None

    def inputs_with_state(self) -> dict[str, Any]:
        """Return the data that may have a state besides the place in them, by their name in a checkpoint."""
        data = self.train_data.dataset if self.takes_user_batches else self.train_data
        is_rebuilt = self._trainer.settings.data.reload_epochs > 0
        return {} if is_rebuilt or isinstance(data, IterableDataset) else {"train_data": data}

    def samples_per_step(self, epoch: int = 0) -> int | None:
        """Return the samples of a full optimizer step; None if a window maker or a batch sampler decides."""
        samples = self._trainer.settings.samples_per_step(num_data_processes(), epoch)
        if samples is None or not self.takes_user_batches:
            return samples
        size = self.user_batch_size
        if size is None:
            return None
        return samples // self._trainer.settings.hps.train_batch_size * size

    def build(self, train_data: Any, val_data: Mapping[str, Any]) -> None:
        """Build the loaders.

        Processes: collective.
        """
        settings = self._trainer.settings
        self.train_data = train_data
        self._also_read = list(val_data.values())
        self.train = self.build_train_again()
        cadence = Cadence.of(settings)
        is_unknown = self.train.source.num_micro_batches is None or settings.optimization.window_maker is not None
        saved = None
        if cadence.checkpoint_every is not None and cadence.checkpoint_every.unit == "epoch":
            saved = cadence.checkpoint_every.number
        for name, interval in (("evaluate_every_n_steps", cadence.evaluate_every), ("checkpoint_every", saved)):
            if isinstance(interval, float) and is_unknown:
                got = f"{interval}, a fraction of an epoch whose length is unknown"
                do = f"for example {name}=100"
                raise fail(ArgumentError, f"Trainer({name}=...)", got=got, expected="a whole number of steps", do=do)
        for name, data in val_data.items():
            self.validation[name] = build_evaluation_loader(
                self._module,
                data,
                settings,
                "validate",
                self._engine,
                seed=self._seed,
                through=self._through,
            )

    def build_train_again(self) -> Loader:
        """Build another training loader, for a pass that must not move the run's own.

        Processes: collective.
        """
        settings = self._trainer.settings
        lessons: Mapping[str, Any] = {}
        # An earlier attempt may have had `auto`, and this one a fixed size.
        if settings.hps.halves_micro_batches:
            lessons = self._lessons.get("out_of_memory", {})
        return build_train_loader(
            self._module,
            self.train_data,
            settings,
            self._trainer.state,
            self._engine,
            seed=self._seed,
            max_micro_batch_size=lessons.get("max_micro_batch_size"),
            also_read=self._also_read,
        )

    def reload_if_due(self) -> None:
        """Reload the data and rebuild their loaders, if that is due at the start of an epoch.

        Processes: collective.
        """
        state, data = self._trainer.state, self._trainer.settings.data
        if data.reload_epochs == 0 or state.train_step > 0:
            return
        if _epoch_of_building(state.epoch, data) == self._built_for:
            return
        self._built_for = state.epoch
        end_workers((self.train, *self.validation.values()))
        settings = self._trainer.settings
        known = {"module": self._module, "user_data": self._user_data}
        facts = addon("check_stage")("reload", settings, **known)
        train_data, val_data = facts.train_data, facts.sets
        if val_data.keys() != self.validation.keys():
            got, expected = f"the sets {list(val_data)}", f"the sets of the previous epoch: {list(self.validation)}"
            do = "return sets with the same names each time: metrics and saving depend on them"
            raise fail(DataError, "the reloaded validation data", got=got, expected=expected, do=do)
        self.build(train_data, val_data)

    def make_largest_batch(self) -> LargestBatch | str:
        """Return the largest possible training micro-batch, or why it is unknown."""
        largest: LargestBatch | str = addon("make_largest_batch")(
            self._module, self.train_data, self._trainer.settings, self.train
        )
        return largest


def check_reloading(settings: DataSettings, module: AcceleratorModule, user_data: UserData) -> None:
    """Warn if nothing can reload data."""
    methods = ("get_train_dataloader", "get_validation_dataloader")
    makes_data = user_data.has_datamodule or any(map(partial(defines, module), methods))
    if settings.reload_epochs and not makes_data:
        warn(
            f"reload_dataloaders_every_n_epochs={settings.reload_epochs} has no effect: the data passed to fit do not "
            f"change; define {' or '.join(methods)} in the module, or pass a datamodule"
        )


@contextmanager
def at_epoch_of_building(state: TrainingState, settings: DataSettings) -> Iterator[None]:
    """Set the state to the epoch for which the current loaders were built, while data methods are called.

    A run resumed in a later epoch gets the data that it had.
    """
    epoch = state.epoch
    state.epoch = _epoch_of_building(epoch, settings)
    try:
        yield
    finally:
        state.epoch = epoch


def _epoch_of_building(epoch: int, settings: DataSettings) -> int:
    if settings.reload_epochs == 0:
        return 0
    return epoch - epoch % settings.reload_epochs
