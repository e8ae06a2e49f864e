"""Prepares the model for training (device, compilation, optimizer, scheduler, wrapper) or evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from accmt.cadence import Cadence, RunLength
from accmt.data import Source
from accmt.data.seeding import seeded_generators
from accmt.engine.accelerator import as_trained
from accmt.engine.base import Engine
from accmt.engine.meta_device import building_for
from accmt.engine.quantized import reject_training_quantized_weights
from accmt.engine.sync_batchnorm import synchronize_if_asked
from accmt.errors import ArgumentError, ModuleContractError, fail
from accmt.huggingface import (
    is_peft_model,
    reject_injected_adapters,
    require_library,
)
from accmt.libraries import private_names
from accmt.libraries.private_names import allow_graphs, compile_in_place, is_compiled
from accmt.loop.logging import Logs
from accmt.messages import say, say_once, warn
from accmt.module import AcceleratorModule, defines
from accmt.optimization import build_optimizer, build_scheduler
from accmt.optimization.stepper import Stepper
from accmt.options import HyperParameters, RunningSettings, Settings
from accmt.options.optimizer_and_scheduler_arguments import standard_rate, weights_of
from accmt.options.optimizer_and_scheduler_names import is_listed, name_of
from accmt.processes import num_data_processes
from accmt.registry import addon
from accmt.run import Run
from accmt.setup.user_methods import call_get_scheduler, require_optimizer, require_scheduler
from accmt.state import Counters

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import Trainer


# ---- The number of optimizer steps, and the learning-rate scheduler for them.


def measure_run(
    settings: Settings,
    cadence: Cadence,
    source: Source,
    micro_batches_per_epoch: int | None,
    samples: int | None,
    counters: Counters,
) -> RunLength:
    """Count the finished steps, the rest of the current epoch, and the following epochs."""

    def steps(epoch: int, micro_batches: int) -> int:
        accumulation = settings.optimization.accumulation_at(epoch) or 1
        return -(-micro_batches // (accumulation * source.micro_batches_per_batch))

    done = counters.global_step + counters.skipped_steps
    max_steps = cadence.max_steps
    if cadence.max_samples is not None and samples is not None:
        # In full batches: the same number in a run that is resumed within an epoch.
        max_steps = min(-(-cadence.max_samples // samples), max_steps or sys.maxsize)
    # Of the settings alone: rebuilt loaders may have another batch size in each epoch.
    basis = [cadence.epochs, cadence.max_steps, cadence.max_samples, settings.samples_per_step(num_data_processes(), 0)]
    if samples is None or micro_batches_per_epoch is None or source.num_micro_batches is None:
        return RunLength(max_steps, None, done, basis, cadence.epochs)
    per_epoch = steps(0, micro_batches_per_epoch)
    num_epochs = cadence.epochs
    if max_steps is not None:
        after_this = max_steps - done - steps(counters.epoch, source.num_micro_batches - counters.train_step)
        needed = counters.epoch + 1 - (-max(0, after_this) // per_epoch)
        if num_epochs is not None:
            needed = min(num_epochs, needed)
        num_epochs = needed
    if cadence.epochs is None:
        return RunLength(max_steps, per_epoch, done, basis, num_epochs)
    to_train = [micro_batches_per_epoch] * (cadence.epochs - counters.epoch)
    if to_train:  # the current epoch may have begun, and may have another length
        to_train[0] = source.num_micro_batches - counters.train_step
    total = done + sum(steps(epoch, micro_batches) for epoch, micro_batches in enumerate(to_train, counters.epoch))
    if max_steps is not None:
        total = min(total, max_steps)
    return RunLength(total, per_epoch, done, basis, num_epochs)


def make_scheduler(
    module: AcceleratorModule, optimizer: torch.optim.Optimizer, settings: Settings, cadence: Cadence, length: RunLength
) -> tuple[Any, bool]:
    """Return the module's scheduler, else that of the hyper-parameters, or None; and whether it is the module's.

    A scheduler that is reset in a resumed run spans the remaining steps.
    """
    total, num_epochs = length.total, length.epochs
    # The new schedule begins at the current step, and spans the remaining ones.
    if total is not None and settings.checkpoints.checkpoint_options.reset_optimizer_on_resume:
        total, num_epochs = max(1, total - length.done), None
    if defines(module, "get_scheduler"):
        epochs = cadence.epochs or 1
        # With `max_steps` alone, the last epoch may end early.
        if not cadence.epochs and total and length.per_epoch:
            epochs = -(-total // length.per_epoch)
        named = {"steps_per_epoch": length.per_epoch or total or 0, "epochs": epochs}
        scheduler = call_get_scheduler(module, optimizer, named)
        if scheduler is not None:
            return require_scheduler(module, scheduler), True
    built = build_scheduler(
        settings.hps, optimizer, total_steps=total, steps_per_epoch=length.per_epoch, num_epochs=num_epochs
    )
    return built, False


_MAX_GRAPHS = 256


@dataclass(frozen=True)
class Prepared:
    """The prepared model, optimizer and scheduler.

    Attributes:
        model: The wrapped model, which reduces gradients over processes.
        unwrapped_model: The user's model.
        stepper: Runs backward, clipping and optimizer steps.
        scheduler: The scheduler, or None.
        set_by_module: The sections of the hyper-parameters that the module decides: "optim", "scheduler".
    """

    model: nn.Module
    unwrapped_model: nn.Module
    stepper: Stepper
    scheduler: Any
    set_by_module: frozenset[str]


def prepare(
    module: AcceleratorModule,
    engine: Engine,
    settings: Settings,
    cadence: Cadence,
    length: RunLength,
    callbacks: Sequence[object] = (),
) -> Prepared:
    """Build optimizer and scheduler, and wrap the model for distributed training.

    Processes: collective.

    Args:
        callbacks: The callbacks of the run: some PEFT models require one.
    """
    # Some initial values (PiSSA by random iteration) change the base model in a way that loading does not repeat.
    if is_peft_model(module.model):
        addon("reject_unsaved_adapters")(module.model)
    # Versions below the supported ones fail later, in private names that they do not have.
    require_library(module.model)
    # The folder of a model with an injected adapter would look like that of a model without one.
    reject_injected_adapters(module.model)
    # Integer weights get no gradient: nothing would be trained.
    reject_training_quantized_weights(module.model)
    engine.require_trainable(settings)
    if settings.running.gradient_checkpointing is not False:
        asked = settings.running.gradient_checkpointing
        addon("enable_gradient_checkpointing")(module.model, asked if isinstance(asked, Mapping) else None)
    # Before the optimizer, which must hold the parameters as they are on the device.
    engine.distribute()
    synchronize_if_asked(module.model, settings, engine.accelerator.device)
    # After the model is on its device: the compiler specializes on it.
    compile_if_asked(module.model, settings.running)
    returned = module.get_optimizer()
    built = returned
    if returned is None:
        built = build_optimizer(settings.hps, module.model, as_trained=as_trained(module.model))
    optimizer = require_optimizer(module, built)
    # A head in another attribute would train on each process by itself, and be in no file.
    if not set(weights_of(optimizer)).issubset(module.model.parameters()):
        got = "an optimizer of parameters that are not in self.model: they would be neither reduced nor saved"
        do = "put their modules into self.model, such as an nn.ModuleDict"
        raise fail(
            ModuleContractError,
            f"{type(module).__name__}.get_optimizer",
            got=got,
            expected="parameters of self.model",
            do=do,
        )
    engine.require_optimizer(optimizer)
    scheduler, has_own_scheduler = make_scheduler(module, optimizer, settings, cadence, length)
    hps = settings.hps
    set_by_module = frozenset(["optim"] * (returned is not None) + ["scheduler"] * has_own_scheduler)
    for part, method in (("optim", "get_optimizer"), ("scheduler", "get_scheduler")):
        # Somebody who changes the YAML wonders why nothing happens.
        if part in set_by_module and hps[part] is not None:
            say_once(f"{type(module).__name__}.{method} takes precedence: `{part}` in the hyper-parameters is not used")
    sets_rates = returned is not None or defines(module, "get_scheduler")
    # `lr: 0` from a sweep ran for hours, and saved the base model as the best one.
    if not sets_rates and trains_nothing(hps, optimizer):
        warn(f"{hps.where('optim', 'lr')} is 0, and no scheduler raises it: the weights will not change")
    has_rate = not {"lr", "max_lr", "base_lr"}.isdisjoint((*hps.optim_kwargs, *hps.scheduler_kwargs))
    # Each optimizer has another default, which nobody has chosen.
    if returned is None and not has_rate and (rate := standard_rate(hps.optimizer_class)) is not None:
        say(f"{hps.where('optim')} has no lr: the learning rate is {name_of(hps.optimizer_class)}'s default, {rate:g}")
    engine.wrap(optimizer, set_to_none=settings.optimization.set_to_none, may_fail=hps.halves_micro_batches)
    stepper = Stepper(
        engine.accelerator,
        optimizer,
        set_to_none=settings.optimization.set_to_none,
        clip=settings.optimization.clip_limit,
        clip_type=settings.optimization.clip_type,
        around_backward=engine.around_backward(),
        norm_of=engine.total_norm,
    )
    return Prepared(engine.model, engine.unwrapped_model, stepper, scheduler, set_by_module)


def trains_nothing(hps: HyperParameters, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether every learning rate is 0 and no scheduler of the hyper-parameters raises it."""
    # A schedule from another package may start at 0 and raise the rate in a way that no argument shows.
    if hps.scheduler_class is not None and not is_listed(hps.scheduler_class):
        return False  # a custom scheduler may set any rate
    has_peak = any(map(hps.scheduler_kwargs.get, ("max_lr", "base_lr", "eta_min", "min_lr")))
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    return not has_peak and all(rate == 0 for rate in rates)


