"""Arguments of other trainers and their accmt equivalents: one row per name.

A row is the line to write, and after " | " the reason to write nothing if the argument is off: None, False, 0 or
empty. The value replaces the example in angle brackets. A line that starts with the name of a section and "+" is part
of that section of the hyper-parameters: several arguments of one section make one line.

If the line depends on the value, a row is a dict of values and lines, the first of which is the example (None is
treated as False), or a tuple of an example and a function, which returns None for a value without an equivalent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from accmt.addons.hints.components import SCHEDULERS
from accmt.options.checks import is_number

Row: TypeAlias = str | Mapping[Any, str] | tuple[str, Callable[[Any], str | None]]

_FSDP = 'Trainer(parallelism={"fsdp": True})'
_DEEPSPEED = f"FSDP2, which shards as ZeRO does: {_FSDP}"
_HANDLER = 'Trainer(accelerator={"kwargs_handlers": [handler]})'
_TRACKERS = {
    "aim": "Aim",
    "clearml": "ClearML",
    "comet": "CometML",
    "dvclive": "DVCLive",
    "mlflow": "MLFlow",
    "dagshub": "MLFlow",
    "swanlab": "SwanLab",
    "tensorboard": "TensorBoard",
    "trackio": "Trackio",
    "wandb": "WandB",
}
PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("16", "16-mixed", "float16", "half"), 'mixed_precision="fp16"'),
    **dict.fromkeys(("bf16-mixed", "bfloat16"), 'mixed_precision="bf16"'),
    **dict.fromkeys(("float32", "fp32", "full"), 'mixed_precision="no"'),
    **dict.fromkeys(("32", "32-true"), "leave it out: the default precision is 32 bits"),
    **dict.fromkeys(
        ("64", "64-true", "double", "float64", "fp64"), "model.double() before fit: mixed_precision has no 64 bits"
    ),
    **dict.fromkeys(("fp8", "transformer-engine"), 'mixed_precision="bf16": this version does not support fp8'),
    "16-true": "model.half() before fit: mixed_precision keeps the weights in 32 bits",
    "bf16-true": "model.bfloat16() before fit: mixed_precision keeps the weights in 32 bits",
}
"""Precisions of other trainers, including torch's dtypes, and the accmt equivalent."""


def find_precision(value: Any) -> str | None:
    """Return the hint for a precision of another trainer, or None."""
    return PRECISIONS.get(str(value).removeprefix("torch."))


def _precision(value: Any) -> str | None:
    name = str(value).removeprefix("torch.")
    do = f'mixed_precision="{name}"' if name in ("no", "fp16", "bf16") else find_precision(value)
    return f"Trainer({do})" if do and do.startswith("mixed_precision=") else do


def _trackers(value: Any) -> str | None:
    """Return the trackers for names such as "wandb" and for instances of classes such as WandbLogger."""
    listed = value if isinstance(value, list | tuple) else [value]
    if value is True or value == "all":
        return "Trainer(log_with=accmt.TensorBoard)"
    if not listed or value in (None, False, "none"):
        return "leave it out: no tracker is used without log_with"
    names = [(item if isinstance(item, str) else type(item).__name__).lower() for item in listed]
    found = [f"accmt.{name}" for text in names for word, name in _TRACKERS.items() if word in text]
    if not found:
        if any("csv" in text for text in names):
            return "leave it out: every run writes history.jsonl"
        is_named = all(isinstance(item, str) for item in listed)
        return (
            f"there is no tracker {', '.join(names)}; for another: Trainer(log_with=accmt.MLFlow)" if is_named else None
        )
    missing = [name for name in names if not any(word in name for word in _TRACKERS)]
    remark = f"  # there is no tracker {', '.join(missing)}" if missing else ""
    return f"Trainer(log_with={found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'}){remark}"


def _accumulation(value: Any) -> str | None:
    if value in (None, 1):
        return "leave it out: gradients are not accumulated by default"
    is_count = is_number(value) and value > 1
    return f"Trainer(grad_accumulation_steps={value!r})" if is_count or isinstance(value, dict) and value else None


def _devices(value: Any) -> str | None:
    if isinstance(value, bool | float | dict):
        return None
    number = int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
    if number in (0, [], ()):
        return 'Trainer(accelerator={"cpu": True})'
    if number in (None, "auto", -1):
        return "accmt launch train.py"
    if is_number(number):
        return f"accmt launch -N {number} train.py" if number > 1 else "python train.py"
    listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).strip(",")
    return f"accmt launch --gpus {listed} train.py" if listed.replace(",", "").isdigit() else None


