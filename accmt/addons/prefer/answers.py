"""Answers that a model writes to held-out prompts, for a table at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from accmt.addons.sft.chat import IGNORED
from accmt.addons.sft.rows import TokenizedRows
from accmt.without_trace import restore_modes

_MOST_TOKENS = 128


class Prompt(NamedTuple):
    """A prompt, and the answer of its row: the chosen one of a pair.

    Attributes:
        input_ids: The tokens of the prompt.
        answer: The tokens of the answer.
    """

    input_ids: list[int]
    answer: list[int]


def find_prompts(rows: TokenizedRows, number: int) -> list[Prompt]:
    """Return the prompts of the first rows that have targets."""
    found: list[Prompt] = []
    for index in range(len(rows)):
        if len(found) == number:
            break
        sample = rows[index]
        if sample["weight"] > 0:
            ids, labels = sample["input_ids"][0], sample["labels"][0]
            start = next(at for at, label in enumerate(labels) if label != IGNORED)
            found.append(Prompt(ids[:start], [label for label in labels if label != IGNORED]))
    return found


def write_answers(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[tuple[str, ...]]:
    """Return each prompt with the answer of its row and the model's own, the most likely token at a time.

    The model is called itself, because `generate` of an adapter calls the model inside, which has no whole weights if
    it is sharded. Without a cache of keys, this is also right for trained prompts.

    Processes: all, if the model is sharded.
    """
    most = min(_MOST_TOKENS, 2 * max(len(prompt.answer) for prompt in prompts))
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stops = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    rows = []
    model.eval()
    try:
        for prompt in prompts:
            ids, start = list(prompt.input_ids), len(prompt.input_ids)
            while len(ids) < start + most and (len(ids) == start or ids[-1] not in stops):
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            texts = (tokenizer.decode(part, skip_special_tokens=True) for part in (*prompt, ids[start:]))
            rows.append(tuple(text.strip() for text in texts))
    finally:
        restore_modes(modes)
    return rows
