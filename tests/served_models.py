"""A tiny chat model, saved, and faults of its exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accmt.cli.main import main
from tests.conversations import LLAMA, make_tokenizer

END = "<|eot|>"


def save_trained(folder: str = "trained", *, tie: bool = False, adds_bos: bool = False) -> Any:
    """Save a model with heads of queries and keys in unequal numbers, and its tokenizer; return the tokenizer."""
    tokenizer = make_tokenizer(LLAMA, adds_bos=adds_bos)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def change_weights(folder: str, change: Any) -> None:
    """Call a function with the model in a folder, and save it again."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)


def untie(model: Any) -> None:
    """Give a model with tied embeddings another output layer, as an export of a head that was not trained."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))


def permute(model: Any) -> None:
    """Order the rows of queries and keys as GGUF's llama models do."""
    for layer in model.model.layers:
        for part, heads in ((layer.self_attn.q_proj, 4), (layer.self_attn.k_proj, 2)):
            part.weight.copy_(permute_rows(part.weight, heads))


def permute_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a matrix with the rows of each head's halves interleaved.

    Source: `LlamaModel.permute` in convert_hf_to_gguf.py of llama.cpp.
    """
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_setting(file: str, name: str, value: Any) -> None:
    """Change a setting in a JSON file."""
    settings = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps({**settings, name: value}))


def check(
    capsys: Any, kind: str, export: str, *options: str, model: str = "trained"
) -> tuple[int, dict[str, str], str]:
    """Run the command; return its exit code, the state of each part, and the first that differs with why."""
    code = main(["check", model, "--against", kind, export, "--json", *options])
    shown = capsys.readouterr()
    if code == 2:
        return code, {}, shown.err
    found = json.loads(shown.out)
    first = next((part for part in found["parts"] if part["name"] == found["first_difference"]), {})
    states = {part["name"]: part["state"] for part in found["parts"]}
    return code, states, f"{found['first_difference']}: {first.get('detail')}; {first.get('do')}"
