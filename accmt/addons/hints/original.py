"""Names of the original accmt: where they are, or what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn

from accmt.addons.recursive_collators import COLLATORS
from accmt.data import set_seed
from accmt.engine.accelerator import current_accelerator
from accmt.errors import UnknownArgumentError, combine, explain, fail, nearest

_PREPARE = "with self.accelerator.split_between_processes(rows) as part: ..."
_IS_INSTALLED = 'importlib.util.find_spec("{package}") is not None'
_EVALUATE = 'Trainer(evaluate_every_n_steps="never"), and run `accmt evaluate RUN --watch` in another process'
_SEED = "trainer.settings.running.seed"

HOMES: Mapping[str, str] = {
    "DataCollatorForLongestSequence": "accmt.data",
    "HyperParameterSearch": "accmt.addons.hyper_parameter_search",
    **dict.fromkeys(("RecursiveCollator", *COLLATORS), "accmt.addons.recursive_collators"),
}
"""Names of the package that exist, and their modules."""

NAMES: Mapping[str, str] = {
    "DataCollatorForWholeWordMask": "accmt.RecursiveCollator(collator) with collator ="
    " transformers.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True), which needs samples of one length:"
    ' tokenizer(text, padding="max_length", return_offsets_mapping=True)',
    "Evaluator": "trainer.test(module, data), or trainer.validate(module, data)",
    "autocast": 'Trainer(mixed_precision="bf16"), which runs steps under autocast',
    "autocast_": 'Trainer(mixed_precision="bf16"), which runs steps under autocast',
    "precision": "torch.get_autocast_dtype(self.device.type) in a step",
    "tqdm": "tqdm.auto.tqdm(rows, disable=not trainer.is_main)",
}
"""Names of the package, and what to write."""

UTILITIES: Mapping[str, str] = {
    "ASYNC": _EVALUATE,
    "ASYNC_HASH": _EVALUATE,
    "ASYNC_TRAIN_GROUP": _EVALUATE,
    "DEBUG_MODE": "trainer.settings.running.fast_dev_run",
    "DEBUG_TIMINGS": 'Trainer(profiler="simple")',
    "DIST_HASH": "trainer.run.name",
    "DebugTimings": 'Trainer(profiler="simple")',
    "IS_CPU": "not torch.accelerator.is_available()",
    "IS_GPU": "torch.accelerator.is_available()",
    "LAST_PROCESS": "accmt.on_last_process(function)()",
    "MASTER_PROCESS": "trainer.is_main",
    "RANK": "self.accelerator.process_index",
    "SEED": _SEED,
    "WORLD_SIZE": "self.accelerator.num_processes",
    "_breakpoint": "accmt.dist_breakpoint(0)",
    "all_gather_dictionary": "accelerate.utils.gather_object([tensors])",
    "clear_device_cache": "torch.accelerator.empty_cache()",
    "combine_dicts": "{**first, **second}",
    "divide_into_batches": "list(accmt.iterbatch(rows, 8))",
    "divide_list": "numpy.array_split(rows, 4)",
    "drop_duplicates": "tensor[mask.bool()]",
    "filter_kwargs": "{name: kwargs[name] for name in kwargs.keys() & inspect.signature(function).parameters}",
    "gather": "self.accelerator.gather(tensor)",
    "gather_and_drop_duplicates": "accmt.gather_on_cpu(tensor), which has no duplicates",
    "gather_into_single_process": "accmt.gather_on_cpu(tensor)",
    "gather_object": "accelerate.utils.gather_object([value])",
    "get_array_partition": "numpy.array_split(rows, 4)[0]",
    "get_number_and_unit": 'accmt.options.units.read_every("name", "3 epochs", ("epoch", "step"))',
    "get_seed": _SEED,
    "get_time_prefix": 'time.strftime("[%Y-%m-%d %H:%M:%S]")',
    "global_randint": "random.Random(self.state.global_step).randint(0, 9), which is the same on all processes",
    "is_deepspeed_available": _IS_INSTALLED.format(package="deepspeed"),
    "is_pandas_available": _IS_INSTALLED.format(package="pandas"),
    "is_tf32_supported": "torch.cuda.is_tf32_supported()",
    "is_transformers_available": _IS_INSTALLED.format(package="transformers"),
    "is_url": "urllib.parse.urlparse(text).scheme",
    "pad": "self.pad(tensor, 0, max_length=8)",
    "prepare": _PREPARE,
    "prepare_array": _PREPARE,
    "prepare_dataframe": _PREPARE,
    "print_gpu_users_by_device": 'subprocess.run("nvidia-smi")',
    "rprint": "accmt.on_main_process(print)(text)",
}
"""Names of the package's `utils`, and what to write."""

