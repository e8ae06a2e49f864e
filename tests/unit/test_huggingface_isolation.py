"""Which models keep packed documents apart is found by a trial that changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from accmt.addons.packing_check import PackedCall, try_packing

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_local_experts": 2,
    "pad_token_id": 0,
}
ISOLATED = ("llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3", "gpt2", "gpt_neox", "mixtral")
MIXED: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "bloom": {},
    "falcon": {"alibi": True, "head_dim": None},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba2": {"num_heads": 4, "state_size": 8, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "modernbert": {},
    "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 32},
    "electra": {"embedding_size": 16},
    "deberta-v2": {},
}
HAVE_NO_SDPA = ("bloom", "mamba2", "deberta-v2")
LEAST = 0.1
"""What every model that mixes documents differs by at least; those that isolate them do by less than 1e-6."""


def build(model_type: str, attention: str = "sdpa", *, scale: float = 8, **changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SMALL, **MIXED.get(model_type, {}), **ENCODERS.get(model_type, {}), **changed}
    if model_type in ENCODERS:
        del sizes["num_key_value_heads"]
    kind = AutoModelForMaskedLM if model_type in ENCODERS else AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **{name: size for name, size in sizes.items() if size is not None})
    model = kind.from_config(config, attn_implementation="eager" if model_type in HAVE_NO_SDPA else attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale if weight.ndim > 1 else 1)
    return model


CASES = [
    (name, attention)
    for attention in ("sdpa", "eager")
    for name in (*ISOLATED, *MIXED, *ENCODERS)
    if attention == "eager" or name not in HAVE_NO_SDPA
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # an older DeBERTa's
@pytest.mark.parametrize(("model_type", "attention"), CASES)
def test_the_trial_says_of_each_architecture_whether_it_mixes_documents(model_type: str, attention: str) -> None:
    model = build(model_type, attention)
    verdict = try_packing(model, PackedCall(model, {}))
    assert verdict.failure is None
    assert verdict.is_isolated == (model_type in ISOLATED)
    assert verdict.difference < 1e-5 if verdict.is_isolated else verdict.difference > LEAST


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "lfm2", "bert"])
@pytest.mark.parametrize("scale", [1, 8])
def test_the_trial_tells_in_half_precision_and_with_weights_as_they_are_drawn(model_type: str, scale: float) -> None:
    model = build(model_type, scale=scale).to(torch.bfloat16)
    verdict = try_packing(model, PackedCall(model, {}))
    assert verdict.is_isolated == (model_type in ISOLATED)
    assert verdict.difference < 0.05 if verdict.is_isolated else verdict.difference > LEAST + verdict.tolerance


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("others", [(), ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")])
@pytest.mark.parametrize("by_embeddings", [False, True])
def test_the_trial_calls_the_model_as_the_run_does(rows: int, others: Any, by_embeddings: bool) -> None:
    calls = []
    for model_type in ("llama", "bert"):
        model = build(model_type)
        hook = model.base_model.register_forward_pre_hook(lambda *call: calls.append(call[2]), with_kwargs=True)
        tokens = (
            {"inputs_embeds": torch.zeros(rows, 5, 16)} if by_embeddings else {"input_ids": torch.ones(rows, 5).long()}
        )
        call = PackedCall(model, {**tokens, "position_ids": torch.arange(2, 7)[None], **dict.fromkeys(others, 1)})
        assert try_packing(model, call).is_isolated == (model_type == "llama")
        hook.remove()
    assert calls[0]["position_ids"].shape == (rows, 19)
    assert int(calls[0]["position_ids"].min()) == 2
    if others:
        assert calls[0]["cu_seq_lens_q"].tolist() == [0, 11, 19]
        assert calls[0]["max_length_q"] == 11
        assert calls[0]["seq_idx"].tolist() == [[0] * 11 + [1] * 8]


class Average(nn.Module):
    """Sees the past as a running mean, from the start of the row or of the document; begins with a head of zeros."""

    def __init__(self, *, isolates: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 6)
        self.head = nn.Linear(6, 30)
        self.isolates = isolates
        nn.init.zeros_(self.head.weight)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        embedded = self.embed(tokens)
        places = torch.arange(tokens.shape[1])
        begins = places - position_ids if self.isolates else torch.zeros_like(position_ids)
        sees = (places >= begins[..., None]) & (places <= places[:, None])
        mean = sees.float() / sees.sum(-1, keepdim=True) @ embedded
        return self.head(nn.functional.dropout(mean, training=self.training))


@pytest.mark.parametrize("isolates", [True, False])
def test_a_model_of_ones_own_is_tried_and_a_head_of_zeros_hides_nothing(isolates: bool) -> None:
    model = Average(isolates=isolates)
    rows = torch.arange(20)[None], torch.tensor([[*range(12), *range(8)]])
    verdict = try_packing(model, PackedCall(model, dict(zip(("tokens", "position_ids"), rows, strict=True))))
    assert verdict.failure is None
    assert verdict.is_isolated == isolates
    assert isolates or verdict.layer == "head"


def test_a_model_that_cannot_be_called_so_is_not_taken_for_one_that_isolates() -> None:
    model = Average(isolates=True)
    for arguments in ({}, {"tokens": torch.zeros(1, 4, dtype=torch.long), "position_ids": torch.zeros(1, 4)}):
        verdict = try_packing(model, PackedCall(model, arguments))
        assert not verdict.is_isolated
        assert verdict.failure == "ValueError: there are not enough tokens to make two documents"


def test_the_trial_leaves_everything_as_it_was() -> None:
    model = build("gpt2", attn_pdrop=0.5)
    model.train()
    model.transformer.h[1].eval()  # which the user keeps so
    model.register_buffer("unequal", torch.tensor([float("nan"), -0.0]))
    average = Average(isolates=True).train()
    buffer = average.calls
    model.embed, average.gpt = average.embed, model
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    modes = [part.training for part in average.modules()]
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    positions = torch.tensor([[*range(12), *range(8)]])
    for tried, arguments in ((model, {}), (average, {"tokens": torch.arange(20)[None], "position_ids": positions})):
        with torch.inference_mode():
            assert try_packing(tried, PackedCall(tried, arguments)).failure is None
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert [part.training for part in average.modules()] == modes
    assert average.calls is buffer
    for name, tensor in average.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in average.modules())
    assert torch.is_grad_enabled()
    assert all(weight.grad is None for weight in average.parameters())
    average(torch.arange(20)[None], positions).sum().backward()


def test_autocast_keeps_no_weight_that_was_cast_in_the_trial() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert try_packing(model, PackedCall(model, {})).is_isolated
        assert torch.is_autocast_cache_enabled()
        model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
