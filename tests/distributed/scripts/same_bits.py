"""Runs with `same_bits` of every kind; writes digests of what is left of each, as {engine: {cell: {part: digest}}}.

torchrun --nproc-per-node 2 same_bits.py RESULT.json FOLDER PLAN, with PLAN a JSON of {engine: [cells, stops]}: "ddp" or
"fsdp", names of `CELLS`, and {name: step or null} of runs to resume, and to interrupt after a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import tests.many_runs  # noqa: F401
from accmt import EMA, AcceleratorModule, Metric, Trainer, read_history
from accmt.callbacks import Callback
from accmt.processes import is_main_process
from tests.toys import InterruptionError, Stream

VOCABULARY, LENGTH, WIDTH, HIDDEN = 31, 7, 6, 33  # an odd width: shards and vector instructions end anywhere
IGNORED = -100
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
NUM_UNITS = 8
BATCH_SIZE = 16
SAMPLES = 75  # the last batch has 6 units, the last of them one sample
HPS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": BATCH_SIZE,
    "optim": {"type": "AdamW", "lr": 0.01},
    "scheduler": {"type": "CosineAnnealingLR"},
}
SETTINGS: dict[str, Any] = {
    "same_bits": NUM_UNITS,
    "seed": 3,
    "log_every": 2,
    "clip_grad": 0.5,
    "checkpoint_every": "3 steps",
    "verbose": False,
}
OF_THIS_RUN = ("run_name", "run_id")
PARTS_OF_THIS_RUN = ("clock", "tracking")


class Ragged(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Tokens, and targets of as many as each has; every ninth has none.

    Args:
        count: How many there are.
        draws: Whether tokens change at each fetch, by all generators.
        length: The targets of the longest; 0 means one label for each sample.
    """

    def __init__(self, count: int = SAMPLES, *, draws: bool = False, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
        self.lengths[::9] = 0
        self.draws, self.length = draws, length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokens[index].clone()
        if self.draws:
            tokens[random.randrange(LENGTH)] = torch.randint(0, VOCABULARY, ())
        targets = tokens.flip(0)
        targets[self.lengths[index] :] = IGNORED
        return tokens, targets if self.length else targets[0].clamp(min=0) % 2

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self[index] for index in range(len(self)))


def build_network(num_outputs: int = VOCABULARY) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN)]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(HIDDEN, num_outputs))


class Words(AcceleratorModule):
    """Predicts tokens; a step has the weight of its targets, and logs what it draws."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = build_network() if model is None else model

    def step(self, batch: Any) -> Any:
        tokens, targets = batch
        logits = self.model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        self.log("noise", torch.rand(()))
        self.log("targets", (targets != IGNORED).sum(), reduction="sum")
        return {"loss": loss, "weight": (targets != IGNORED).sum(), "largest": logits.detach().max()}


class Logging(Words):
    """Logs in a hook, also on a process that has no part of the last batch."""

    def on_after_optimizer_step(self, **_: Any) -> None:
        self.log("steps", float(self.state.global_step))


class Labels(AcceleratorModule):
    """Predicts a label of each sample, and returns nothing but the loss."""

    def __init__(self) -> None:
        self.model = build_network(2)

    def training_step(self, batch: Any) -> Any:
        return functional.cross_entropy(self.model(batch[0]).mean(1), batch[1])

    def validation_step(self, batch: Any) -> Any:
        logits = self.model(batch[0]).mean(1)
        loss = functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "accuracy": (logits.argmax(1), batch[1]), "weighted": (logits[:, 0], batch[1])}


class Unreadable(Ragged):
    """Has samples that cannot be read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % 16 == 3:
            raise OSError("broken")
        return super().__getitem__(index)


class Infinite(Words):
    """Has losses that are not finite."""

    def training_step(self, batch: Any) -> Any:
        output = self.step(batch)
        if int(batch[0][0, 0]) == 7:
            output["loss"] = output["loss"] * math.inf
        return output


class LeavingOut(Words):
    """Leaves batches out, among them the first."""

    def training_step(self, batch: Any) -> Any:
        if int(batch[0][0, 0]) % 3 == 0:
            return None
        return self.step(batch)


class ByPosition(Metric):
    """Depends on the order of the samples."""

    def compute(self, predictions: Any, references: Any) -> Any:
        """Return a weighted mean."""
        return {"weighted": ((predictions - references) * torch.arange(1.0, 1 + len(predictions))).mean()}


