"""Which layers of a transformers model FSDP2 shards one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from accmt.errors import ModuleContractError
from accmt.parallel.shards import _embeddings_for_themselves

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}


def layers_of(model: nn.Module, names: list[str] | None = None) -> Any:
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=names)
    with _embeddings_for_themselves(model, plugin):
        found = plugin.transformer_cls_names_to_wrap
    assert plugin.transformer_cls_names_to_wrap is names
    return found


def test_a_layer_that_holds_the_embeddings_is_not_sharded_by_itself() -> None:
    bert = BertModel(BertConfig(**SIZES))
    assert layers_of(bert) == ["BertLayer"]


def test_what_needs_no_change_stays_as_it_is() -> None:
    assert layers_of(LlamaForCausalLM(LlamaConfig(**SIZES))) is None
    assert layers_of(nn.Sequential(nn.Linear(2, 2))) is None
    assert layers_of(BertModel(BertConfig(**SIZES)), ["BertLayer"]) == ["BertLayer"]


def test_a_layer_with_embeddings_that_is_asked_for_is_an_error() -> None:
    with pytest.raises(ModuleContractError, match="BertEmbeddings, which holds the embeddings"):
        layers_of(BertModel(BertConfig(**SIZES)), ["BertEmbeddings", "BertLayer"])
