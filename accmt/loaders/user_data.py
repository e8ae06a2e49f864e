"""The data of a run: passed to a method of the Trainer, or of the module or a datamodule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch.utils.data import DataLoader, Dataset

from accmt.data import (
    is_stream,
)
from accmt.errors import ArgumentError, DataError, fail
from accmt.messages import warn
from accmt.module import AcceleratorModule
from accmt.options import DataSettings, HyperParameters
from accmt.registry import addon

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import Trainer


Evaluation: TypeAlias = Literal["validate", "test", "predict"]
Purpose: TypeAlias = Literal["train"] | Evaluation
Stage: TypeAlias = Literal["fit"] | Evaluation


class UserData:
    """The data passed to a method of the Trainer, by purpose.

    Args:
        method: The method.
        data: Its data arguments.
        datamodule: Its argument `datamodule`.

    Raises:
        ArgumentError: Both were passed, or `datamodule` has no method that returns a loader.
    """

    def __init__(self, method: Stage, data: Mapping[Purpose, Any], datamodule: Any = None) -> None:
        self._data = data
        self._datamodule: Any = None
        if datamodule is not None and self.has_any:
            got, do = "both data and a datamodule", "remove one of the two"
            raise fail(ArgumentError, f"{method}(datamodule=...)", got=got, expected="one source of data", do=do)
        if datamodule is not None:
            self._datamodule = addon("datamodule")(datamodule)

    @property
    def has_datamodule(self) -> bool:
        """Whether the data come from a datamodule, which can be called again."""
        return self._datamodule is not None

    @property
    def has_any(self) -> bool:
        """Whether there are any data."""
        return self.has_datamodule or any(data is not None for data in self._data.values())

    def load(self, purpose: Purpose) -> Any:
        """Return the data for a purpose, from the datamodule if there is one; None if there are none."""
        return self._data.get(purpose) if self._datamodule is None else self._datamodule.load(purpose)

    def begin(self, stage: Stage, trainer: Trainer, accelerator: Accelerator) -> None:
        """Prepare the data, once the process group exists.

        Processes: collective.
        """
        if self._datamodule is not None:
            self._datamodule.begin(stage, trainer, accelerator)

    @contextmanager
    def ending(self, stage: Stage) -> Iterator[None]:
        """Tear down the datamodule at the end; an error of the caller takes precedence."""
        try:
            yield
        except BaseException:
            try:
                self._end(stage)
            except Exception as own:  # noqa: BLE001 - the caller's error takes precedence
                warn(f"teardown of the datamodule raised {type(own).__name__}: {own}")
            raise
        self._end(stage)

    def _end(self, stage: Stage) -> None:
        if self._datamodule is not None:
            self._datamodule.end(stage)


class _Source(NamedTuple):
    method: str
    argument: str
    limit: str


SOURCES: dict[Evaluation, _Source] = {
    "validate": _Source("get_validation_dataloader", "val_dataset", "val"),
    "test": _Source("get_test_dataloader", "test_dataset", "test"),
    "predict": _Source("get_predict_dataloader", "dataset", "predict"),
}


def find_train_data(module: AcceleratorModule, user_data: Any, hps: HyperParameters) -> Any:
    """Return the training data: from the module, else as passed to `fit`; several sources are mixed."""
    data = _ask(module.get_train_dataloader, user_data)
    if isinstance(data, dict) or hps.data is not None:
        return addon("mix_sources")(data, hps)
    if data is None:
        do = "trainer.fit(module, train_dataset), or def get_train_dataloader(self) in the module"
        raise fail(DataError, "fit", got="no training data", expected="a dataset or a DataLoader", do=do)
    return data


def find_data(module: AcceleratorModule, user_data: Any, purpose: Evaluation, settings: DataSettings) -> dict[str, Any]:
    """Return the sets to validate, test or predict, by name; empty if they are limited to 0 batches."""
    method, argument, limit = SOURCES[purpose]
    data = _ask(getattr(module, method), user_data)
    if data is None:
        do = f"trainer.{purpose}(module, {argument}), or def {method}(self) in the module"
        raise fail(
            DataError, purpose, got="no data", expected="a dataset or a DataLoader, or several in a list or dict", do=do
        )
    if getattr(settings.limits, limit) == 0:
        return {}
    return name_sets(data)


def find_validation_data(module: AcceleratorModule, user_data: Any, settings: DataSettings) -> dict[str, Any]:
    """Return the validation sets by name; empty if there are none or they are limited to 0 batches."""
    data = _ask(module.get_validation_dataloader, user_data)
    return {} if data is None or settings.limits.val == 0 else name_sets(data)


def name_sets(data: Any) -> dict[str, Any]:
    """Return datasets by name: a dict's keys, "0", "1" ... for a list, "" for a single one.

    A list of samples is one dataset; a list of datasets or loaders is several.

    Raises:
        DataError: A list has both, or a name cannot be used.
    """
    if isinstance(data, list | tuple) and len(data):
        by_kind = {type(entry): entry for entry in data}  # a list of a million samples has few
        sets = [kind.__name__ for kind, entry in by_kind.items() if _is_dataset(entry)]
        if len(sets) == len(by_kind):
            return {str(index): dataset for index, dataset in enumerate(data)}
        if sets:
            kinds = " and ".join(kind.__name__ for kind in by_kind)
            got = f"a {type(data).__name__} of {kinds}"
            expected = "datasets only, or samples only; a list or tuple inside it is a sample"
            do = 'name the sets: {"first": ..., "second": ...}'
            raise fail(DataError, "the sets to evaluate", got=got, expected=expected, do=do)
    if not isinstance(data, dict):
        return {"": data}
    for name in data:
        if not isinstance(name, str) or not name or "__" in name or "@" in name or "/" in name:
            expected = "strings without '__', '@' and '/', which separate them from the names of metrics"
            raise fail(DataError, "the names of the validation sets", got=repr(name), expected=expected, do="rename it")
    return data


def _is_dataset(entry: Any) -> bool:
    """Return whether an entry of a list is a dataset, rather than a sample."""
    if isinstance(entry, Dataset | DataLoader) or hasattr(entry, "column_names"):  # as those of `datasets` have
        return True
    # Samples can have a length and indices, too: sequences, arrays, and what is read by key, such as a graph.
    is_sequence = isinstance(entry, list | tuple | str | bytes | bytearray | range)
    is_sample = is_sequence or hasattr(entry, "keys") or hasattr(entry, "__array__")
    return not (is_sample or is_stream(entry))


def _ask(method: Callable[..., Any], user_data: Any) -> Any:
    made = method(user_data) if inspect.signature(method).parameters else method()
    return user_data if made is None else made
