"""What to write here for a value of another trainer's argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from math import inf
from typing import Any, TypeAlias

from accmt.options.numbers import is_number

Advice: TypeAlias = Callable[[Any], str | None]
"""Makes the line for a value; None where the value says nothing that a line could."""

_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
_FSDP = 'Trainer(parallelism={"fsdp": True})'
_DEEPSPEED = f"FSDP2, which shards as ZeRO does: {_FSDP}"
_NOT_BUILT = "there is no {} in this version; processes of DDP: `accmt launch --strat ddp train.py`"
_TRACKERS = {
    "aim": "Aim",
    "clearml": "ClearML",
    "comet": "CometML",
    "dvclive": "DVCLive",
    "mlflow": "MLFlow",
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
}


def advise_value(name: str, value: Any) -> str | None:
    """Return the line for an argument with this value, or None where the example of its name has to do."""
    value = value.value if isinstance(value, Enum) else value
    if name in ("logger", "report_to"):
        return _advise_trackers(value)
    if name == "precision":  # a torch.dtype, perhaps
        return _advise_precision(value)
    return _BY_NAME[name](value) if name in _BY_NAME and isinstance(value, _PLAIN) else None


def _number(
    template: str, off: str = "there is no limit or number of one's own", *, least: float = 0, most: float = inf
) -> Advice:
    """Advise a number up to `most` that is passed on; None, False, and what is not above `least`, is to be left out."""

    def advise(value: Any) -> str | None:
        if value is None or value is False or (is_number(value) and value <= least):
            return f"leave it out: {off}"
        return template.format(value) if is_number(value) and value <= most else None

    return advise


def _beta(pair: str) -> Advice:
    advise = _number(f"optim: {{{{type: AdamW, lr: 1e-4, betas: {pair}}}}}", "0.9 and 0.999", least=-1, most=0.9999999)
    return lambda value: advise(float(value) if type(value) is int else value)  # torch wants floats


def _flag(on: str, off: str) -> Advice:
    return lambda value: on if value is True else off if value in (False, None) else None


def _text(template: str, off: str) -> Advice:
    def advise(value: Any) -> str | None:
        if value is None or value is False:
            return off
        return template.format(value) if isinstance(value, str) else None

    return advise


def _choice(lines: Mapping[Any, str]) -> Advice:
    return lambda value: lines.get(value) if isinstance(value, str | bool | int | None) else None


def _mapping(template: str) -> Advice:
    def advise(value: Any) -> str | None:
        if not value:
            return "leave it out: there is nothing in it"
        return template.format(value) if isinstance(value, dict) else None

    return advise


def _advise_trackers(value: Any) -> str | None:
    """Return the trackers of names such as "wandb", and of objects of classes such as WandbLogger."""
    listed = value if isinstance(value, list | tuple) else [value]
    if value is True:
        return "Trainer(log_with=accmt.TensorBoard)"
    if not listed or value in (None, False, "none"):
        return "leave it out: without log_with there is no tracker"
    names = [(item if isinstance(item, str) else type(item).__name__).lower() for item in listed]
    found = [f"accmt.{name}" for text in names for word, name in _TRACKERS.items() if word in text]
    if not found:
        return "leave it out: every run writes history.jsonl" if any("csv" in text for text in names) else None
    return f"Trainer(log_with={found[0] if len(found) == 1 else '[' + ', '.join(found) + ']'})"


def _advise_accumulation(value: Any) -> str | None:
    if value in (None, 1):
        return "leave it out: nothing is accumulated"
    is_count = is_number(value) and value > 1
    return f"Trainer(grad_accumulation_steps={value!r})" if is_count or isinstance(value, dict) and value else None


def _advise_devices(value: Any) -> str | None:
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


def _advise_strategy(value: Any) -> str | None:
    text = str(value).lower()
    if value is None or text == "auto":
        return "leave it out: several processes have DDP"
    if "fsdp" in text:
        return _FSDP
    if "deepspeed" in text:
        return _DEEPSPEED
    for engine in ("xla", "tpu", "megatron"):
        if engine in text:
            return _NOT_BUILT.format(text)
    if "find_unused_parameters_true" in text:
        return 'Trainer(ddp_kwargs={"find_unused_parameters": True})'
    return "accmt launch --strat ddp train.py"


def _advise_epochs(value: Any) -> str | None:
    if value is None or (is_number(value) and value <= 0):
        return "leave it out, and write `max_steps: 1000` in the hyper-parameters"
    if not is_number(value):
        return None
    whole = int(value) == value
    return f"epochs: {int(value)}" if whole else f"epochs: {int(value) + 1}, and max_steps where {value} epochs end"


def _advise_fraction(value: Any) -> str | None:
    """Advise an interval of evaluations: a float is a part of an epoch, of which 1.0 is the whole."""
    if value is None or (isinstance(value, float) and value == 1):
        return "leave it out: each epoch is evaluated"
    return f"Trainer(evaluate_every_n_steps={value!r})" if is_number(value) and value > 0 else None


def _advise_scheduler(value: Any) -> str | None:
    from accmt.options.optimizer_and_scheduler_names import schedulers_of_transformers

    own = schedulers_of_transformers().get(value) if isinstance(value, str) else None
    return own and f"scheduler: {{type: {own}{', warmup_ratio: 0.1' if 'armup' in own else ''}}}"


def _advise_best(value: Any) -> str | None:
    if value is None or not isinstance(value, str):
        return None
    name = value.removeprefix("eval_")
    return (
        'Trainer(model_saving="best_valid_loss")'
        if name == "loss"
        else f'Trainer(model_saving="best_{name}", metrics=["{name}"])'
    )


def _advise_resume(value: Any) -> str | None:
    if value in (None, False):
        return "leave it out: a run starts from the beginning unless resume says otherwise"
    return f"Trainer(resume={value!r})" if value is True or isinstance(value, str) else None


PRECISIONS: Mapping[str, str] = {
    "16": 'mixed_precision="fp16"',
    "16-mixed": 'mixed_precision="fp16"',
    "16-true": "model.half() before fit: mixed_precision keeps the weights in 32 bits",
    "32": "leave it out: a launch without a precision computes in 32 bits",
    "32-true": "leave it out: a launch without a precision computes in 32 bits",
    "64": "model.double() before fit: there is no precision of 64 bits",
    "64-true": "model.double() before fit: there is no precision of 64 bits",
    "bf16-mixed": 'mixed_precision="bf16"',
    "bf16-true": "model.bfloat16() before fit: mixed_precision keeps the weights in 32 bits",
    "bfloat16": 'mixed_precision="bf16"',
    "double": "model.double() before fit: there is no precision of 64 bits",
    "float16": 'mixed_precision="fp16"',
    "float32": 'mixed_precision="no"',
    "float64": "model.double() before fit: there is no precision of 64 bits",
    "fp32": 'mixed_precision="no"',
    "fp64": "model.double() before fit: there is no precision of 64 bits",
    "fp8": 'mixed_precision="bf16": there is no fp8 in this version',
    "full": 'mixed_precision="no"',
    "half": 'mixed_precision="fp16"',
    "transformer-engine": 'mixed_precision="bf16": there is no fp8 in this version',
}
"""Precisions as others write them, torch's types among them, and what to do here."""


