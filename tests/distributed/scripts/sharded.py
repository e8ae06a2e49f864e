"""Trains what differs where a model is sharded, and writes what came of it: one case after the other, in one launch.

    PYTHONPATH=. torchrun --nproc-per-node 2 sharded.py RESULT.json FOLDER

Everything that is written has to be equal on every launch, but for rounding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tests.many_runs  # noqa: F401
from accmt import EMA, AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer, read_history
from accmt.errors import AccmtError
from accmt.parallel.shards import is_sharded
from accmt.processes import is_main_process, run_on_main_process
from accmt.sharded_tensors import make_whole
from tests.splitting import is_split, num_data_processes

VOCABULARY = 61
SAMPLES = 22
STEPS = 4


def make_texts() -> TensorDataset:
    """Make rows of tokens, the last ones of which are padding that is not trained on."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, 9), generator=generator)
    lengths = torch.randint(3, 10, (SAMPLES, 1), generator=generator)
    return TensorDataset(tokens, torch.where(torch.arange(9) < lengths, tokens, -100))


def make_llama(**options: Any) -> Any:
    """Make a Llama whose vocabulary no number of processes divides."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **{**sizes, **options})
    return LlamaForCausalLM(config)


class Texts(AcceleratorModule):
    """Trains a causal model by tokens."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = make_llama() if model is None else model

    def step(self, batch: Any) -> Any:
        tokens, labels = batch
        output = self.model(input_ids=tokens, labels=labels)
        return {"loss": output.loss, "weight": (labels[:, 1:] != -100).sum()}


class Last(Callback):
    """Writes down the norm of the gradient before each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(sum(make_whole(gradient).double().square().sum() for gradient in gradients) ** 0.5))


def fit(module: AcceleratorModule, folder: Path, callbacks: Any = (), **settings: Any) -> dict[str, Any]:
    """Train, and return losses, norms and results; the samples of a step are the same on every launch."""
    own: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "seed": 5, "verbose": False} | settings
    optim = own.pop("optim", {"type": "AdamW", "lr": 1e-2})
    micro = own.pop("max_micro_batch_size", None)
    hps = {"max_steps": STEPS, "batch_size": 12 // num_data_processes(), "optim": optim, "max_micro_batch_size": micro}
    recorder = Last()
    trainer = Trainer(hps, folder / "model", logging_dir=folder / "logs", callbacks=[recorder, *callbacks], **own)
    trainer.fit(module, make_texts(), make_texts())
    rows = read_history(trainer.log_dir) if is_main_process() else []
    losses = [row["values"]["train_loss"] for row in rows if "train_loss" in row.get("values", {})]
    return {"losses": losses, "norms": recorder.norms, "results": dict(trainer.state.metrics)}


def weights_of(module: AcceleratorModule) -> list[float]:
    """Return the sum of each parameter."""
    return [float(make_whole(p.detach()).double().sum()) for p in module.unwrapped_model.parameters()]


def plain(folder: Path) -> Any:
    module = Texts()
    return {**fit(module, folder), "weights": weights_of(module)}


def accumulated(folder: Path) -> Any:
    """Train a model with norms of each head, whose gradients tensor parallelism adds up, in windows of two batches."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **heads))
    module = Texts(model)
    return {**fit(module, folder, max_micro_batch_size=6 // num_data_processes()), "weights": weights_of(module)}


class Reviews(AcceleratorModule):
    """Trains an encoder, whose embeddings lie in a layer that it names among those to shard."""

    def __init__(self) -> None:
        self.model = make_bert(BertForSequenceClassification)

    def step(self, batch: Any) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0][:, 0] % 2).loss


def make_bert(kind: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **rates))


def encoder(folder: Path) -> Any:
    module = Reviews()
    return {**fit(module, folder), "weights": weights_of(module)}


def clipped_by_value(folder: Path) -> Any:
    return fit(Texts(), folder, clip_grad={"value": 0.01})


def clipped_and_monitored(folder: Path) -> Any:
    return fit(Texts(), folder, clip_grad=0.1, monitor={"grad_norm": True})


