"""DPO under gradient accumulation, here and in TRL: how far weights are from those of one big batch.

    .venv-chat-templates/bin/python tests/benchmarks/compare_preference.py

Pairs in steps of 8, as whole batches and in micro-batches of 4 and of 2. The change of all weights in an epoch is
compared with that of whole batches, in float64. `make chat-templates` makes the environment.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch

from accmt import PreferenceModule, Trainer
from tests.unit.test_addons_prefer import WORDS, make_model, tokenizer

STEP = 8


def make_pairs(number: int) -> list[dict[str, str]]:
    texts = [" ".join(WORDS[index % 5 : index % 5 + 1 + index % 4]) for index in range(2 * number)]
    return [
        {"prompt": f"{WORDS[n % 7]}?", "chosen": f" {texts[n]}", "rejected": f" {texts[n + number]} no"}
        for n in range(number)
    ]


def train_here(number: int, size: int) -> list[torch.Tensor]:
    module = PreferenceModule(make_model(), tokenizer(), beta=0.5)
    hps = {"epochs": 1, "batch_size": STEP, "max_micro_batch_size": size, "optim": {"type": "SGD", "lr": 0.5}}
    with tempfile.TemporaryDirectory() as folder:
        own = {"shuffle_train": False, "verbose": False, "dataloader_num_workers": 0}
        Trainer(hps, folder, **own).fit(module, make_pairs(number))
    return [weight.detach() for weight in module.model.parameters()]


def train_in_trl(number: int, size: int) -> list[torch.Tensor]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model: Any = make_model()
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=STEP // size,
            num_train_epochs=1,
            learning_rate=0.5,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            beta=0.5,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        rows = Dataset.from_list(make_pairs(number))
        trainer = DPOTrainer(model, make_model(), config, train_dataset=rows, processing_class=tokenizer())
        trainer.train()
        assert trainer.state.global_step == 2, trainer.state.global_step
    return [weight.detach() for weight in model.parameters()]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start = [weight.detach() for weight in make_model().parameters()]
    lines = ["| pairs, micro-batches | accmt | TRL |", "|---|---|---|"]
    for number, named in ((16, "16, two full steps"), (13, "13, the last step has 5")):
        whole = [train(number, STEP) for train in (train_here, train_in_trl)]
        for size in (4, 2):
            split = [train(number, size) for train in (train_here, train_in_trl)]
            errors = [distance(one, other) / distance(other, start) for one, other in zip(split, whole, strict=True)]
            lines.append(f"| {named}; micro-batches of {size} | {errors[0]:.1e} | {errors[1]:.1e} |")
    print("\n".join(lines))


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return sum(float((a - b).pow(2).sum()) for a, b in zip(one, other, strict=True)) ** 0.5


if __name__ == "__main__":
    main()
