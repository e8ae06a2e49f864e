"""Migration hints for methods that other trainers call on a module, but accmt does not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from accmt.addons import module_tools
from accmt.callbacks.callback import HOOKS
from accmt.errors import ModuleContractError, combine, explain, fail, nearest
from accmt.module import AcceleratorModule, defines
from accmt.registry import addon

_OPTIMIZER_AND_SCHEDULER = "def get_optimizer(self): return optimizer, and get_scheduler for its scheduler"
_EVALUATION = "def validation_step(self, batch), and on_evaluation_end(self, metrics) for code after the evaluation"

FOREIGN_METHODS: Mapping[str, Mapping[str, str]] = {
    "LightningModule": {
        "backward": "def do_backward(self, loss) in a subclass of Trainer, or derive from ExtendedAcceleratorModule",
        "clip_gradients": "Trainer(clip_grad=1.0)",
        "configure_callbacks": "def get_callbacks(self): return [callback]",
        "configure_gradient_clipping": "Trainer(clip_grad=1.0)",
        "configure_optimizers": "def get_optimizer(self): return torch.optim.AdamW(self.model.parameters(), lr=1e-3),"
        " and def get_scheduler(self, optimizer, steps_per_epoch, epochs) for its scheduler; or `optim` and `scheduler`"
        " in the hyper-parameters; a scheduler that Lightning stepped once per epoch (its default) also needs"
        " `step_scheduler_per_epoch: true` in the hyper-parameters",
        "configure_sharded_model": "def __init__(self): self.model = MyNetwork()",
        "lr_scheduler_step": "def get_scheduler(self, optimizer, steps_per_epoch, epochs): return scheduler, which is"
        " stepped after each optimizer step; once per epoch with `step_scheduler_per_epoch: true`",
        "on_after_batch_transfer": "the same at the beginning of training_step and validation_step",
        "on_before_batch_transfer": "the same in collate_fn",
        "on_load_checkpoint": "def load_state_dict(self, state)",
        "on_predict_batch_end": "the same in predict_step",
        "on_predict_batch_start": "the same in predict_step",
        "on_predict_end": "the same after trainer.predict(module, data)",
        "on_predict_epoch_end": "the same with what trainer.predict(module, data) returns",
        "on_predict_epoch_start": "the same before trainer.predict(module, data)",
        "on_predict_model_eval": "the same in predict_step",
        "on_predict_start": "the same before trainer.predict(module, data)",
        "on_test_batch_end": "def on_after_validation_step(self, batch, outputs), which is called by `test`, too",
        "on_test_batch_start": "def on_before_validation_step(self, batch), which is called by `test`, too",
        "on_test_end": "def on_evaluation_end(self, metrics), which is called by `test`, too",
        "on_test_epoch_end": "def on_evaluation_end(self, metrics), which is called by `test`, too",
        "on_test_epoch_start": "def on_evaluation_start(self), which is called by `test`, too",
        "on_test_model_eval": "def on_evaluation_start(self), which is called by `test`, too",
        "on_test_model_train": "def on_evaluation_end(self, metrics), which is called by `test`, too",
        "on_test_start": "def on_evaluation_start(self), which is called by `test`, too",
        "on_validation_model_eval": "def on_evaluation_start(self)",
        "on_validation_model_train": "def on_evaluation_end(self, metrics)",
        "on_validation_model_zero_grad": "def on_evaluation_start(self)",
        "optimizer_step": "def do_opt_step(self) in a subclass of Trainer; or on_before_optimizer_step,"
        " on_after_optimizer_step in the module",
        "optimizer_zero_grad": "def do_zero_grad(self) in a subclass of Trainer",
        "predict_dataloader": "def get_predict_dataloader(self): return data",
        "prepare_data": "trainer.fit(module, datamodule=data), which keeps this method",
        "setup": "def on_fit_start(self); or trainer.fit(module, datamodule=data), which keeps this method",
        "teardown": "def on_fit_end(self); or trainer.fit(module, datamodule=data), which keeps this method",
        "test_dataloader": "def get_test_dataloader(self): return data",
        "test_epoch_end": "def on_evaluation_end(self, metrics); accmt.OutputCollector gathers outputs of steps",
        "test_step_end": "the same at the end of test_step",
        "train": "def on_epoch_start(self), such as self.model.encoder.eval()",
        "train_dataloader": "def get_train_dataloader(self): return data",
        "training_epoch_end": "def on_epoch_end(self); accmt.OutputCollector gathers outputs of steps",
        "training_step_end": "the same at the end of training_step",
        "transfer_batch_to_device": 'Trainer(data_options={"device_placement": False}), and move the batch yourself',
        "val_dataloader": "def get_validation_dataloader(self): return data",
        "validation_epoch_end": "def on_evaluation_end(self, metrics); accmt.OutputCollector gathers outputs of steps",
        "validation_step_end": "the same at the end of validation_step",
    },
    "transformers' Trainer": {
        "_get_eval_sampler": 'Trainer(sampler={"val": sampler})',
        "_get_train_sampler": "Trainer(sampler=sampler)",
        "_prepare_inputs": "the same at the beginning of training_step and validation_step",
        "_save": "def on_save_model(self, folder)",
        "_save_checkpoint": "def on_save_checkpoint(self, folder)",
        "autocast_smart_context_manager": 'Trainer(mixed_precision="bf16")',
        "compute_loss": "def training_step(self, batch): return loss, and validation_step (or step for both)",
        "compute_loss_context_manager": 'Trainer(mixed_precision="bf16")',
        "compute_metrics": 'Trainer(metrics=["accuracy", "f1"]), or a custom accmt.Metric',
        "create_model_card": "def on_save_model(self, folder)",
        "create_optimizer": "def get_optimizer(self): return optimizer",
        "create_optimizer_and_scheduler": _OPTIMIZER_AND_SCHEDULER,
        "create_scheduler": "def get_scheduler(self, optimizer, steps_per_epoch, epochs): return scheduler",
        "evaluate": _EVALUATION,
        "evaluation_loop": _EVALUATION,
        "get_batch_samples": "def get_train_dataloader(self): return data",
        "get_decay_parameter_names": "def get_optimizer(self): return optimizer, with a group for each weight_decay",
        "get_eval_dataloader": "def get_validation_dataloader(self): return data",
        "get_optimizer_cls_and_kwargs": "def get_optimizer(self): return optimizer",
        "log": "def on_log(self, values, step)",
        "on_init_end": "the same in __init__, or def on_fit_start(self)",
        "on_predict": "the same with what trainer.predict(module, data) returns",
        "on_push_begin": "def on_save_model(self, folder)",
        "on_save": "def on_save_checkpoint(self, folder), or on_save_model",
        "on_step_begin": "def on_before_training_step(self, batch), which is called for each batch",
        "on_substep_end": "def on_after_training_step(self, batch, outputs), which is called for each batch",
        "predict": "def predict_step(self, batch)",
        "prediction_loop": _EVALUATION,
        "prediction_step": 'def validation_step(self, batch): return {"loss": loss, "f1": (predictions, labels)};'
        " predict_step for trainer.predict",
        "preprocess_logits_for_metrics": "the same in validation_step, which returns the inputs of metrics",
        "save_model": "def on_save_model(self, folder)",
    },
    "the original accmt": {
        "compile": 'Trainer(compile={"mode": "default"}); self.teacher = torch.compile(teacher) in __init__',
    },
    "PyMarlin's ModuleInterface": {
        "get_optimizers_schedulers": _OPTIMIZER_AND_SCHEDULER,
        "get_test_dataloaders": "def get_test_dataloader(self): return data",
        "get_val_dataloaders": "def get_validation_dataloader(self): return data",
        "val_step": "def validation_step(self, batch): return loss",
    },
}
"""Methods by trainer, and what to write instead."""

_MANUAL = ", in a class derived from ExtendedAcceleratorModule"

FOREIGN_ATTRIBUTES: Mapping[str, str] = {
    "additional_backward": f"self.backward(loss){_MANUAL}",
    "additional_optimizer_step": f"self.step_optimizer(optimizer){_MANUAL}",
    "additional_optimizer_zero_grad": f"self.zero_grad(){_MANUAL}",
    "additional_scheduler_step": f"self.step_scheduler(scheduler){_MANUAL}",
    "args": "self.trainer.settings",
    "clip_gradients": "Trainer(clip_grad=1.0)",
    "compile": 'Trainer(compile={"mode": "default"})',
    "current_epoch": "self.state.epoch",
    "eval": "self.model.eval()",
    "global_rank": "self.accelerator.process_index",
    "global_step": "self.state.global_step",
    "hparams": "self.lr = lr in __init__ for each of its arguments; self.trainer.hps has the hyper-parameters",
    "load_temp_state": 'Trainer(resume="folder")',
    "local_rank": "self.accelerator.local_process_index",
    "logger": "self.tracker, or self.trainer.logger",
    "lr_schedulers": "self.scheduler, or self.schedulers() in a class derived from ExtendedAcceleratorModule",
    "manual_backward": "self.backward(loss), in a class derived from ExtendedAcceleratorModule",
    "named_parameters": "self.model.named_parameters()",
    "optimizers": "self.optimizer, or self.optimizers() in a class derived from ExtendedAcceleratorModule",
    "parameters": "self.model.parameters()",
    "print": "print if self.trainer.is_main",
    "register": 'self.model = torch.nn.ModuleDict({"first": first, "second": second}), and def get_optimizer(self):'
    " return accmt.ChainedOptimizer([optimizer, second_optimizer])",
    "reset_optimizer": "self.trainer.reset_optimizer()",
    "save_hyperparameters": "leave it out: hps.yaml and trainer_config.json are saved with the model; for values of"
    " self.hparams, write self.lr = lr",
    "untoggle_optimizer": "with self.toggled_optimizer(optimizer), in a class derived from ExtendedAcceleratorModule",
    "toggle_optimizer": "with self.toggled_optimizer(optimizer), in a class derived from ExtendedAcceleratorModule",
    "save_temp_state": 'self.trainer.save_checkpoint("folder")',
    "train": "self.model.train()",
}
"""Attributes of a LightningModule or of transformers' Trainer, and the accmt equivalent."""

