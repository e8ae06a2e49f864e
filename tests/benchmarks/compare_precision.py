"""Prints how much of a model in bfloat16 four loops train under mixed precision, at a rate of fine-tuning.

    .venv/bin/python tests/benchmarks/compare_precision.py

Most models are shared in bfloat16, and transformers reads them so. Each loop trains the same small language model from
such a folder for 160 steps of AdamW at a rate of 2e-5, with bfloat16 as its mixed precision: what share of the weights
have changed, and the mean loss of what it was trained on. The last line is a loop by hand over a model read in float32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer as HfTrainer

from accmt import AcceleratorModule, Trainer

EPOCHS, BATCH_SIZE, RATE = 20, 8, 2e-5
Rows = list[dict[str, torch.Tensor]]


def make_model(folder: Path) -> None:
    """Write the folder of a model in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).bfloat16().save_pretrained(folder)


def make_rows() -> Rows:
    """Make sentences of random tokens, all of the same length."""
    tokens = torch.randint(100, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def by_accmt(folder: Path, rows: Rows) -> nn.Module:
    """Train with this library."""
    module = AcceleratorModule.from_hf(folder, "AutoModelForCausalLM")
    hps = {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "optim": {"type": "AdamW", "lr": RATE, "weight_decay": 0.0}}
    own: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "mixed_precision": "bf16", "verbose": False}
    Trainer(hps, folder / "accmt", logging_dir=folder / "logs", **own).fit(module, rows)
    return module.unwrapped_model


def by_hand(folder: Path, rows: Rows, **read: Any) -> nn.Module:
    """Train in a loop with Accelerate."""
    model = AutoModelForCausalLM.from_pretrained(folder, **read).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, BATCH_SIZE, shuffle=True))
    for _ in range(EPOCHS):
        for batch in loader:
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)


def by_transformers(folder: Path, rows: Rows) -> nn.Module:
    """Train with transformers' Trainer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    arguments = TrainingArguments(
        str(folder / "hf"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    HfTrainer(model, arguments, train_dataset=rows).train()
    return model


def in_float32(folder: Path, rows: Rows) -> nn.Module:
    """Train by hand what was read in float32."""
    return by_hand(folder, rows, dtype="float32")


LOOPS: dict[str, Callable[[Path, Rows], nn.Module]] = {
    "accmt": by_accmt,
    "by hand with Accelerate": by_hand,
    "transformers Trainer": by_transformers,
    "by hand, read in float32": in_float32,
}


def measure(name: str, folder: Path) -> str:
    """Train in one of the loops, and return a line of the table."""
    torch.manual_seed(0)
    rows = make_rows()
    before = {key: weight.float() for key, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    model: Any = LOOPS[name](folder, rows).eval()
    changed = torch.cat([(weight.float() != before[key]).flatten() for key, weight in model.state_dict().items()])
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        loss = model.float()(**batch).loss.item()
    return f"| {name} | {changed.float().mean():.0%} | {loss:.3f} |"


def main() -> None:
    """Train in each of the loops, in a process of its own, and print the table."""
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        print("| loop | weights that have changed | loss |\n|---|---|---|")
        for loop in LOOPS:
            with get_context("spawn").Pool(1) as pool:  # Accelerate has one precision for a process
                print(pool.apply(measure, (loop, Path(name))))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
