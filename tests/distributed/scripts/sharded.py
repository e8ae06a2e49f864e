"""Trains what differs where a model is sharded, and writes what came of it: one case after the other, in one launch.

    PYTHONPATH=. torchrun --nproc-per-node 2 sharded.py RESULT.json FOLDER

Everything that is written has to be equal on every launch, but for rounding.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tests.many_runs  # noqa: F401
from accmt import EMA, AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer, read_history
from accmt.errors import AccmtError
from accmt.processes import is_main_process, num_processes, process_index, run_on_main_process
from accmt.sharded_tensors import is_dtensor, make_whole
from tests.splitting import is_split, num_data_processes

VOCABULARY = 61
SAMPLES = 22
STEPS = 4
HPS_IN_FIT = {"max_steps": STEPS, "batch_size": 12 // num_data_processes(), "optim": {"type": "AdamW", "lr": 1e-2}}


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


def make_gpt2(seed: int | None = 0, device: str = "cpu") -> Any:
    """Make a model with tied weights that is no Llama."""
    if seed is not None:
        torch.manual_seed(seed)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **rates))


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
    outcome = fit(module, folder, model_saving=["best_valid_loss", "last"])
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
    outcome = fit(module, folder, model_saving=["best_valid_loss", "last"], checkpoint_every="step")
    own = {name: make_whole(tensor) for name, tensor in module.unwrapped_model.state_dict().items() if "lora" in name}

    def load() -> bool:
        loaded = PeftModel.from_pretrained(make_llama(), folder / "model" / "last").state_dict()
        return len(own) > 0 and all(torch.equal(loaded[name], tensor) for name, tensor in own.items())

    return {**outcome, "is_same": run_on_main_process(load)}


class Unfreeze(Callback):
    """Trains the head alone, then all."""

    def on_fit_start(self) -> None:
        self.module.freeze(self.module.unwrapped_model.model)

    def on_epoch_start(self) -> None:
        if self.state.epoch == 1:
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
    return {"norms": outcome["norms"], "weights": weights_of(module), "skipped": module.state.skipped_steps}


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
    module = Texts(make_llama(num_hidden_layers=1))
    outcome = fit(module, folder, compile={"backend": "eager"}, model_saving="last")
    names = run_on_main_process(
        lambda: sorted(AutoModelForCausalLM.from_pretrained(folder / "model" / "last").state_dict())
    )
    return {**outcome, "names": names}


class Graphs(Callback):
    """Counts the compiler's graphs after each step."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_update_end(self) -> None:
        self.numbers.append(counters["stats"]["unique_graphs"])


def by_inductor(folder: Path) -> Any:
    """Compile with the default backend, continue an interrupted run, and count graphs from epoch to epoch."""
    make = partial(make_llama, num_hidden_layers=1)
    plain_outcome = fit(Texts(make()), folder / "plain")
    graphs, settings = Graphs(), {"compile": True, "checkpoint_every": "step"}
    module = Texts(make())
    outcome = fit(module, folder / "whole", [graphs], **settings)
    part = Texts(make())
    try:
        fit(part, folder / "part", [StopAt(2)], resume="auto", **settings)
    except InterruptedError:
        part = Texts(make())
        fit(part, folder / "part", resume="auto", **settings)
    # An epoch has two steps, of two sizes, and an evaluation after them. All is compiled when the second one begins.
    is_steady = 0 < graphs.numbers[2] == graphs.numbers[3]
    is_same = weights_of(part) == weights_of(module)
    return {"plain": plain_outcome, "compiled": outcome, "is_steady": is_steady, "is_same": is_same}


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
    """Train models that each process reads its part of, tied and not, and draw a new head."""
    tied = train_in_fit(folder / "tied", partial(make_llama, tie_word_embeddings=True))
    return {"untied": train_in_fit(folder / "untied", make_llama), "tied": tied, "head": draw_head(folder / "tied")}