class Experts(nn.Module):
    """Uses one of two layers, by what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        output: torch.Tensor = self.experts[int(tokens[0, 0]) % 2](self.first(tokens))
        return output


class Normalized(nn.Module):
    """Has batch norm, whose running statistics training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_network()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        normalized: torch.Tensor = self.norm(self.layers(tokens))
        return normalized


def build_language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))


def build_adapter() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = LoraConfig(r=3, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(build_language_model(), targets)


class Adapted(Words):
    """Trains an adapter of a language model."""

    def __init__(self) -> None:
        super().__init__(build_adapter())

    def step(self, batch: Any) -> Any:
        output = self.model(input_ids=batch[0], labels=batch[1])
        return {"loss": output.loss, "weight": (batch[1][:, 1:] != IGNORED).sum()}


class Documents(Dataset[dict[str, list[int]]]):
    """Texts of different lengths, as lists of tokens and labels."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.words = Ragged(count)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens, targets = self.words[index]
        length = 2 + int(self.words.lengths[index])
        return {"input_ids": tokens[:length].tolist(), "labels": targets[:length].tolist()}

    def __len__(self) -> int:
        return len(self.words)


class Reading(Words):
    """Trains a language model, whose loss accmt weights by its targets."""

    def __init__(self) -> None:
        super().__init__(build_language_model())

    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.model(**batch).loss, "noise": torch.rand(())}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = {"input_ids": 0, "labels": IGNORED}
    batch = {
        name: torch.tensor([sample[name] + [padding] * (longest - len(sample[name])) for sample in samples])
        for name, padding in rows.items()
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return batch | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def cut_to_longest(samples: list[Any]) -> Any:
    """Collate samples without the tokens after the longest: units differ in shape."""
    longest = max(1, *(int((targets != IGNORED).sum()) for _, targets in samples))
    return tuple(torch.stack([part[:longest] for part in parts]) for parts in zip(*samples, strict=True))


class StopAt(Callback):
    """Ends the run on all processes, after the backward of the window that follows a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, **_: Any) -> None:
        if self.state.global_step == self.step:
            raise InterruptionError


@dataclass(frozen=True)
class Cell:
    """A kind of run.

    Attributes:
        settings: Arguments of the Trainer that it has in addition.
        hps: Hyper-parameters that it has in addition.
        module: Makes its module.
        data: Makes its training data.
        validation: Makes its validation data.
        callbacks: Makes its callbacks.
        engines: On which it can run.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    hps: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], AcceleratorModule] = Words
    data: Callable[[], Any] = Ragged
    validation: Callable[[], Any] = lambda: Ragged(21)
    callbacks: Callable[[], list[Callback]] = list
    engines: tuple[str, ...] = ("ddp", "fsdp")


SGD = {"optim": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}

OF_STREAM = {"scheduler": None}  # of which torch would have to know the length

CELLS: dict[str, Cell] = {
    "dropout, ragged targets, clipping": Cell(),
    "no clipping, last batch of one sample": Cell({"clip_grad": None}, SGD, Logging, lambda: Ragged(65)),
    "loss of samples, metrics": Cell(
        {"metrics": ["accuracy", ByPosition("weighted")], "model_saving": ["best_accuracy", "last"]},
        module=Labels,
        data=lambda: Ragged(length=0),
        validation=lambda: Ragged(21, length=0),
    ),
    "accumulation of 3 batches": Cell({"grad_accumulation_steps": 3, "log_every": 1}),
    "accumulation by epoch": Cell({"grad_accumulation_steps": {0: 1, 1: 2}}),
    "ragged batches": Cell({"collate_fn": cut_to_longest}),
    "EMA": Cell(callbacks=lambda: [EMA(0.9)]),
    "LoRA": Cell(module=Adapted),
    "early stopping": Cell({"patience": 2, "evaluate_every_n_steps": 1}, SGD | {"optim": {"type": "SGD", "lr": 2.0}}),
    "bf16": Cell({"mixed_precision": "bf16"}),
    "samples drawn at random by a worker": Cell(
        {"dataloader_num_workers": 1}, data=lambda: Ragged(draws=True), validation=lambda: Ragged(21, draws=True)
    ),
    "limited batches": Cell({"limit_batches": {"train": 3, "val": 1}}),
    "clipping of values, norms logged": Cell({"clip_grad": {"value": 0.01}, "monitor": {"grad_norm": True}}),
    "layers that depend on the batch": Cell(module=lambda: Words(Experts()), engines=("ddp",)),
    "samples and losses that are skipped": Cell(
        {"failures": {"on_bad_sample": "skip", "on_nonfinite": "skip"}}, module=Infinite, data=Unreadable
    ),
    "stream": Cell({}, OF_STREAM, data=lambda: Stream([*Ragged()]), validation=lambda: Stream([*Ragged(21)])),
    "stream read by workers, accumulation of 3 batches": Cell(
        {"dataloader_num_workers": 2, "grad_accumulation_steps": 3}, OF_STREAM, data=lambda: Stream([*Ragged()])
    ),
    "batches left out": Cell(module=LeavingOut, engines=("ddp",)),
    "batch norm": Cell(module=lambda: Words(Normalized())),
    "token budget": Cell(
        {"collate_fn": pad, "grad_accumulation_steps": 2}, {"max_tokens": 24}, Reading, Documents, lambda: Documents(21)
    ),
    "packing": Cell(
        {"collate_fn": {"val": pad}}, {"max_tokens": 24, "packing": True}, Reading, Documents, lambda: Documents(21)
    ),
    "mixture": Cell(
        hps={"data": {"mix": {"a": 0.7, "b": 0.3}}}, data=lambda: {"a": Ragged(), "b": Ragged(40, draws=True)}
    ),
    "4 units": Cell({"same_bits": 4, "evaluate_every_n_steps": "0.5 epochs"}, {"batch_size": 12}),
}
INTERRUPTED = Cell(
    {"grad_accumulation_steps": 2, "checkpoint_every": "step", "resume": "auto"},
    {"epochs": 3},
    data=lambda: Ragged(draws=True),
    callbacks=lambda: [EMA(0.9)],
)
"""A run of 3 steps an epoch, with a row of every second."""


def cells_of(engine: str) -> list[str]:
    """Return the names of the cells that an engine can run."""
    return [name for name, cell in CELLS.items() if engine in cell.engines]


def make_settings(cell: Cell, engine: str) -> dict[str, Any]:
    settings = SETTINGS | cell.settings
    if engine == "fsdp" and WORLD > 1:
        settings["parallelism"] = {"fsdp": True}
    return settings


def run(cell: Cell, folder: Path, engine: str, *, stop: int | None = None) -> dict[str, str]:
    """Train, and return the digests of what is in the run's folders; nothing if it is interrupted after a step."""
    callbacks = cell.callbacks() + ([] if stop is None else [StopAt(stop)])
    settings = make_settings(cell, engine)
    trainer = Trainer(HPS | cell.hps, folder / "model", logging_dir=folder / "logs", callbacks=callbacks, **settings)
    with contextlib.suppress(InterruptionError):
        trainer.fit(cell.module(), cell.data(), cell.validation())
        return digests_of(trainer) if is_main_process() else {}
    return {}


