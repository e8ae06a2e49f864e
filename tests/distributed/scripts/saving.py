"""Saves a grid of models as a Trainer does, and loads every folder of it again.

`saving.py save RESULT FOLDER`: one update each, then what `Trainer.save_model` does, into `FOLDER/trained`; on several
processes the same models, sharded by `fully_shard`, into `FOLDER/sharded` too.
`saving.py load RESULT FOLDER...`: in a fresh process, every model of such folders.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[3]))

import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer
from accmt.huggingface import save_model
from accmt.processes import is_main_process
from accmt.run.model_saver import save_model as save_run
from accmt.saving.weights import ShardedState

SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
HPS = {"epochs": 1, "max_steps": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
AUTO_CLASSES = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}


class Plain(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.first(tokens[:, :6].to(self.first.weight.dtype)))
        scores: Tensor = self.second(hidden)
        return scores


class Tied(Plain):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 20)
        self.head.weight = self.second.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.head(torch.ones(8))


class SharedView(Plain):
    """Two modules with the same view of a larger memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(24, 8)
        self.second.weight = nn.Parameter(memory[2:22])
        self.same = nn.Linear(8, 20)
        self.same.weight = self.second.weight  # a second Parameter would part from it at `Module.to`

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.same(torch.ones(8))


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, **SPECIAL))


def t5() -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "num_layers": 2, "num_heads": 2, "d_ff": 16, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=20, **sizes, **SPECIAL))


def lora() -> nn.Module:
    base = gpt2()
    generator = torch.Generator().manual_seed(3)
    for weight in base.parameters():  # the same in every process: a folder holds the adapter alone
        weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(base, config)


def compiled_in_part() -> nn.Module:
    model = Tied()
    model.first = torch.compile(model.first, backend="eager")  # type: ignore[assignment]
    return model


def compiled_layer() -> nn.Module:
    model: Any = bert()
    model.bert.encoder.layer[0] = torch.compile(model.bert.encoder.layer[0], backend="eager")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "shared-view": SharedView,
    "bfloat16": lambda: Plain().to(torch.bfloat16),
    "compiled": Plain,  # by the Trainer
    "compiled-by-hand": lambda: torch.compile(Plain(), backend="eager"),
    "compiled-in-part": compiled_in_part,
    "bert": bert,
    "compiled-layer": compiled_layer,
    "gpt2": gpt2,
    "t5": t5,
    "lora": lora,
}
UNCOMPILED = {"compiled-by-hand": Plain, "compiled-in-part": Tied, "compiled-layer": bert}


class Module(AcceleratorModule):
    """Any model of the grid."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, batch: Any) -> Tensor:
        return score(self.model, getattr(self.unwrapped_model, "config", None), batch[0]).float().square().mean()


def score(model: nn.Module, config: Any, tokens: Tensor) -> Tensor:
    if config is None:
        scores: Tensor = model(tokens)
        return scores
    decoder = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
    logits: Tensor = model(input_ids=tokens, **decoder).logits
    return logits


def make_tokens() -> Tensor:
    return torch.arange(8 * 6).reshape(8, 6) % 19


def outputs(model: nn.Module) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return score(model.eval(), getattr(model, "config", None), make_tokens())


def cells_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    size = sum(weight.nbytes for weight in model.parameters())
    for split, max_shard_size in {"one": "10GB", "three": int(0.4 * size)}.items():
        for form, safe in {"safetensors": True, "bin": False}.items():
            yield f"{split}-{form}", {"max_shard_size": max_shard_size, "safe_serialization": safe}


def train(folder: Path) -> dict[str, Tensor]:
    """Train each model for an update, save it, and return what it computes, by name and cell."""
    expected = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        module = Module(make())
        is_compiled = {"compile": {"backend": "eager"}} if name == "compiled" else {}
        trainer = Trainer(
            HPS,
            str(folder / name),
            model_saving=None,
            checkpoint_every=None,
            verbose=False,
            seed=0,
            logging_dir=str(folder / "logs"),
            **is_compiled,
        )
        trainer.fit(module, TensorDataset(make_tokens()))
        told = trainer.run.settings
        for cell, settings in cells_of(module.model):
            run = replace(trainer.run, settings=replace(told, saving=replace(told.saving, **settings)))
            save_run(run, folder / name / cell)
            expected[f"{name}/{cell}"] = outputs(module.model)
    return expected


def shard(folder: Path) -> dict[str, Tensor]:
    """Shard each model, save it, and return what it computed before."""
    mesh = init_device_mesh("cpu", (2,))
    expected = {}
    for name, make in MODELS.items():
        if name in ("compiled", "compiled-by-hand"):  # the wrapper around the whole is the launch's, and gone by then
            continue
        torch.manual_seed(0)
        model = make()
        before, settings_by_cell = outputs(model), list(cells_of(model))
        fully_shard(model, mesh=mesh)
        state = ShardedState(model)
        for cell, settings in settings_by_cell:
            state.run_on_main(partial(save_model, model, state, folder / name / cell, **settings))
            expected[f"{name}/{cell}"] = before
    return expected


def load(folder: Path) -> dict[str, list[str]]:
    """Load every model of a folder, and return what is wrong with each."""
    expected = torch.load(folder / "expected.pt")
    return {key: list(find_faults(folder / key, key, value)) for key, value in expected.items()}


def find_faults(folder: Path, key: str, expected: Tensor) -> Iterator[str]:
    name, cell = key.split("/")
    for fresh in filter(None, (MODELS[name], UNCOMPILED.get(name))):
        torch.manual_seed(99)
        module = Module(fresh())
        module.load_weights(folder)
        if not torch.equal(outputs(module.model), expected):
            yield "other outputs"
    if name in AUTO_CLASSES:
        yield from find_faults_of_transformers(folder, AUTO_CLASSES[name], expected)
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    if (len(files) >= 3) != (cell.startswith("three") and name != "lora"):
        yield f"{len(files)} files"
    names = [weight for path in files for weight in read_names(path)]
    yield from (weight for weight in names if "_orig_mod" in weight or weight.startswith("module."))


def find_faults_of_transformers(folder: Path, auto_class: Any, expected: Tensor) -> Iterator[str]:
    found, report = auto_class.from_pretrained(folder, output_loading_info=True)
    for weight in found.parameters():
        weight.data = weight.data.clone()  # a mapped file lies at other offsets, which changes last bits
    if any(report.values()):
        yield f"from_pretrained: {report}"
    if not torch.equal(outputs(found), expected):
        yield "other outputs from from_pretrained"


def read_names(path: Path) -> list[str]:
    return list(safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path))


def main() -> None:
    command, result, *folders = sys.argv[1:]
    torch.set_num_threads(1)
    if command == "load":
        Path(result).write_text(json.dumps({folder: load(Path(folder)) for folder in folders}))
        return
    saved = {"trained": train, "sharded": shard}
    for name, save in saved.items():
        expected = save(Path(folders[0]) / name)
        if is_main_process():
            torch.save(expected, Path(folders[0]) / name / "expected.pt")
    if is_main_process():
        Path(result).write_text(json.dumps(list(saved)))


if __name__ == "__main__":
    main()
