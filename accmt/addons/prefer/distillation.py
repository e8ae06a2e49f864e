"""`DistillationModule`: trains a causal model on the predictions of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.addons.prefer.losses import divergence, in_full_precision, weighted_mean
from accmt.addons.pretrained import load_pretrained
from accmt.addons.sft.chat import IGNORED, LOSS_WEIGHTS
from accmt.addons.sft.module import SFTModule
from accmt.engine.meta_device import building_for
from accmt.errors import ArgumentError, ModuleContractError, fail

if TYPE_CHECKING:
    from accmt.addons.prefer.section import PreferSection


class DistillationModule(SFTModule):
    """Distillation: a causal model learns the predictions of a teacher at the tokens that `SFTModule` would train.

    The rows are those of `SFTModule`. A batch weighs as many as its target tokens, of which the loss is the mean.

    Args:
        model: The model, or a function that builds it at the start of a run.
        tokenizer: A fast tokenizer, with a chat template for conversations; it is saved with the model.
        teacher: A model with the same vocabulary, or a function that builds it; it is not trained or saved.
        beta: 0 is the forward KL divergence, 1 the reverse, and between them the generalized Jensen-Shannon divergence.
        temperature: Divides the logits of both models.
        max_length: The maximum number of tokens per row; None keeps all.

    Raises:
        ArgumentError: `beta` or `temperature` is out of range.
    """

    section_name = "prefer"

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        tokenizer: Any,
        teacher: nn.Module | Callable[[], nn.Module],
        *,
        beta: float = 0.0,
        temperature: float = 1.0,
        max_length: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_length=max_length)
        if not 0 <= beta <= 1:
            do = "0 is the forward KL divergence, 1 the reverse"
            raise fail(
                ArgumentError, "DistillationModule(beta=...)", got=repr(beta), expected="a number from 0 to 1", do=do
            )
        if not temperature > 0:
            where = "DistillationModule(temperature=...)"
            raise fail(ArgumentError, where, got=repr(temperature), expected="a number above 0", do="for example 1.0")
        self._beta, self._temperature = beta, temperature
        if isinstance(teacher, nn.Module):
            self.teacher = teacher
        else:
            self._build_teacher = teacher

    @classmethod
    def arguments_of(cls, section: PreferSection) -> dict[str, Any]:  # type: ignore[override]
        """Return the arguments that a section sets."""
        found: dict[str, Any] = {"max_length": section.max_length, **section.options}
        if section.teacher is not None:
            found["teacher"] = partial(load_pretrained, section.teacher, "AutoModelForCausalLM")
        return found

    def configure_model(self) -> None:
        """Build the model and the teacher."""
        super().configure_model()
        if self.teacher is None:
            with building_for(None):  # each process needs it in full
                self.teacher = self._build_teacher()

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean divergence over the target tokens, and their number as weight.

        Raises:
            ModuleContractError: The vocabularies differ.
        """
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name not in ("labels", LOSS_WEIGHTS)}
        inputs["use_cache"] = False
        with torch.no_grad():
            theirs = self.teacher(**inputs).logits  # type: ignore[misc]
        own = self.model(**inputs).logits[:, -labels.shape[1] :]
        if own.shape[-1] != theirs.shape[-1]:
            got = f"a teacher with a vocabulary of {theirs.shape[-1]} tokens, and a model with {own.shape[-1]}"
            do = "choose a teacher of the same family, with the same tokenizer"
            raise fail(ModuleContractError, "distillation", got=got, expected="the same vocabulary", do=do)
        is_target = labels[:, 1:] != IGNORED
        own, theirs = (in_full_precision(one[:, :-1][is_target]) for one in (own, theirs))
        weights = batch[LOSS_WEIGHTS][:, 1:][is_target] if LOSS_WEIGHTS in batch else own.new_ones(len(own))
        per_token = divergence(own, theirs, beta=self._beta, temperature=self._temperature)
        agrees = (own.detach().argmax(-1) == theirs.argmax(-1)).float()
        return {
            "loss": weighted_mean(per_token, weights),
            "weight": weights.sum(),
            "agreement": weighted_mean(agrees, weights),
        }

    def validation_step(self, batch: Any, key: str = "") -> dict[str, Any]:
        """Return the same as `step`."""
        return self.step(batch)
