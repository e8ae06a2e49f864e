"""Builds samplers and loaders for the data of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from accmt.data import (
    ByCount,
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
from accmt.errors import ArgumentError, fail
from accmt.loaders.user_data import SOURCES, Evaluation
from accmt.messages import warn
from accmt.module import AcceleratorModule, defines
from accmt.options import DataSettings, Settings
from accmt.processes import data_index, num_data_processes
from accmt.registry import addon, find
from accmt.state import TrainingState

if TYPE_CHECKING:
    pass


def build_train_loader(
    module: AcceleratorModule,
    data: Any,
    settings: Settings,
    state: TrainingState,
    engine: Engine,
    *,
    seed: int,
    max_micro_batch_size: int | None = None,
    also_read: Sequence[Any] = (),
) -> Loader:
    """Build the loader of training batches.

    Processes: collective.
    """
    data_settings = settings.data
    if isinstance(data, DataLoader) and data_settings.data_options.group_by_length:
        warn("group_by_length has no effect on a DataLoader, which has its own order: pass its dataset to fit")
    collate = find_collate(module, settings, data, "train")
    pins_memory = _pins_memory(data_settings, engine.accelerator.device)
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
    source = build_source(batcher.data if batcher else data, engine.arrange(options))
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
    maker = engine.group(maker)
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
        limit=getattr(data_settings.limits, SOURCES[purpose].limit),
        shuffle=is_validation and data_settings.shuffle_validation,
        sampler=data_settings.sampler_of("val") if is_validation else None,
        **_reading(settings, batcher, collate=collate, seed=seed, pins_memory=pins_memory),
    )
    options = engine.arrange(options)
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
        "skips_bad": settings.handling.skips_bad_samples,
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
