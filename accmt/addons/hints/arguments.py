"""What other trainers call things, and what to write here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from accmt.addons.hints.fine_tuning import OF_AXOLOTL, OF_TRL
from accmt.addons.hints.joint import advise_joint
from accmt.addons.hints.values import advise_value
from accmt.options.failures import Failures

FOREIGN: Mapping[str, Mapping[str, str]] = {
    "Lightning's Trainer": {
        "accumulate_grad_batches": "Trainer(grad_accumulation_steps=4)",
        "auto_lr_find": "trainer.tune(module, data, lr=True)",
        "auto_scale_batch_size": 'trainer.tune(module, data, batch_size="power")',
        "barebones": "leave it out: what nobody asked for costs nothing",
        "check_val_every_n_epoch": 'Trainer(evaluate_every_n_steps="2 epochs")',
        "checkpoint_callback": "Trainer(checkpoint_every=None)",
        "ckpt_path": 'Trainer(resume="out/checkpoint-model/step-00000100")',
        "default_root_dir": 'Trainer(model_path="out/model", logging_dir="logs")',
        "devices": "accmt launch -N 2 train.py",
        "early_stop_callback": "Trainer(patience=3)",
        "gpus": "accmt launch -N 2 train.py",
        "gradient_clip_algorithm": 'Trainer(clip_grad={"value": 0.5})',
        "gradient_clip_val": "Trainer(clip_grad=1.0)",
        "log_every_n_steps": "Trainer(log_every=50)",
        "logger": "Trainer(log_with=accmt.TensorBoard)",
        "max_epochs": "epochs: 3",
        "num_nodes": "accelerate launch --num_machines 2 --machine_rank 0 --main_process_ip 10.0.0.1 train.py",
        "num_processes": "accmt launch -N 2 train.py",
        "precision": 'Trainer(mixed_precision="bf16")',
        "plugins": 'Trainer(accelerator={"kwargs_handlers": [handler]})',
        "replace_sampler_ddp": "Trainer(shard_dataloaders=False)",
        "strategy": "accmt launch --strat ddp train.py",
        "tpu_cores": "there is no TPU in this version",
        "track_grad_norm": 'Trainer(monitor=["grad_norm"])',
        "use_distributed_sampler": "Trainer(shard_dataloaders=False)",
        "val_check_interval": "Trainer(evaluate_every_n_steps=0.25)",
    },
    "transformers' TrainingArguments": {
        "adam_beta1": "optim: {type: AdamW, lr: 1e-4, betas: [0.9, 0.999]}",
        "adam_beta2": "optim: {type: AdamW, lr: 1e-4, betas: [0.9, 0.999]}",
        "adam_epsilon": "optim: {type: AdamW, lr: 1e-4, eps: 1e-8}",
        "auto_find_batch_size": "Trainer(auto_micro_batch=True)",
        "average_tokens_across_devices": "leave it out: every token of all processes counts the same",
        "bf16": 'Trainer(mixed_precision="bf16")',
        "data_seed": "Trainer(seed=0)",
        "ddp_broadcast_buffers": "leave it out: it is torch's default",
        "ddp_bucket_cap_mb": 'Trainer(ddp_kwargs={"bucket_cap_mb": 25})',
        "ddp_find_unused_parameters": 'Trainer(ddp_kwargs={"find_unused_parameters": True})',
        "ddp_static_graph": 'Trainer(ddp_kwargs={"static_graph": True})',
        "ddp_timeout": 'Trainer(accelerator={"kwargs_handlers": [handler]})',
        "deepspeed": 'Trainer(parallelism={"fsdp": True})',
        "disable_tqdm": "Trainer(enable_progress_bar=False)",
        "do_eval": "leave it out: what is called says it, trainer.fit, trainer.validate or trainer.predict",
        "do_predict": "leave it out: what is called says it, trainer.fit, trainer.validate or trainer.predict",
        "do_train": "leave it out: what is called says it, trainer.fit, trainer.validate or trainer.predict",
        "eval_accumulation_steps": 'Trainer(metric_options={"gather_chunk_size": "32MB"})',
        "eval_on_start": "Trainer(eval_when_start=True)",
        "eval_steps": "Trainer(evaluate_every_n_steps=500)",
        "eval_strategy": "Trainer(evaluate_every_n_steps=500)",
        "evaluation_strategy": "Trainer(evaluate_every_n_steps=500)",
        "fp16": 'Trainer(mixed_precision="fp16")',
        "fsdp": 'Trainer(parallelism={"fsdp": True})',
        "full_determinism": 'Trainer(seed=0, torch_flags={"deterministic": True})',
        "gradient_accumulation_steps": "Trainer(grad_accumulation_steps=4)",
        "gradient_checkpointing_kwargs": 'Trainer(gradient_checkpointing={"use_reentrant": False})',
        "greater_is_better": 'Trainer(model_saving="best_f1", metrics=["f1"])',
        "hub_model_id": 'Trainer(callbacks=accmt.PushToHub("user/name"))',
        "hub_strategy": 'Trainer(callbacks=accmt.PushToHub("user/name"))',
        "hub_token": 'Trainer(callbacks=accmt.PushToHub("user/name"))',
        "label_smoothing_factor": "torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)",
        "learning_rate": "optim: {type: AdamW, lr: 1e-4}",
        "load_best_model_at_end": 'Trainer(model_saving="best_f1", metrics=["f1"])',
        "logging_steps": "Trainer(log_every=10)",
        "logging_strategy": "Trainer(log_every=10)",
        "lr_scheduler_kwargs": "scheduler: {type: CosineWithWarmup, num_cycles: 2}",
        "lr_scheduler_type": "scheduler: {type: LinearWithWarmup, warmup_ratio: 0.1}",
        "max_grad_norm": "Trainer(clip_grad=1.0)",
        "metric_for_best_model": 'Trainer(model_saving="best_f1", metrics=["f1"])',
        "neftune_noise_alpha": "model.get_input_embeddings().register_forward_hook(hook)",
        "no_cuda": 'Trainer(accelerator={"cpu": True})',
        "num_train_epochs": "epochs: 3",
        "optim_args": "optim: {type: AdamW, lr: 1e-4, betas: [0.9, 0.95]}",
        "output_dir": 'Trainer(model_path="out/model")',
        "overwrite_output_dir": "Trainer(max_previous_runs=0)",
        "per_device_eval_batch_size": "batch_size: [16, 32]",
        "per_device_train_batch_size": "batch_size: 16",
        "push_to_hub": 'Trainer(callbacks=accmt.PushToHub("user/name"))',
        "remove_unused_columns": 'dataset.select_columns(["input_ids", "attention_mask", "labels"])',
        "report_to": "Trainer(log_with=accmt.TensorBoard)",
        "resume_from_checkpoint": "Trainer(resume=True)",
        "save_safetensors": "Trainer(safe_serialization=True)",
        "save_steps": 'Trainer(checkpoint_every="500 steps")',
        "save_strategy": 'Trainer(checkpoint_every="500 steps")',
        "save_total_limit": "Trainer(max_checkpoints=2)",
        "tf32": "accmt.allow_tf32()",
        "train_sampling_strategy": "Trainer(group_by_length=True)",
        "torch_compile": "Trainer(compile=True)",
        "torch_compile_backend": 'Trainer(compile={"backend": "inductor"})',
        "torch_compile_mode": 'Trainer(compile={"mode": "max-autotune"})',
        "torch_empty_cache_steps": "torch.cuda.empty_cache() in on_update_end",
        "use_cpu": 'Trainer(accelerator={"cpu": True})',
        "warmup_ratio": "scheduler: {type: LinearWithWarmup, warmup_ratio: 0.1}",
        "warmup_steps": "scheduler: {type: LinearWithWarmup, num_warmup_steps: 100}",
        "weight_decay": "optim: {type: AdamW, lr: 1e-4, weight_decay: 0.01, no_decay: [bias, norm]}",
    },
    "transformers' Trainer": {
        "args": 'Trainer(model_path="out/model"), and its other values as arguments and hyper-parameters',
        "compute_loss_func": "def training_step(self, batch): return loss",
        "compute_metrics": 'Trainer(metrics=["accuracy", "f1"])',
        "data_collator": "Trainer(collate_fn=collator)",
        "eval_dataset": "trainer.fit(module, train_dataset, val_dataset)",
        "model": 'trainer.fit((path, "AutoModelForCausalLM"), train_dataset, val_dataset)  # or self.model of a module',
        "model_init": "def __init__(self): self.model = MyNetwork()",
        "optimizers": "def get_optimizer(self): return optimizer, and get_scheduler for its scheduler",
        "preprocess_logits_for_metrics": 'def validation_step(self, batch): return {"f1": (predictions, labels)}',
        "processing_class": "module.processor = tokenizer",
        "tokenizer": "module.processor = tokenizer",
        "train_dataset": "trainer.fit(module, train_dataset, val_dataset)",
    },
    "TRL's SFTTrainer": OF_TRL,
    "axolotl's YAML": OF_AXOLOTL,
    "other trainers": {
        "early_stopping": "Trainer(patience=3)",
    },
    "an optimizer": {
        "lr": "optim: {type: AdamW, lr: 1e-4}",
        "momentum": "optim: {type: SGD, lr: 1e-2, momentum: 0.9}",
    },
}
"""By where it is an argument: each name, and the line of the hyper-parameters, the program or the shell to write."""


_SET_BY_ITSELF = ("disable_tqdm", "optim")
"""What `TrainingArguments` set without being told, or what is the same here."""

_OTHER_DEFAULTS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "learning_rate",
    "lr_scheduler_type",
    "max_grad_norm",
    "num_train_epochs",
    "weight_decay",
)
"""What has another default here, or none."""

EXAMPLE = object()
"""Stands for a value that is not known: the advice is the line of the table."""


JOINED: Mapping[str, tuple[str, str]] = {
    **{f"limit_{stage}_batches": ("limit_batches", stage) for stage in ("train", "val", "test", "predict")},
    "consolidate_metrics": ("metric_options", "means"),
    "additional_metric_consolidation": ("metric_options", "further"),
    "report_all_metrics": ("metric_options", "report_all"),
    "gather_chunk_size": ("metric_options", "gather_chunk_size"),
    **{name: ("failures", name) for name in (field.name for field in fields(Failures))},
    **{name: ("torch_flags", name) for name in ("deterministic", "benchmark", "detect_anomaly")},
    "tracker_offline": ("tracker_delivery", "offline"),
    "tracker_flush_s": ("tracker_delivery", "flush_s"),
}
"""What is an argument of its own elsewhere, and an entry of one here."""

REPLACED: Mapping[str, Callable[[Any], str]] = {
    "hooks": lambda value: "callbacks=[...]",
    "clip_grad_type": lambda value: f"clip_grad={{{value!r}: 0.5}}",
    "compile_kwargs": lambda value: f"compile={value!r}",
    "enable_checkpointing": lambda value: "checkpoint_every=" + ('"epoch"' if value else "None"),
    "evaluate_every_n_epochs": lambda value: f'evaluate_every_n_steps="{value} epochs"',
    "min_epochs": lambda value: f'min_length="{value} epochs"',
    "min_steps": lambda value: f'min_length="{value} steps"',
}
"""What has no name of its own here, and the line to write."""


def find_foreign(
    name: str, value: Any = EXAMPLE, beside: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, str] | None:
    """Return where a name is an argument and what to do here, or None for a name that nobody else has.

    Args:
        name: The name.
        value: Its value, which is then in the line to write.
        beside: What else was written there, which may belong into the same line.
    """
    for owner, names in FOREIGN.items():
        if name in names:
            if name == "args" and is_dataclass(value):
                return owner, _write_each(value)
            advice = None if value is EXAMPLE else advise_joint(name, beside) or advise_value(name, value)
            return owner, _write(advice or names[name])
    return None


def _write_each(arguments: Any) -> str:
    """Return what to do about each value of an object such as `TrainingArguments` that is not the default here."""
    changed = {}
    for field in fields(arguments):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(arguments, field.name)
        is_off = value is None or (value is False and not default)
        is_default = value == default and field.name not in _OTHER_DEFAULTS
        if not (is_off or is_default or field.name in _SET_BY_ITSELF):
            changed[field.name] = value
    beside = {**changed, "optim": getattr(arguments, "optim", None)}
    advice = {name: advise_key(name, beside) for name in changed}
    lines = [f"{name}: {do.partition(': `')[0]}" for name, do in advice.items() if do and not do.startswith("leave ")]
    return "write what stands in it as arguments and hyper-parameters:" + "".join(f"\n    {line}" for line in lines)


def find_replaced(name: str, value: Any) -> str | None:
    """Return the line to write for a name that is an entry of another argument here, or that another one replaces."""
    if name in JOINED:
        argument, key = JOINED[name]
        return f'write Trainer({argument}={{"{key}": {value!r}}})'
    return f"write Trainer({REPLACED[name](value)})" if name in REPLACED else None


def _write(here: str) -> str:
    if re.match(r"\w+: ", here):
        return f"write `{here}` in the hyper-parameters"
    if here.startswith(("after fit ", "leave ", "there is ")):
        return here
    is_command = " launch " in here or here.startswith("python ")
    return f"start the program with `{here}`" if is_command else f"write {here}"


def advise_key(key: str, values: Mapping[str, Any]) -> str | None:
    """Return what to do about a key of the hyper-parameters that is something else, or None if nobody knows it.

    Args:
        key: The key.
        values: What was written there, and beside it.
    """
    from accmt.options.settings import Settings

    value = values[key]
    foreign = find_foreign(key, value, values)
    if foreign is not None:
        owner, do = foreign
        return f"{do}: `{key}` is an argument of {owner}"
    if key in ("model_path", *Settings.defaults()):
        return f"write Trainer({key}={value!r}): `{key}` is an argument of the Trainer"
    return None