def digests_of(trainer: Trainer) -> dict[str, str]:
    """Return digests of weights, optimizer, checkpoint, history and saved models."""
    newest = max(trainer.checkpoint_path.glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    tensors = _read_rows(newest)
    others = {name: value for name, value in state["others"].items() if name not in OF_THIS_RUN}
    others["parts"] = {name: part for name, part in others["parts"].items() if name not in PARTS_OF_THIS_RUN}
    rows = list(_without_times(read_history(trainer.log_dir)))
    model = trainer.settings.model_folder
    saved = {
        f"{path.relative_to(model)} {name}": tensor
        for path in model.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert rows
    assert saved
    return {
        "weights": _digest({name: tensor for name, tensor in tensors.items() if name.startswith("model.")}),
        "optimizer": _digest({name: tensor for name, tensor in tensors.items() if not name.startswith("model.")}),
        "checkpoint": _digest_of_text([others, state["model"], state["optimizers"]]),
        "history": _digest_of_text(rows),
        "best model": _digest(saved),
    }


def _read_rows(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, of which each process of a sharded model has written its rows."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors[name] = torch.cat([tensors[name], tensor]) if name in tensors else tensor
    return tensors


def _without_times(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if "values" in row:
            values = {name: value for name, value in row["values"].items() if not name.endswith(("_s", "_per_s"))}
            yield {"step": row["step"], "values": values}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_of_text(value: Any) -> str:
    return hashlib.md5(json.dumps(value, sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def main(result: str, folder: str, plan: str) -> None:
    digests: dict[str, dict[str, Any]] = {}
    for engine, (cells, stops) in json.loads(plan).items():
        of_engine = digests[engine] = {}
        for name in cells:
            path = Path(folder, f"{engine}-{WORLD}", name.replace(" ", "-"))
            of_engine[name] = run(CELLS[name], path, engine)
        for name, stop in stops.items():
            of_engine[name] = run(INTERRUPTED, Path(folder, name, engine), engine, stop=stop)
    if is_main_process():
        Path(result).write_text(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
