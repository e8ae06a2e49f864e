"""The run of `killed_run.py` with a language model whose documents are packed into rows.

killed_packed_run.py <folder> <workers> <async: 0 or 1>
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule
from tests.faults.scripts.killed_run import HPS, SAMPLES, WIDTH, train


class Documents(Dataset[dict[str, list[int]]]):
    """Documents of 3 to 24 tokens, some of which are replaced at random each time they are read."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = 3 + index * 7 % 22
        ids = [(index + place) % 29 + 2 if random.random() < 0.8 else 1 for place in range(length)]
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return SAMPLES


class Packed(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=31,
            hidden_size=WIDTH // 8,
            intermediate_size=WIDTH // 4,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
        self.model = LlamaForCausalLM(config)

    def step(self, batch: Any) -> Any:
        return self.model(**batch).loss


def main(folder: str, workers: str, is_async: str) -> None:
    train(Packed(), Documents(), HPS | {"max_tokens": 40, "packing": True}, folder, workers, is_async)


if __name__ == "__main__":
    main(*sys.argv[1:])
