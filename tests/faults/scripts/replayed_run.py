"""A run of one of many kinds, whose steps are replayed.

replayed_run.py <folder> <kind> <precision> <accumulation> <seed>

Kinds: "dataset", "stream", "tokens" (a token budget), "manual" (manual optimization), "packed" and "lora".
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer

SAMPLES = 90
SLEEP_S = 0.01


def make_sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a sample that is augmented at random each time it is read."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(5, generator=generator)
    return inputs + 0.1 * torch.randn(5) + 0.1 * random.random(), inputs.sum().reshape(1)


class Points(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return make_sample(index)

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(SAMPLES):
            yield make_sample(index)


class Documents(Dataset[Any]):
    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [(index + place) % 29 + 2 if random.random() < 0.8 else 1 for place in range(3 + index * 7 % 12)]
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return SAMPLES


class Small(AcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 1))

    def step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]).float(), batch[1])

    def length_of(self, sample: Any) -> int:
        return 2 + int(100 * sample[1].abs()) % 6


class Manual(ExtendedAcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]).float(), batch[1])
        self.backward(loss)
        self.step_optimizer()
        self.zero_grad()
        self.step_scheduler()
        return loss


class Language(AcceleratorModule):
    def __init__(self, *, has_adapter: bool) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
        self.model: Any = LlamaForCausalLM(config)
        if has_adapter:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))

    def step(self, batch: Any) -> Any:
        return self.model(**batch).loss


class Slow(Callback):
    """Gives a kill time to come between two steps."""

    def on_update_end(self) -> None:
        time.sleep(SLEEP_S)


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main(folder: str, kind: str, precision: str, accumulation: str, seed: str) -> None:
    torch.manual_seed(int(seed))
    is_text = kind in ("packed", "lora")
    module = Language(has_adapter=kind == "lora") if is_text else Manual() if kind == "manual" else Small()
    data: Any = Documents() if is_text else Stream() if kind == "stream" else Points()
    hps: dict[str, Any] = {"epochs": 4, "batch_size": 3, "optim": {"type": "AdamW", "lr": 0.01}}
    hps |= {"max_tokens": 40, "packing": True} if kind == "packed" else {"max_tokens": 12} if kind == "tokens" else {}
    trainer = Trainer(
        hps,
        f"{folder}/model",
        logging_dir=f"{folder}/logs",
        run_name="run",
        seed=int(seed),
        verbose=False,
        resume="auto",
        model_saving=None,
        checkpoint_every="7 steps",
        checkpoint_options={"keep_every": "10 steps"},
        ledger={"every": 5},
        grad_accumulation_steps=int(accumulation),
        mixed_precision=precision,
        collate_fn=pad if kind == "lora" else None,
        callbacks=Slow(),
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
