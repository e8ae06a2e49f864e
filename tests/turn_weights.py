"""Conversations with weights, and the gradient of their weighted loss in plain torch."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from accmt import SFTModule, Trainer
from accmt.addons.sft.chat import IGNORED, mask_row
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer

NUMBER = 8
SHAPES: dict[str, dict[str, Any]] = {
    "padding": {},
    "budget": {"max_tokens": 300},
    "packing": {"max_tokens": 500, "packing": True},
}


@cache
def tokenizer() -> Any:
    return make_tokenizer(conversations.CHATML)


def weighted_rows(number: int = NUMBER) -> list[dict[str, Any]]:
    """Draw conversations; turns and rows have weights, but not all of them."""
    draw, rows = random.Random(7), []
    for index, row in enumerate(draw_conversations(number, seed=5)):
        messages = [
            {**one, "weight": draw.choice([0, 0.25, 1, 3.5, None])} if one["role"] == "assistant" else one
            for one in row["messages"]
        ]
        weight = {0: {}, 1: {"weight": 0.5}, 2: {"weight": 2}, 3: {"weight": 0}}[index % 4]
        rows.append({**row, "messages": messages, **weight})
    return [*rows[:-1], draw_conversations(1, seed=6)[0]]  # the last one has none, as many rows of real data


def weights_by_turn(row: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the tokens of a row and their weights: each turn is masked where all others have the weight 0."""
    ids: list[int] = []
    weights: list[float] = []
    for index, message in enumerate(row["messages"]):
        if message["role"] != "assistant":
            continue
        alone = [
            {**one, "weight": int(place == index)} if one["role"] == "assistant" else one
            for place, one in enumerate(row["messages"])
        ]
        masked = mask_row(tokenizer(), {**row, "messages": alone, "weight": 1})
        own = 1 if message.get("weight") is None else message["weight"]
        own *= row.get("weight", 1)
        ids, weights = masked.input_ids, weights or [0.0] * len(masked.input_ids)
        weights = [own if label != IGNORED else one for label, one in zip(masked.labels, weights, strict=True)]
    return ids, weights


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **sizes)).double()


def expected_gradient(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Return the gradient of sum(w ce) / sum(w) over all tokens of all rows."""
    model = make_model()
    lost, total = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        ids, weights = weights_by_turn(row)
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        each = functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        lost = lost + (each * torch.tensor(weights[1:])).sum()
        total += sum(weights[1:])
    (lost / total).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def gradient_of_step(folder: Path, rows: list[dict[str, Any]], shape: str, accumulation: int, processes: int) -> Any:
    """Return the gradient of one step over all rows, from the change that SGD makes."""
    hps = {
        "epochs": 1,
        "batch_size": len(rows) // accumulation // processes,
        "optim": {"type": "SGD", "lr": 1.0},
        **SHAPES[shape],
    }
    module = SFTModule(make_model(), tokenizer())
    before = torch.cat([weight.detach().flatten().clone() for weight in module.model.parameters()])
    trainer = Trainer(
        hps, folder, seed=1, verbose=False, dataloader_num_workers=0, grad_accumulation_steps=accumulation
    )
    trainer.fit(module, rows)
    assert trainer.state.global_step == 1
    return before - torch.cat([weight.detach().flatten() for weight in module.model.parameters()])