def built_gpt2(folder: Path) -> Any:
    """The same of GPT-2, which has tied weights and layers of its own; and a head in the place of one that misfits."""
    outcome = {"tied": train_in_fit(folder, make_gpt2), "head": draw_head(folder)}
    options: dict[str, Any] = {"num_labels": 2, "pad_token_id": 0}
    make = partial(AutoModelForSequenceClassification.from_pretrained, folder / "base", **options)
    run_on_main_process(lambda: make().save_pretrained(folder / "misfit" / "base") and None)
    misfit = draw_head(folder / "misfit", ignore_mismatched_sizes=True)
    return {**outcome, "misfit": {"is_same": misfit["is_same"]}}  # it is read whole


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


class EmptyTied(EmptyLayers):
    """Has tied weights without values."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        self.model[1].weight = self.model[0].weight


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
    outcome = fit(layers, folder / "layers", optim={"type": "SGD", "lr": 1e-30}) if not is_split() else {}
    found = [make_whole(p.detach()) for p in layers.unwrapped_model.parameters()] if outcome else []
    is_same = all(is_unmoved(*pair) for pair in zip(found, whole.parameters(), strict=False))
    torch.manual_seed(0)
    module = Empty()
    fit(module, folder / "llama", model_saving="last")
    return {"is_same": is_same, "weights": weights_of(module), "names": run_on_main_process(lambda: names_of(folder))}


def is_unmoved(weight: torch.Tensor, start: torch.Tensor) -> bool:
    """Return whether a weight is what it was, but for what a rate of 1e-30 adds to zeros."""
    return torch.allclose(weight, start, rtol=0.0, atol=1e-25)


def from_meta_tied(folder: Path) -> Any:
    """Compare the first weights of GPT-2, which has tied ones and draws some twice, with those of one process."""
    torch.manual_seed(0)
    expected = make_gpt2(seed=None, device="meta").to_empty(device="cpu")
    expected.init_weights()
    torch.manual_seed(0)
    module = Texts(make_gpt2(seed=None, device="meta"))
    outcome = fit(module, folder, optim={"type": "SGD", "lr": 1e-30})
    model = module.unwrapped_model
    is_tied = model.transformer.wte.weight is model.lm_head.weight
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return {**outcome, "is_same": is_tied and all(is_unmoved(make_whole(p.detach()), own) for p, own in pairs)}


def names_of(folder: Path) -> list[str]:
    return sorted(AutoModelForCausalLM.from_pretrained(folder / "llama" / "model" / "last").state_dict())


def built_in_bf16(folder: Path) -> Any:
    """Train a model in bf16 that each process reads its part of, in the precision in which it is trained."""
    from accelerate import PartialState

    PartialState(cpu=True).wait_for_everyone()
    run_on_main_process(lambda: make_llama().to(torch.bfloat16).save_pretrained(folder / "base") and None)
    built = BuiltInFit(folder / "base", "AutoModelForCausalLM")
    own: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "seed": 5, "verbose": False}
    trainer = Trainer(HPS_IN_FIT, folder / "model", mixed_precision="bf16", logging_dir=folder / "logs", **own)
    trainer.fit(built.module, Labelled(), Labelled())
    parts = {"is_as_asked": built.is_as_asked and built.module.model.dtype == torch.float32}
    return {"loss": round(trainer.state.metrics["val_loss"], 1), **parts}


class BuiltInFit:
    """Lets a module build its model in fit, and notes whether this process then has no more than its part."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.module = AcceleratorModule.from_hf(folder, kind, in_fit=True, **options)
        assert getattr(self.module, "model", None) is None
        self.build = self.module.configure_model
        self.module.configure_model = self.configure_model  # type: ignore[method-assign]
        self.is_as_asked = False

    def configure_model(self) -> None:
        self.build()
        are_parts = [is_dtensor(p) for p in self.module.model.parameters() if p.ndim > 1]
        is_in_parts = any(are_parts) if is_split() else all(are_parts)  # a plan has no new heads
        self.is_as_asked = num_processes() == 1 or is_in_parts


