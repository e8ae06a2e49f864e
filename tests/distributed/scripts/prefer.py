"""Preference tuning on some processes, whole and resumed; writes what came of it.

torchrun --nproc-per-node 2 prefer.py RESULT.json FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import tests.many_runs  # noqa: F401
from accmt import PreferenceModule, RewardModule, Trainer
from accmt.processes import is_main_process, num_processes
from accmt.sharded_tensors import make_whole
from tests import conversations
from tests.conversations import make_tokenizer
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.splitting import is_split, num_data_processes

BATCH, BATCH_OF_KTO, STOP = 4, 8, 4
WORDS = ["the", "rain", "window", "price", "don't", "e.g.", "yes"]


def make_rows(loss: str) -> list[dict[str, Any]]:
    """Nine rows, so that the last step of an epoch has one; and one that is not trained."""
    rows: list[dict[str, Any]] = []
    for index in range(9):
        asked = [{"role": "user", "content": " ".join(WORDS[: 1 + index % 5])}]
        answers = [f"{WORDS[index % 7]} " * (1 + index % 4), f"{WORDS[(index + 3) % 7]} " * (1 + index % 3) + "no"]
        chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in answers)
        if loss == "kto":
            rows.append({"prompt": asked, "completion": chosen if index % 2 else rejected, "label": bool(index % 2)})
        else:
            rows.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
    if loss != "kto":
        rows[5] = {**rows[5], "rejected": rows[5]["chosen"]}
    return rows


def make_module(loss: Any, *, lora: bool, folder: Path | None = None) -> PreferenceModule | RewardModule:
    tokenizer = make_tokenizer(conversations.CHATML)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes)
    if loss == "reward":
        config.num_labels = 1
        return RewardModule(LlamaForSequenceClassification(config).double(), tokenizer)
    model: Any = LlamaForCausalLM(config).double()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return PreferenceModule(model, tokenizer, loss, reference_folder=folder)


def train(
    folder: Path, loss: str, *, lora: bool, budget: bool, packing: bool = False, accumulation: int = 1, **settings: Any
) -> tuple[PreferenceModule | RewardModule, Trainer]:
    number = num_data_processes()
    size = (BATCH if loss != "kto" else BATCH_OF_KTO) // (number * accumulation)
    hps: dict[str, Any] = {"epochs": 2, "batch_size": [size, 3], "optim": {"type": "SGD", "lr": 0.1}}
    module, rows = make_module(loss, lora=lora, folder=folder / "reference" if budget else None), make_rows(loss)
    own = {"seed": 1, "shuffle_train": False, "verbose": False, "dataloader_num_workers": 0, "log_every": -1}
    hps |= {"max_tokens": 100} if budget or packing else {}
    hps |= {"packing": packing}
    hps |= {"evaluation": {"generate": {"max_new_tokens": 4}}} if lora else {}
    trainer = Trainer(
        hps,
        folder,
        checkpoint_every="2 steps",
        grad_accumulation_steps=accumulation,
        **own,
        **settings,
    )
    with contextlib.suppress(InterruptionError):
        trainer.fit(module, rows, rows[:7])
    return module, trainer


def weights_of(module: PreferenceModule | RewardModule) -> torch.Tensor:
    trained = [weight for weight in module.unwrapped_model.parameters() if weight.requires_grad]
    return torch.cat([make_whole(weight).detach().flatten() for weight in trained])


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"loss": "dpo", "lora": False, "budget": False},
    "whole, budget": {"loss": "dpo_norm", "lora": False, "budget": True},
    "packed": {"loss": "dpo", "lora": False, "budget": False, "packing": True},
    "lora": {"loss": "dpo", "lora": True, "budget": False},
    "kto": {"loss": "kto", "lora": False, "budget": False},
    "kto, accumulated": {"loss": "kto", "lora": False, "budget": False, "accumulation": 4},
    "kto, budget": {"loss": "kto", "lora": False, "budget": True},
    "kto, packed": {"loss": "kto", "lora": False, "budget": False, "packing": True},
    "reward": {"loss": "reward", "lora": False, "budget": False},
    "reward, packed": {"loss": "reward", "lora": False, "budget": False, "packing": True},
}


RESUMED = ("whole, budget", "lora")
SHARDED = ("whole, budget", "lora", "kto, accumulated", "kto, budget", "reward, packed")
SPLIT = ("whole", "whole, budget", "kto, accumulated")  # with tensor parallelism


def main(result: str, folder: str) -> None:
    found = {}
    is_sharded = "ACCELERATE_USE_FSDP" in os.environ
    for name in SPLIT if is_split() else SHARDED if is_sharded else KINDS:
        kind = KINDS[name]
        before = weights_of(make_module(kind["loss"], lora=kind["lora"]))
        own = Path(folder) / name
        module, trainer = train(own / "whole", **kind)
        whole = weights_of(module)
        resumed = whole
        if name in RESUMED and num_processes() > 1:
            train(own / "parts", **kind, callbacks=InterruptAt(STOP))
            resumed = weights_of(train(own / "parts", **kind, resume=True)[0])
        found[name] = {
            "moved": float((whole - before).abs().max()),
            "resumes": torch.equal(whole, resumed),
            "weights": whole.tolist(),
            "metrics": trainer.state.metrics,
        }
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
