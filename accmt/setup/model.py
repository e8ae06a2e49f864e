"""Makes the model ready to be trained: device, compilation, optimizer, scheduler, wrapper; or to be evaluated only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.checkpoint.frozen import find_read_only
from accmt.engine.accelerator import must_keep_in_step
from accmt.engine.base import Engine
from accmt.engine.building import building_for, device_of_shards
from accmt.engine.choice import choose_engine
from accmt.engine.meta import fill, is_on_meta
from accmt.engine.reduction import (
    TransparentWrapper,
    broadcast_buffers,
    broadcast_weights,
    is_container,
    require_same_tensors,
    sending_quantized_weights,
    settle_buckets,
)
from accmt.engine.replicas import reject_renormalization, require_equal_weights
from accmt.engine.shards import (
    as_shard,
    is_by_fsdp,
    is_sharded,
    require_known_shards,
    shard_model,
    try_steps_of_shards,
)
from accmt.engine.sync_batchnorm import restore_batch_norm, synchronize_if_asked
from accmt.engine.tensor_parallel import (
    beginning_anew,
    partial_gradients,
    ranks_of_batch,
    require_whole_heads,
    share_weights,
    split_tensors,
    tensor_parallel_size,
)
from accmt.errors import ArgumentError, ModuleContractError, explain
from accmt.huggingface import (
    enable_gradient_checkpointing,
    reject_injected_adapters,
    reject_sharding_quantized_weights,
    reject_training_quantized_weights,
    reject_unsaved_adapters,
    require_library,
    try_quantized_layers,
)
from accmt.libraries import private_names
from accmt.libraries.private_names import (
    allow_graphs,
    buffers_of,
    compile_in_place,
    forget_prepared,
    is_compiled,
    left_out_by_ddp,
    prepare_alone,
)
from accmt.loop.cadence import Cadence, RunLength
from accmt.loop.logging import Logs
from accmt.module import AcceleratorModule
from accmt.optimization import build_optimizer
from accmt.optimization.stepper import Stepper
from accmt.options import HyperParameters, RunningSettings, Settings
from accmt.precision import autocast, hold_in_float32
from accmt.processes import num_data_processes, num_processes, share_batches
from accmt.run import Run
from accmt.setup.module_checks import require_optimizer
from accmt.setup.run_length import make_scheduler
from accmt.sharded_tensors import is_expanded

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.protocols import TrainerProtocol

_MAX_GRAPHS = 256


@dataclass(frozen=True)
class Prepared:
    """What the model, its optimizer and its scheduler became.

    Attributes:
        engine: How the processes work with one model.
        model: The model that reduces gradients over processes.
        unwrapped_model: The user's model itself.
        stepper: Backward, clipping and optimizer.
        scheduler: The scheduler, or None.
    """

    engine: Engine
    model: nn.Module
    unwrapped_model: nn.Module
    stepper: Stepper
    scheduler: Any


def prepare(
    module: AcceleratorModule,
    accelerator: Accelerator,
    settings: Settings,
    cadence: Cadence,
    length: RunLength,
    callbacks: Sequence[object] = (),
) -> Prepared:
    """Build optimizer and scheduler, and wrap the model for the launch.

    Processes: collective.

    Args:
        callbacks: Those of the run, some of which models of PEFT need.
    """
    reject_unsaved_adapters(module.model, (module, *callbacks))
    _make_ready(module.model, accelerator, settings)
    own = module.get_optimizer()
    built = _build_optimizer(module.model, settings, accelerator) if own is None else own
    optimizer = require_optimizer(module, built)
    _require_own_parameters(module, optimizer)
    if accelerator.is_fsdp2 or is_sharded(module.model):
        reject_low_bit_states(optimizer)
    scheduler = make_scheduler(module, optimizer, settings, cadence, length)
    model = _wrap(module.model, optimizer, accelerator)
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    reject_renormalization(unwrapped)
    if is_sharded(unwrapped):
        try_steps_of_shards(optimizer)
    else:
        require_equal_weights(unwrapped)
    settle_buckets(model, set_to_none=settings.optimization.set_to_none)
    summed = partial_gradients(unwrapped)
    stepper = Stepper(
        accelerator,
        optimizer,
        set_to_none=settings.optimization.set_to_none,
        clip=settings.optimization.clip_limit,
        clip_type=settings.optimization.clip_type,
        around_backward=partial(beginning_anew, summed) if summed else None,
    )
    engine = choose_engine(module, accelerator, model, optimizer, set_to_none=settings.optimization.set_to_none)
    return Prepared(engine, model, unwrapped, stepper, scheduler)


def _make_ready(model: nn.Module, accelerator: Accelerator, settings: Settings) -> None:
    """Check what a model is made of, and bring it to where, and into the precision in which, it is trained."""
    _require_trainable(model, accelerator, settings)
    if settings.running.gradient_checkpointing is not False:
        asked = settings.running.gradient_checkpointing
        enable_gradient_checkpointing(model, asked if isinstance(asked, Mapping) else None)
    if not is_sharded(model):
        require_same_tensors(model)  # before anything of a type is exchanged, as in the trial of the optimizer
    _distribute_first(model, accelerator)
    is_in_parts = accelerator.is_fsdp2 or is_sharded(model)
    if accelerator.device_placement and not is_in_parts:
        _move(model, accelerator.device)
    fixed = find_read_only(model) if num_processes() > 1 else {}
    if fixed:
        got = f"{next(iter(fixed))} is in memory that is mapped read-only, and processes exchange weights and buffers"
        do = "copy it: torch.from_numpy(np.array(table)); or train on one process"
        raise ModuleContractError(explain("self.model", got, "memory that can be written", do))
    if accelerator.mixed_precision in ("fp16", "bf16") and not accelerator.is_fsdp2:
        hold_in_float32(model)
    if accelerator.device_placement and not is_in_parts:
        with autocast(accelerator):
            try_quantized_layers(model)
    synchronize_if_asked(model, settings, accelerator.device)
    compile_if_asked(model, settings.running)


def _move(model: nn.Module, device: torch.device) -> None:
    """Bring a model to a device; buffers that are views of one memory stay so, which `nn.Module.to` parts."""
    shared: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    for part in model.modules():
        for name, buffer in buffers_of(part).items():
            if type(buffer) is torch.Tensor and buffer.layout == torch.strided and buffer.numel():
                shared.setdefault(buffer.untyped_storage().data_ptr(), []).append((part, name, buffer))
    model.to(device)
    for places in shared.values():
        owners = {id(buffer): buffer for _, _, buffer in places}
        part, name, first = places[0]
        is_view = len(places) > 1 or is_expanded(first)
        if not is_view or buffers_of(part)[name] is first or any(one.dtype != first.dtype for one in owners.values()):
            continue
        whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).to(device)
        moved = {key: whole.as_strided(one.size(), one.stride(), one.storage_offset()) for key, one in owners.items()}
        for part, name, buffer in places:
            buffers_of(part)[name] = moved[id(buffer)]


def _require_trainable(model: nn.Module, accelerator: Accelerator, settings: Settings) -> None:
    require_library(model)
    reject_injected_adapters(model)
    reject_training_quantized_weights(model)
    if accelerator.is_fsdp2:
        reject_sharding_quantized_weights(model)
    if settings.optimization.auto_micro_batch and must_keep_in_step(model):
        got = "a sharded model: a process without memory cannot leave what it does together with the others"
        do = "leave it out (`tune` uses it too), and take a smaller batch size or gradient_checkpointing=True"
        raise ArgumentError(explain("Trainer(auto_micro_batch=True)", got, "a model that each process has whole", do))


def create_optimizer(model: nn.Module, optim: str | type[torch.optim.Optimizer], **optim_kwargs: Any) -> Any:
    """Return an optimizer as the hyper-parameters would build it, for `get_optimizer` of a module.

    Args:
        model: The model: `self.model`.
        optim: Name, import path or class of the optimizer.
        **optim_kwargs: Its arguments, `groups`, `no_decay` and `layer_decay` among them.

    Raises:
        HyperParameterError: An argument is wrong, or a group does not fit the model.
    """
    hps = HyperParameters(optim=optim, optim_kwargs=optim_kwargs)
    return build_optimizer(hps, model, as_trained=as_shard if must_keep_in_step(model) else torch.clone)


def _build_optimizer(model: nn.Module, settings: Settings, accelerator: Accelerator) -> torch.optim.Optimizer:
    is_in_parts = accelerator.is_fsdp2 or is_sharded(model)
    return build_optimizer(settings.hps, model, as_trained=as_shard if is_in_parts else torch.clone)


def _wrap(own: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> nn.Module:
    """Return the model as it is trained: sharded, or wrapped unless it is a container of what the steps call."""
    model: nn.Module
    if is_sharded(own):  # by a run before, by the program, or by tensor parallelism
        require_known_shards(own)
        return own
    if accelerator.is_fsdp2:
        _require_forward(own)
        shard_model(own, accelerator, optimizer)
        return own
    if is_container(own):
        model = prepare_alone(own, accelerator)
        broadcast_weights(model)
        broadcast_buffers(model)
        return model
    views = {name: buffer for name, buffer in own.named_buffers() if is_expanded(buffer)}  # which nothing can write
    with sending_quantized_weights(own), left_out_by_ddp(own, views) if views else nullcontext():
        model, _ = accelerator.prepare(own, optimizer)
    if isinstance(model, DistributedDataParallel):
        model.__class__ = TransparentWrapper
    return model


def prepare_for_evaluation(module: AcceleratorModule, accelerator: Accelerator, settings: Settings) -> Engine:
    """Make the model ready to be evaluated only: device, compilation and precision are as in training.

    Processes: collective; every process gets the main process's weights, as training would give them.
    """
    model = module.model
    _distribute_first(model, accelerator)
    compile_if_asked(model, settings.running)
    if is_sharded(model):
        require_known_shards(model)
    elif accelerator.is_fsdp2:
        _require_forward(model)
        shard_model(model, accelerator, None)
    else:
        model = prepare_alone(model, accelerator)
        broadcast_weights(model)
    return choose_engine(module, accelerator, model, None)


def _distribute_first(model: nn.Module, accelerator: Accelerator) -> None:
    """Spread what has to be spread before the optimizer is built, so that it has the parameters as they are trained.

    That is a model that is split by tensor parallelism, and sharded where processes are left for that; and a model that
    has no values yet.
    """
    is_empty = is_on_meta(model)
    if num_data_processes() < num_processes():
        _split(model, accelerator)
    if is_empty:
        if accelerator.is_fsdp2 and not is_by_fsdp(model):
            _require_forward(model)
            shard_model(model, accelerator, None)
        fill(model, device_of_shards(accelerator))


def _split(model: nn.Module, accelerator: Accelerator) -> None:
    comes_split, is_empty = is_sharded(model), is_on_meta(model)
    if not comes_split:
        split_tensors(model, accelerator)
    if accelerator.device_placement and not is_empty:
        model.to(accelerator.device)
    if is_by_fsdp(model):
        return
    if comes_split and not is_empty:
        share_weights(model, accelerator)
    if accelerator.is_fsdp2:
        shard_model(model, accelerator, None)


def _require_forward(model: nn.Module) -> None:
    """Reject to shard a container: its parts are called without it, and only its call would make them whole."""
    if is_container(model):
        got = f"a {type(model).__name__} without a forward of its own, sharded by FSDP2"
        do = "give it a forward that calls its parts, or train it without `parallelism`"
        raise ModuleContractError(explain("self.model", got, "a model that is called itself", do))


def compile_if_asked(model: nn.Module, settings: RunningSettings) -> None:
    """Compile a model, or its repeated layers, unless an earlier run did."""
    parts = _find_regions(model) if settings.compiles_regions else [model]
    if settings.compiles and not any(map(is_compiled, parts)):
        if settings.compile_buckets is not None:
            allow_graphs(_MAX_GRAPHS)
        try:
            for part in parts:
                compile_in_place(part, **settings.compile_kwargs)
        except RuntimeError as error:
            expected, do = (
                "a mode and a backend that torch.compile has",
                'compile={"mode": "max-autotune"}, or compile=True',
            )
            where = f"Trainer(compile={dict(settings.compile_kwargs)!r})"
            raise ArgumentError(explain(where, str(error), expected, do)) from error


def _find_regions(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a model repeats, as Accelerate's regional compilation finds them.

    Source: `compile_regions` of Accelerate, which makes a new model of other names.
    """
    from accelerate.utils.other import is_repeated_blocks

    layers = [layer for part in model.modules() if is_repeated_blocks(part) for layer in cast(nn.ModuleList, part)]
    if not layers:
        got, expected = f"a {type(model).__name__} without a ModuleList of equal layers", "layers that repeat"
        where, do = 'Trainer(compile={"regional": True})', "compile=True compiles the whole model"
        raise ArgumentError(explain(where, got, expected, do))
    return layers


