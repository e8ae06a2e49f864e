"""Quantized weights, low-bit optimizers and Liger's kernels, whose layouts and code on a GPU are others than on a CPU.

A case is skipped where its package is not in the image; it may lie on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from accmt import AcceleratorModule
from tests.gpu.toys import AtStep, InterruptionError, interrupt, train

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "lr": 1e-3},
    "bitsandbytes": {"type": "bitsandbytes.optim.AdamW8bit", "lr": 1e-3},
    "torchao 8 bit": {"type": "torchao.optim.AdamW8bit", "lr": 1e-4},
    "torchao 4 bit": {"type": "torchao.optim.AdamW4bit", "lr": 1e-4},
    "torchao fp8": {"type": "torchao.optim.AdamWFp8", "lr": 1e-4},
}
LORA = {"r": 16, "dropout": 0.2, "targets": ["q_proj", "v_proj"]}
CELLS = [("nf4", "bitsandbytes"), ("nf4", "AdamW"), ("int8", "AdamW"), *((None, name) for name in OPTIMIZERS)]
NEEDS = {"nf4": "bitsandbytes", "int8": "bitsandbytes"}


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (24, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@pytest.fixture
def base() -> str:
    """A folder with a tiny model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained("base")
    return "./base"


def make(base: str, **model: Any) -> AcceleratorModule:
    torch.manual_seed(3)
    hps = {"epochs": 1, "batch_size": 1, "optim": "SGD"}
    return AcceleratorModule.from_hps({**hps, "model": {"path": base, "type": "AutoModelForCausalLM", **model}})


def trained(module: AcceleratorModule) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu() for name, weight in module.model.named_parameters() if weight.requires_grad}


@pytest.mark.cuda_only("other layouts of quantized weights and states")
@pytest.mark.parametrize(("quantization", "optimizer"), CELLS)
def test_what_trains_resumes_with_equal_bits(
    base: str, quantization: str | None, optimizer: str, settings: dict[str, Any]
) -> None:
    for package in ("peft", NEEDS.get(quantization or ""), OPTIMIZERS[optimizer]["type"].partition(".")[0]):
        if package not in (None, "AdamW"):
            pytest.importorskip(package)
    model = {"lora": LORA, "quantization": quantization} if quantization else {}
    own = {**settings, "checkpoint_every": "2 steps", "torch_flags": {"deterministic": True}}
    others = {"hps": {"optim": OPTIMIZERS[optimizer]}, "val": Texts()}
    whole, resumed, before = make(base, **model), make(base, **model), trained(make(base, **model))
    train(whole, Texts(), own, folder="whole", **others)
    with contextlib.suppress(InterruptionError):
        train(make(base, **model), Texts(), own, folder="parts", callbacks=AtStep(7, interrupt), **others)
    train(resumed, Texts(), own, folder="parts", resume=True, **others)
    expected, found = trained(whole), trained(resumed)
    assert any(not torch.equal(weight, before[name]) for name, weight in expected.items())
    assert not [name for name, weight in found.items() if not torch.equal(weight, expected[name])]


@pytest.mark.cuda_only("Liger's kernels run on GPUs")
def test_with_ligers_kernels_a_model_learns_what_it_does_without(base: str, settings: dict[str, Any]) -> None:
    pytest.importorskip("liger_kernel")
    hps = {"optim": {"type": "SGD", "lr": 0.1}}
    plain = make(base)  # first: Liger replaces functions of transformers for the rest of the process
    train(plain, Texts(), settings, folder="plain", hps=hps)
    kernels, before = make(base, kernels="liger"), trained(make(base))
    train(kernels, Texts(), settings, folder="kernels", hps=hps)
    assert "liger" in type(kernels.model.model.norm).__module__ + kernels.model.model.norm.forward.__func__.__module__
    for name, weight in trained(kernels).items():
        torch.testing.assert_close(weight, trained(plain)[name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(weight, before[name])
