"""Finds the data of a run, and builds samplers and loaders for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accmt.data import (
    ByCount,
    LargestBatch,
    Loader,
    MicroBatch,
    Shard,
    SourceOptions,
    build_collate,
    build_source,
    in_buckets,
    is_stream,
)
from accmt.data.collate import CollateChain
from accmt.data.seeding import seed_with_global
from accmt.engine.base import Engine
from accmt.errors import ArgumentError, DataError, fail
from accmt.loop.cadence import Cadence
from accmt.messages import warn
from accmt.module import AcceleratorModule, defines
from accmt.options import DataSettings, HyperParameters, Settings
from accmt.processes import data_index, num_data_processes
from accmt.recovery.restart import Recovery
from accmt.registry import addon, find
from accmt.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import Trainer


# ---- Data or a datamodule passed to a method of the Trainer.


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


_DATA: dict[Evaluation, _Source] = {
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
    method, argument, limit = _DATA[purpose]
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


def build_train_loader(
    module: AcceleratorModule,
    data: Any,
    settings: Settings,
    state: TrainingState,
    *,
    seed: int,
    device: torch.device,
    max_micro_batch_size: int | None = None,
    also_read: Sequence[Any] = (),
) -> Loader:
    """Build the loader of training batches.

    Processes: collective.
    """
    data_settings = settings.data
    if isinstance(data, DataLoader) and data_settings.data_options.group_by_length:
        warn("group_by_length has no effect on a DataLoader, which has its own order: pass its dataset to fit")
    collate, pins_memory = find_collate(module, settings, data, "train"), _pins_memory(data_settings, device)
    _seed_own_generators(data, collate)
    batcher = _find_token_batcher(
        module, data, settings, collate=collate, seed=seed, pins_memory=pins_memory, kind="training"
    )
    micro_batches_per_batch = 1
    if not batcher:
        micro_batch_size = settings.hps.micro_batch_size_within(max_micro_batch_size)
        micro_batches_per_batch = settings.hps.train_batch_size // micro_batch_size
        sets_size = isinstance(data, DataLoader) or data_settings.data_options.batch_sampler is not None
        if micro_batches_per_batch > 1 and sets_size:
            warn("max_micro_batch_size has no effect: your DataLoader or batch sampler sets the batch size")
            micro_batches_per_batch = 1
    options = SourceOptions(
        purpose="train",
        batch_size=settings.hps.train_batch_size // micro_batches_per_batch,
        micro_batches_per_batch=micro_batches_per_batch,
        limit=data_settings.limits.train,
        shuffle=data_settings.shuffle_train,
        sampler=find_sampler(module, data, settings, seed=seed),
        group_stream=_find_stream_groups(module, data, settings),
        batch_sampler=data_settings.data_options.batch_sampler,
        drop_last=data_settings.data_options.drop_last,
        also_read=also_read,
        **_reading(settings, batcher, collate=collate, seed=seed, pins_memory=pins_memory),
    )
    source = build_source(batcher.data if batcher else data, options)
    maker: Any
    if (name := settings.optimization.window_maker) is not None:
        if module.uses_manual_optimization:
            got = f"{name!r}, and a module with manual optimization"
            do = "leave it out: the module decides when to step"
            raise fail(ArgumentError, "Trainer(grad_accumulation_steps=...)", got=got, expected="one of the two", do=do)
        is_full = find("accmt.window_makers", name)
        count_tokens = batcher.count_tokens if batcher else None
        maker = addon("window_function")(name, is_full, state, count_tokens)
    elif module.uses_manual_optimization:
        maker = ByCount(None)
    else:
        maker = ByCount(settings.optimization.accumulation_at)
    if batcher:
        maker = batcher.for_training(maker)
    return Loader(source, maker)


def _find_token_batcher(module: AcceleratorModule, data: Any, settings: Settings, **options: Any) -> Any:
    """Return what splits the samples of some data by a token budget; None if batches are used as loaded."""
    return None if settings.hps.max_tokens is None else addon("token_batches")(module, data, settings, **options)


def build_evaluation_loader(
    module: AcceleratorModule,
    data: Any,
    settings: Settings,
    purpose: Evaluation,
    engine: Engine,
    *,
    seed: int,
    through: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] | None = None,
) -> Loader:
    """Build the loader for one set to validate, test or predict.

    Processes: collective.
    """
    data_settings = settings.data
    is_validation = purpose == "validate"
    # Losses logged per batch are those of batches as loaded.
    logs_batches = is_validation and not settings.evaluation.report_loss_after_eval
    collate = find_collate(module, settings, data, "val")
    pins_memory = _pins_memory(data_settings, engine.accelerator.device)
    _seed_own_generators(data, collate)
    batcher = None
    if not logs_batches:
        batcher = _find_token_batcher(
            module, data, settings, collate=collate, seed=seed, pins_memory=pins_memory, kind="evaluation"
        )
    batch_size = settings.hps.val_batch_size if is_validation else settings.hps.test_batch_size
    if is_validation and data_settings.overfit_batches:
        batch_size = settings.hps.train_batch_size  # the same number of the same samples
    options = SourceOptions(
        purpose=purpose,
        batch_size=batch_size,
        limit=getattr(data_settings.limits, _DATA[purpose].limit),
        shuffle=is_validation and data_settings.shuffle_validation,
        sampler=data_settings.sampler_of("val") if is_validation else None,
        **_reading(settings, batcher, collate=collate, seed=seed, pins_memory=pins_memory),
    )
    if batcher is None:
        return Loader(build_source(data, options), through=through)
    maker = batcher.for_evaluation(purpose, batch_size=options.batch_size)
    return Loader(build_source(batcher.data, options), maker, through=through)


def _seed_own_generators(data: Any, collate: Any) -> None:
    """Seed the generators of data and collate function for each batch, so that its random numbers are reproducible."""
    source = data
    # The loader's own function makes its batches; that of the module or the Trainer is not called.
    if isinstance(data, DataLoader):
        source, collate = data.dataset, data.collate_fn
    functions: Iterable[Any] = [collate]
    if isinstance(collate, CollateChain):
        functions = collate.functions
    for function in functions:
        if hasattr(function, "create_rng") and function.seed is not None:
            function.create_rng()  # transformers' collate functions create their generator in the first call
        seed_with_global(function)
    if not is_stream(source):
        seed_with_global(source)


def end_workers(loaders: Iterable[Loader]) -> None:
    """End the loader workers, which would wait for another epoch."""
    for loader in loaders:
        loader.source.end_workers()


def _pins_memory(settings: DataSettings, device: torch.device) -> bool:
    return settings.dataloader_pin_memory and device.type != "cpu"


def _reading(settings: Settings, batcher: Any, *, collate: Any, seed: int, pins_memory: bool) -> dict[str, Any]:
    """Return the options of a source that are the same for training and evaluation."""
    return {
        "shard": _shard(settings.data),
        "seed": seed,
        "collate": batcher.keep_samples if batcher else collate,
        "num_workers": settings.data.dataloader_num_workers,
        "persistent_workers": settings.data.data_options.persistent_workers,
        "pin_memory": pins_memory and not batcher,  # which collates, and pins what it makes
        "skips_bad": settings.failures.on_bad_sample == "skip",
    }


def _shard(settings: DataSettings) -> Shard:
    return Shard(data_index(), num_data_processes()) if settings.data_options.shard else Shard()


def find_collate(module: AcceleratorModule, settings: Settings, data: Any, phase: Literal["train", "val"]) -> Any:
    """Return the user's collate function for a phase: that of the module, of the Trainer, or None."""
    bucket = settings.running.compile_buckets
    collate = getattr(module, f"collate_fn_{phase}") or module.collate_fn
    if collate is None:
        collate = build_collate(settings.data.collate_fn_of(phase))
    if bucket is None or isinstance(data, DataLoader):
        return collate
    return in_buckets(collate, bucket)