def create_optimizer(model: nn.Module, optim: str | type[torch.optim.Optimizer], **optim_kwargs: Any) -> Any:
    """Return an optimizer as built from hyper-parameters, for use in a module's `get_optimizer`.

    Args:
        model: The model: `self.model`.
        optim: The optimizer's name, import path or class.
        **optim_kwargs: Its arguments, including `groups`, `no_decay` and `layer_decay`.

    Raises:
        HyperParameterError: An argument is invalid, or a group does not match the model.
    """
    hps = HyperParameters(optim=optim, optim_kwargs=optim_kwargs)
    return build_optimizer(hps, model, as_trained=as_trained(model))


def prepare_for_evaluation(engine: Engine, settings: Settings) -> None:
    """Prepare the model for evaluation only, with the device, compilation and precision of training.

    Processes: collective; all processes get the main process's weights, as in training.
    """
    engine.spread()
    compile_if_asked(engine.unwrapped_model, settings.running)
    engine.wrap_for_evaluation()


def compile_if_asked(model: nn.Module, settings: RunningSettings) -> None:
    """Compile a model or its repeated layers, if requested and not already done."""
    parts = _find_regions(model) if settings.compiles_regions else [model]
    # A second fit with the same module would compile the compiled model again.
    if settings.compiles and not any(map(is_compiled, parts)):
        if settings.compile_buckets is not None:
            allow_graphs(_MAX_GRAPHS)
        try:
            for part in parts:
                compile_in_place(part, **settings.compile_kwargs)
        except RuntimeError as error:
            expected = "a mode and a backend that torch.compile has"
            do = 'compile={"mode": "max-autotune"}, or compile=True'
            where = f"Trainer(compile={dict(settings.compile_kwargs)!r})"
            raise fail(ArgumentError, where, got=str(error), expected=expected, do=do) from error


