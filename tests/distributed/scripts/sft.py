"""Supervised fine-tuning on some processes, of rows and of a stream, whole and resumed; writes what came of it.

torchrun --nproc-per-node 2 sft.py RESULT.json FOLDER KIND
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import tests.many_runs  # noqa: F401
from accmt import SFTModule, Trainer
from accmt.processes import is_main_process, num_processes
from accmt.sharded_tensors import make_whole
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer
from tests.resume.unbroken import InterruptAt, InterruptionError

BATCH, STOP = 4, 4
NO_ANSWER = {"messages": [{"role": "user", "content": "nobody answers"}]}
KINDS: dict[str, dict[str, Any]] = {
    "batches": {},
    "packing": {"max_tokens": 500, "packing": True},
    "nf4": {},
}


class Rows(IterableDataset[Any]):
    """Rows that keep their own position."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.place, self.loaded = rows, 0, 0

    def __iter__(self) -> Any:
        self.place, self.loaded = self.loaded, 0
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["place"]


def make_module(kind: str, *, lora: bool) -> SFTModule:
    """Make a module of a model in double precision, or of a quantized one with an adapter."""
    tokenizer = make_tokenizer(conversations.CHATML)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    model = quantize(model) if kind == "nf4" else model.double()
    if lora:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, config)
    return SFTModule(model, tokenizer)


def quantize(model: LlamaForCausalLM) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "pytorch_model.bin")  # `save_pretrained` is for the first process
        model.config.to_json_file(Path(folder) / "config.json")
        loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, use_safetensors=False)
    return prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)


def train(folder: Path, kind: str, *, lora: bool, streams: bool, **settings: Any) -> SFTModule:
    """Train for two epochs; the rows of a step are the same on every number of processes."""
    rows = [NO_ANSWER, *draw_conversations(8, seed=3), NO_ANSWER, NO_ANSWER]
    number = int(os.environ.get("WORLD_SIZE", "1"))
    hps = {"epochs": 2, "batch_size": BATCH // number, "optim": {"type": "SGD", "lr": 0.05}, **KINDS[kind]}
    module = make_module(kind, lora=lora)
    own = {"seed": 1, "shuffle_train": False, "verbose": False, "dataloader_num_workers": 0, "log_every": -1}
    trainer = Trainer(hps, folder, checkpoint_every="2 steps", **own, **settings)
    with contextlib.suppress(InterruptionError):
        trainer.fit(module, Rows(rows) if streams else rows, rows)
    return module


def weights_of(module: SFTModule) -> torch.Tensor:
    trained = [weight for weight in module.unwrapped_model.parameters() if weight.requires_grad]
    return torch.cat([make_whole(weight).detach().flatten() for weight in trained])


def main(result: str, folder: str, kind: str) -> None:
    found = {}
    for lora, streams in ((True, False), (True, True)) if kind == "nf4" else ((False, False), (True, True)):
        before = weights_of(make_module(kind, lora=lora))
        name = f"{'lora' if lora else 'whole'}, {'stream' if streams else 'rows'}"
        data: dict[str, Any] = {"lora": lora, "streams": streams}
        whole = weights_of(train(Path(folder) / name / "whole", kind, **data))
        resumed = None
        if num_processes() > 1 or kind == "nf4":
            train(Path(folder) / name / "parts", kind, callbacks=InterruptAt(STOP), **data)
            resumed = weights_of(train(Path(folder) / name / "parts", kind, resume=True, **data))
        found[name] = {
            "moved": bool((whole - before).abs().max() > 1e-4),
            "resumes": resumed is not None and torch.equal(whole, resumed),
            "weights": whole.tolist(),
        }
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