def grouped(folder: Path) -> Any:
    """Train in groups with a rate for each layer, and with an optimizer of its own for matrices."""
    groups = [{"kind": "matrix", "type": "SGD", "lr": 0.5, "momentum": 0.9}]
    optim = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1, "no_decay": "norm", "layer_decay": 0.8, "groups": groups}
    module = Texts()
    outcome = fit(module, folder, optim=optim, clip_grad=0.1)
    return {**outcome, "weights": weights_of(module)}


def checked(folder: Path) -> Any:
    """Let a Trainer check itself that a run which is interrupted and continued is the unbroken one."""
    hps = {"max_steps": STEPS, "batch_size": 6 // num_data_processes(), "optim": {"type": "AdamW", "lr": 1e-2}}
    trainer = Trainer(hps, folder / "model", logging_dir=folder / "logs", model_saving=None, verbose=False, seed=5)
    return {"is_compared": trainer.check_resume(Texts(), make_texts()) > 0}


def averaged(folder: Path) -> Any:
    module = Texts()
    outcome = fit(module, folder / "whole", [average := EMA(0.9)], checkpoint_every="step")
    sums = {name: float(make_whole(tensor).double().sum()) for name, tensor in average.average.items()}
    part = Texts()
    try:
        fit(part, folder / "part", [EMA(0.9), StopAt(2)], checkpoint_every="step", resume="auto")
    except InterruptedError:
        part = Texts()
        fit(part, folder / "part", [other := EMA(0.9)], checkpoint_every="step", resume="auto")
    is_same = all(
        torch.equal(make_whole(other.average[name]), make_whole(tensor)) for name, tensor in average.average.items()
    )
    return {**outcome, "averages": sums, "is_same": is_same, "same_weights": weights_of(part) == weights_of(module)}


class StopAt(Callback):
    """Ends the run, on all processes."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_before_training_step(self) -> None:
        if self.state.global_step == self.update:
            raise InterruptedError


def saved(folder: Path) -> Any:
    """Save the best and the last model, and load them with transformers: the same bits."""
    module = Texts(make_llama(tie_word_embeddings=True))
    outcome = fit(module, folder, model_saving="best_valid_loss", save_last=True)
    own = {name: make_whole(tensor) for name, tensor in module.unwrapped_model.state_dict().items()}

    def load() -> dict[str, Any]:
        loaded = AutoModelForCausalLM.from_pretrained(folder / "model" / "last")
        is_same = all(torch.equal(own[name], tensor) for name, tensor in loaded.state_dict().items())
        is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
        best = AutoModelForCausalLM.from_pretrained(folder / "model")
        return {"is_same": is_same, "is_tied": is_tied, "class": type(best).__name__}

    return {**outcome, **run_on_main_process(load)}


def with_adapter(folder: Path) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(3)
    module = Texts(get_peft_model(make_llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])))
    outcome = fit(module, folder, model_saving="best_valid_loss", checkpoint_every="step", save_last=True)
    own = {name: make_whole(tensor) for name, tensor in module.unwrapped_model.state_dict().items() if "lora" in name}

    def load() -> bool:
        loaded = PeftModel.from_pretrained(make_llama(), folder / "model" / "last").state_dict()
        return len(own) > 0 and all(torch.equal(loaded[name], tensor) for name, tensor in own.items())

    return {**outcome, "is_same": run_on_main_process(load)}


class Unfreeze(Callback):
    """Trains the head alone, then all."""

    def on_fit_start(self) -> None:
        self.module.freeze(self.module.unwrapped_model.model)

    def on_update_end(self) -> None:
        if self.state.global_step == 2:
            self.module.unfreeze()


def unfrozen(folder: Path) -> Any:
    module = Texts()
    return {**fit(module, folder, [Unfreeze()]), "weights": weights_of(module)}


class ByHand(ExtendedAcceleratorModule):
    """Steps by itself."""

    def __init__(self) -> None:
        self.model = make_llama()

    def training_step(self, batch: Any) -> torch.Tensor:
        tokens, _ = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.backward(loss)
        self.step_optimizer()
        self.zero_grad()
        return loss

    def validation_step(self, batch: Any) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def by_hand(folder: Path) -> Any:
    module = ByHand()
    return {**fit(module, folder), "weights": weights_of(module)}


class SkipsNothing(Texts):
    """Has a loss that is not finite at its second step."""

    def training_step(self, batch: Any) -> Any:
        output = self.step(batch)
        return {**output, "loss": output["loss"] * (float("nan") if self.state.batch_iteration == 1 else 1.0)}


def guarded(folder: Path) -> Any:
    module = SkipsNothing()
    outcome = fit(module, folder, failures={"on_nonfinite": "skip"})
    return {"norms": outcome["norms"], "weights": weights_of(module), "skipped": module.state.skipped_updates}


def half(folder: Path) -> Any:
    module = Texts()
    outcome = fit(module, folder, mixed_precision="bf16", gradient_checkpointing=True)
    return {
        "rounded": [round(loss, 1) for loss in outcome["losses"]],
        "dtypes": [str(next(module.model.parameters()).dtype)],
    }


class Writes(Texts):
    """Generates at the end of an evaluation."""

    def validation_step(self, batch: Any) -> Any:
        tokens, _ = batch
        written = self.model.generate(tokens[:, :3], max_new_tokens=3, do_sample=False, pad_token_id=0)
        return {"loss": written.double().mean()}


def generated(folder: Path) -> Any:
    return fit(Writes(), folder)


def compiled(folder: Path) -> Any:
    module = Texts()
    outcome = fit(module, folder, compile={"backend": "eager"}, save_last=True)
    names = run_on_main_process(
        lambda: sorted(AutoModelForCausalLM.from_pretrained(folder / "model" / "last").state_dict())
    )
    return {**outcome, "names": names}


class CallsPart(Texts):
    """Goes around the model."""

    def step(self, batch: Any) -> Any:
        return self.model.model(input_ids=batch[0]).last_hidden_state.mean()


class Labelled(torch.utils.data.Dataset[Any]):
    """The texts as a transformers model takes them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = make_texts()[index]
        return {"input_ids": tokens, "labels": labels}

    def __len__(self) -> int:
        return SAMPLES


def built_in_fit(folder: Path) -> Any:
    return {str(is_tied): build_in_fit(folder / str(is_tied), is_tied=is_tied) for is_tied in (False, True)}


class Empty(Texts):
    """Is built without values, when the processes know one another."""

    def __init__(self) -> None:
        pass

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = make_llama()


class EmptyLayers(AcceleratorModule):
    """The same of torch's own layers."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = make_layers()

    def step(self, batch: Any) -> torch.Tensor:
        return self.model(batch[0].float()).square().mean()


class EmptyTied(Texts):
    """Has tied weights without values."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.model = make_llama(tie_word_embeddings=True)


class EmptyOwn(EmptyLayers):
    """Has a part that cannot fill itself."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(9, 16), nn.MultiheadAttention(16, 2))


def make_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def from_meta(folder: Path) -> Any:
    """Train models from scratch that no process holds as a whole, and compare their first weights."""
    torch.manual_seed(0)
    layers, whole = EmptyLayers(), make_layers()
    torch.manual_seed(0)
    outcome = fit(layers, folder / "layers", optim={"type": "SGD", "lr": 0.0}) if not is_split() else {}
    found = [make_whole(p.detach()) for p in layers.unwrapped_model.parameters()] if outcome else []
    is_same = all(torch.equal(*pair) for pair in zip(found, whole.parameters(), strict=False))
    torch.manual_seed(0)
    module = Empty()
    fit(module, folder / "llama", save_last=True)
    return {"is_same": is_same, "weights": weights_of(module), "names": run_on_main_process(lambda: names_of(folder))}


def names_of(folder: Path) -> list[str]:
    return sorted(AutoModelForCausalLM.from_pretrained(folder / "llama" / "model" / "last").state_dict())


def built_in_bf16(folder: Path) -> Any:
    """Train a model in bf16 that each process reads its part of, in the precision in which it is trained."""
    from accelerate import PartialState

    PartialState(cpu=True).wait_for_everyone()
    run_on_main_process(lambda: make_llama().to(torch.bfloat16).save_pretrained(folder / "base") and None)
    module = AcceleratorModule.from_hf(folder / "base", "AutoModelForCausalLM", in_fit=True)
    own: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "seed": 5, "verbose": False}
    hps = {"max_steps": STEPS, "batch_size": 12 // num_data_processes(), "optim": {"type": "AdamW", "lr": 1e-2}}
    trainer = Trainer(hps, folder / "model", mixed_precision="bf16", logging_dir=folder / "logs", **own)
    trainer.fit(module, Labelled(), Labelled())
    model = module.unwrapped_model
    is_read_in_parts = vars(model).get("_is_distributed_loading_by_transformers", False)
    is_whole = not is_sharded(model)
    parts = {"is_as_asked": is_whole or (is_read_in_parts and model.dtype == torch.float32)}
    return {"loss": round(trainer.state.metrics["val_loss"], 1), **parts}


def build_in_fit(folder: Path, *, is_tied: bool) -> Any:
    """Train a model that each process reads its part of, and one with a new head, which is whole at first."""
    from accelerate import PartialState

    PartialState(cpu=True).wait_for_everyone()
    run_on_main_process(lambda: make_llama(tie_word_embeddings=is_tied).save_pretrained(folder / "base") and None)
    module = AcceleratorModule.from_hf(folder / "base", "AutoModelForCausalLM", in_fit=True)
    assert getattr(module, "model", None) is None
    own: dict[str, Any] = {"model_saving": None, "seed": 5, "verbose": False, "logging_dir": folder / "logs"}
    hps = {"max_steps": STEPS, "batch_size": 12 // num_data_processes(), "optim": {"type": "AdamW", "lr": 1e-2}}
    trainer = Trainer(hps, folder / "model", **own, checkpoint_every="step", save_last=True)
    trainer.fit(module, Labelled(), Labelled())
    last = AutoModelForCausalLM.from_pretrained(folder / "model" / "last").state_dict()
    whole = {name: make_whole(tensor) for name, tensor in module.unwrapped_model.state_dict().items()}
    is_same = all(torch.equal(whole[name], tensor) for name, tensor in last.items())
    torch.manual_seed(7)
    options: dict[str, Any] = {"in_fit": True, "num_labels": 3, "pad_token_id": 0}
    other = AcceleratorModule.from_hf(folder / "base", "AutoModelForSequenceClassification", **options)
    Trainer(hps, folder / "other", **own, checkpoint_every=None).predict(other, Labelled(), return_predictions=False)
    head = float(make_whole(other.model.score.weight.detach()).double().sum())
    return {"results": dict(trainer.state.metrics), "weights": weights_of(module), "is_same": is_same, "head": head}


def refused(folder: Path) -> Any:
    """Return what is said to what cannot work on shards; one process trains it."""
    asked: dict[str, Callable[[Path], Any]] = {
        "part": lambda place: fit(CallsPart(), place),
        "auto_micro_batch": lambda place: fit(Texts(), place, auto_micro_batch=True),
        "adapter": with_adapter,
        "tied_meta": lambda place: fit(EmptyTied(), place),
        "no_reset": lambda place: fit(EmptyOwn(), place),
        "tied": lambda place: fit(Texts(make_bert(BertForMaskedLM)), place),
        "heads": lambda place: fit(Texts(make_llama(num_attention_heads=1)), place),
        "own_data": lambda place: fit(Texts(), place, shard_dataloaders=False),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask(folder / name)
        except AccmtError as error:
            said[name] = str(error)
    return said


_TRAINED = (
    plain,
    accumulated,
    encoder,
    grouped,
    clipped_by_value,
    clipped_and_monitored,
    averaged,
    unfrozen,
    by_hand,
    guarded,
    half,
)
_BUILT = (built_in_fit, built_in_bf16, from_meta)
_KEPT = (saved, with_adapter, generated, compiled)
CASES = {case.__name__: case for case in (*_TRAINED, checked, *_KEPT, *_BUILT, refused)}


def main(result: str, folder: str, *names: str) -> None:
    outcomes = {}
    for name in names or CASES:
        AcceleratorState._reset_state()  # one precision for a program, else
        outcomes[name] = CASES[name](Path(folder) / name)
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
