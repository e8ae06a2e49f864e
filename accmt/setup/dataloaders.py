"""The loaders of a run that trains, and how they are built again when an epoch begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from accmt.data import Loader
from accmt.data.largest import LargestBatch
from accmt.engine.base import Engine
from accmt.errors import ArgumentError, DataError, explain
from accmt.features.listed import FEATURES
from accmt.loop.cadence import Cadence
from accmt.module import AcceleratorModule, defines
from accmt.options import DataSettings
from accmt.recovery.restart import Recovery
from accmt.recovery.shutdown import stopping_if_asked
from accmt.setup.datasets import build_evaluation_loader, build_train_loader, end_workers, find_sets, make_largest_batch
from accmt.setup.user_data import UserData
from accmt.state import TrainingState

if TYPE_CHECKING:
    from accmt.protocols import TrainerProtocol


class Loaders:
    """The loaders of a run.

    Args:
        trainer: The Trainer.
        module: The module, whose own data come first.
        user_data: What the user passed to `fit`.
        recovery: What was found to fit in memory.
        engine: How the processes work with the model.
        seed: Seed of everything random.

    Attributes:
        train: That of the training data.
        validation: Those of the validation sets, by name.
    """

    train: Loader

    def __init__(
        self,
        trainer: TrainerProtocol,
        module: AcceleratorModule,
        user_data: UserData,
        recovery: Recovery,
        engine: Engine,
        *,
        seed: int,
    ) -> None:
        self.validation: dict[str, Loader] = {}
        self._train_data: Any = None
        self._also_read: list[Any] = []
        self._trainer = trainer
        self._module = module
        self._user_data = user_data
        self._seed = seed
        self._engine = engine
        self._recovery = recovery
        self._built_for = _epoch_of_building(trainer.state.epoch, trainer.settings.data)

    def build(self, train_data: Any, val_data: Mapping[str, Any]) -> None:
        """Build the loaders of data that were found.

        Processes: collective.
        """
        settings = self._trainer.settings
        self._train_data = train_data
        for feature in FEATURES:
            feature.check(settings, self._module, train_data)
        self._also_read = list(val_data.values())
        self.train = self.build_train_again()
        _check_fraction(Cadence.of(settings), self.train)
        for name, data in val_data.items():
            self.validation[name] = build_evaluation_loader(
                self._module,
                data,
                settings,
                "validate",
                self._engine,
                seed=self._seed,
                through=partial(stopping_if_asked, trainer=self._trainer),
            )

    def build_train_again(self) -> Loader:
        """Build one more loader of the training data, for a pass that leaves the run's own where it is.

        Processes: collective.
        """
        settings = self._trainer.settings
        lessons = self._recovery.lessons.get("out_of_memory", {}) if settings.optimization.auto_micro_batch else {}
        return build_train_loader(
            self._module,
            self._train_data,
            settings,
            seed=self._seed,
            device=self._engine.accelerator.device,
            max_micro_batch_size=lessons.get("max_micro_batch_size"),
            also_read=self._also_read,
        )

    def reload_if_due(self) -> None:
        """Ask for the data again and build their loaders, if that is due as an epoch begins.

        Processes: collective.
        """
        state, settings = self._trainer.state, self._trainer.settings.data
        if settings.reload_epochs == 0 or state.train_step > 0:
            return
        if _epoch_of_building(state.epoch, settings) == self._built_for:
            return
        self._built_for = state.epoch
        end_workers((self.train, *self.validation.values()))
        train_data, val_data = find_sets(self._module, self._user_data, self._trainer.settings)
        if val_data.keys() != self.validation.keys():
            got, expected = f"the sets {list(val_data)}", f"those of the epoch before: {list(self.validation)}"
            do = "return sets of the same names each time: metrics and saving go by them"
            raise DataError(explain("the reloaded validation data", got, expected, do))
        self.build(train_data, val_data)

    def make_largest_batch(self) -> LargestBatch | str:
        """Return the largest micro-batch that the training data can bring, or why it is not known."""
        return make_largest_batch(self._module, self._train_data, self._trainer.settings, self.train)


def check_reloading(settings: DataSettings, module: AcceleratorModule, user_data: UserData) -> None:
    """Check that something can be asked for data again."""
    asked, every = ("get_train_dataloader", "get_validation_dataloader"), settings.reload_epochs
    makes_data = user_data.has_datamodule or any(defines(module, name) for name in asked)
    if every and not makes_data:
        where = f"Trainer(reload_dataloaders_every_n_epochs={every})"
        got, expected = "data that you passed to fit, which stay the same", f"a module with {' or '.join(asked)}"
        do = "def get_train_dataloader(self) in the module, fit(datamodule=...), or leave the argument out"
        raise ArgumentError(explain(where, got, expected, do))


@contextmanager
def at_epoch_of_building(state: TrainingState, settings: DataSettings) -> Iterator[None]:
    """Set the state to the epoch for which the current loaders are built, while data are asked for.

    A run that continues in a later epoch gets the data that it had.
    """
    epoch = state.epoch
    state.epoch = _epoch_of_building(epoch, settings)
    try:
        yield
    finally:
        state.epoch = epoch


def _epoch_of_building(epoch: int, settings: DataSettings) -> int:
    every = settings.reload_epochs
    return epoch - epoch % every if every else 0


def _check_fraction(cadence: Cadence, loader: Loader) -> None:
    every = cadence.evaluate_every
    if isinstance(every, float) and loader.source.num_micro_batches is None:
        got = f"{every}, a fraction of an epoch whose length is unknown"
        do = "evaluate_every_n_steps=100, say"
        raise ArgumentError(explain("Trainer(evaluate_every_n_steps=...)", got, "a whole number of steps", do))
