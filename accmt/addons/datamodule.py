"""Datamodules: objects with the methods of a Lightning `LightningDataModule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accmt.errors import ArgumentError, DataError, fail, nearest
from accmt.loaders import Purpose, Stage
from accmt.processes import run_on_every_process

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import Trainer

_LOADERS: dict[Purpose, str] = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_METHODS = (*_LOADERS.values(), "prepare_data", "setup", "teardown")


class DataModule:
    """Wraps a user's object with methods of a Lightning `LightningDataModule`; all of them are optional.

    Args:
        own: The object; its attribute `trainer` is set to the Trainer.

    Raises:
        ArgumentError: It is a class, has a method with a misspelled name, or has no method that returns a loader.
    """

    def __init__(self, own: Any) -> None:
        if isinstance(own, type):
            do = f"datamodule={own.__name__}(...)"
            raise fail(ArgumentError, "datamodule", got=f"the class {own.__name__}", expected="an object of it", do=do)
        self._own = own
        self._stages: list[Stage] = []
        for name in dir(self._own):
            if name in _METHODS:
                value = getattr(self._own, name)
                if value is not None and not callable(value):
                    where, got = f"{type(self._own).__name__}.{name}", f"an object of type {type(value).__name__}"
                    raise fail(ArgumentError, where, got=got, expected="a method", do=f"def {name}(self): ...")
            elif not name.startswith("_"):
                self._check_spelling(name)
        if not any(self._find(method) for method in _LOADERS.values()):
            expected = f"an object with {' or '.join(f'{method}()' for method in _LOADERS.values())}"
            do = "pass datasets or DataLoaders as train_dataset and val_dataset"
            raise fail(ArgumentError, "datamodule", got=type(own).__name__, expected=expected, do=do)

    def load(self, purpose: Purpose) -> Any:
        """Call the datamodule's method for a purpose; None if it has none."""
        method = self._find(_LOADERS[purpose])
        data = None if method is None else method()
        if data is None and method is not None and purpose == "train":
            where, expected = f"{type(self._own).__name__}.train_dataloader", "a dataset or a DataLoader"
            raise fail(DataError, where, got="None", expected=expected, do="return DataLoader(dataset, batch_size=16)")
        return data

    def begin(self, stage: Stage, trainer: Trainer, accelerator: Accelerator) -> None:
        """Call `prepare_data` on one process (per machine, if `prepare_data_per_node`), then `setup` on all.

        Processes: collective. Does nothing if the stage has already started.
        """
        if stage in self._stages:
            return
        self._own.trainer = trainer
        per_machine = getattr(self._own, "prepare_data_per_node", False)
        prepares = accelerator.is_local_main_process if per_machine else accelerator.is_main_process
        if not self._stages:
            run_on_every_process(lambda: self._call("prepare_data") if prepares else None)
        self._stages.append(stage)  # from here on, teardown is needed
        run_on_every_process(lambda: self._call("setup", stage))

    def end(self, stage: Stage) -> None:
        """Call `teardown`, unless the datamodule is still in use."""
        if stage in self._stages:
            self._stages.remove(stage)
            if not self._stages:
                self._call("teardown", stage)

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._own, name, None)
        if method is not None:
            method(*arguments)

    def _check_spelling(self, name: str) -> None:
        meant = nearest(name, _METHODS, cutoff=0.9)
        if meant is None or self._find(meant) is not None or not callable(getattr(type(self._own), name, None)):
            return
        got, expected = f"a method {name}, but no {meant}", f"methods among {', '.join(_METHODS)}"
        do = f"rename it to {meant} (or to a less similar name)"
        raise fail(ArgumentError, f"the datamodule {type(self._own).__name__}", got=got, expected=expected, do=do)

    def _find(self, name: str) -> Callable[[], Any] | None:
        """Return a method if the user defined it: those of Lightning's base class raise errors."""
        method: Callable[[], Any] | None = getattr(self._own, name, None)
        return None if getattr(method, "__qualname__", "").startswith("DataHooks.") else method
