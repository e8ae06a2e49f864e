"""What `TrainingArguments` of transformers calls optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping

OPTIMIZERS: Mapping[str, str] = {
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_hf": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_torch_fused": "AdamW",
    "adamw4bit": "torchao.optim.AdamW4bit",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "adamwfp8": "torchao.optim.AdamWFp8",
    "ademamix": "bitsandbytes.optim.AdEMAMix",
    "ademamix_8bit": "bitsandbytes.optim.AdEMAMix8bit",
    "lion": "bitsandbytes.optim.Lion",
    "lion_32bit": "bitsandbytes.optim.Lion32bit",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "paged_lion_32bit": "bitsandbytes.optim.PagedLion32bit",
    "paged_lion_8bit": "bitsandbytes.optim.PagedLion8bit",
    "rmsprop": "RMSprop",
    "rmsprop_bnb": "bitsandbytes.optim.RMSprop",
    "rmsprop_bnb_32bit": "bitsandbytes.optim.RMSprop32bit",
    "rmsprop_bnb_8bit": "bitsandbytes.optim.RMSprop8bit",
    "sgd": "SGD",
}
"""Values of transformers' `optim`, each with accmt's name or an import path."""

SCHEDULERS: Mapping[str, str] = {
    "constant": "Constant",
    "constant_with_warmup": "ConstantWithWarmup",
    "cosine": "CosineWithWarmup",
    "cosine_with_min_lr": "transformers.get_cosine_with_min_lr_schedule_with_warmup",
    "cosine_with_restarts": "CosineWithHardRestartsWithWarmup",
    "inverse_sqrt": "InverseSQRT",
    "linear": "LinearWithWarmup",
    "polynomial": "PolynomialDecayWithWarmup",
    "reduce_lr_on_plateau": "ReduceLROnPlateau",
    "warmup_stable_decay": "transformers.get_wsd_schedule",
}
"""The values of transformers' `lr_scheduler_type`, each with accmt's name."""


def find_component(part: str, name: str) -> str | None:
    """Return what to write in accmt for such a name in any case, or None.

    Args:
        part: "optim" or "scheduler".
        name: The name.
    """
    return (SCHEDULERS if part == "scheduler" else OPTIMIZERS).get(name.lower())