def find_precision(value: Any) -> str | None:
    """Return what to do here for a precision as others write it, or None."""
    return PRECISIONS.get(str(value).removeprefix("torch."))


def _advise_precision(value: Any) -> str | None:
    name = str(value).removeprefix("torch.")
    if name in ("no", "fp16", "bf16"):
        return f'Trainer(mixed_precision="{name}")'
    do = PRECISIONS.get(name)
    return f"Trainer({do})" if do and do.startswith("mixed_precision=") else do


def _advise_warmup(value: Any) -> str | None:
    name = "warmup_ratio" if isinstance(value, float) and value < 1 else "num_warmup_steps"
    return _number(f"scheduler: {{{{type: LinearWithWarmup, {name}: {{0}}}}}}", "there is no warm-up by itself")(value)


_EACH_EPOCH = "leave it out: each epoch is evaluated"
_EVALUATION = {
    "epoch": _EACH_EPOCH,
    "no": "leave the validation data out of trainer.fit(module, train_dataset)",
    "steps": "Trainer(evaluate_every_n_steps=500)",
}
_TABLE_OF_MODEL = "leave it out: no table is printed unless enable_model_summary says so"
_SAMPLER = _flag(
    "leave it out: the samples are shared over the processes by themselves", "Trainer(shard_dataloaders=False)"
)
_PRECISION = "leave it out: the precision is the launch's, unless mixed_precision says otherwise"
_UPLOAD = 'Trainer(callbacks=accmt.PushToHub("user/name"))'
_NOTHING_TO_UPLOAD = "leave it out: nothing is uploaded"
_ON_CPU = _flag('Trainer(accelerator={"cpu": True})', "leave it out: the device is the launch's")
_BY_ITSELF = "leave it out: what is called says it, trainer.fit, trainer.validate or trainer.predict"
_DDP = "leave it out: it is torch's default"

_LENGTH = _number("sft: {{data: train.jsonl, max_length: {0}}}", "rows are kept whole", least=1)

