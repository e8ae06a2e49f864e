"""What the user passes to a method of the Trainer: data, or a datamodule that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accmt.errors import ArgumentError, DataError, explain, nearest
from accmt.messages import warn
from accmt.processes import run_on_every_process

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.protocols import TrainerProtocol

Evaluation: TypeAlias = Literal["validate", "test", "predict"]
Purpose: TypeAlias = Literal["train"] | Evaluation
Stage: TypeAlias = Literal["fit"] | Evaluation

_LOADERS: dict[Purpose, str] = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_METHODS = (*_LOADERS.values(), "prepare_data", "setup", "teardown")


class DataModule:
    """A user's object with the methods of a Lightning `LightningDataModule`, each of which may be missing.

    Args:
        own: The object. It gets the Trainer as its attribute `trainer`.

    Raises:
        ArgumentError: It is a class, has a method with a misspelt name, or makes no loader at all.
    """

    def __init__(self, own: Any) -> None:
        if isinstance(own, type):
            do = f"datamodule={own.__name__}(...)"
            raise ArgumentError(explain("datamodule", f"the class {own.__name__}", "an object of it", do))
        self._own = own
        self._stages: list[Stage] = []
        self._check_methods()
        if not any(self._find(method) for method in _LOADERS.values()):
            expected = f"an object with {' or '.join(f'{method}()' for method in _LOADERS.values())}"
            do = "give datasets and DataLoaders as train_dataset and val_dataset"
            raise ArgumentError(explain("datamodule", type(own).__name__, expected, do))

    def load(self, purpose: Purpose) -> Any:
        """Return what the datamodule makes for a purpose, made again; None if it makes nothing for it."""
        method = self._find(_LOADERS[purpose])
        data = None if method is None else method()
        if data is None and method is not None and purpose == "train":
            where, expected = f"{type(self._own).__name__}.train_dataloader", "a dataset or a DataLoader"
            raise DataError(explain(where, "None", expected, "return DataLoader(dataset, batch_size=16)"))
        return data

    def begin(self, stage: Stage, trainer: TrainerProtocol, accelerator: Accelerator) -> None:
        """Let the data be prepared, by one process (of each machine, if `prepare_data_per_node`), then set up by all.

        Processes: collective. A stage that has begun already is not begun again.
        """
        if stage in self._stages:
            return
        self._own.trainer = trainer
        per_machine = getattr(self._own, "prepare_data_per_node", False)
        prepares = accelerator.is_local_main_process if per_machine else accelerator.is_main_process
        if not self._stages:
            run_on_every_process(lambda: self._call("prepare_data") if prepares else None)
        self._stages.append(stage)  # from here on there is something to tear down
        run_on_every_process(lambda: self._call("setup", stage))

    def end(self, stage: Stage) -> None:
        """Let the datamodule clear up, unless it is in use for something else."""
        if stage in self._stages:
            self._stages.remove(stage)
            if not self._stages:
                self._call("teardown", stage)

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._own, name, None)
        if method is not None:
            method(*arguments)

    def _check_methods(self) -> None:
        for name in dir(self._own):
            if name in _METHODS:
                self._check_callable(name)
            elif not name.startswith("_"):
                self._check_spelling(name)

    def _check_callable(self, name: str) -> None:
        value = getattr(self._own, name)
        if value is not None and not callable(value):
            where, got = f"{type(self._own).__name__}.{name}", f"an object of {type(value).__name__}"
            raise ArgumentError(explain(where, got, "a method", f"def {name}(self): ..."))

    def _check_spelling(self, name: str) -> None:
        meant = nearest(name, _METHODS, cutoff=0.9)
        if meant is None or self._find(meant) is not None or not callable(getattr(type(self._own), name, None)):
            return
        got, expected = f"a method {name}, and no {meant}", f"methods among {', '.join(_METHODS)}"
        do = f"rename it to {meant} (or to a less similar name)"
        raise ArgumentError(explain(f"the datamodule {type(self._own).__name__}", got, expected, do))

    def _find(self, name: str) -> Callable[[], Any] | None:
        """Return a method that the user has written: the one of Lightning's base class raises."""
        method: Callable[[], Any] | None = getattr(self._own, name, None)
        return None if getattr(method, "__qualname__", "").startswith("DataHooks.") else method


class UserData:
    """The data, by purpose, that the user passed to a method of the Trainer.

    Args:
        method: The method.
        data: Its own arguments.
        datamodule: Its argument `datamodule`.

    Raises:
        ArgumentError: There are both, or `datamodule` makes no loader at all.
    """

    def __init__(self, method: Stage, data: Mapping[Purpose, Any], datamodule: Any = None) -> None:
        self._data = data
        self._datamodule: DataModule | None = None
        if datamodule is not None and self.has_any:
            got, do = "a dataset or a DataLoader, and a datamodule", "leave one of the two out"
            raise ArgumentError(explain(f"{method}(datamodule=...)", got, "one that the data come from", do))
        if datamodule is not None:
            self._datamodule = DataModule(datamodule)

    @property
    def has_datamodule(self) -> bool:
        """Whether a datamodule makes the data, which can be asked again."""
        return self._datamodule is not None

    @property
    def has_any(self) -> bool:
        """Whether there is anything at all."""
        return self.has_datamodule or any(data is not None for data in self._data.values())

    def load(self, purpose: Purpose) -> Any:
        """Return the data for a purpose, as they are or made again; None if there are none."""
        return self._data.get(purpose) if self._datamodule is None else self._datamodule.load(purpose)

    def begin(self, stage: Stage, trainer: TrainerProtocol, accelerator: Accelerator) -> None:
        """Get the data ready, once the processes know of one another.

        Processes: collective.
        """
        if self._datamodule is not None:
            self._datamodule.begin(stage, trainer, accelerator)

    @contextmanager
    def ending(self, stage: Stage) -> Iterator[None]:
        """Let a datamodule clear up afterwards; the error that ended what was done goes first."""
        try:
            yield
        except BaseException:
            try:
                self._end(stage)
            except Exception as own:  # noqa: BLE001 - the error above goes first
                warn(f"teardown of the datamodule raised {type(own).__name__}: {own}")
            raise
        self._end(stage)

    def _end(self, stage: Stage) -> None:
        if self._datamodule is not None:
            self._datamodule.end(stage)
