"""Which layers of a transformers model FSDP2 shards one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from accmt import ChainedOptimizer
from accmt.engine.shards import _embeddings_for_themselves, try_steps_of_shards
from accmt.errors import ModuleContractError
from accmt.optimization.stepper import Stepper
from tests.raising import raises_at
from tests.schedule_free import FreeSGD

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
    with raises_at(ModuleContractError, "the model, sharded by FSDP2"):
        layers_of(BertModel(BertConfig(**SIZES)), ["BertEmbeddings", "BertLayer"])


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[nn.Parameter]:
    """A weight that is sharded over this process alone, which torch computes with as over several."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    torch.distributed.destroy_process_group()


def test_an_optimizer_that_cannot_step_shards_is_an_error_before_the_first_step(shard: nn.Parameter) -> None:
    sgd, adam = torch.optim.SGD([shard], lr=0.1, momentum=0.9), torch.optim.AdamW([shard], fused=True)
    for one in (sgd, adam, FreeSGD([shard])):
        try_steps_of_shards(one)
        assert not one.state
    assert torch.equal(shard.full_tensor(), torch.ones(4, 3))
    for kind in (torch.optim.Adafactor, torch.optim.Rprop, transformers.Adafactor):
        with raises_at(ModuleContractError, "the optimizer"):
            try_steps_of_shards(kind([shard]))
    other = nn.Parameter(torch.ones(2))
    chained = ChainedOptimizer([torch.optim.Adafactor([other]), torch.optim.SGD([shard])])
    try_steps_of_shards(chained)  # Adafactor has a whole weight only


def test_a_gradient_of_a_gradient_with_freed_shards_is_explained(shard: nn.Parameter) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    stepper = Stepper(Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    with raises_at(ModuleContractError, "the backward of a model that FSDP2 shards"):
        stepper.backward(gradient.square().sum())
