"""Finds the weight of a loss that a transformers model computes, if the step returns no weight."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import reduce
from torch import nn

from accmt.addons.loss_targets import SAY_WHAT_COUNTS, count_targets, kind_of_targets
from accmt.huggingface import is_peft_model, is_transformers_model
from accmt.huggingface.model_kinds import find_transformers_models
from accmt.libraries.private_names import is_compiled, looking_at_compiled_calls
from accmt.messages import say_once, warn_once
from accmt.processes import num_data_processes, num_processes
from accmt.run import EvaluationRun
from accmt.run.features import Feature

_OF_SENTENCES = frozenset({"next_sentence_label", "sentence_order_label", "mc_labels"})


class _Call(NamedTuple):
    """A call of a model that computed a loss; keeps only a weak reference to the loss."""

    loss: weakref.ref[torch.Tensor]
    inputs: dict[str, torch.Tensor]
    model: Any
    objects: torch.Tensor | None = None  # boxes or masks, where the loss is a mean over these


class OwnLoss(Feature):
    """Detects that a loss comes from a transformers model, and over how many target tokens it is averaged.

    A step that returns `self.model(**batch).loss` needs no weight, as in transformers' Trainer. Losses that a step
    changes are not detected.
    """

    name = "own_loss"

    def __init__(self, run: EvaluationRun, watched: dict[nn.Module, Any]) -> None:
        self._state = run.state
        self._watched = watched
        # Whether the losses before were such ones, of the data that are trained on and of the set that is evaluated:
        # it is so for all or for none. A manual step may compute several losses, which are checked separately.
        self._counted: dict[str, bool | None] = {}
        self._is_manual = run.module.uses_manual_optimization
        self._knows_balance = False
        self._calls: deque[_Call] = deque(maxlen=4)  # of the step that runs
        self._objects: torch.Tensor | None = None
        self._objects_of: dict[Any, torch.Tensor] = {}  # by model: its wrapper is looked at after it

    @classmethod
    def for_run(cls, run: EvaluationRun) -> OwnLoss | None:
        model = run.unwrapped_model
        watched: dict[nn.Module, Any] = {one: one for one in find_transformers_models(model)}
        if is_transformers_model(model) or is_peft_model(model):
            watched[run.model] = model  # a wrapper may return copies of what its model returns
        return cls(run, watched) if watched else None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Look at what each call of the models returns."""
        losses = _DetectionLosses(self._note_objects)
        with ExitStack() as stack:
            for called, model in self._watched.items():
                look = partial(self._look, model)
                if is_compiled(called):
                    stack.enter_context(losses.counting())  # such a call has no hook before it
                    stack.enter_context(looking_at_compiled_calls(called, look))
                else:
                    stack.callback(called.register_forward_pre_hook(losses.begin).remove)
                    stack.callback(called.register_forward_hook(look, with_kwargs=True).remove)
                    stack.callback(called.register_forward_hook(losses.end, always_call=True).remove)
            yield

    def before_forward(self, batch: Any) -> None:
        self._calls.clear()

    def before_set_forward(self) -> None:
        self._calls.clear()

    def before_set(self) -> None:
        self._counted.pop("evaluation", None)

    def weigh(self, loss: Any, *, is_given: bool) -> torch.Tensor | None:
        """Return the number of target tokens of which the loss of a step is the mean, on the device."""
        what = "training" if self._state.stage == "train" else "evaluation"
        counted_before = self._counted.get(what)
        weight = None if is_given else self._find_weight(loss, counted_before=counted_before)
        if counted_before is None and not (self._is_manual and what == "training"):
            self._counted[what] = weight is not None
        return weight

    def _find_weight(self, loss: Any, *, counted_before: bool | None) -> torch.Tensor | None:
        """Return that number; where such losses came before, also of a loss that the step has computed further."""
        if not self._calls or counted_before is False:
            return None
        own = next((call for call in self._calls if call.loss() is loss), None)
        if own is not None and counted_before is None:
            name = type(own.model).__name__
            targets = "boxes or masks" if own.objects is not None else kind_of_targets(own.model, own.inputs)
            say_once(f"a step returns the loss of {name} unchanged: each batch is weighted by its {targets}")
        call = own or (self._calls[-1] if counted_before else None)
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
        has_parts = self._state.grad_accum_steps > 1 or num_data_processes() > 1
        if has_parts and self._state.stage == "train" and not self._knows_balance:
            self._knows_balance = True
            _warn_of_balance(model, loss, getattr(outputs, "aux_loss", None))
        inputs = {name: named[name] for name in SAY_WHAT_COUNTS if isinstance(named.get(name), torch.Tensor)}
        objects = self._objects_of.get(model)
        if objects is not None or kind_of_targets(model, inputs) is not None:
            self._calls.append(_Call(weakref.ref(loss), inputs, model, objects))