ONLY_WITH: Mapping[str, str] = {
    "evaluate": "ignore_keys",
    "log": "logs",
    "predict": "ignore_keys",
    "save_model": "output_dir",
    "setup": "stage",
    "teardown": "stage",
    "train": "mode",
}
"""Common names: they are treated as another trainer's method only if they also have its parameter."""


def find_foreign_method(name: str) -> tuple[str, str] | None:
    """Return which trainer has a method and what to write in accmt, or None for an unknown name."""
    for owner, methods in FOREIGN_METHODS.items():
        if name in methods:
            here = methods[name]
            return owner, f"do {here}" if here.startswith("the same ") else f"write {here}"
    return None


def find_attribute(module: object, name: str) -> Any:
    """Return a tool of the original accmt's modules, such as `pad`.

    Raises:
        AttributeError: There is no such attribute; the message has the line to write, if it exists elsewhere.
    """
    if name in module_tools.NAMES:
        return getattr(module_tools, name)
    do = FOREIGN_ATTRIBUTES.get(name)
    if do is None:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}", name=name, obj=module)
    got, expected = "an attribute of another trainer's module", "an attribute of an AcceleratorModule"
    message = explain(f"self.{name}", got, expected, do if do.startswith("leave ") else f"write {do}")
    raise AttributeError(message, name=name, obj=module)


