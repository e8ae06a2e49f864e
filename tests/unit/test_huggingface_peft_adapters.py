"""Adapters of PEFT that a run rejects before its first step."""

from __future__ import annotations

from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, Trainer
from accmt.errors import ModuleContractError
from tests.raising import raises_at


class Adapted(AcceleratorModule):
    def __init__(self, config: PeftConfig) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)), config)

    def step(self, batch: Any) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def test_what_would_not_load_as_it_was_trained_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="pissa_niter_4")
    module, data = Adapted(config), TensorDataset(torch.randint(0, 16, (8, 5)))
    with raises_at(ModuleContractError, "the adapter 'default' of self.model"):
        Trainer({"epochs": 1, "batch_size": 4, "optim": "AdamW"}, "out/m", verbose=False).fit(module, data)
    assert module.state.global_step == 0
    assert not list(tmp_path.rglob("*.safetensors"))


class Allocated(Adapted):
    """AdaLoRA as PEFT's example trains it."""

    def __init__(self) -> None:
        super().__init__(
            AdaLoraConfig(target_modules=["q_proj", "v_proj"], init_r=4, target_r=1, tinit=1, total_step=8)
        )

    def on_before_zero_grad(self, **_: Any) -> None:
        self.unwrapped_model.base_model.update_and_allocate(self.state.global_step)


def allocate(path: str, epochs: int, **settings: Any) -> dict[str, torch.Tensor]:
    module = Allocated()
    data = TensorDataset(torch.arange(64).reshape(16, 4) % 16)
    hps = {"epochs": epochs, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01}}
    Trainer(hps, path, verbose=False, seed=1, checkpoint_every="epoch", **settings).fit(module, data)
    return {name: weight for name, weight in module.model.state_dict().items() if "lora_" in name}


def test_adalora_whose_ranks_a_hook_allocates_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = allocate("out/a", 2)
    ranks = [int((weight != 0).sum()) for name, weight in whole.items() if "lora_E" in name]
    assert sum(ranks) < 8
    allocate("out/b", 1)
    resumed = allocate("out/b", 2, resume=True)
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
    fresh = Allocated()
    fresh.load_weights("out/a")
    batch = (torch.arange(4)[None],)
    assert torch.isfinite(fresh.step(batch))