def detach_run(run: Run) -> None:
    """Give the module its own model back, and end the processes that load data."""
    for loader in (run.train_loader, *run.val_loaders.values()):
        loader.source.end_workers()
    detach_model(run.module, run.model, run.accelerator)
    if run.accelerator is not run.settings.running.accelerator:  # what a user prepared is not ours to forget
        run.accelerator.free_memory()


def detach_model(module: AcceleratorModule, model: nn.Module, accelerator: Accelerator) -> None:
    """Give the module its own model back, without the wrappers of the run, and let the Accelerator forget it."""
    own = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    forget_prepared(own, model, accelerator)
    restore_batch_norm(own)
    module.model = own


def configure_model(module: Any, accelerator: Accelerator) -> None:
    """Let a module make its model now, unless it has one; whether it is a module at all is checked later.

    What it reads by `from_hf` comes distributed where the run distributes models.

    Processes: all, when they know one another.
    """
    if isinstance(module, AcceleratorModule) and getattr(module, "model", None) is None:
        with building_for(accelerator):
            module.configure_model()


def share_batches_if_split(module: AcceleratorModule, accelerator: Accelerator, settings: Settings) -> None:
    """Let the processes over which tensors of the model are split, or will be, share their batches.

    Raises:
        ArgumentError: Each process has data of its own.
    """
    asked = tensor_parallel_size(accelerator)
    size = ranks_of_batch(module.model, asked)
    share_batches(size)
    if size > 1:
        require_whole_heads(module.model, size)
    if size != asked and accelerator.is_fsdp2 and not is_by_fsdp(module.model):
        got = f"a model that comes split over {size} processes, and FSDP2 over all"
        do = f'Trainer(parallelism={{"tp": {size}}}): the other processes shard'
        raise ArgumentError(explain("Trainer(parallelism=...)", got, "FSDP2 over the others", do))
    if size > 1 and not settings.data.shard_dataloaders:
        got = f"data of its own for each process, {size} of which have to see the same: they hold one model"
        do = "leave shard_dataloaders out: every process passes the same data, which accmt shards"
        raise ArgumentError(explain("Trainer(shard_dataloaders=False)", got, "data that all processes share", do))


