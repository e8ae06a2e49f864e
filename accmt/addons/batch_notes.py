"""Explains failed steps and errors in batches for transformers models, as notes on exceptions or as warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from accmt.addons.batch_facts import add_note_of_phase, add_note_of_step
from accmt.addons.gpu_processes import describe_processes
from accmt.errors import explain, is_out_of_memory
from accmt.huggingface.model_kinds import find_transformers_models, predicts_next_token
from accmt.messages import say_once, warn_once
from accmt.run import EvaluationRun
from accmt.run.features import Feature
from accmt.state import TrainingState

# ---- Errors in a batch for which torch raises `index out of range in self`, or nothing


_IGNORED = -100
# What torch says of a step that needs gradients; the last, of torch.func in the trial of such a step.
_NEEDS_GRADIENTS = "does not require grad|nference tensor|saved tensor hooks"
_POSITIONS = ("position_embeddings", "wpe", "embed_positions")


def add_note_of_batch(error: Exception, model: nn.Module, batch: Any) -> None:
    """Add a note to a step's exception if its batch has a known problem.

    Args:
        error: The exception.
        model: The model, without wrappers.
        batch: The batch on the host: after a failed assertion, GPU memory cannot be read.
    """
    if not isinstance(error, IndexError | RuntimeError | ValueError) or is_out_of_memory(error):
        return
    found = next(find_transformers_models(model), None)
    if found is None or not isinstance(batch, Mapping):
        return
    note = next(_find_faults(found, batch), None)
    if note is not None:
        error.add_note(note)


def warn_of_trained_padding(model: nn.Module, batch: Any) -> None:
    """Warn if padding tokens of a batch have labels, so that the model would learn to generate padding.

    Args:
        model: The model, without wrappers.
        batch: The first batch of a run, on the host.
    """
    found = next(find_transformers_models(model), None)
    if found is None or found.config.is_encoder_decoder or not isinstance(batch, Mapping):
        return  # in sequence-to-sequence models, the mask is that of the inputs, and labels are outputs
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not (_are_whole(mask) and _are_whole(labels)) or labels.ndim != 2 or mask.shape != labels.shape:
        return
    targets, padding = labels != _IGNORED, mask == 0
    if predicts_next_token(found):  # the first token after a text may be its end, which the model should generate
        padding[:, 1:] = padding[:, 1:] & padding[:, :-1]
    number = int((targets & padding).sum())
    if number:
        share = f"{number} of the {int(targets.sum())} targets in the first batch are padding (attention_mask 0)"
        warn_once(
            f"{share} and would be trained; use labels.masked_fill(attention_mask == 0, -100)",
            about="padding with labels",
        )


def _find_faults(model: Any, batch: Mapping[str, Any]) -> Iterator[str]:
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if _are_whole(ids):
        yield from _fault_of_ids(model, ids)
        yield from _fault_of_length(model, ids)
        yield from _fault_of_padding(model, ids)
    if isinstance(labels, torch.Tensor) and labels.numel():
        yield from _fault_of_labels(model, labels)


def _are_whole(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() > 0 and not value.is_floating_point()


def _fault_of_ids(model: Any, ids: torch.Tensor) -> Iterator[str]:
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # models with two encoders, such as CLIP
        return
    rows = getattr(embeddings, "num_embeddings", None)
    if rows is None:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        expected = f"ids from 0 to {rows - 1}: {type(model).__name__} has embeddings for {rows} tokens"
        do = "use this model's tokenizer, or call model.resize_token_embeddings(len(tokenizer))"
        yield explain('batch["input_ids"]', f"the id {low if low < 0 else high}", expected, do)


def _fault_of_length(model: Any, ids: torch.Tensor) -> Iterator[str]:
    tables = (part for name, part in model.named_modules() if name.rpartition(".")[2] in _POSITIONS)
    table = next((part for part in tables if isinstance(part, nn.Embedding)), None)
    if table is None:
        return
    # With a padding index, as in RoBERTa, positions begin after it; OPT and BART have their own offset.
    first = table.padding_idx + 1 if table.padding_idx is not None else getattr(table, "offset", 0)
    longest = table.num_embeddings - first
    if ids.shape[-1] > longest:
        expected = f"at most {longest} tokens: {type(model).__name__} has no more positions"
        do = f"tokenizer(..., truncation=True, max_length={longest})"
        yield explain('batch["input_ids"]', f"{ids.shape[-1]} tokens in a row", expected, do)


def _fault_of_padding(model: Any, ids: torch.Tensor) -> Iterator[str]:
    name = type(model).__name__
    if name.endswith("SequenceClassification") and len(ids) > 1 and model.config.pad_token_id is None:
        got, expected = "None", f"a token: {name} classifies the last one before the padding"
        do = "model.config.pad_token_id = tokenizer.pad_token_id, before `fit`; for a tokenizer without one, first "
        do += "tokenizer.pad_token = tokenizer.eos_token"
        yield explain("model.config.pad_token_id", got, expected, do)


def _fault_of_labels(model: Any, labels: torch.Tensor) -> Iterator[str]:
    name = type(model).__name__
    is_of_classes = name.endswith("Classification")
    number = model.config.num_labels if is_of_classes else getattr(model.config, "vocab_size", None)
    problem = getattr(model.config, "problem_type", None)
    if number is None or (is_of_classes and (number == 1 or problem == "regression")):
        return
    if labels.is_floating_point():
        if is_of_classes and labels.ndim == 1:
            expected = f"whole numbers: the model has {number} classes; floats are regression targets"
            do = "use labels.long(), or pass num_labels=1 to from_pretrained or from_hf"
            yield explain('batch["labels"]', f"{labels.dtype} for {name}", expected, do)
        return
    if is_of_classes and "Token" not in name and labels.ndim == 2 and labels.shape[1] == number:
        expected = f"floats, 0 or 1 for each of the {number} classes: samples of {name} have several"
        got = f"{labels.dtype} of shape {tuple(labels.shape)}"
        do = 'use labels.float(), and a model with problem_type="multi_label_classification"'
        yield explain('batch["labels"]', got, expected, do)
        return
    targets = labels[labels != _IGNORED]
    low, high = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
    if low < 0 or high >= number:
        what = "classes" if is_of_classes else "tokens"
        expected = f"labels from 0 to {number - 1}, or -100 for no target: {name} has {number} {what}"
        do = f"pass num_labels={high + 1} to from_pretrained or from_hf" if low >= 0 else "number the classes from 0"
        do = do if is_of_classes else "use this model's tokenizer"
        yield explain('batch["labels"]', f"the label {low if low < 0 else high}", expected, do)


def hint_at_weights(batch: Any) -> None:
    """Explain how a step returns a weight, if a batch has tokens without targets and its step returned none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return
    if (labels == _IGNORED).any():
        say_once(
            "labels are -100 at some tokens, and batches are weighted by samples: if the loss is a mean over tokens, "
            'return {"loss": loss, "weight": (labels != -100).sum()}'
        )