def _strategy(value: Any) -> str | None:
    text = str(value).lower()
    if not isinstance(value, str | None):
        return None
    if value is None or text == "auto":
        return "leave it out: several processes use DDP by default"
    if "fsdp" in text:
        return _FSDP
    if "deepspeed" in text:
        return _DEEPSPEED
    if any(engine in text for engine in ("xla", "tpu", "megatron")):
        return f"there is no {text} in this version; for DDP: `accmt launch --strat ddp train.py`"
    if "find_unused_parameters_true" in text:
        return 'Trainer(parallelism={"ddp": {"find_unused_parameters": True}})'
    return "accmt launch --strat ddp train.py"


def _epochs(value: Any) -> str | None:
    if value is None or (is_number(value) and value <= 0):
        return "leave it out, and write `max_steps: 1000` in the hyper-parameters"
    if not is_number(value):
        return None
    is_whole = int(value) == value
    return f"epochs: {int(value)}" if is_whole else f"epochs: {int(value) + 1}  # and max_steps for {value} epochs"


def _interval(value: Any) -> str | None:
    """Return the hint for an evaluation interval: a float is a fraction of an epoch."""
    if value is None or (isinstance(value, float) and value == 1):
        return "leave it out: evaluation runs after every epoch"
    return f"Trainer(evaluate_every_n_steps={value!r})" if is_number(value) and value > 0 else None


def _scheduler(value: Any) -> str | None:
    own = SCHEDULERS.get(value) if isinstance(value, str) else None
    return own and f"scheduler + type: {own}{', warmup_ratio: 0.1' if 'armup' in own else ''}"


