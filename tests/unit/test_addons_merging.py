"""Merging adapters: the merged model computes what the model with its adapter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accmt import merge_adapter
from accmt.addons.peft_adapters import save_adapters
from accmt.errors import WeightsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`:UserWarning"),  # what is tested here
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:UserWarning"),
]

TOKENS = torch.arange(12).view(2, 6)


def save_adapted(*, tie: bool = False, **lora: Any) -> torch.Tensor:
    """Save a tiny model and an adapter around it; return what the two compute."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=tie, **sizes)).save_pretrained("base")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, init_lora_weights=False, **lora)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), config)
    save_adapters(model, model.state_dict(), Path("adapter"))
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("tie", "lora"),
    [
        (True, {"target_modules": ["q_proj"]}),
        (True, {"target_modules": ["embed_tokens", "q_proj"]}),
        (True, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
        (True, {"target_modules": ["lm_head"]}),
        (True, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
        (True, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        (False, {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}),
    ],
    ids=["layers", "embeddings", "both", "output", "tokens", "saved", "repeated layers"],
)
def test_an_adapter_is_merged_into_its_own_layer_alone(tie: bool, lora: dict[str, Any]):
    expected = save_adapted(tie=tie, **lora)
    merge_adapter("adapter", "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained("merged")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora", [{}, {"trainable_token_indices": [1, 2]}], ids=["layers", "tokens"])
def test_weights_that_are_still_equal_stay_tied(lora: dict[str, Any]):
    save_adapted(tie=True, target_modules=["q_proj"], **lora)
    merge_adapter("adapter", "merged")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_what_peft_cannot_merge_is_said_in_its_words():
    save_adapted(target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(WeightsError, match=r"got: Impossible to merge LoRA with `lora_bias=True`"):
        merge_adapter("adapter", "merged")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")