def _find_regions(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, as in Accelerate's regional compilation.

    Source: `compile_regions` of Accelerate, which returns a new model with other names.
    """
    from accelerate.utils.other import is_repeated_blocks

    layers: list[nn.Module] = []
    for part in model.modules():
        if is_repeated_blocks(part):
            layers += cast(nn.ModuleList, part)
    # Compiling nothing would look like success.
    if not layers:
        got, expected = f"a {type(model).__name__} without a ModuleList of equal layers", "layers that repeat"
        where, do = 'Trainer(compile={"regional": True})', "compile=True compiles the whole model"
        raise fail(ArgumentError, where, got=got, expected=expected, do=do)
    return layers


def detach_run(run: Run) -> None:
    """Restore the module's own model, and end the loader workers."""
    for loader in (run.train_loader, *run.val_loaders.values()):
        loader.source.end_workers()
    run.engine.detach()
    if run.accelerator is not run.settings.running.accelerator:  # keep what the user prepared
        run.accelerator.free_memory()


def configure_model(module: Any, accelerator: Accelerator, *, seed: int | None = None) -> None:
    """Call the module's `configure_model`, unless it has a model; invalid modules are reported later.

    Models loaded by `from_hf` are sharded if the run shards models.

    Processes: all, once the process group exists.

    Args:
        module: The module.
        accelerator: The run's accelerator.
        seed: The seed of weights that are drawn, so that a run with the same seed begins with the same ones; None
            leaves the generators alone.
    """
    if isinstance(module, AcceleratorModule) and getattr(module, "model", None) is None:
        with building_for(accelerator), nullcontext() if seed is None else seeded_generators(seed):
            module.configure_model()


def is_prepared(module: AcceleratorModule) -> bool:
    """Return whether a run uses the module's model."""
    model = getattr(module, "model", None)
    return model is not None and private_names.is_prepared(model)


def attach_run(trainer: Trainer, module: AcceleratorModule, accelerator: Accelerator, prepared: Prepared) -> None:
    """Set the attributes that a module has during training."""
    attach_evaluation(trainer, module, accelerator, prepared.model)
    module.optimizer = prepared.stepper.optimizer
    module.scheduler = prepared.scheduler


def attach_evaluation(trainer: Trainer, module: AcceleratorModule, accelerator: Accelerator, model: nn.Module) -> None:
    """Set the attributes that a module has in training and evaluation."""
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