def _best(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    name = value.removeprefix("eval_")
    if name == "loss":
        return 'Trainer(model_saving="best_valid_loss")'
    return f'Trainer(model_saving="best_{name}", metrics=["{name}"])'


def _resume(value: Any) -> str | None:
    if value in (None, False):
        return "leave it out: a run starts from the beginning unless you set resume"
    return f"Trainer(resume={value!r})" if value is True or isinstance(value, str) else None


def _adapter(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return f"model + {'quantization: nf4, ' if value == 'qlora' else ''}lora.targets: all-linear"


def _datasets(value: Any) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    path = first.get("path") if isinstance(first, Mapping) else first
    return f"sft + data: {path}" if isinstance(path, str) and path else None


_BY_ITSELF = "leave it out: call trainer.fit, trainer.validate or trainer.predict"
_DDP = "torch's default is used"
_EACH_EPOCH = "evaluation runs after every epoch"
_EVALUATION: Row = {
    "steps": "Trainer(evaluate_every_n_steps=500)",
    "epoch": f"leave it out: {_EACH_EPOCH}",
    "no": "leave the validation data out of trainer.fit(module, train_dataset)",
}
_PRECISION = "the launcher sets the precision, unless you set mixed_precision"
_UPLOAD = 'Trainer(callbacks=accmt.PushToHub("user/name")) | nothing is uploaded by default'
_ON_CPU = 'Trainer(accelerator={"cpu": True}) | the launcher selects the device'
_SAMPLER: Row = {
    False: 'Trainer(data_options={"shard": False})',
    True: "leave it out: samples are distributed over the processes by default",
}
_CLIP = "gradients are not clipped by default"
_LOG = "log_every=-1 logs one row per epoch"
_LENGTH = "sft + max_length: <1024> | rows are not truncated by default"
_BEST = 'Trainer(model_saving="best_f1", metrics=["f1"])'
_FIT = "trainer.fit(module, train_dataset, val_dataset)"

FOREIGN: Mapping[str, Mapping[str, Row]] = {
    "Lightning's Trainer": {
        "accumulate_grad_batches": ("Trainer(grad_accumulation_steps=4)", _accumulation),
        "auto_lr_find": "trainer.tune(module, data, lr=True) | the learning rate is set in the hyper-parameters",
        "auto_scale_batch_size": {
            "power": 'trainer.tune(module, data, batch_size="power")',
            True: 'trainer.tune(module, data, batch_size="power")',
            "binsearch": 'trainer.tune(module, data, batch_size="binsearch")',
            False: "leave it out: the batch size does not change by default",
        },
        "barebones": "leave it out: features that you do not use cost nothing",
        "check_val_every_n_epoch": f'Trainer(evaluate_every_n_steps="<2> epochs") | {_EACH_EPOCH}',
        "checkpoint_callback": {
            False: "Trainer(checkpoint_every=None)",
            True: "leave it out: every epoch ends with a checkpoint",
        },
        "ckpt_path": 'Trainer(resume="out/checkpoint-model/step-00000100")',
        "default_root_dir": 'Trainer(model_path="<out>/model", logging_dir="<out>/logs")',
        "devices": ("accmt launch -N 2 train.py", _devices),
        "early_stop_callback": "Trainer(patience=3)",
        "gpus": ("accmt launch -N 2 train.py", _devices),
        "gradient_clip_algorithm": {
            "value": 'Trainer(clip_grad={"value": 0.5})',
            "norm": "leave it out: clipping by norm is the default",
            False: "leave it out: clipping by norm is the default",
        },
        "gradient_clip_val": f"Trainer(clip_grad=<1.0>) | {_CLIP}",
        "log_every_n_steps": f"Trainer(log_every=<50>) | {_LOG}",
        "logger": ("Trainer(log_with=accmt.TensorBoard)", _trackers),
        "max_epochs": ("epochs: 3", _epochs),
        "num_nodes": "accelerate launch --num_machines <2> --machine_rank 0 --main_process_ip 10.0.0.1 train.py"
        " | one machine is the default",
        "num_processes": ("accmt launch -N 2 train.py", _devices),
        "precision": ('Trainer(mixed_precision="bf16")', _precision),
        "plugins": f"{_HANDLER} | it is empty",
        "replace_sampler_ddp": _SAMPLER,
        "strategy": ("accmt launch --strat ddp train.py", _strategy),
        "tpu_cores": "there is no TPU in this version",
        "train_dataloaders": _FIT,
        "val_dataloaders": _FIT,
        "track_grad_norm": 'Trainer(monitor=["grad_norm"]) | the norm is not logged by default',
        "use_distributed_sampler": _SAMPLER,
        "val_check_interval": ("Trainer(evaluate_every_n_steps=0.25)", _interval),
    },
    "transformers' TrainingArguments": {
        "learning_rate": "optim + lr: <1e-4> | a learning rate of 0 trains nothing",
        "weight_decay": "optim + weight_decay: <0.01>, no_decay: [bias, norm] | AdamW's default is 0.01",
        "adam_beta1": "optim + beta1: <0.9> | the defaults are 0.9 and 0.999",
        "adam_beta2": "optim + beta2: <0.999> | the defaults are 0.9 and 0.999",
        "adam_epsilon": "optim + eps: <1e-8> | the default is 1e-8",
        "auto_find_batch_size": "max_micro_batch_size: auto | the batch size does not change by default",
        "average_tokens_across_devices": "leave it out: all tokens of all processes have the same weight",
        "bf16": f'Trainer(mixed_precision="bf16") | {_PRECISION}',
        "data_seed": "there is one seed for weights and data: Trainer(seed=<0>)",
        "ddp_broadcast_buffers": f"leave it out: {_DDP}",
        "ddp_bucket_cap_mb": f'Trainer(parallelism={{"ddp": {{"bucket_cap_mb": <25>}}}}) | {_DDP}',
        "ddp_find_unused_parameters": 'Trainer(parallelism={"ddp": {"find_unused_parameters": True}})'
        " | all parameters must be used by default",
        "ddp_static_graph": f'Trainer(parallelism={{"ddp": {{"static_graph": True}}}}) | {_DDP}',
        "ddp_timeout": _HANDLER.replace("handler]", "InitProcessGroupKwargs(timeout=timedelta(seconds=<1800>))]")
        + f" | {_DDP}",
        "deepspeed": f"{_DEEPSPEED} | several processes use DDP by default",
        "disable_tqdm": {True: "Trainer(enable_progress_bar=False)", False: "Trainer(enable_progress_bar=True)"},
        "do_eval": _BY_ITSELF,
        "do_predict": _BY_ITSELF,
        "do_train": _BY_ITSELF,
        "eval_accumulation_steps": 'Trainer(metric_options={"gather_chunk_size": "32MB"})'
        " | predictions are gathered in chunks by default",
        "eval_on_start": "Trainer(eval_when_start=True) | there is no evaluation before training by default",
        "eval_steps": f"Trainer(evaluate_every_n_steps=<500>) | {_EACH_EPOCH}",
        "eval_strategy": _EVALUATION,
        "evaluation_strategy": _EVALUATION,
        "fp16": f'Trainer(mixed_precision="fp16") | {_PRECISION}',
        "fsdp": f"{_FSDP} | several processes use DDP by default",
        "full_determinism": 'Trainer(torch_flags={"deterministic": True}) | it is off by default',
        "gradient_accumulation_steps": ("Trainer(grad_accumulation_steps=4)", _accumulation),
        "gradient_checkpointing_kwargs": 'Trainer(gradient_checkpointing=<{"use_reentrant": False}>) | it is empty',
        "greater_is_better": {
            False: 'accmt.Metric("name", greater_is_better=False)',
            True: "leave it out: each metric defines its direction",
        },
        "hub_model_id": _UPLOAD,
        "hub_strategy": _UPLOAD,
        "hub_token": _UPLOAD,
        "label_smoothing_factor": "torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(),"
        " label_smoothing=<0.1>) | there is no label smoothing by default",
        "load_best_model_at_end": f"{_BEST} | the module keeps the last weights by default",
        "logging_steps": f"Trainer(log_every=<10>) | {_LOG}",
        "logging_strategy": {
            "steps": "Trainer(log_every=10)",
            "epoch": "Trainer(log_every=-1)",
            "no": "leave it out: no tracker is used without log_with",
        },
        "lr_scheduler_kwargs": "scheduler: {type: CosineWithWarmup, num_cycles: 2}",
        "lr_scheduler_type": ("scheduler + type: LinearWithWarmup, warmup_ratio: 0.1", _scheduler),
        "max_grad_norm": f"Trainer(clip_grad=<1.0>) | {_CLIP}",
        "metric_for_best_model": (_BEST, _best),
        "neftune_noise_alpha": "model.get_input_embeddings().register_forward_hook(hook), a function that adds"
        " noise with alpha <5> | no noise is added by default",
        "no_cuda": _ON_CPU,
        "num_train_epochs": ("epochs: 3", _epochs),
        "optim_args": "optim: {type: AdamW, lr: 1e-4, betas: [0.9, 0.95]}",
        "output_dir": 'Trainer(model_path="<out/model>")',
        "overwrite_output_dir": 'Trainer(checkpoint_options={"max_previous_runs": 0})'
        " | the model of an earlier run is kept by default",
        "per_device_eval_batch_size": "batch_size: [16, <32>] | batch_size is used for both",
        "per_device_train_batch_size": "batch_size: <16> | batch_size has no default",
        "push_to_hub": _UPLOAD,
        "remove_unused_columns": {
            True: 'dataset.select_columns(["input_ids", "attention_mask", "labels"])',
            False: "leave it out: columns are kept",
        },
        "report_to": ("Trainer(log_with=accmt.TensorBoard)", _trackers),
        "resume_from_checkpoint": ("Trainer(resume=True)", _resume),
        "save_safetensors": {
            False: "Trainer(safe_serialization=False)",
            True: "leave it out: weights are saved as safetensors",
        },
        "save_steps": 'Trainer(checkpoint_every="<500> steps") | every epoch ends with a checkpoint',
        "save_strategy": {
            "steps": 'Trainer(checkpoint_every="500 steps")',
            "best": 'Trainer(model_saving="best_valid_loss")',
            "epoch": 'Trainer(checkpoint_every="epoch")',
            "no": "Trainer(checkpoint_every=None)",
        },
        "save_total_limit": 'Trainer(checkpoint_options={"max_checkpoints": <2>})'
        " | the newest checkpoint is kept by default",
        "tf32": "accmt.allow_tf32() | torch's default is used",
        "train_sampling_strategy": {
            "group_by_length": 'Trainer(data_options={"group_by_length": True})',
            "random": "leave it out: every epoch is shuffled",
            "sequential": "Trainer(shuffle_train=False)",
        },
        "torch_compile": "Trainer(compile=True) | the model is not compiled by default",
        "torch_compile_backend": 'Trainer(compile={"backend": "<inductor>"}) | the model is not compiled by default',
        "torch_compile_mode": 'Trainer(compile={"mode": "<max-autotune>"}) | the model is not compiled by default',
        "torch_empty_cache_steps": "torch.cuda.empty_cache() in on_update_end",
        "use_cpu": _ON_CPU,
        "warmup_ratio": "scheduler + warmup_ratio: <0.1> | there is no warm-up by default",
        "warmup_steps": "scheduler + num_warmup_steps: <100> | there is no warm-up by default",
    },
    "transformers' Trainer": {
        "args": "Trainer(hps_config=args)",
        "compute_loss_func": "def training_step(self, batch): return loss",
        "compute_metrics": 'Trainer(metrics=["accuracy", "f1"])',
        "data_collator": "Trainer(collate_fn=collator)",
        "eval_dataset": _FIT,
        "model": "trainer.fit(model, train_dataset, val_dataset)  # or self.model of a module",
        "model_init": "def __init__(self): self.model = MyNetwork()",
        "optimizers": "def get_optimizer(self): return optimizer, and get_scheduler for its scheduler",
        "preprocess_logits_for_metrics": 'def validation_step(self, batch): return {"f1": (predictions, labels)}',
        "processing_class": "module.processor = tokenizer",
        "tokenizer": "module.processor = tokenizer",
        "train_dataset": _FIT,
    },
    "Accelerate's Accelerator": {
        "cpu": _ON_CPU,
        "deepspeed_plugin": f"{_DEEPSPEED} | several processes use DDP by default",
        "device_placement": {
            False: 'Trainer(data_options={"device_placement": False})',
            True: "leave it out: batches are moved to the device by default",
        },
        "dynamo_backend": 'Trainer(compile={"backend": "<inductor>"}) | the model is not compiled by default',
        "even_batches": "leave it out: each epoch uses each sample once, with any number of processes",
        "fsdp_plugin": f"{_FSDP} | several processes use DDP by default",
        "gradient_accumulation_plugin": "Trainer(grad_accumulation_steps=4)",
        "kwargs_handlers": f"{_HANDLER} | it is empty",
        "project_dir": 'Trainer(logging_dir="<out/logs>") | the default is logs',
        "split_batches": {
            True: "leave it out, and divide batch_size by the number of processes: it is per process",
            False: "leave it out: batch_size is per process",
        },
        "step_scheduler_with_optimizer": {
            False: "step_scheduler_per_epoch: true",
            True: "leave it out: the scheduler is stepped after each optimizer step",
        },
    },
    "TRL's SFTTrainer": {
        "assistant_only_loss": "leave it out: the loss of a conversation only includes the assistant's messages",
        "chat_template_path": "sft + chat_template: <template.jinja> | the tokenizer's template is used",
        "completion_only_loss": "leave it out: the loss of a prompt with a completion only includes the completion",
        "dataset_text_field": 'dataset.rename_column("<content>", "text")',
        "formatting_func": "dataset.map(function)",
        "max_length": _LENGTH,
        "max_seq_length": _LENGTH,
        "model_init_kwargs": "model + dtype: bfloat16",
        "peft_config": "model + lora.r: 16, lora.alpha: 32, lora.targets: all-linear",
        "use_liger_kernel": "model + kernels: liger | torch's kernels are used by default",
    },
    "axolotl's YAML": {
        "base_model": "model + path: <./base> | the module defines the model",
        "adapter": ("model + lora.r: 16, lora.alpha: 32, lora.targets: all-linear", _adapter),
        "load_in_4bit": "model + quantization: nf4 | the model is not quantized by default",
        "load_in_8bit": "model + quantization: int8 | the model is not quantized by default",
        "lora_r": "model + lora.r: <16>",
        "lora_alpha": "model + lora.alpha: <32>",
        "lora_dropout": "model + lora.dropout: <0.05> | there is no dropout by default",
        "lora_target_modules": "model + lora.targets: <[q_proj, v_proj]>",
        "lora_target_linear": "model + lora.targets: all-linear | lora_target_modules selects the layers",
        "flash_attention": "model + attn_implementation: flash_attention_2 | transformers selects the implementation",
        "chat_template": "sft + chat_template: template.jinja",
        "datasets": ("sft + data: train.jsonl", _datasets),
        "evals_per_epoch": "Trainer(evaluate_every_n_steps=0.25)",
        "lr_scheduler": ("scheduler + type: CosineWithWarmup, warmup_ratio: 0.1", _scheduler),
        "micro_batch_size": "batch_size: <2> | batch_size has no default",
        "num_epochs": ("epochs: 3", _epochs),
        "pad_to_sequence_len": "leave it out: a batch is padded to its longest row",
        "sample_packing": "leave it out, and write `packing: true` and `max_tokens: 2048` in the hyper-parameters",
        "saves_per_epoch": 'Trainer(checkpoint_every="0.25 epochs")',
        "val_set_size": "sft + validation: validation.jsonl | no rows are held out by default",
        "sequence_len": _LENGTH,
        "special_tokens": 'tokenizer.add_special_tokens({"pad_token": "[PAD]"})',
        "train_on_inputs": "leave it out: the format of the rows determines which tokens are trained",
        "wandb_project": "Trainer(log_with=accmt.WandB)",
    },
    "the original accmt": {
        "batch_sampler_train": 'Trainer(data_options={"batch_sampler": [[0, 1], [2, 3]]})',
        "batch_sampler_val": "def get_validation_dataloader(self): return DataLoader(data, batch_sampler=sampler)",
        "cleanup_cache_every_n_steps": "if self.state.global_step % <100> == 0: torch.cuda.empty_cache()"
        " in on_update_end | caches are not emptied by default",
        "destroy_after_training": {
            True: "trainer.close(), which leaves the process group",
            False: "leave it out: the process group stays until trainer.close()",
        },
        "disable_model_saving": {True: "Trainer(model_saving=None)", False: "leave it out: the best model is saved"},
        "enable_prepare_logging": {
            True: "Trainer(enable_model_summary=True)",
            False: "leave it out: preparing the model prints nothing",
        },
        "module_hooks": {
            True: "def on_evaluation_start(self)",
            False: "leave on_evaluation_start and on_evaluation_end out of the module",
        },
        "multiple_checkpoints": {
            True: 'Trainer(checkpoint_options={"max_checkpoints": 3})',
            False: "leave it out: the newest checkpoint is kept by default",
        },
        "prepare_batch": {
            True: "leave it out: autocast casts floats where the model needs it",
            False: "leave it out: batches keep their dtype",
        },
        "reset_optimizer_every_n_steps": "if self.state.global_step % <500> == 0: self.trainer.reset_optimizer()"
        " in on_update_end | the optimizer is not reset by default",
        "safe_mode": {
            True: "leave it out: steps call the model through its wrapper",
            False: "leave it out: without the wrapper, processes would not share gradients",
        },
        "safe_steps": {
            True: "max_micro_batch_size: auto",
            False: "leave it out: a step that runs out of memory is not repeated by default",
        },
    },
    "other trainers": {
        "early_stopping": "Trainer(patience=3)",
    },
    "an optimizer": {
        "lr": "optim + lr: <1e-4> | a learning rate of 0 trains nothing",
        "momentum": "optim + type: SGD, lr: 1e-2, momentum: <0.9> | there is no momentum by default",
    },
}
"""Rows by trainer and argument name."""

ABOVE = {
    **dict.fromkeys(("check_val_every_n_epoch", "num_nodes", "max_length", "max_seq_length", "sequence_len"), 1),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2"), -1),
}
"""Numbers up to this value mean that an argument is off; the default is 0."""

UP_TO = {"adam_beta1": 0.9999999, "adam_beta2": 0.9999999, "warmup_ratio": 1}
"""The largest value that is inserted into the line."""

_FREEZING = "remove it: module.freeze(part) before fit, and module.unfreeze(part) in on_epoch_start of a callback"
_CALLBACKS = {
    "BackboneFinetuning": _FREEZING,
    "BaseFinetuning": _FREEZING,
    "EarlyStoppingCallback": "remove it, and write Trainer(patience=3)",
    "EarlyStopping": "remove it, and write Trainer(patience=3)",
    "ModelCheckpoint": 'remove it, and write Trainer(model_saving="best_valid_loss", checkpoint_every="epoch")',
    "LearningRateMonitor": 'remove it, and write Trainer(monitor=["learning_rate"])',
    "PrinterCallback": "remove it: each evaluation prints a line",
    "ProgressCallback": "remove it, and write Trainer(enable_progress_bar=True)",
}


def find_callback(callback: object) -> str | None:
    """Return what to write instead of another trainer's callback, or None."""
    name = next((kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _CALLBACKS), "")
    advice = _CALLBACKS.get(name)
    if advice is None or "patience=3" not in advice:
        return advice
    patience = getattr(callback, "early_stopping_patience", getattr(callback, "patience", 3))
    monitor = getattr(callback, "monitor", None)
    min_delta = getattr(callback, "early_stopping_threshold", getattr(callback, "min_delta", None))
    if isinstance(monitor, str) or min_delta:
        # Lightning negates `min_delta` where lower is better.
        options = {"patience": patience, "min_delta": abs(min_delta or 0)}
        patience = json.dumps({monitor if isinstance(monitor, str) else "valid_loss": options})
    return advice.replace("patience=3", f"patience={patience}")