def _warn_of_other_losses(model: Any, named: Mapping[str, Any]) -> None:
    """Warn about losses that depend on how samples are batched, whatever the weight."""
    name = f"the loss of {type(model).__name__}"
    over = do = ""
    if named.get("sampled_negative_indices") is not None:
        over = "masked frames"
        do = 'return {"loss": outputs.loss / number, "weight": number}, with number = mask_time_indices.sum()'
    elif getattr(model.config, "ctc_loss_reduction", None) == "sum":
        over, do = "samples", "set model.config.ctc_loss_reduction = 'mean'"
    if over:
        warn_once(
            f"{name} is a sum over {over}: it grows with the batch size, but is averaged over batches; {do}",
            about="a loss that is a sum",
        )
    added = [key for key in _OF_SENTENCES if named.get(key) is not None]
    if added and named.get("labels") is not None:
        added = ["a mean over sentences to a mean over tokens"]
    elif getattr(model.config, "use_guided_attention_loss", False):
        added = [
            "guided attention to a mean over frames (disable it with model.config.use_guided_attention_loss = False)"
        ]
    else:
        return
    warn_once(
        f"{name} adds {added[0]}. No weight is right for both terms, so the result depends on the accumulation and "
        "on the number of processes",
        about="a loss that adds means",
    )


def _warn_of_balance(model: Any, loss: torch.Tensor, balance: Any) -> None:
    """Warn about the load-balancing term of a mixture of experts, which is no mean over samples."""
    name = f"the loss of {type(model).__name__}"
    config = getattr(model, "config", None)
    coefficient = getattr(model, "router_aux_loss_coef", None) or getattr(config, "router_aux_loss_coef", None)
    if coefficient and isinstance(balance, torch.Tensor):
        share = abs(float(coefficient * balance.detach()) / float(loss.detach()))
        warn_once(
            f"{name} has a load-balancing term ({share:.1%} of it), a statistic of each micro-batch: the gradient is "
            "the mean of theirs, so it depends on the accumulation and on the number of processes. Fewer, larger "
            "micro-batches reduce the difference; a model built with router_aux_loss_coef=0 has no such term",
            about=f"load balance in {name}",
        )


class _DetectionLosses:
    """Lets losses of detection and segmentation divide by the boxes or masks of this process's batch.

    transformers' divide by the mean over processes, a collective that a process without a batch does not enter. What a
    batch weighs sees to the rest, with accumulation and uneven batches, too. Their `reduce` is replaced only while a
    model of the run is called.

    Args:
        note: Called with the number of boxes or masks.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        loaded = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
        self._modules = [vars(module) for module in loaded if vars(module).get("reduce") is reduce]
        self._note = note
        self._num_calls = 0  # a wrapper calls the model in it

    def begin(self, *_: Any) -> None:
        """Act before a call of a model."""
        self._num_calls += 1
        for module in self._modules:
            module["reduce"] = self._count

    def end(self, *_: Any) -> None:
        """Act after a call of a model."""
        self._num_calls -= 1
        for module in self._modules if self._num_calls == 0 else ():
            module["reduce"] = reduce

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Act as in a call of a model."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _count(self, number: torch.Tensor) -> torch.Tensor:
        self._note(number)
        whole: torch.Tensor = number * num_processes()  # by which the loss divides
        return whole
