"""TF32 is switched only where somebody asks for it; weights are trained in float32, or their owner is told."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, Callback, ChainedOptimizer, Trainer, allow_tf32
from tests.toys import InterruptAt, InterruptionError, make_trainer


@pytest.fixture(autouse=True)
def _restore():
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize(("arguments", "precision", "cudnn"), [((), "high", True), ((False,), "highest", False)])
def test_tf32_is_allowed_and_taken_back_for_products_and_convolutions(arguments, precision, cudnn):
    torch.set_float32_matmul_precision("medium")
    allow_tf32(*arguments)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cudnn.allow_tf32 is cudnn


@pytest.fixture
def in_halves(tmp_path: Path) -> Path:
    """Return the folder of a model in bfloat16, as most are shared; its head is tied to its embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=30, **sizes, tie_word_embeddings=True)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def make_rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(30, (16, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def fit(module: AcceleratorModule, path: str = "out/model", **settings: Any) -> Trainer:
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "AdamW", "lr": 1e-5}}
    trainer = make_trainer(hps, path, **settings)
    with contextlib.suppress(InterruptionError):
        trainer.fit(module, make_rows(), make_rows())
    return trainer


def read(folder: Path, **arguments: Any) -> AcceleratorModule:
    return AcceleratorModule.from_hf(folder, "AutoModelForCausalLM", **arguments)


def weights_of(module: AcceleratorModule) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.model.named_parameters()}


def is_warned(caplog: pytest.LogCaptureFixture) -> bool:
    return "are bfloat16: rounding drops updates smaller than about 0.20% of a weight; load" in caplog.text


def test_mixed_precision_trains_weights_in_float32_whatever_they_were_read_in(in_halves, caplog):
    read_so, asked = read(in_halves), read(in_halves, dtype="float32")
    assert read_so.model.dtype == torch.bfloat16
    for module in (read_so, asked):
        fit(module, mixed_precision="bf16", model_saving="last")
    found, expected = weights_of(read_so), weights_of(asked)
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert read_so.model.get_input_embeddings().weight is read_so.model.get_output_embeddings().weight
    saved = dict(AutoModelForCausalLM.from_pretrained("out/model/last").named_parameters())
    assert all(torch.equal(weight, saved[name]) for name, weight in found.items())
    assert not is_warned(caplog)


def test_such_a_run_resumes_with_equal_bits(in_halves):
    settings = {"mixed_precision": "bf16", "checkpoint_every": "step"}
    whole, resumed = read(in_halves), read(in_halves)
    fit(whole, "out/whole", **settings)
    fit(read(in_halves), "out/parts", **settings, callbacks=[InterruptAt(5)])
    fit(resumed, "out/parts", **settings, resume=True)
    found = weights_of(resumed)
    assert all(torch.equal(weight, found[name]) for name, weight in weights_of(whole).items())


def test_frozen_weights_keep_their_type(in_halves):
    module = read(in_halves)
    module.freeze()
    module.unfreeze(module.model.model.norm)
    before = weights_of(module)
    fit(module, mixed_precision="bf16", model_saving="last")
    saved = dict(AutoModelForCausalLM.from_pretrained("out/model/last").named_parameters())
    assert all(torch.equal(weight.float(), saved[name]) for name, weight in weights_of(module).items())
    for name, weight in weights_of(module).items():
        if name == "model.norm.weight":
            assert weight.dtype == torch.float32
            assert not torch.equal(weight, before[name].float())
        else:
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, before[name])


def test_weights_that_are_trained_in_16_bits_are_named_with_what_to_write(in_halves, caplog):
    module = read(in_halves)
    before = weights_of(module)
    fit(module)
    assert is_warned(caplog)
    assert "20 of 20 trained parameters" in caplog.text
    changed = [(weight != before[name]).float().mean() for name, weight in weights_of(module).items()]
    assert torch.stack(changed).mean() < 0.5, "which is why"


def test_weights_in_16_bits_that_are_unfrozen_in_a_run_are_named_then(in_halves, caplog):
    said: list[bool] = []

    class Unfreeze(Callback):
        def on_epoch_start(self) -> None:
            said.append(is_warned(caplog))
            self.module.unfreeze()

        def on_fit_end(self) -> None:
            said.append(is_warned(caplog))

    module = read(in_halves)
    module.freeze()
    module.unfreeze(module.model.model.norm)
    fit(module, callbacks=[Unfreeze()], mixed_precision="bf16")
    assert said[0] is False
    assert said[-1] is True


def test_an_optimizer_that_rounds_by_chance_may_have_weights_in_16_bits(in_halves, caplog):
    class Rounding(torch.optim.AdamW):
        bf16_stochastic_round = True

    module = read(in_halves)
    module.get_optimizer = lambda: Rounding(module.model.parameters(), lr=1e-5)
    fit(module)
    assert not is_warned(caplog)
    first, *others = module.model.parameters()
    for kind, is_coarse in ((Rounding, False), (torch.optim.AdamW, True)):
        both = ChainedOptimizer([Rounding(others, lr=1e-5), kind([first], lr=1e-5)])
        module.get_optimizer = lambda both=both: both
        fit(module, resume=False)
        assert ("1 of 20 trained parameters are bfloat16" in caplog.text) == is_coarse


class Regression(AcceleratorModule):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs).float(), targets)


def around(normalization: nn.Module) -> nn.Module:
    after = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), normalization, *after).bfloat16()


@pytest.mark.parametrize("frozen", [(), ("1.weight",), ("1.weight", "1.bias")], ids=["none", "weight", "all"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, lambda size: nn.GroupNorm(2, size)], ids=["batches", "groups"])
def test_normalization_beside_weights_that_become_float32_computes(kind, frozen):
    model = around(kind(4))
    for name in frozen:
        model.get_parameter(name).requires_grad_(requires_grad=False)
    data = TensorDataset(torch.randn(8, 3, 8, 8), torch.randn(8, 2))
    make_trainer({"epochs": 1, "batch_size": 4}, mixed_precision="bf16").fit(Regression(model), data)
    floats = [tensor for tensor in model[1].state_dict().values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == list(frozen)
