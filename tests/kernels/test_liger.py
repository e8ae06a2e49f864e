"""`kernels: liger` of the model section, with the package; `make kernels` runs it.

On a CPU triton interprets two of the kernels: the loss and the rotation of positions. `make gpu` has all of them.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, Trainer
from accmt.errors import HyperParameterError

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of Liger's backends for other hardware
]
INTERPRETED = {"type": "liger", "rms_norm": False, "swiglu": False}


class Texts(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained("llama")
    BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).save_pretrained("bert")


def hps_of(**model: Any) -> dict[str, Any]:
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.5}}
    return {**hps, "model": {"path": "./llama", "type": "AutoModelForCausalLM", **model}}


def fit(folder: str, **model: Any) -> Any:
    module = AcceleratorModule.from_hps(hps_of(**model))
    Trainer(hps_of(**model), folder, seed=1, verbose=False).fit(module, Texts(), Texts())
    return module.model


def test_a_model_with_kernels_learns_what_it_does_without_and_its_folder_is_an_ordinary_one():
    plain = fit("out/plain")  # first: Liger replaces functions of transformers for the rest of the process
    kernels = fit("out/kernels", kernels=INTERPRETED)
    assert "liger" in kernels.forward.__func__.__module__
    assert not any(
        "liger" in part.forward.__func__.__module__ for part in plain.modules() if hasattr(part.forward, "__func__")
    )
    moved = LlamaForCausalLM.from_pretrained("llama")
    for own, expected, before in zip(kernels.parameters(), plain.parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(own, before)
    loaded = LlamaForCausalLM.from_pretrained("out/kernels")
    assert all(map(torch.equal, loaded.parameters(), kernels.parameters()))


def test_an_adapter_lies_around_a_model_with_kernels():
    model = fit("out/lora", kernels=INTERPRETED, lora={"r": 2, "targets": ["q_proj"]})
    assert "liger" in model.get_base_model().forward.__func__.__module__
    assert any(weight.abs().sum() > 0 for name, weight in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    ("model", "place", "message"),
    [
        ({"kernels": {"type": "liger", "swiglo": True}}, "model.kernels.swiglo", "do: write `swiglu`"),
        ({"kernels": {"type": "liger", "swiglu": "on"}}, "model.kernels.swiglu", "expected: bool"),
        ({"kernels": {"type": "liger", "model": True}}, "model.kernels.model", "an argument of apply_liger_kernel_to_"),
        ({"kernels": {"type": "liger", "cross_entropy": True}}, "model.kernels", "cannot both be True"),
        ({"path": "./bert", "type": "AutoModelForMaskedLM", "kernels": "liger"}, "model.kernels", "a model of bert"),
    ],
)
def test_what_liger_does_not_take_has_its_place(model, place, message):
    with pytest.raises(HyperParameterError) as raised:
        AcceleratorModule.from_hps(hps_of(**model))
    assert str(raised.value).startswith(f"hps_config {place}\n")
    assert message in str(raised.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_comes_before_the_first_step(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(HyperParameterError, match=r"no GPU on this machine\n.*\n  do: remove `kernels` here"):
        AcceleratorModule.from_hps(hps_of(kernels="liger"))


def test_weights_of_tokens_are_right_with_the_kernels_too():
    """Liger's fused loss has no weights of tokens; without labels, its forward returns the logits."""
    from accmt import SFTModule
    from tests import conversations
    from tests.conversations import make_tokenizer

    def step(**model: Any) -> tuple[Any, list[torch.Tensor]]:
        module = AcceleratorModule.from_hps(hps_of(**model))
        module.model.resize_token_embeddings(len(tokenizer))
        module.model.train()
        own = SFTModule(module.model, tokenizer)
        output = own.step(own.collate_fn(samples))
        output["loss"].backward()
        return output, [weight.grad for weight in module.model.parameters()]

    from accmt.addons.sft.chat import mask_row

    torch.manual_seed(0)
    tokenizer = make_tokenizer(conversations.CHATML)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c", "weight": 0.5}]
    turns += [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]
    samples = [mask_row(tokenizer, {"messages": turns}).sample()]
    torch.manual_seed(1)
    plain, expected = step()
    torch.manual_seed(1)
    fused, found = step(kernels=INTERPRETED)
    assert fused["weight"] == plain["weight"]
    torch.testing.assert_close(fused["loss"], plain["loss"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