def reject_foreign_methods(module: Any, callbacks: Any = None) -> None:
    """Reject methods that only other trainers call: here they would silently be ignored.

    Raises:
        ModuleContractError: The module or a callback has some.
    """
    name = type(module).__name__
    expected = "methods of an AcceleratorModule, or others that its own methods call"
    errors = [] if callbacks is None else list(_find_setup(callbacks))
    for method, owner, do in find_unused_foreign_methods(type(module)):
        got, do = f"a method of {owner}, which accmt never calls", f"{do}; or rename it, if it is called elsewhere"
        errors.append(fail(ModuleContractError, f"{name}.{method}", got=got, expected=expected, do=do))
    if errors:
        raise combine(ModuleContractError, errors)
    if getattr(module, "automatic_optimization", True) is False and not module.uses_manual_optimization:
        where, got = f"{name}.automatic_optimization", "False, which has no effect"
        do = "derive from ExtendedAcceleratorModule, and call self.backward(loss), self.step() and self.zero_grad()"
        raise fail(
            ModuleContractError, where, got=got, expected="an ExtendedAcceleratorModule, which steps manually", do=do
        )


_OF_CALLBACKS = {
    "setup": "write def on_fit_start(self), which is called after the optimizer is created; call module.freeze()"
    " and what else get_optimizer depends on before fit",
    "teardown": "write def on_fit_end(self)",
}


def _find_setup(callbacks: Any) -> Iterator[ModuleContractError]:
    """Yield errors about methods of Lightning's callbacks that are not named like hooks."""
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        for method, _, _ in find_unused_foreign_methods(type(callback)):
            if method in _OF_CALLBACKS:
                where, got = f"{type(callback).__name__}.{method}", "a method that only Lightning calls"
                yield fail(ModuleContractError, where, got=got, expected="hooks of accmt", do=_OF_CALLBACKS[method])