class BatchNotes(Feature):
    """Checks the first batch of a run, and batches whose step fails."""

    name = "batch_notes"

    def __init__(self, model: nn.Module, state: TrainingState) -> None:
        self._model = model
        self._state = state

    @classmethod
    def for_run(cls, run: EvaluationRun) -> BatchNotes:
        return cls(run.unwrapped_model, run.state)

    def on_step_error(self, error: Exception, batch: Any) -> None:
        add_note_of_step(error, self._state, self._model, batch)
        add_note_of_batch(error, self._model, batch)
        if is_out_of_memory(error) and (processes := describe_processes()):
            error.add_note(f"processes on the GPUs of this machine:\n{processes}")
        if not self._model.training and re.search(_NEEDS_GRADIENTS, str(error)):
            got = "a step that needs gradients: torch.inference_mode forbids them, torch.no_grad turns them off"
            do = "Trainer(inference_mode=False), and `with torch.enable_grad():` in the step"
            error.add_note(explain("the evaluation", got, "a step without gradients", do))

    def on_end(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            add_note_of_phase(error, self._state)

    def on_first_batch(self, batch: Any, *, is_hint_wanted: bool) -> None:
        warn_of_trained_padding(self._model, batch)
        if is_hint_wanted:
            hint_at_weights(batch)
