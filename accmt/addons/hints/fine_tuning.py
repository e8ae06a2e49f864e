"""What TRL's SFTTrainer and axolotl's YAML call things, and what to write here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BASE = "path: ./base, type: AutoModelForCausalLM"
_LORA = f"model: {{{_BASE}, lora: {{r: 16, alpha: 32, targets: all-linear}}}}"
_TEMPLATE = "sft: {data: train.jsonl, chat_template: template.jinja}"
_LENGTH = "sft: {data: train.jsonl, max_length: 1024}"
_HELD_OUT = "sft: {data: train.jsonl, validation: validation.jsonl}"

OF_TRL: Mapping[str, str] = {
    "assistant_only_loss": "leave it out: of a conversation only what the assistant writes is trained",
    "chat_template_path": _TEMPLATE,
    "completion_only_loss": "leave it out: of a prompt and its completion only the completion is trained",
    "dataset_text_field": 'dataset.rename_column("content", "text")',
    "formatting_func": "dataset.map(function)",
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "model_init_kwargs": f"model: {{{_BASE}, dtype: bfloat16}}",
    "peft_config": _LORA,
    "use_liger_kernel": f"model: {{{_BASE}, kernels: liger}}",
}
"""The arguments of TRL's `SFTTrainer` and `SFTConfig` that transformers does not have."""

OF_AXOLOTL: Mapping[str, str] = {
    "adapter": _LORA,
    "base_model": f"model: {{{_BASE}}}",
    "chat_template": _TEMPLATE,
    "datasets": "sft: {data: train.jsonl}",
    "evals_per_epoch": "Trainer(evaluate_every_n_steps=0.25)",
    "flash_attention": f"model: {{{_BASE}, attn_implementation: flash_attention_2}}",
    "load_in_4bit": f"model: {{{_BASE}, quantization: nf4}}",
    "load_in_8bit": f"model: {{{_BASE}, quantization: int8}}",
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "lora_r": _LORA,
    "lora_target_linear": _LORA,
    "lora_target_modules": _LORA,
    "lr_scheduler": "scheduler: {type: CosineWithWarmup, warmup_ratio: 0.1}",
    "micro_batch_size": "batch_size: 2",
    "num_epochs": "epochs: 3",
    "pad_to_sequence_len": "leave it out: a batch is padded to its longest row",
    "sample_packing": "leave it out, and write `packing: true` and `max_tokens: 2048` in the hyper-parameters",
    "saves_per_epoch": 'Trainer(checkpoint_every="0.25 epochs")',
    "sequence_len": _LENGTH,
    "special_tokens": 'tokenizer.add_special_tokens({"pad_token": "<pad>"})',
    "train_on_inputs": "leave it out: the form of the rows says what is trained",
    "val_set_size": _HELD_OUT,
    "wandb_project": "Trainer(log_with=accmt.WandB)",
}
"""The keys of axolotl's YAML that transformers' `TrainingArguments` do not have."""

OF_MODEL = (
    "base_model",
    "adapter",
    "load_in_4bit",
    "load_in_8bit",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_linear",
    "lora_target_modules",
    "flash_attention",
)
"""The keys of axolotl's YAML that are in the section `model` here."""

OF_SFT = ("datasets", "val_set_size", "sequence_len")
"""Those that are in the section `sft`."""


def advise_model(known: Mapping[str, Any]) -> str:
    """Return the section `model` for keys of axolotl's."""
    parts = [f"path: {known.get('base_model', './base')}", "type: AutoModelForCausalLM"]
    if known.get("load_in_4bit") or known.get("adapter") == "qlora":
        parts.append("quantization: nf4")
    elif known.get("load_in_8bit"):
        parts.append("quantization: int8")
    if any(name == "adapter" or name.startswith("lora_") for name in known):
        targets = known.get("lora_target_modules")
        is_linear = known.get("lora_target_linear") or not targets
        values = {
            "r": known.get("lora_r"),
            "alpha": known.get("lora_alpha"),
            "dropout": known.get("lora_dropout"),
            "targets": "all-linear" if is_linear else str(targets).replace("'", ""),
        }
        parts.append(
            f"lora: {{{', '.join(f'{name}: {value}' for name, value in values.items() if value is not None)}}}"
        )
    if known.get("flash_attention"):
        parts.append("attn_implementation: flash_attention_2")
    return f"model: {{{', '.join(parts)}}}"


def advise_sft(known: Mapping[str, Any]) -> str:
    """Return the section `sft` for keys of axolotl's."""
    sets = known.get("datasets")
    first = sets[0] if isinstance(sets, list) and sets else sets
    path = first.get("path") if isinstance(first, Mapping) else first
    parts = [f"data: {path or 'train.jsonl'}"]
    if known.get("val_set_size"):
        parts.append("validation: validation.jsonl")
    if known.get("sequence_len"):
        parts.append(f"max_length: {known['sequence_len']}")
    return f"sft: {{{', '.join(parts)}}}"