_CONTRACT = tuple(
    name
    for name in vars(AcceleratorModule)
    if callable(getattr(AcceleratorModule, name)) or name.startswith("collate_fn")
)


def reject_misspelt_methods(module: AcceleratorModule) -> None:
    """Reject methods that are nearly called like one of an `AcceleratorModule`: they would silently be ignored.

    Raises:
        ModuleContractError: The module has one, and not the method itself.
    """
    names = {name for kind in type(module).__mro__ if kind not in AcceleratorModule.__mro__ for name in vars(kind)}
    for name in sorted(names - set(dir(AcceleratorModule))):
        meant = nearest(name, _CONTRACT, cutoff=0.9)
        if meant and not name.startswith("_") and not defines(module, meant):
            got, do = f"a method {name}, but no {meant}", f"rename it to {meant} (or to a less similar name)"
            raise fail(
                ModuleContractError, type(module).__name__, got=got, expected="methods of an AcceleratorModule", do=do
            )


_LIBRARIES = frozenset({"accmt", "builtins", "lightning", "pytorch_lightning", "torch", "transformers"})


def find_unused_foreign_methods(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, trainer and hint for each method of another trainer that a module's class does not call itself."""
    of_user = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in _LIBRARIES]
    every = [(name, value) for base in of_user for name, value in sorted(vars(base).items())]
    for name, value in every:
        foreign = find_foreign_method(name)
        if foreign is None:
            continue
        function = _unwrap(value)
        is_used = any(name in _names_in(other) for method, other in every if method != name)
        if not isinstance(function, FunctionType) or is_used:
            continue
        if name not in ONLY_WITH or ONLY_WITH[name] in inspect.signature(function).parameters:
            yield name, *foreign


def _names_in(value: Any) -> Iterator[str]:
    function = _unwrap(value)
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _unwrap(value: Any) -> Any:
    """Return the function behind a method, a property or a decorator that uses `functools.wraps`."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return inspect.unwrap(value.fget if isinstance(value, property) and value.fget else value)


_LOG_KEYWORDS: Mapping[str, str] = {
    "add_dataloader_idx": "remove it: with several validation sets, the set's name is added automatically",
    "batch_size": 'return {"loss": loss, "weight": weight}, or define get_batch_size',
    "enable_graph": "remove it: graphs are never kept",
    "metric_attribute": "remove it: pass metrics to the Trainer, Trainer(metrics=[...])",
    "on_epoch": "remove it: Trainer(log_every=-1) writes one row per epoch",
    "on_step": "remove it: Trainer(log_every=10) sets the interval of rows, and instant=True writes one now",
    "rank_zero_only": "remove it: a value may be logged on some processes only",
    "reduce_fx": 'write reduction="sum", or remove it for the mean',
    "sync_dist": "remove it: values are averaged over all processes",
    "sync_dist_group": "remove it: values are averaged over all processes",
}


def find_log_keyword(keyword: str) -> str | None:
    """Return what to do with a keyword of Lightning's `log`, or None."""
    return _LOG_KEYWORDS.get(keyword)


def find_foreign_hook(name: str) -> tuple[str, str] | None:
    """Return what a method that is named like a hook is elsewhere, and what to write; None for an unknown name."""
    hook = addon("other_hook_names").get(name)
    if hook is not None:
        keywords = ", ".join(("self", *HOOKS[hook]))
        do = f"def {hook}({keywords}); or also derive from accmt.compat.OtherHookNames, which accepts it"
        return "a name that other trainers use for a hook", do
    foreign = find_foreign_method(name)
    return foreign and (f"a hook of {foreign[0]}, which does not exist here", foreign[1])


_PARAMETERS: Mapping[str, str] = {
    "args": "self.trainer.settings",
    "batch_idx": "self.state.batch_idx",
    "checkpoint": "what `def state_dict(self)` returns and `def load_state_dict(self, state)` restores",
    "control": "self.trainer.should_stop",
    "dataloader_idx": "the `key` of on_validation_start",
    "pl_module": "self.module",
    "state": "self.state",
    "trainer": "self.trainer",
}
"""Parameters that other trainers pass to hooks, and the accmt equivalent."""


def find_parameters(names: Iterable[str]) -> list[str]:
    """Return where to find what other trainers pass to hooks under these names."""
    return [f"{name} is {_PARAMETERS[name]}" for name in sorted(names) if name in _PARAMETERS]