def find_sampler(module: AcceleratorModule, data: Any, settings: Settings, *, seed: int) -> Any:
    """Return the sampler of the training data, or None.

    A dataset with a method `order_run`, such as a curriculum or a mixture, defines the order of the whole run.
    """
    if hasattr(data, "order_run"):
        return data.order_run(module, settings, num_shards=_shard(settings.data).count, seed=seed)
    if not _groups_by_length(data, settings) or is_stream(data):
        return settings.data.sampler_of("train")
    return addon("group_dataset")(
        data, _length_of(module), settings.hps.train_batch_size, shuffle=settings.data.shuffle_train
    )


def _find_stream_groups(
    module: AcceleratorModule, data: Any, settings: Settings
) -> Callable[[Any, int], IterableDataset[Any]] | None:
    """Return what groups the samples of a training stream by length, or None."""
    if not _groups_by_length(data, settings) or not is_stream(data):
        return None
    return partial(addon("group_stream"), batch_size=settings.hps.train_batch_size, length_of=_length_of(module))


def _groups_by_length(data: Any, settings: Settings) -> bool:
    return settings.data.data_options.group_by_length and not isinstance(data, DataLoader)


def _length_of(module: AcceleratorModule) -> Callable[[Any], Any] | None:
    if defines(module, "length_of"):
        return module.length_of
    return None


# ---- The loaders of a training run, and how they are rebuilt at the start of an epoch.


class Loaders:
    """The loaders of a run.

    Args:
        trainer: The Trainer.
        module: The module, whose data take precedence.
        user_data: The data passed to `fit`.
        recovery: What is known from earlier attempts, such as the batch size that fits in memory.
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
        recovery: Recovery,
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
        self._recovery = recovery
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
            lessons = self._recovery.lessons.get("out_of_memory", {})
        return build_train_loader(
            self._module,
            self.train_data,
            settings,
            self._trainer.state,
            seed=self._seed,
            device=self._engine.accelerator.device,
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
