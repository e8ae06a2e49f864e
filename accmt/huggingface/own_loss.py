"""The loss that a transformers model computes itself, of labels for each token, where a step returns it as it is."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accmt.huggingface.model_kinds import (
    begins_with_prompt,
    find_transformers_models,
    is_peft_model,
    is_transformers_model,
    predicts_next_token,
)
from accmt.libraries.private_names import is_compiled, looking_at_compiled_calls
from accmt.messages import say_once, warn_once

_IGNORED = -100
_SAY_WHAT_COUNTS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "labels",
        "start_positions",
        "bool_masked_pos",
        "future_values",
        "future_observed_mask",
    }
)
_DETECT_REPLACED_TOKENS = frozenset({"ElectraForPreTraining", "FunnelForPreTraining"})
_OF_SENTENCES = frozenset({"next_sentence_label", "sentence_order_label", "mc_labels"})


class _Call(NamedTuple):
    """A call of a model that computed a loss, which nothing is kept of but who it is."""

    loss: weakref.ref[torch.Tensor]
    inputs: dict[str, torch.Tensor]
    model: Any
    objects: torch.Tensor | None = None  # boxes or masks, where the loss is a mean over these


class OwnLoss:
    """Finds out that a loss is a transformers model's own, and of how many target tokens it is the mean.

    A step that returns `self.model(**batch).loss` need not say so, as nobody has to in transformers' Trainer. Nothing
    is known of a loss that a step computes further.

    Args:
        model: The model, without the wrapper of the launch.
        wrapped: The model as steps call it.

    Attributes:
        calls: The last calls of the step that runs, which begins with none.
    """

    def __init__(self, model: nn.Module, wrapped: nn.Module) -> None:
        self._watched: dict[nn.Module, Any] = {one: one for one in find_transformers_models(model)}
        if is_transformers_model(model) or is_peft_model(
            model
        ):  # a wrapper may return copies of what its model returns
            self._watched[wrapped] = model
        self.calls: deque[_Call] = deque(maxlen=4)
        self._objects: torch.Tensor | None = None
        self._objects_of: dict[Any, torch.Tensor] = {}  # by model: its wrapper is looked at after it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what each call of the models returns."""
        with ExitStack() as stack:
            if self._watched:
                stack.enter_context(_counting_own_objects(self._note_objects))
            for called, model in self._watched.items():
                look = partial(self._look, model)
                if is_compiled(called):
                    stack.enter_context(looking_at_compiled_calls(called, look))
                else:
                    stack.callback(called.register_forward_hook(look, with_kwargs=True).remove)
            yield

    def find_weight(self, loss: object, *, counted_before: bool | None) -> torch.Tensor | None:
        """Return the number of target tokens of which the loss of a step is the mean, on the device.

        Args:
            loss: What the step returned.
            counted_before: Whether it was so for the losses before, for it is for all or for none; None if it is the
                first. Then the targets of a loss that the step has computed further are counted, too.

        Returns:
            None where the loss is a mean of something else, or nobody knows.
        """
        if not self.calls or counted_before is False:
            return None
        own = next((call for call in self.calls if call.loss() is loss), None)
        if own is not None and counted_before is None:
            name = type(own.model).__name__
            targets = "boxes or masks" if own.objects is not None else _kind_of_targets(own.model, own.inputs)
            say_once(f"a step returns the loss of {name} as it is: each batch weighs its {targets}")
        call = own or (self.calls[-1] if counted_before else None)
        if call is None or call.objects is not None:
            return None if call is None else call.objects
        return count_targets(call.model, call.inputs)

    def _note_objects(self, number: torch.Tensor) -> None:
        self._objects = number.detach().reshape(()).clamp(min=1)  # as the loss divides by it

    def _look(self, model: Any, _: nn.Module, __: tuple[Any, ...], named: Mapping[str, Any], outputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._objects is not None:
            self._objects_of[model], self._objects = self._objects, None
        loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)
        if not isinstance(loss, torch.Tensor) or named.get("num_items_in_batch") is not None:
            return  # with which the loss is a sum over this batch's tokens, divided by that number
        _warn_of_other_losses(model, named)
        inputs = {name: named[name] for name in _SAY_WHAT_COUNTS if isinstance(named.get(name), torch.Tensor)}
        objects = self._objects_of.get(model)
        if objects is not None or _kind_of_targets(model, inputs) is not None:
            self.calls.append(_Call(weakref.ref(loss), inputs, model, objects))