def is_prepared(module: AcceleratorModule) -> bool:
    """Return whether a run works with the module's model."""
    model = getattr(module, "model", None)
    return model is not None and private_names.is_prepared(model)


def _require_own_parameters(module: AcceleratorModule, optimizer: Any) -> None:
    own = {id(parameter) for parameter in module.model.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        got = "an optimizer of parameters that are not in self.model: they would be neither reduced nor saved"
        do = "put their modules into self.model, such as an nn.ModuleDict"
        raise ModuleContractError(
            explain(f"{type(module).__name__}.get_optimizer", got, "parameters of self.model", do)
        )


def reject_low_bit_states(optimizer: Any) -> None:
    """Reject optimizers for sharded weights that cannot step them, or whose states of them cannot be stored."""
    for one in getattr(optimizer, "optimizers", [optimizer]):
        library, name = type(one).__module__.partition(".")[0], type(one).__name__
        if library == "bitsandbytes" or (library == "torchao" and not name.startswith("_")):  # those keep whole numbers
            got = f"{name} of {library}, and a model whose weights are shards (FSDP2, tensor parallelism)"
            expected = "an optimizer of torch for shards; or each weight whole, as without FSDP2"
            do = "write `type: AdamW` in `optim`; or launch with `accmt launch --strat ddp`"
            raise ModuleContractError(explain("the optimizer", got, expected, do))


def attach_run(
    trainer: TrainerProtocol, module: AcceleratorModule, accelerator: Accelerator, prepared: Prepared
) -> None:
    """Give the module what it has while it is trained."""
    attach_evaluation(trainer, module, accelerator, prepared.model)
    module.optimizer = prepared.stepper.optimizer
    module.scheduler = prepared.scheduler


def attach_evaluation(
    trainer: TrainerProtocol, module: AcceleratorModule, accelerator: Accelerator, model: nn.Module
) -> None:
    """Give the module what it has whatever is done with it."""
    module.trainer = trainer
    module.state = trainer.state
    module.accelerator = accelerator
    module.device = accelerator.device
    module.model = model
    module.tracker = None
    module.logs = Logs(trainer)
    if module.teacher is not None:
        module.teacher.to(accelerator.device).eval().requires_grad_(requires_grad=False)
        compile_if_asked(module.teacher, trainer.settings.running)
