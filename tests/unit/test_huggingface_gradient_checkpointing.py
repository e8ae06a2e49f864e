import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from accmt.addons.pretrained import enable_gradient_checkpointing
from accmt.errors import ArgumentError
from tests.raising import raises_at

TOKENS = torch.arange(12).reshape(2, 6)


def build(*, lora=False, dropout=0.0):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **special, **drops, use_cache=False))
    if lora:
        config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.train()


def gradients(model):
    torch.manual_seed(1)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def count_layer_calls(model):
    calls = []
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers[0].ln_1.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kwargs", [None, {}, {"preserve_rng_state": True}, {"use_reentrant": True}], ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_gradients_are_the_same_and_layers_are_computed_twice(lora, kwargs):
    plain, recomputing = build(lora=lora, dropout=0.1), build(lora=lora, dropout=0.1)
    enable_gradient_checkpointing(recomputing, kwargs)
    calls = count_layer_calls(recomputing)
    expected, got = gradients(plain), gradients(recomputing)
    assert len(calls) == 2
    assert got.keys() == expected.keys()
    assert all(gradient is not None and torch.equal(gradient, expected[name]) for name, gradient in got.items())


@pytest.mark.parametrize(
    ("kwargs", "expected"), [(None, False), ({"preserve_rng_state": False}, False), ({"use_reentrant": True}, True)]
)
def test_recomputation_is_not_reentrant_unless_asked_for(kwargs, expected):
    model = build()
    enable_gradient_checkpointing(model, kwargs)
    assert model.transformer.h[0]._gradient_checkpointing_func.keywords["use_reentrant"] is expected


def test_a_model_without_layers_that_can_be_recomputed_is_rejected():
    with raises_at(ArgumentError, "Trainer(gradient_checkpointing=...) with Linear"):
        enable_gradient_checkpointing(nn.Linear(1, 1))


def test_a_transformers_model_that_does_not_support_it_is_rejected():
    model = build()
    model.supports_gradient_checkpointing = False
    with raises_at(ArgumentError, "Trainer(gradient_checkpointing=...) with GPT2LMHeadModel"):
        enable_gradient_checkpointing(model)