_HISTORY = "accmt.read_history(trainer.log_dir)"
_OF_STATE = {
    "best_metric": "state.best",
    "best_model_checkpoint": "Trainer(model_path=...): the folder of the best model",
    "is_last_validation_batch": "def on_evaluation_end(self, metrics)",
    "log_history": _HISTORY,
    "num_checkpoints_made": "self.num_checkpoints += 1 in def on_save_checkpoint(self, folder)",
    "training_loss": _HISTORY,
    "train_dataloader_idx": "state.global_step, at which the stages of accmt.StepsCurriculum begin",
}
_CALLBACKS = "Trainer(callbacks=[...])"
_FOLDERS = "leave it out: the run's folder, trainer.log_dir, has the metrics and the state"
_OF_TRAINER = {
    "accelerator": "trainer.run.module.accelerator",
    "add_callback": _CALLBACKS,
    "args": "trainer.settings, or trainer.hps",
    "create_model_card": "leave it out: each model folder has a model card, README.md",
    "eval_dataset": "trainer.val_dataloaders",
    "get_eval_dataloader": "trainer.val_dataloaders",
    "get_train_dataloader": "trainer.train_dataloader",
    "hyperparameter_search": "accmt.HyperParameterSearch",
    "is_local_process_zero": "accmt.on_local_main_process(function)()",
    "is_world_process_zero": "trainer.is_main",
    "log": 'module.log("name", value)',
    "log_metrics": "leave it out: `fit` and `validate` print their results",
    "lr_scheduler": "trainer.run.module.scheduler",
    "optimizer": "trainer.run.module.optimizer",
    "pop_callback": _CALLBACKS,
    "processing_class": "trainer.run.module.processor",
    "push_to_hub": 'Trainer(callbacks=accmt.PushToHub("user/name"))',
    "remove_callback": _CALLBACKS,
    "save_metrics": _FOLDERS,
    "save_state": _FOLDERS,
    "train": "trainer.fit(module, train_dataset, val_dataset), and Trainer(resume=True) to resume",
    "train_dataset": "trainer.train_dataloader",
}
_OF_LIGHTNING = {
    "checkpoint_callback": "trainer.state.best for the best values; the best model is in model_path",
    "datamodule": "callbacks=[MyCallback(datamodule)]",
    "global_rank": "self.module.accelerator.process_index in a callback",
    "is_global_zero": "trainer.is_main",
    "lightning_module": "self.module in a callback",
    "max_epochs": "trainer.hps.epochs",
    "max_steps": "trainer.hps.max_steps",
    "optimizers": "self.module.optimizer in a callback",
    "world_size": "trainer.state.num_processes",
}
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {"TrainingState": _OF_STATE, "Trainer": _OF_TRAINER | _OF_LIGHTNING}
"""Attributes by class, and what to write."""

METRIC_KEYWORDS: Mapping[str, str] = {
    "cast": "leave `cast` out, and write predictions.float() in `compute`: predictions keep their dtype",
    "do_checks": "leave `do_checks` out: shapes are always checked, once per evaluation",
}
"""Keywords of `Metric`, and what to do."""

_LONG = (
    'leave `{name}` out: long sequences fit with gradient_checkpointing=True and parallelism={{"fsdp": True}},'
    " and `max_tokens` bounds a micro-batch"
)
_PARALLELISM = {
    "sp": _LONG.format(name="sp"),
    "cp": _LONG.format(name="cp"),
    "ep": 'leave `ep` out: parallelism={"fsdp": True} shards experts like other weights',
}


