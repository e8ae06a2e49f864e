"""The run of `killed_run.py` with preference tuning, whose reference is computed first.

    killed_prefer_run.py <folder> <workers> <async: 0 or 1> [<max_tokens>]

ACCMT_TEST_LOSS is the loss. ACCMT_TEST_QUANTIZED=1 tunes an adapter on a model in 4 bits. The file `started` is there
when the reference is about to be computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accmt import PreferenceModule
from tests import conversations
from tests.conversations import make_tokenizer
from tests.faults.scripts.killed_run import HPS, SAMPLES, WIDTH, train

LOSS: Any = os.environ.get("ACCMT_TEST_LOSS", "dpo")
IS_QUANTIZED = "ACCMT_TEST_QUANTIZED" in os.environ
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


def make_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    width = 64 if IS_QUANTIZED else WIDTH // 8
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    if not IS_QUANTIZED:
        return model
    model.save_pretrained("base")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained("base", quantization_config=four_bits)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1))


def main(folder: str, workers: str, is_async: str, max_tokens: str | None = None) -> None:
    tokenizer = make_tokenizer(conversations.CHATML)
    model = make_model(len(tokenizer))
    module = PreferenceModule(model, tokenizer, LOSS, reference_folder="reference")
    Path("started").write_text("computing")
    train(module, make_rows(), HPS | {"max_tokens": max_tokens}, folder, workers, is_async)


if __name__ == "__main__":
    main(*sys.argv[1:])
