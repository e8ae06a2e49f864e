"""Finds by name what the core does not import: add-ons of accmt, and what other packages add.

A package adds something by an entry point in its `pyproject.toml`, and users name it as they name what is built in:

    [project.entry-points."accmt.trackers"]
    notebook_server = "my_package.tracker:NotebookServer"

    Trainer(log_with="notebook_server", ...)

A group is one extension point. Entry points are read only where a name is not built in, and loaded only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

MONITORED_VALUES = "accmt.monitored_values"

EXTENSION_POINTS = (
    "accmt.optimizers",
    "accmt.schedulers",
    "accmt.metrics",
    MONITORED_VALUES,
    "accmt.trackers",
    "accmt.checkpointers",
    "accmt.engines",
    "accmt.precisions",
    "accmt.window_makers",
)
"""The groups in which other packages add something: docs/contributing.md."""

_ADDONS = "accmt.addons"

FIT_VARIABLE = "ACCMT_FIT"
"""Names an add-on that runs in place of `Trainer.fit`, in a program that a command of accmt starts."""

ARGUMENTS_VARIABLE = "ACCMT_ARGUMENTS"
"""Names an add-on that changes the arguments of a Trainer when it is created, in such a program."""

PROGRAM_VARIABLE = "ACCMT_PROGRAM"
"""The command that started a program, if it is one of accmt, for the resume hint."""

ADDED_FEATURES = "accmt.features"

HPS_SECTIONS = "accmt.hps_sections"
"""Sections of the hyper-parameters for add-ons: functions that return what the section says, and its errors."""

_BUILT_IN: dict[str, dict[str, str]] = {
    _ADDONS: {
        "adapt_callback": "accmt.addons.transformers_callback:adapt_callback",
        "adalora_ranks": "accmt.addons.peft_adapters:find_adalora_ranks",
        "add_flags": "accmt.addons.command_line:add_flags",
        "as_module": "accmt.addons.models_in_fit:as_module",
        "averages_of_weights": "accmt.addons.averaged_weights:Averages",
        "replicas": "accmt.addons.replicas:Replicas",
        "averages": "accmt.addons.averages:Averages",
        "begin_fork": "accmt.addons.fork.beginning:begin_fork",
        "debug_arguments": "accmt.addons.debug_levels:change_arguments",
        "deliveries": "accmt.addons.trackers.deliveries:Deliveries",
        "describe_trackers": "accmt.addons.trackers.spec:describe_trackers",
        "describe_start": "accmt.addons.start_line:describe_start",
        "build_grouped_optimizer": "accmt.addons.parameter_groups:build_grouped_optimizer",
        "separate_states": "accmt.addons.chained_states:separate_states",
        "build_watch": "accmt.addons.watch:build_watch",
        "build_with_adapter": "accmt.addons.peft_adapters:build_with_adapter",
        "check_stage": "accmt.checks:check_stage",
        "reporting_failed_setup": "accmt.checks:reporting_failed_setup",
        "check_fork": "accmt.addons.fork.argument:check_fork",
        "check_keywords": "accmt.addons.hints.keywords:check_keywords",
        "check_resume": "accmt.addons.resume_check:check_resume",
        "copy_missing": "accmt.addons.several_disks:copy_missing",
        "datamodule": "accmt.addons.datamodule:DataModule",
        "function_module": "accmt.addons.made_modules:FunctionModule",
        "module_from_hf": "accmt.addons.made_modules:from_hf",
        "module_from_hps": "accmt.addons.made_modules:from_hps",
        "enable_gradient_checkpointing": "accmt.addons.pretrained:enable_gradient_checkpointing",
        "load_pretrained_weights": "accmt.addons.pretrained:load_pretrained_weights",
        "evaluate_alone": "accmt.addons.standalone_evaluation:evaluate_alone",
        "predict_alone": "accmt.addons.standalone_evaluation:predict_alone",
        "manual_optimization": "accmt.addons.manual_optimization:ManualOptimization",
        "stream_source": "accmt.addons.streams:StreamSource",
        "user_loader_source": "accmt.addons.streams:UserLoaderSource",
        "evaluate": "accmt.addons.evaluate_beside.evaluations:evaluate_fit",
        "evaluation_metric": "accmt.addons.evaluate_metrics:EvaluationMetric",
        "find_attribute": "accmt.addons.hints.methods:find_attribute",
        "find_disks": "accmt.addons.separate_disks:find_disks",
        "find_former_attribute": "accmt.addons.hints.original:find_former_attribute",
        "find_name": "accmt.addons.hints.original:find_name",
        "find_newest_on_disks": "accmt.addons.several_disks:find_newest_on_disks",
        "find_trackers": "accmt.addons.trackers.spec:find_specs",
        "fork": "accmt.addons.fork.program:fork_fit",
        "fork_arguments": "accmt.addons.fork.program:change_arguments",
        "group_dataset": "accmt.addons.token_batches.lengths:group_dataset",
        "group_stream": "accmt.addons.token_batches.lengths:group_stream",
        "hint_for_argument": "accmt.addons.hints.arguments:find_foreign",
        "hint_for_callback": "accmt.addons.hints.table:find_callback",
        "hint_for_component": "accmt.addons.hints.components:find_component",
        "hint_for_hook": "accmt.addons.hints.methods:find_foreign_hook",
        "hint_for_key": "accmt.addons.hints.arguments:advise_key",
        "hint_for_log": "accmt.addons.hints.methods:find_log_keyword",
        "hint_for_precision": "accmt.addons.hints.table:find_precision",
        "hint_for_replaced": "accmt.addons.hints.arguments:find_replaced",
        "hint_for_option": "accmt.addons.hints.original:find_option",
        "reject_replacing_best": "accmt.addons.best_model_folder:reject_replacing_best",
        "reject_metric_keywords": "accmt.addons.hints.original:reject_metric_keywords",
        "read_parallelism": "accmt.addons.parallelism_argument:read_parallelism",
        "hints_for_parameters": "accmt.addons.hints.methods:find_parameters",
        "in_units": "accmt.addons.same_bits.engine:in_units",
        "load_adapters": "accmt.addons.peft_adapters:load_adapters",
        "make_largest_batch": "accmt.addons.largest_batch:make_largest_batch",
        "media_log": "accmt.addons.media:MediaLog",
        "mix_sources": "accmt.addons.mix.sources:mix_sources",
        "monitor": "accmt.addons.monitor:build_monitor",
        "notebook_curve": "accmt.addons.notebook:NotebookView",
        "other_hook_names": "accmt.addons.hints.other_names:HOOK_NAMES",
        "overlay_flags": "accmt.addons.hps_flags:overlay",
        "printing_resume_hint": "accmt.addons.resume_hint:printing_resume_hint",
        "profiler": "accmt.addons.profilers:build_profiler",
        "prove": "accmt.addons.prove:prove",
        "read_arguments": "accmt.addons.training_arguments:read_arguments",
        "read_base_name": "accmt.addons.peft_adapters:read_base_name",
        "read_config": "accmt.addons.command_line:read_config",
        "read_grouping": "accmt.addons.parameter_groups:read_grouping",
        "read_in_parts": "accmt.addons.reading_in_parts:read_in_parts",
        "read_source": "accmt.addons.training_arguments:read_source",
        "reject_foreign_methods": "accmt.addons.hints.methods:reject_foreign_methods",
        "reject_misspelt_methods": "accmt.addons.hints.methods:reject_misspelt_methods",
        "reject_stream": "accmt.addons.readers.shards:reject_stream",
        "reject_unsaved_adapters": "accmt.addons.peft_adapters:reject_unsaved_adapters",
        "reject_without_evaluations": "accmt.addons.evaluate_beside.settings:reject_without_evaluations",
        "replay": "accmt.addons.flight_recorder.replay:replay_fit",
        "replay_run": "accmt.addons.flight_recorder.replay:replay",
        "resolve_trackers": "accmt.addons.trackers.spec:resolve_trackers",
        "save_adapters": "accmt.addons.peft_adapters:save_adapters",
        "split_tensors": "accmt.addons.tensor_parallel:split_tensors",
        "spread_reader": "accmt.addons.several_disks:SpreadReader",
        "sweep_arguments": "accmt.addons.sweep.trial:trial_arguments",
        "sweep_fit": "accmt.addons.sweep.trial:fit_trial",
        "take_typed": "accmt.addons.command_line:take_typed",
        "tensor_parallel": "accmt.addons.tensor_parallel:Split",
        "text_function": "accmt.addons.text_metrics:load_text_function",
        "token_batches": "accmt.addons.token_batches.batcher:find_token_batcher",
        "torch_metric": "accmt.addons.torch_metrics:TorchMetric",
        "try_quantized_layers": "accmt.addons.quantized_layers:try_quantized_layers",
        "tune": "accmt.addons.tuning:tune",
        "write_card": "accmt.addons.model_card:write_card",
        "window_function": "accmt.addons.window_function:ByFunction",
        "without_bad_samples": "accmt.addons.bad_samples:without_bad_samples",
    },
    ADDED_FEATURES: {
        "missing_gradients": "accmt.addons.missing_gradients:MissingGradients",
        "quantized_weights": "accmt.addons.quantized_weights:QuantizedWeights",
        "bad_samples": "accmt.addons.bad_samples:BadSampleCounts",
        "packing_check": "accmt.addons.packing_check:PackingCheck",
        "own_loss": "accmt.addons.own_loss:OwnLoss",
        "batch_notes": "accmt.addons.batch_notes:BatchNotes",
        "crash_loop": "accmt.addons.crash_loop:CrashLoop",
        "changed_data": "accmt.addons.changed_data:ChangedData",
        "launches": "accmt.addons.launches:LaunchRecord",
        "fork_point": "accmt.addons.fork.beginning:ForkPoint",
        "flight_recorder": "accmt.addons.flight_recorder.recorder:Recorder",
        "examiner": "accmt.addons.flight_recorder.examiner:Examiner",
        "generation": "accmt.addons.generation:Generation",
        "tasks": "accmt.addons.benchmark_tasks:BenchmarkTasks",
        "timed_checkpoints": "accmt.addons.goodput.pace:TimedCheckpoints",  # acts on what the next one has measured
        "goodput": "accmt.addons.goodput.recorder:GoodputRecorder",
        "same_bits": "accmt.addons.same_bits.feature:SameBits",
        "sources": "accmt.addons.mix.feature:SourceLosses",
        "window_sums": "accmt.addons.prefer.window_sums:WindowSums",  # reads ahead, after others have measured
        "remote_models": "accmt.addons.remote_models:RemoteModels",  # a model is published before its checkpoint
        "remote_checkpoints": "accmt.addons.remote_checkpoints:RemoteCheckpoints",
    },
    HPS_SECTIONS: {
        "evaluation": "accmt.addons.generation:read_evaluation_section",
        "model": "accmt.addons.model_from_hps:read_model_section",
        "sft": "accmt.addons.sft.section:read_sft_section",
        "prefer": "accmt.addons.prefer.section:read_prefer_section",
        "data": "accmt.addons.mix.section:read_data_section",
    },
    "accmt.metrics": {
        "accuracy": "accmt.metrics.accuracy:Accuracy",
        "auroc": "accmt.addons.prediction_metrics:AUROC",
        "cer": "accmt.addons.text_metrics:CER",
        "chrf": "accmt.addons.text_metrics:ChrF",
        "exact_match": "accmt.addons.text_metrics:ExactMatch",
        "f1": "accmt.addons.prediction_metrics:F1",
        "mae": "accmt.addons.prediction_metrics:MAE",
        "mse": "accmt.addons.prediction_metrics:MSE",
        "perplexity": "accmt.addons.prediction_metrics:Perplexity",
        "precision": "accmt.addons.prediction_metrics:Precision",
        "r2": "accmt.addons.prediction_metrics:R2",
        "recall": "accmt.addons.prediction_metrics:Recall",
        "rmse": "accmt.addons.prediction_metrics:RMSE",
        "rouge": "accmt.addons.text_metrics:Rouge",
        "sacrebleu": "accmt.addons.text_metrics:SacreBLEU",
        "wer": "accmt.addons.text_metrics:WER",
    },
    "accmt.trackers": {
        "tensorboard": "accmt.addons.trackers.tensorboard:TensorBoard",
        "mlflow": "accmt.addons.trackers.mlflow:MLFlow",
        "wandb": "accmt.addons.trackers.wandb:WandB",
        "comet_ml": "accmt.addons.trackers.comet_ml:CometML",
        "aim": "accmt.addons.trackers.aim:Aim",
        "clearml": "accmt.addons.trackers.clearml:ClearML",
        "dvclive": "accmt.addons.trackers.dvclive:DVCLive",
        "trackio": "accmt.addons.trackers.trackio:Trackio",
        "swanlab": "accmt.addons.trackers.swanlab:SwanLab",
    },
}


ONLY_WITH: dict[str, tuple[str, ...]] = {
    "bad_samples": ("skips_bad_samples",),
    "crash_loop": ("checkpoint_every",),
    "flight_recorder": ("ledger",),
    "examiner": ("ledger",),
    "generation": ("evaluation",),
    "tasks": ("evaluation",),
    "timed_checkpoints": ("checkpoint_every",),
    "remote_checkpoints": ("checkpoint", "resume"),
    "remote_models": ("model_url",),
    "same_bits": ("same_bits",),
    "sources": ("data",),
    "fork_point": ("fork",),
}
"""The settings, or sections of the hyper-parameters, without which a feature of an add-on does nothing, so that it is
not imported."""


def addon(name: str) -> Any:
    """Return an add-on of accmt that the core uses where a user asks for it."""
    return find(_ADDONS, name)


def find(group: str, name: str) -> Any:
    """Return what a name stands for in a group.

    Args:
        group: An extension point, such as "accmt.trackers".
        name: The name of something built in, or of an entry point that an installed package has in this group.

    Raises:
        KeyError: Nothing has this name there; `names(group)` are those that exist.
    """
    if name in (built_in := _BUILT_IN.get(group, {})):
        module, _, attribute = built_in[name].partition(":")
        return getattr(import_module(module), attribute)
    from importlib.metadata import entry_points  # only here: it reads the metadata of all installed packages

    for entry_point in entry_points(group=group, name=name):
        return entry_point.load()
    raise KeyError(name)


def names(group: str) -> list[str]:
    """Return the names of a group: first what is built in, then what installed packages add."""
    from importlib.metadata import entry_points

    added = [entry_point.name for entry_point in entry_points(group=group)]
    return list(dict.fromkeys([*_BUILT_IN.get(group, ()), *added]))


def added_features(is_set: Callable[[str], bool]) -> list[Any]:
    """Return the features of add-ons that a run may use, in the order in which they are listed.

    Args:
        is_set: Returns whether a setting is set.
    """
    listed = _BUILT_IN[ADDED_FEATURES]
    # Importing an add-on that does nothing in this run would only take time.
    used = [name for name in listed if name not in ONLY_WITH or any(map(is_set, ONLY_WITH[name]))]
    return [find(ADDED_FEATURES, name) for name in used]


def is_built_in(group: str, name: str) -> bool:
    """Return whether a name is accmt's own, or an add-on's of accmt."""
    return name in _BUILT_IN.get(group, {})


class FormerNames:
    """Base class of objects with attributes that have another name in the original accmt."""

    if not TYPE_CHECKING:  # where every name would exist

        def __getattr__(self, name: str) -> Any:
            """Return what the name stands for, or raise an error with the line to write, or the usual one."""
            return addon("find_former_attribute")(self, name)