def find_name(name: str) -> Any:
    """Return what a name of the original stands for.

    Raises:
        ImportError: It does not exist; the message has the line to write.
        AttributeError: The original has no such name either.
    """
    if name == "accelerator":
        return current_accelerator()
    if name == "seed_everything":
        return set_seed
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    do = NAMES.get(name) or UTILITIES.get(name)
    if do is None:
        message = f"module 'accmt' has no attribute {name!r}"
        raise AttributeError(message, name=name)
    raise ImportError(_describe(f"accmt.{name}", "a name of accmt", do), name="accmt")


def find_in_module(name: str) -> Any:
    """Return a name from one of the original's modules, such as `accmt.hp_search`: here, all are names of the package.

    Raises:
        ImportError, AttributeError: As `find_name`.
    """
    import accmt

    return getattr(accmt, name) if name in accmt.__all__ else find_name(name)


def find_former_attribute(owner: object, name: str) -> Any:
    """Return what an attribute of another trainer or its state stands for.

    Raises:
        AttributeError: It does not exist; if another trainer has it, the message has the line to write.
    """
    for kind in type(owner).__mro__:
        if name in FORMER.get(kind.__name__, {}):
            return FORMER[kind.__name__][name](owner)
        do = ATTRIBUTES.get(kind.__name__, {}).get(name)
        if do is not None:
            where, expected = f"{kind.__name__}.{name}", f"an attribute of {kind.__name__}"
            do = do if do.startswith("leave ") else f"write {do}"
            message = explain(where, "an attribute of another trainer", expected, do)
            raise AttributeError(message, name=name, obj=owner)
    return object.__getattribute__(owner, name)  # also if a property raised an AttributeError: that error again


def group_by_set(metrics: Mapping[str, float], loss: str = "val_loss") -> dict[str, dict[str, float]]:
    """Return metrics by the key of their validation set, with the original's names.

    Args:
        metrics: Results of an evaluation, by name; those of a single validation set get the key "0".
        loss: The name of the loss, which the original calls "valid_loss".
    """
    by_set: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        metric, _, key = name.partition("__")
        by_set.setdefault(key or "0", {})["valid_loss" if metric == loss else metric] = value
    return by_set


def _evaluating(function: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Return `trainer.test` or `trainer.validate` with the original's arguments, which always write the results."""

    def evaluate(
        module: Any,
        dataset: Any,
        results_output: str | None = "results.json",
        verbose: bool = True,  # noqa: FBT001, FBT002 - the original's signature is positional
    ) -> dict[str, float]:
        return function(module, dataset, verbose=verbose, results_output=results_output)

    return evaluate


FORMER: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "TrainingState": {
        "additional_metrics": lambda state: group_by_set(state.metrics),
        "is_end_of_epoch": lambda state: state.is_last_training_batch,
    },
    "Trainer": {
        "evaluate_on_test": lambda trainer: _evaluating(trainer.test),
        "evaluate_on_validation": lambda trainer: _evaluating(trainer.validate),
        "log_artifact": lambda trainer: trainer.run.module.log_artifact,
        "log_artifacts": lambda trainer: trainer.run.module.log_artifacts,
    },
}
"""Attributes by class that exist under another name, and what returns their value."""


def reject_metric_keywords(kind: str, name: str, unknown: Mapping[str, Any]) -> NoReturn:
    """Reject keywords that a metric does not have.

    Raises:
        UnknownArgumentError: Always.
    """
    known = ("greater_is_better", "comparator", "main_metric")
    errors = []
    for keyword in unknown:
        do = METRIC_KEYWORDS.get(keyword) or f"did you mean {nearest(keyword, known, cutoff=0)}?"
        where, expected = f"{kind}({name!r}, {keyword}=...)", f"a keyword of Metric: {', '.join(known)}"
        errors.append(fail(UnknownArgumentError, where, got="an unknown keyword", expected=expected, do=do))
    raise combine(UnknownArgumentError, errors)


def find_option(kind: str, name: str) -> str | None:
    """Return what to do about an unknown entry of options, or None."""
    return _PARALLELISM.get(name) if kind == "ParallelismOptions" else None


def _describe(where: str, expected: str, do: str) -> str:
    return explain(where, "a name of the original accmt", expected, f"write {do}")