def train_in_fit(folder: Path, make: Callable[[], Any]) -> Any:
    from accelerate import PartialState

    PartialState(cpu=True).wait_for_everyone()
    run_on_main_process(lambda: make().save_pretrained(folder / "base") and None)
    built = BuiltInFit(folder / "base", "AutoModelForCausalLM")
    own: dict[str, Any] = {"model_saving": "last", "seed": 5, "verbose": False, "logging_dir": folder / "logs"}
    trainer = Trainer(HPS_IN_FIT, folder / "model", **own, checkpoint_every="step")
    trainer.fit(built.module, Labelled(), Labelled())
    last = AutoModelForCausalLM.from_pretrained(folder / "model" / "last")
    whole = {name: make_whole(tensor) for name, tensor in built.module.unwrapped_model.state_dict().items()}
    is_same = all(torch.equal(whole[name], tensor) for name, tensor in last.state_dict().items())
    is_tied = last.get_input_embeddings().weight is last.get_output_embeddings().weight
    outcome = {"results": dict(trainer.state.metrics), "weights": weights_of(built.module), "tied": str(is_tied)}
    return {**outcome, "is_same": is_same, "is_as_asked": built.is_as_asked}


def draw_head(folder: Path, **further: Any) -> Any:
    """Compare a new head with what one process would have drawn; the processes' generators differ."""
    kind, options = "AutoModelForSequenceClassification", {"num_labels": 3, "pad_token_id": 0, **further}
    torch.manual_seed(7)
    expected = AutoModelForSequenceClassification.from_pretrained(folder / "base", **options).state_dict()
    built = BuiltInFit(folder / "base", kind, **options)
    torch.manual_seed(7 + process_index())
    trainer = Trainer(HPS_IN_FIT, folder / "other", logging_dir=folder / "logs", checkpoint_every=None, verbose=False)
    trainer.predict(built.module, Labelled(), return_predictions=False)
    found = built.module.model.state_dict()
    is_same = all(torch.equal(make_whole(found[name]), tensor) for name, tensor in expected.items())
    return {"is_same": is_same, "is_as_asked": built.is_as_asked}


class ToHalf(Callback):
    """Changes the type of all weights when a run has begun."""

    def on_fit_start(self) -> None:
        self.module.unwrapped_model.to(torch.bfloat16)


def fit_with_layer(name: str, folder: Path) -> Any:
    """Train with layers of a name, as `accelerate config` would set it."""
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = name
    try:
        return fit(Texts(), folder)
    finally:
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]


def fit_from_another(folder: Path) -> Any:
    """Resume from the checkpoint of another model."""
    fit(Texts(), folder, checkpoint_every="step")
    return fit(Texts(make_llama(intermediate_size=32)), folder, checkpoint_every="step", resume=True)


def refused(folder: Path) -> Any:
    """Return what is said to what cannot work on shards; one process trains it."""
    asked: dict[str, Callable[[Path], Any]] = {
        "part": lambda place: fit(CallsPart(), place),
        "auto_micro_batch": lambda place: fit(Texts(), place, max_micro_batch_size="auto"),
        "adapter": with_adapter,
        "tied_meta": lambda place: fit(EmptyTied(), place),
        "no_reset": lambda place: fit(EmptyOwn(), place),
        "tied": lambda place: fit(Texts(make_bert(BertForMaskedLM)), place),
        "heads": lambda place: fit(Texts(make_llama(num_attention_heads=1)), place),
        "other_model": lambda place: fit(Texts(make_llama(num_hidden_layers=1 + process_index())), place),
        "own_data": lambda place: fit(Texts(), place, data_options={"shard": False}),
    }
    if "ACCELERATE_USE_FSDP" in os.environ and not is_split():
        asked["other_type"] = lambda place: fit(Texts(), place, [ToHalf()])
        asked["layer"] = lambda place: fit_with_layer("NoSuchLayer", place)
        asked["other_checkpoint"] = fit_from_another
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
_BUILT = (built_in_fit, built_gpt2, built_in_bf16, from_meta, from_meta_tied)
_KEPT = (saved, with_adapter, generated, compiled)
SLOW_CASES = {"by_inductor": by_inductor}
CASES = {case.__name__: case for case in (*_TRAINED, checked, *_KEPT, *_BUILT, refused)}


def main(result: str, folder: str, *names: str) -> None:
    outcomes = {}
    for name in names or CASES:
        AcceleratorState._reset_state()  # one precision for a program, else
        outcomes[name] = (CASES | SLOW_CASES)[name](Path(folder) / name)
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