_BY_NAME: Mapping[str, Advice] = {
    "accumulate_grad_batches": _advise_accumulation,
    "adam_beta1": _beta("[{0}, 0.999]"),
    "adam_beta2": _beta("[0.9, {0}]"),
    "adam_epsilon": _number("optim: {{type: AdamW, lr: 1e-4, eps: {0}}}", "1e-8 is the default"),
    "auto_find_batch_size": _flag("Trainer(auto_micro_batch=True)", "leave it out: batches stay as they are"),
    "auto_lr_find": lambda value: (
        "trainer.tune(module, data, lr=True)"
        if value is True or isinstance(value, str)
        else "leave it out: the rate is that of the hyper-parameters"
    ),
    "auto_scale_batch_size": _choice(
        {
            True: 'trainer.tune(module, data, batch_size="power")',
            "power": 'trainer.tune(module, data, batch_size="power")',
            "binsearch": 'trainer.tune(module, data, batch_size="binsearch")',
            False: "leave it out: batches stay as they are",
            None: "leave it out: batches stay as they are",
        }
    ),
    "bf16": _flag('Trainer(mixed_precision="bf16")', _PRECISION),
    "check_val_every_n_epoch": _number(
        'Trainer(evaluate_every_n_steps="{0} epochs")', "each epoch is evaluated", least=1
    ),
    "checkpoint_callback": _flag("leave it out: each epoch ends with a checkpoint", "Trainer(checkpoint_every=None)"),
    "ddp_broadcast_buffers": _flag("leave it out: buffers are the main process's in evaluations", _DDP),
    "ddp_bucket_cap_mb": _number('Trainer(ddp_kwargs={{"bucket_cap_mb": {0}}})', "it is torch's default"),
    "ddp_find_unused_parameters": _flag(
        'Trainer(ddp_kwargs={"find_unused_parameters": True})', "leave it out: all parameters are expected to be used"
    ),
    "ddp_static_graph": _flag('Trainer(ddp_kwargs={"static_graph": True})', _DDP),
    "ddp_timeout": _number(
        'Trainer(accelerator={{"kwargs_handlers": [InitProcessGroupKwargs(timeout=timedelta(seconds={0}))]}})',
        "it is torch's default",
    ),
    "deepspeed": lambda value: _DEEPSPEED if value else "leave it out: several processes have DDP",
    "default_root_dir": _text(
        'Trainer(model_path="{0}/model", logging_dir="{0}/logs")', 'Trainer(model_path="model", logging_dir="logs")'
    ),
    "devices": _advise_devices,
    "disable_tqdm": _flag("Trainer(enable_progress_bar=False)", "Trainer(enable_progress_bar=True)"),
    "do_eval": lambda value: _BY_ITSELF,
    "do_predict": lambda value: _BY_ITSELF,
    "do_train": lambda value: _BY_ITSELF,
    "eval_accumulation_steps": _number(
        'Trainer(metric_options={{"gather_chunk_size": "32MB"}})', "predictions travel in parts by themselves"
    ),
    "eval_on_start": _flag("Trainer(eval_when_start=True)", "leave it out: there is no evaluation before training"),
    "eval_steps": _number("Trainer(evaluate_every_n_steps={0})", "each epoch is evaluated"),
    "eval_strategy": _choice(_EVALUATION),
    "evaluation_strategy": _choice(_EVALUATION),
    "fp16": _flag('Trainer(mixed_precision="fp16")', _PRECISION),
    "fsdp": lambda value: _FSDP if value else "leave it out: several processes have DDP",
    "full_determinism": _flag('Trainer(seed=0, torch_flags={"deterministic": True})', "leave it out: it is off"),
    "gpus": _advise_devices,
    "gradient_accumulation_steps": _advise_accumulation,
    "gradient_checkpointing_kwargs": _mapping("Trainer(gradient_checkpointing={0!r})"),
    "gradient_clip_algorithm": _choice(
        {
            "value": 'Trainer(clip_grad={"value": 0.5})',
            "norm": "leave it out: it is the norm",
            None: "leave it out: it is the norm",
        }
    ),
    "gradient_clip_val": _number("Trainer(clip_grad={0})", "gradients are not clipped unless clip_grad says so"),
    "greater_is_better": _flag(
        "leave it out: the direction belongs to the metric", 'accmt.Metric("name", greater_is_better=False)'
    ),
    "label_smoothing_factor": _number(
        "torch.nn.functional.cross_entropy(logits, labels, label_smoothing={0})", "nothing is smoothed"
    ),
    "learning_rate": _number("optim: {{type: AdamW, lr: {0}}}", "a rate of 0 trains nothing"),
    "load_best_model_at_end": _flag(
        'Trainer(model_saving="best_f1", metrics=["f1"])', "leave it out: the module ends with the last weights"
    ),
    "log_every_n_steps": _number("Trainer(log_every={0})", "a row of each epoch is log_every=-1"),
    "logging_steps": _number("Trainer(log_every={0})", "a row of each epoch is log_every=-1"),
    "logging_strategy": _choice(
        {
            "epoch": "Trainer(log_every=-1)",
            "no": "leave it out: without log_with there is no tracker",
            "steps": "Trainer(log_every=10)",
        }
    ),
    "lr": _number("optim: {{type: AdamW, lr: {0}}}", "a rate of 0 trains nothing"),
    "lr_scheduler_type": _advise_scheduler,
    "max_epochs": _advise_epochs,
    "max_grad_norm": _number("Trainer(clip_grad={0})", "gradients are not clipped unless clip_grad says so"),
    "base_model": _text("model: {{path: {0}, type: AutoModelForCausalLM}}", "leave it out: the module has a model"),
    "lr_scheduler": _advise_scheduler,
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "metric_for_best_model": _advise_best,
    "micro_batch_size": _number("batch_size: {0}", "batch_size has no default"),
    "momentum": _number("optim: {{type: SGD, lr: 1e-2, momentum: {0}}}", "there is none unless optim says so"),
    "neftune_noise_alpha": _number(
        "model.get_input_embeddings().register_forward_hook(hook), a function that adds the noise of alpha {0}",
        "no noise is added",
    ),
    "no_cuda": _ON_CPU,
    "num_epochs": _advise_epochs,
    "num_nodes": _number(
        "accelerate launch --num_machines {0} --machine_rank 0 --main_process_ip 10.0.0.1 train.py",
        "one machine is what every launcher starts",
        least=1,
    ),
    "num_processes": _advise_devices,
    "num_train_epochs": _advise_epochs,
    "output_dir": _text('Trainer(model_path="{0}")', 'Trainer(model_path="out/model")'),
    "overwrite_output_dir": _flag(
        "Trainer(max_previous_runs=0)", "leave it out: an earlier run's model is kept beside the new one"
    ),
    "per_device_eval_batch_size": _number("batch_size: [16, {0}]", "batch_size is both"),
    "per_device_train_batch_size": _number("batch_size: {0}", "batch_size has no default"),
    "plugins": lambda value: None if value else "leave it out: there is nothing in it",
    "push_to_hub": _flag(_UPLOAD, _NOTHING_TO_UPLOAD),
    "replace_sampler_ddp": _SAMPLER,
    "resume_from_checkpoint": _advise_resume,
    "save_safetensors": _flag("leave it out: weights are safetensors", "Trainer(safe_serialization=False)"),
    "save_steps": _number('Trainer(checkpoint_every="{0} steps")', "each epoch ends with a checkpoint"),
    "save_strategy": _choice(
        {
            "best": 'Trainer(model_saving="best_valid_loss")',
            "epoch": 'Trainer(checkpoint_every="epoch")',
            "no": "Trainer(checkpoint_every=None)",
            "steps": 'Trainer(checkpoint_every="500 steps")',
        }
    ),
    "save_total_limit": _number("Trainer(max_checkpoints={0})", "max_checkpoints has a default"),
    "sequence_len": _LENGTH,
    "strategy": _advise_strategy,
    "tf32": _flag("accmt.allow_tf32()", "leave it out: it is as torch has it"),
    "train_sampling_strategy": _choice(
        {
            "group_by_length": "Trainer(group_by_length=True)",
            "random": "leave it out: each epoch has an order of its own",
            "sequential": "Trainer(shuffle_train=False)",
        }
    ),
    "torch_compile": _flag("Trainer(compile=True)", "leave it out: nothing is compiled"),
    "torch_compile_backend": _text('Trainer(compile={{"backend": "{0}"}})', "leave it out: nothing is compiled"),
    "torch_compile_mode": _text('Trainer(compile={{"mode": "{0}"}})', "leave it out: nothing is compiled"),
    "track_grad_norm": _number('Trainer(monitor=["grad_norm"])', "no norm is logged"),
    "use_cpu": _ON_CPU,
    "use_distributed_sampler": _SAMPLER,
    "val_check_interval": _advise_fraction,
    "warmup_ratio": _number("scheduler: {{type: LinearWithWarmup, warmup_ratio: {0}}}", "there is no warm-up", most=1),
    "warmup_steps": _advise_warmup,
    "weight_decay": lambda value: _number(
        f"optim: {{{{type: AdamW, lr: 1e-4, weight_decay: {{0}}{', no_decay: [bias, norm]' if value else ''}}}}}",
        "AdamW has 0.01",
        least=-1,
    )(value),
}
