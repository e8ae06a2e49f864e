"""Language models on some processes: LoRA, recomputed activations, and `generate` in the validation step.

torchrun --nproc-per-node 2 fine_tuning.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import xxhash
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer
from accmt.processes import gather_objects, is_main_process, process_index
from tests.low_bit import Rounded

HPS = {"epochs": 2, "batch_size": 2, "optim": {"type": "AdamW", "lr": 0.05}}
IGNORED = "_ddp_params_and_buffers_to_ignore"
PROMPTS = torch.tensor([[3, 4], [5, 6], [7, 8]])


def build(*, lora: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=0))
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))


class Writer(AcceleratorModule):
    """Learns sequences of tokens, and writes some in each validation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.written: dict[str, list[int]] = {}

    def training_step(self, batch: Any) -> Any:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss

    def validation_step(self, batch: Any) -> Any:
        (prompts,) = batch
        tokens = write(self.model, prompts)
        self.written |= {str(prompt.tolist()): row.tolist() for prompt, row in zip(prompts, tokens, strict=True)}
        return self.model(input_ids=prompts, labels=prompts).loss


def write(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompts)
    tokens: torch.Tensor = model.generate(input_ids=prompts, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return tokens


def train(folder: Path, *, lora: bool, gradient_checkpointing: Any) -> dict[str, Any]:
    module = Writer(build(lora=lora))
    tokens = torch.arange(8 * 6).reshape(8, 6) % 19
    trainer = Trainer(
        HPS,
        str(folder / f"{lora}-{gradient_checkpointing}"),
        model_saving="always",
        checkpoint_every=None,
        gradient_checkpointing=gradient_checkpointing,
        verbose=False,
        seed=0,
        logging_dir=str(folder / "logs"),
    )
    trainer.fit(module, TensorDataset(tokens), TensorDataset(PROMPTS))
    digest = xxhash.xxh3_64()
    for weight in module.model.parameters():
        digest.update(weight.detach().numpy().tobytes())
    module.model.eval()
    after = {str(p.tolist()): write(module.model, p[None])[0].tolist() for p in PROMPTS}
    return {"digest": digest.hexdigest(), "written": module.written, "after": after, "loss": trainer.state.metrics}


class Quantized(nn.Module):
    """A layer behind a frozen one whose weight is made of other tensors, and is another one on each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(process_index())
        self.frozen = nn.Parameter(Rounded.of(torch.randn(3, 3)), requires_grad=False)
        self.trained = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight: Any = self.frozen
        outputs: torch.Tensor = self.trained(inputs @ weight.dequantize())
        return outputs


class AroundQuantized(AcceleratorModule):
    def __init__(self) -> None:
        self.model = Quantized()

    def training_step(self, batch: Any) -> Any:
        return self.model(batch[0]).square().mean()


def train_around_quantized(folder: Path) -> dict[str, Any]:
    module, settings = AroundQuantized(), {"model_saving": None, "checkpoint_every": None, "verbose": False}
    trainer = Trainer(HPS, str(folder / "quantized"), **settings, logging_dir=str(folder / "logs"), seed=0)
    trainer.fit(module, TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(1))))
    weight = module.model.frozen
    frozen = {"codes": weight.codes.tolist(), "scale": weight.scale.item(), "ignored": vars(module.model).get(IGNORED)}
    return {**frozen, "trained": module.model.trained.weight.tolist()}


def main() -> None:
    result, folder = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    own = {
        f"lora={lora} checkpointing={bool(kwargs)}": train(folder, lora=lora, gradient_checkpointing=kwargs)
        for lora in (False, True)
        for kwargs in (False, True)
    }
    own["around quantized"] = train_around_quantized(folder)
    every = gather_objects(own)
    if is_main_process():
        result.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
