"""`RewardModule`: trains a reward model, a sequence classifier with one label, on pairs of answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accmt.addons.prefer.losses import bradley_terry, in_full_precision, share_right, weighted_mean
from accmt.addons.prefer.rows import OF_PACKED_ROWS, AnswersReader, PackAnswers, PadAnswers, length_of_pair
from accmt.addons.sft.module import RowModule
from accmt.addons.sft.rows import padding_id
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.errors import ArgumentError, ModuleContractError, fail
from accmt.huggingface.model_kinds import without_adapter

if TYPE_CHECKING:
    from accmt.addons.prefer.section import PreferSection


class RewardModule(RowModule):
    """Trains a reward model on pairs of answers, with the loss of Bradley and Terry.

    Pass `fit` rows as for `PreferenceModule`; a row may have a `"margin"`, by which the chosen answer is better. The
    model is saved as a sequence classifier with one label, the reward.

    Args:
        model: A transformers model for sequence classification with `num_labels=1`, or a function that builds it.
        tokenizer: A fast tokenizer, with a chat template for conversations; it is saved with the model.
        max_length: The maximum number of tokens of a prompt with its answer; None keeps all.
        center: Keeps rewards near 0: the factor of (r_w + r_l)² in the loss.

    Raises:
        ArgumentError: `center` is negative.
        ModuleContractError: The model has another number of labels.
    """

    section_name = "prefer"

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        tokenizer: Any,
        *,
        max_length: int | None = None,
        center: float = 0.0,
    ) -> None:
        if not center >= 0:
            raise fail(
                ArgumentError,
                "RewardModule(center=...)",
                got=repr(center),
                expected="at least 0",
                do="for example 0.01",
            )
        reader = AnswersReader(tokenizer, "pairs", max_length)
        super().__init__(model, tokenizer, reader, PadAnswers(padding_id(tokenizer)))
        self._center = center
        if isinstance(model, nn.Module):
            self._prepare_head()

    @classmethod
    def arguments_of(cls, section: PreferSection) -> dict[str, Any]:
        """Return the arguments that a section sets."""
        return {"max_length": section.max_length, **section.options}

    def configure_model(self) -> None:
        """Build the model, and check its head."""
        super().configure_model()
        self._prepare_head()

    def _prepare_head(self) -> None:
        config: Any = self.model.config
        if getattr(config, "num_labels", None) != 1 or not hasattr(self.model, "score"):
            got = f"{type(self.model).__name__} with {getattr(config, 'num_labels', 'no')} labels"
            do = "write `model: {path: ..., type: AutoModelForSequenceClassification, num_labels: 1}`"
            if getattr(config, "num_labels", None) == 1:
                got += ", but without `score`: not a causal architecture"
                do = "start with a causal model, such as Llama or Qwen"
            raise fail(
                ModuleContractError, "a reward model", got=got, expected="a sequence classifier with one label", do=do
            )
        # With it, the model finds the last token of each answer.
        config.pad_token_id = padding_id(self.processor)

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the pairs, and their number or total weight as weight."""
        weights = batch["weight"]
        chosen, rejected = in_full_precision(self._rewards(batch)).view(len(weights), 2).unbind(1)
        lost, margins = bradley_terry(chosen, rejected, batch["margin"], center=self._center), chosen - rejected
        values = {
            "margin": margins,
            "accuracy": share_right(margins),
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        return {
            "loss": weighted_mean(lost, weights),
            "weight": weights.sum(),
            **({"losses": lost.detach(), "weights": weights} if self.wants_sample_losses else {}),
            **{name: weighted_mean(one.detach(), weights) for name, one in values.items()},
        }

    def _rewards(self, batch: Any) -> Tensor:
        """Return the rewards of all answers, computed in one forward.

        Raises:
            ModuleContractError: The answers are packed, and the model computes its loss in another way.
        """
        ids = batch["input_ids"]
        if "answer_lengths" not in batch:
            mask = batch["attention_mask"].flatten(0, 1)
            padded: Tensor = self.model(input_ids=ids.flatten(0, 1), attention_mask=mask, use_cache=False).logits
            return padded
        inputs = {name: values for name, values in batch.items() if name in OF_PACKED_ROWS}
        # As in the model, the reward of an answer is at its last token that is not the padding token, which may also be
        # the one that ends a text.
        places, lengths = torch.arange(ids.shape[1], device=ids.device), batch["answer_lengths"]
        last = torch.split(torch.where(ids[0] == padding_id(self.processor), 0, places), lengths)
        answers = zip(last, torch.split(places, lengths), strict=True)
        ends = torch.stack([torch.maximum(part.max(), own[0]) for part, own in answers])
        # The output has only the score of the last token of a row, so the loss returns those at the labels' positions.
        # It is part of the output, too, so wrappers that reduce or shard gradients see what is trained on.
        model = self.unwrapped_model
        within: Any = without_adapter(model)
        before, within.loss_function = within.loss_function, _scores_at
        try:
            packed: Tensor | None = self.model(**inputs, labels=ends, use_cache=False).loss
        finally:
            within.loss_function = before
        if packed is None or packed.shape != ends.shape:
            got = f"a {type(model).__name__}, which has the reward of one answer per row only"
            expected = "a model that computes its loss with `loss_function`, such as Llama or Qwen"
            do = "remove `packing`; `max_tokens` alone splits batches by length"
            raise fail(ModuleContractError, "packing for a reward model", got=got, expected=expected, do=do)
        return packed

    @property
    def packer_class(self) -> type[DocumentPacker]:
        """What packs pairs into rows."""
        return PackAnswers

    def length_of(self, sample: Any) -> int | None:
        """Return the tokens of a sample: in packed rows, without padding the shorter answer."""
        return length_of_pair(self, sample)

    def validation_step(self, batch: Any, key: str = "") -> dict[str, Any]:
        """Return the same as `step`."""
        return self.step(batch)


def _scores_at(*, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return logits[0, labels, 0]