def _warn_of_other_losses(model: Any, named: Mapping[str, Any]) -> None:
    """Name a loss that no weight makes independent of how samples are batched and shared."""
    name = f"the loss of {type(model).__name__}"
    over = do = ""
    if named.get("sampled_negative_indices") is not None:
        over = "masked frames"
        do = 'return {"loss": loss / number, "weight": number} with number = mask_time_indices.sum()'
    elif getattr(model.config, "ctc_loss_reduction", None) == "sum":
        over, do = "samples", "write model.config.ctc_loss_reduction = 'mean'"
    if over:
        warn_once(
            f"{name} is a sum over {over}: it grows with the batch, and is averaged over batches; {do}",
            about="a loss that is a sum",
        )
    added = [key for key in _OF_SENTENCES if named.get(key) is not None]
    if added and named.get("labels") is not None:
        added = ["a mean over sentences to the one over tokens"]
    elif getattr(model.config, "use_guided_attention_loss", False):
        added = ["guided attention to a mean over frames (model.config.use_guided_attention_loss = False drops it)"]
    else:
        return
    warn_once(
        f"{name} adds {added[0]}: one weight fits only one of them, so accumulation and several processes change it",
        about="a loss that adds means",
    )


@contextmanager
def _counting_own_objects(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Let losses of detection and segmentation divide by the boxes or masks of this process's batch.

    transformers' divide by the mean over processes, a collective that a process without a batch does not enter. What a
    batch weighs sees to the rest, with accumulation and uneven batches, too.
    """
    from accelerate import PartialState
    from accelerate.utils import reduce

    def count(number: torch.Tensor) -> torch.Tensor:
        note(number)
        whole: torch.Tensor = number * PartialState().num_processes  # by which the loss divides
        return whole

    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    modules = [module for module in loaded if vars(module).get("reduce") is reduce]
    for module in modules:
        vars(module)["reduce"] = count
    try:
        yield
    finally:
        for module in modules:
            vars(module)["reduce"] = reduce


def count_targets(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the target tokens, pixels, frames or values of a batch, which its mean loss is over.

    Args:
        model: A transformers model.
        inputs: What it was called with, by name.

    Returns:
        None where the loss is a mean over samples.
    """
    labels: Any = inputs.get("labels")
    is_target: torch.Tensor
    match _kind_of_targets(model, inputs):
        case "target pixels":
            is_target = labels != model.config.semantic_loss_ignore_index
        case "target frames":
            is_target = labels[..., 0] != _IGNORED
        case "observed values":
            # Of several series the models count a point in time only where all of them were observed.
            mask = inputs["future_observed_mask"]
            is_target = mask if mask.ndim == 2 else mask.amin(-1)
        case "answers":
            is_target = inputs["start_positions"] < inputs["input_ids"].shape[-1]  # others were cut off
        case "masked patches":
            is_target = inputs["bool_masked_pos"]
        case "real tokens":
            is_target = inputs["attention_mask"] == 1
        case "target tokens":
            is_first_none = predicts_next_token(model) and not begins_with_prompt(model)
            is_target = (labels[:, 1:] if is_first_none else labels) != _IGNORED
        case _:
            return None
    count: torch.Tensor = is_target.sum()
    return count


def _kind_of_targets(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what the loss of a model is a mean over, in words; None where it is the samples, or nobody knows."""
    labels, name = inputs.get("labels"), type(model).__name__
    if name in _DETECT_REPLACED_TOKENS and inputs.get("attention_mask") is not None:
        return "real tokens"
    if _is_of_tokens(model, labels):
        return "target tokens"
    if _is_of_pixels(model, labels):
        return "target pixels"
    if _is_of_frames(model, labels):
        return "target frames"
    mask = inputs.get("future_observed_mask")
    if isinstance(mask, torch.Tensor) and inputs.get("future_values") is not None and hasattr(model, "config"):
        return "observed values"
    if getattr(inputs.get("start_positions"), "ndim", 0) == getattr(inputs.get("input_ids"), "ndim", 0) - 1 == 1:
        return "answers"
    if name.endswith("ForMaskedImageModeling") and inputs.get("bool_masked_pos") is not None:
        return "masked patches"
    return None


def hint_at_weights(batch: Any) -> None:
    """Say how a step returns a weight, where a batch has tokens that are no targets and its step returned none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return
    if (labels == _IGNORED).any():
        say_once(
            "labels are -100 at some tokens, and each batch weighs its samples: where the loss is a mean over tokens, "
            'return {"loss": loss, "weight": (labels != -100).sum()}'
        )


def _is_of_pixels(model: Any, labels: Any) -> bool:
    """Return whether each pixel has one of several classes."""
    if getattr(labels, "ndim", 0) != 3 or labels.is_floating_point():
        return False
    return hasattr(model.config, "semantic_loss_ignore_index") and model.config.num_labels > 1


def _is_of_frames(model: Any, labels: Any) -> bool:
    """Return whether the labels are spectrograms, padded to the longest; no other model has labels of such a shape."""
    if getattr(labels, "ndim", 0) != 3 or not labels.is_floating_point():
        return False
    return bool(getattr(model.config, "num_mel_bins", None) == labels.shape[-1])


def _is_of_tokens(model: Any, labels: Any) -> bool:
    """Return whether each token has a label; the loss of a CTC model is none over them."""
    if getattr(labels, "ndim", 0) != 2 or labels.is_floating_point() or labels.is_complex():
        return False
    is_multi_label = getattr(model.config, "problem_type", None) == "multi_label_classification"
    return not is_multi_label and not hasattr(model.config, "ctc_loss_reduction")
