"""The run of `killed_run.py` with preference tuning, whose reference is computed first.

    killed_prefer_run.py <folder> <workers> <async: 0 or 1> [<max_tokens>]

ACCMT_TEST_LOSS is the loss. The file `started` is there when the reference is about to be computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accmt import PreferenceModule
from tests import conversations
from tests.conversations import make_tokenizer
from tests.faults.scripts.killed_run import HPS, SAMPLES, WIDTH, train

LOSS: Any = os.environ.get("ACCMT_TEST_LOSS", "dpo")
WORDS = ["the", "rain", "window", "price", "don't", "e.g.", "yes"]


def make_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index in range(SAMPLES):
        prompt = f"{WORDS[index % 7]} {index}?"
        answers = [f" {WORDS[index % 5]}" * (1 + index % 4), f" {WORDS[(index + 3) % 7]}" * (1 + index % 3) + " no"]
        if LOSS == "kto":
            rows.append({"prompt": prompt, "completion": answers[index % 2], "label": not index % 2})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return rows


def make_module() -> PreferenceModule:
    tokenizer = make_tokenizer(conversations.CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH // 8,
        intermediate_size=WIDTH // 4,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    return PreferenceModule(LlamaForCausalLM(config), tokenizer, LOSS, reference_folder="reference")


def main(folder: str, workers: str, is_async: str, max_tokens: str | None = None) -> None:
    module = make_module()
    Path("started").write_text("computing")
    train(module, make_rows(), HPS | {"max_tokens": max_tokens}, folder, workers, is_async)


if __name__ == "__main__":
    main(*sys.argv[1:])
