"""Trains on rows of which those of process 1 alone hold packed documents, and writes the weights' sum.

torchrun --nproc-per-node 2 packed_on_one.py llama|nested|opt RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule
from accmt.addons import packing_check
from accmt.processes import gather_objects, is_main_process
from accmt.sharded_tensors import make_whole
from tests.distributed.scripts.sharded import VOCABULARY, make_llama
from tests.toys import make_trainer

STEPS = 4


class Around(nn.Module):
    """A model around one of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> Any:
        outputs = self.inner(**batch)
        return {"logits": outputs.logits * self.scale}


class Rows(AcceleratorModule):
    def __init__(self, model: nn.Module, *, is_nested: bool) -> None:
        self.model = model
        self.is_nested = is_nested

    def training_step(self, batch: Any) -> Any:
        outputs = self.model(batch) if self.is_nested else self.model(**batch)
        return outputs["logits"].square().mean()


def make_rows(*, packs: bool) -> list[dict[str, torch.Tensor]]:
    """Return rows in which the documents of each second one are packed after the first step, or are rows themselves."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2 * STEPS, 8), generator=generator)
    places = torch.arange(8)
    is_packed = [packs and index % 2 == 1 and index > 2 for index in range(len(ids))]
    positions = [places % 4 if packed else places for packed in is_packed]
    return [{"input_ids": row, "position_ids": place} for row, place in zip(ids, positions, strict=True)]


def make_model(kind: str) -> nn.Module:
    if kind == "opt":
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"word_embed_proj_dim": 16, "max_position_embeddings": 32, "vocab_size": VOCABULARY}
        return OPTForCausalLM(OPTConfig(**sizes, tie_word_embeddings=False))
    return Around(make_llama()) if kind == "nested" else make_llama()


def main(kind: str, result: str, folder: str) -> None:
    os.chdir(folder)
    trials, real = [], packing_check.try_packing

    def count(*args: Any, **kwargs: Any) -> Any:
        trials.append(real(*args, **kwargs))
        return trials[-1]

    packing_check.try_packing = count
    found = {}
    for name in ("plain", "packed"):
        trials.clear()
        hps = {"epochs": 1, "batch_size": 1, "optim": {"type": "SGD", "lr": 0.1}}
        module = Rows(make_model(kind), is_nested=kind == "nested")
        trainer = make_trainer(hps, shuffle_train=False, seed=3, checkpoint_every=None)
        trainer.fit(module, make_rows(packs=name == "packed"))
        total = sum(float(make_whole(weight).double().abs().sum()) for weight in module.model.parameters())
        found[name] = {
            "total": total,
            "steps": trainer.state.global_step,
            "trials": gather_objects(len(trials)),
            "isolated": all(gather_objects(all(verdict.is_isolated for verdict in trials))),
            "modes": all(part.training for part in module.model.modules()),
        }
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
