"""`PreferenceModule`: tunes a causal model on preferences, in one forward over all answers of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accmt.addons.prefer import losses
from accmt.addons.prefer.losses import LossName, Objective, Reference
from accmt.addons.prefer.reference import with_reference
from accmt.addons.prefer.rows import (
    OF_PACKED_ROWS,
    OTHER,
    AnswersReader,
    LabeledRows,
    PackAnswers,
    PackLabeled,
    PadAnswers,
    PadLabeled,
    length_of_pair,
)
from accmt.addons.sft.chat import IGNORED
from accmt.addons.sft.module import RowModule
from accmt.addons.sft.rows import TokenizedRows, padding_id
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.checkpoint.frozen import digest_of
from accmt.data import is_stream
from accmt.engine.accelerator import current_accelerator
from accmt.engine.meta_device import building_for
from accmt.engine.quantized import keeping_quantized_weights
from accmt.errors import ArgumentError, CheckpointError, DataError, fail, nearest
from accmt.huggingface.model_kinds import is_peft_model
from accmt.messages import say_once
from accmt.metrics import Metric
from accmt.precisions import autocast
from accmt.without_trace import restore_modes

if TYPE_CHECKING:
    from accmt.addons.prefer.section import PreferSection


_KTO = "kto"
_ADAPTER_PARTS = ("lora_", "modules_to_save", "trainable_tokens")
# Entries of a configuration that do not change what a model computes: where it is from, and how it is run.
_NOT_COMPUTED = {
    *("_name_or_path", "transformers_version", "use_cache", "base_model_name_or_path", "inference_mode", "revision"),
    *("peft_version", "auto_mapping", "tokenizer_class", "pad_token_id", "return_dict"),
}
_CHANGED = "already changes the model, or other weights are trained, too"


class LogProbs(NamedTuple):
    """The log-probabilities of answers.

    Attributes:
        sums: Sums over the trained tokens of each answer `[samples, answers]`.
        lengths: Numbers of trained tokens `[samples, answers]`.
    """

    sums: Tensor
    lengths: Tensor


def log_probs(logits: Tensor, batch: Mapping[str, Any]) -> LogProbs:
    """Return the log-probabilities of answers, in float32 or higher.

    Args:
        logits: `[samples, answers, length, vocabulary]`; for packed answers `[1, tokens, vocabulary]`.
        batch: The `labels` `[samples, answers, length]`, -100 at tokens that do not count; or those of packed answers
            `[1, tokens]`, with their `answer_lengths`.
    """
    labels = batch["labels"]
    shifted, targets = losses.in_full_precision(logits[..., :-1, :]), labels[..., 1:]
    lost = functional.cross_entropy(shifted.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORED)
    per_token, counts = -lost.view_as(targets), targets != IGNORED
    if (lengths := batch.get("answer_lengths")) is None:
        return LogProbs(per_token.sum(-1), counts.sum(-1))
    # The first token of a packed answer has no label, so no answer loses or gains one by the shift.
    every = (torch.split(functional.pad(one[0], (1, 0)), lengths) for one in (per_token, counts))
    parts = (torch.stack([part.sum() for part in answers]) for answers in every)
    return LogProbs(*(part.view(len(batch["weight"]), -1) for part in parts))


class PreferenceModule(RowModule):
    """Preference tuning of a causal transformers model.

    Pass `fit` rows: `{"prompt": ..., "chosen": ..., "rejected": ...}`, or for KTO `{"prompt": ..., "completion": ...,
    "label": true}`, as a list, a `datasets.Dataset` or a stream. They are tokenized on the fly. A batch weighs as many
    as its pairs (or their `"weight"`), so that accumulation and the number of processes do not change the gradient.

    Args:
        model: The model, or a function that builds it at the start of a run.
        tokenizer: A fast tokenizer, with a chat template for conversations; it is saved with the model.
        loss: "dpo", "dpo_norm" (length-normalized), "hinge", "ipo", "simpo", "orpo" or "kto".
        max_length: The maximum number of tokens of a prompt with its answer; None keeps all. Answers are truncated, and
            prompts are not: a pair whose prompt is too long is not trained.
        reference: "adapter" is the model without its PEFT adapter, "copy" a copy of the model as it starts. "auto" uses
            the former if the adapter does not change the model yet. SimPO and ORPO need no reference.
        reference_folder: A folder for the log-probabilities of the reference, the model as it starts. They are computed
            once, before training, so that training needs no reference in memory, and no second forward pass.
        **options: `beta`, `label_smoothing`, `gamma`, `desirable_weight` and `undesirable_weight`, depending on the
            loss.

    Raises:
        ArgumentError: An unknown loss, an invalid option, or an option that the loss does not have.

    Examples:
        With a causal language model of transformers, and its tokenizer:

            Trainer("hps.yaml", "out/chat").fit(PreferenceModule(model, tokenizer, beta=0.1), rows)
    """

    section_name = "prefer"
    window_sums: list[float] | None = None

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        tokenizer: Any,
        loss: LossName = "dpo",
        *,
        max_length: int | None = None,
        reference: Reference = "auto",
        reference_folder: str | PathLike[str] | None = None,
        **options: float,
    ) -> None:
        names = [field.name for field in fields(Objective)[1:]]
        for name in options:
            if name not in names:
                do = f"did you mean {nearest(name, names, cutoff=0)}?"
                raise fail(
                    ArgumentError, "PreferenceModule", got=name, expected=f"an option: {', '.join(names)}", do=do
                )
        self.objective = Objective(loss, **options)
        self._is_adapter_off = False
        reader = AnswersReader(tokenizer, "labels" if loss == "kto" else "pairs", max_length)
        collate_fn = (PadLabeled if loss == "kto" else PadAnswers)(padding_id(tokenizer))
        super().__init__(model, tokenizer, reader, collate_fn)
        self._reference = reference
        self._folder = None if reference_folder is None else Path(reference_folder)
        self._start: str | None = None  # the digest of the reference
        if self._folder is not None and (reference != "auto" or not self.objective.kind.needs_reference):
            got = f"reference={reference!r} and a folder" if reference != "auto" else f"a folder with the loss {loss}"
            expected = "a loss with a reference, and the reference that `auto` selects"
            raise fail(ArgumentError, "reference_folder", got=got, expected=expected, do="remove `reference_folder`")
        if isinstance(model, nn.Module):
            self._choose_reference()

    @classmethod
    def arguments_of(cls, section: PreferSection) -> dict[str, Any]:
        """Return the arguments that a section sets."""
        names = ("loss", "max_length", "reference", "reference_folder")
        return {name: getattr(section, name) for name in names} | section.options

    def configure_model(self) -> None:
        """Build the model, and its reference."""
        # A reference is needed in full by each process, so the model is not built in shards.
        with building_for(None):
            super().configure_model()
        self._choose_reference()

    def _choose_reference(self) -> None:
        if not self.objective.kind.needs_reference:
            return
        # LoRA's second factors are 0 while an adapter does not change its model. Other trained weights would change it.
        named, is_adapted = dict(self.model.named_parameters()), is_peft_model(self.model)
        trained = [name for name, weight in named.items() if weight.requires_grad]
        factors = [weight for name, weight in named.items() if "lora_B" in name or "lora_embedding_A" in name]
        is_new = (
            is_adapted
            and all(any(part in name for part in _ADAPTER_PARTS) for name in trained)
            and bool(factors)
            and not any(bool(weight.any()) for weight in factors)
        )
        self._is_adapter_off = is_new
        if self._folder is not None:
            self._start = self._digest_reference(self.model)
            return
        if self._reference == "adapter" and not is_new:
            got = f"an adapter that {_CHANGED}" if is_adapted else "a model without a PEFT adapter"
            do = 'reference="copy"; or merge the adapter first' if is_adapted else 'reference="copy", or add LoRA'
            expected = "an adapter that is new: without it, the model is the one that training starts from"
            raise fail(ArgumentError, 'reference="adapter"', got=got, expected=expected, do=do)
        if self._reference == "adapter" or (self._reference == "auto" and is_new):
            return
        if is_adapted:
            say_once(
                f"the adapter {_CHANGED}, so the reference is a copy of model and adapter; to save memory, merge the "
                "adapter (accmt merge) and train a new one and nothing else"
            )
        self.teacher = deepcopy(self.model).requires_grad_(requires_grad=False).eval()

    @property
    def needs_window_sums(self) -> bool:
        """Whether the loss depends on the whole optimizer step, as KTO's baseline does."""
        return self.objective.loss == "kto"

    def sum_for_window(self, batch: Any) -> Tensor:
        """Return the weighted sum of the log-ratios of answers to other prompts, and the sum of weights, for KTO."""
        ratios, weights = self._other_ratios(batch)
        return torch.stack([(ratios * weights).sum(), weights.sum().to(ratios.dtype)])

    def make_metric(self, loss_name: str) -> KTOResults:
        """Return the metric that computes the results of a whole validation set, for KTO."""
        return KTOResults(self.objective, loss_name)

    @torch.no_grad()
    def _other_ratios(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the log-ratios of the answers to other prompts, and their weights, both `[samples]`.

        The model runs without dropout, so that the baseline does not depend on how a step is split.
        """
        batch, model = _others(batch), self.unwrapped_model
        with _as_reference(model, adapter_off=False):
            own = log_probs(self._logits(model, batch), batch).sums
        known = batch.get("reference")
        if known is None:
            known = log_probs(self._reference_logits(batch), batch).sums
        return (own - known)[:, 0], batch["weight"]

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the pairs (or answers), and their number or total weight as weight."""
        return self._evaluate(batch, self.window_sums)

    def validation_step(self, batch: Any, key: str = "") -> dict[str, Any]:
        """Return the loss, the KL divergence from the reference, and for KTO what the results of the set depend on."""
        return self._evaluate(batch, None, in_evaluation=True)

    def _evaluate(self, batch: Any, sums: list[float] | None, *, in_evaluation: bool = False) -> dict[str, Any]:
        kind, weights = self.objective.kind, batch["weight"]
        others: tuple[Tensor, Tensor] | None = None
        baseline: Tensor | float | None = None
        if self.needs_window_sums:
            if sums is None:
                others = self._other_ratios(batch)
                baseline = losses.weighted_mean(*others)
            else:
                baseline = sums[0] / (sums[1] or 1.0)
            batch = _own(batch)
        known = batch.get("reference")  # computed before training
        before = self._reference_logits(batch) if kind.needs_reference and known is None else None
        logits = self._logits(self.model, batch)
        own = log_probs(logits, batch)
        known = log_probs(before, batch).sums if before is not None else known
        totals = own.sums if known is None else own.sums - known
        scores = totals / own.lengths.clamp(min=1) if kind.is_per_token else totals
        # An answer without targets would have a probability of 1 and infinite odds, and 0 * inf is NaN.
        scores = torch.where(own.lengths > 0, scores, scores - 1)
        if baseline is not None:
            lost, values = self.objective.score_answers(scores[:, 0], batch["is_desirable"] > 0, baseline)
            values["length"] = own.lengths[:, 0]
        else:
            lost = self.objective.score(scores)
            # The rewards are β times the log-ratios.
            rewards = self.objective.strength * (totals if kind.needs_reference else scores)
            chosen, rejected = rewards.unbind(1)
            values = {
                "margin": chosen - rejected,
                "accuracy": losses.share_right(chosen - rejected),
                "reward_chosen": chosen,
                "reward_rejected": rejected,
                "log_prob_chosen": own.sums[:, 0],
                "log_prob_rejected": own.sums[:, 1],
                "length_chosen": own.lengths[:, 0],
                "length_rejected": own.lengths[:, 1],
            }
        if in_evaluation and before is not None:
            values["kl"] = _mean_kl(logits, before, batch["labels"])
        rows = {}
        if in_evaluation and others is not None:
            rows = KTOResults.rows_of((scores[:, 0].detach(), weights), others, batch["is_desirable"])
        return {
            "loss": losses.weighted_mean(lost, weights),
            "weight": weights.sum(),
            **({"losses": lost.detach(), "weights": weights} if self.wants_sample_losses else {}),
            **{name: losses.weighted_mean(one.detach(), weights) for name, one in values.items()},
            **rows,
        }

    def _logits(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the logits of all answers, computed in one forward."""
        if "answer_lengths" in batch:
            inputs = {name: values for name, values in batch.items() if name in OF_PACKED_ROWS}
            packed: Tensor = model(**inputs, use_cache=False).logits
            return packed
        ids, mask = batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)
        logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        # An adapter may put a trained prompt before the tokens.
        return logits[:, -ids.shape[1] :].reshape(*batch["input_ids"].shape, -1)

    @torch.no_grad()
    def _reference_logits(self, batch: Any) -> Tensor:
        """Return the logits of the reference, without dropout."""
        if self.teacher is not None:
            logits = self._logits(self.teacher, batch)
        else:
            with _as_reference(self.unwrapped_model, adapter_off=True):
                logits = self._logits(self.unwrapped_model, batch)
        return logits

    @property
    def packer_class(self) -> type[DocumentPacker]:
        """What packs answers into rows."""
        return PackLabeled if self.needs_window_sums else PackAnswers

    def length_of(self, sample: Any) -> int | None:
        """Return the tokens of a sample: in packed rows, without padding the shorter answer."""
        return None if self.needs_window_sums else length_of_pair(self, sample)

    def get_train_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples; those of KTO have both labels.

        Raises:
            DataError: All of them have the same label.
        """
        if self.needs_window_sums:
            # Checked before the log-probabilities of a reference are computed; invalid rows are rejected when read.
            sources = [*dataset.values()] if isinstance(dataset, dict) else [dataset]
            if not any(
                rows is None or isinstance(rows, DataLoader | TokenizedRows) or is_stream(rows) for rows in sources
            ):
                found = (rows[index] for rows in sources for index in range(len(rows)))
                labels = {bool(row["label"]) for row in found if isinstance(row, Mapping) and "label" in row}
                if len(labels) == 1:
                    got, expected = f"only rows with the label {labels.pop()}", "desirable and undesirable answers"
                    raise fail(
                        DataError, "rows for KTO", got=got, expected=expected, do="add rows with the other label"
                    )
        return super().get_train_dataloader(dataset)

    def make_samples(self, rows: Any) -> Any:
        """Return rows as samples; those of KTO have an answer to another prompt, too."""
        if rows is None or isinstance(rows, DataLoader | TokenizedRows):
            return rows
        is_kto = self.objective.loss == "kto"
        if is_stream(rows):
            if is_kto or self._folder is not None:
                where = "rows for KTO" if is_kto else "rows with reference_folder"
                do = "pass a list or a datasets.Dataset"
                raise fail(DataError, where, got="a stream", expected="rows that are read by index", do=do)
            return super().make_samples(rows)
        if not is_kto:
            return self._with_reference(super().make_samples(rows))
        return self._with_reference(LabeledRows(rows, self._reader))

    def _with_reference(self, samples: TokenizedRows) -> TokenizedRows:
        """Return rows with the log-probabilities of the reference, if there is a folder for them."""
        if self._folder is None:
            return samples
        accelerator, tokenizer, model = current_accelerator(), self.processor, self.unwrapped_model
        precision = "no" if accelerator is None else accelerator.mixed_precision
        text = f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.chat_template} {self._reader.max_length}"
        facts = {
            "model": str(self._start),
            "tokenizer, chat template or max_length": xxhash.xxh3_64_hexdigest(text.encode()),
            "mixed_precision": str(precision),
        }

        def require_start() -> None:
            if self._digest_reference(model) != self._start:
                got, expected = "rows that are not in the folder, and a trained model", "the model at the start"
                do = "pass these rows to fit as well, or use a module without reference_folder"
                raise fail(DataError, "reference_folder", got=got, expected=expected, do=do)

        def compute(rows: list[dict[str, Any]]) -> Tensor:
            device = torch.device("cpu") if accelerator is None else accelerator.device
            model.to(device)
            batch = {name: values.to(device) for name, values in self.collate_fn(rows).items()}  # type: ignore[misc]
            context = nullcontext() if accelerator is None else autocast(accelerator)
            kept = keeping_quantized_weights(model)  # as during a run
            with torch.no_grad(), context, kept, _as_reference(model, adapter_off=self._is_adapter_off):
                parts = (_own(batch), _others(batch)) if self.needs_window_sums else (batch,)
                return torch.cat([log_probs(self._logits(model, part), part).sums for part in parts], 1)

        trainer = getattr(self, "trainer", None)  # none outside of a run
        max_tokens = None if trainer is None else trainer.hps.max_tokens
        return with_reference(samples, self._folder, facts, compute, require_start, max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return a digest of the reference, so that a resumed run cannot continue with another one."""
        return {} if self._find_digest() is None else {"reference": self._find_digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the reference with that of the checkpoint.

        Raises:
            CheckpointError: They differ.
        """
        if self._find_digest() not in (None, state.get("reference")):
            got, expected = (
                "another reference model than that of the checkpoint",
                "the model that training started from",
            )
            do = "build the module with the same model as at the start; the checkpoint restores the trained weights"
            raise fail(CheckpointError, f"{type(self).__name__}.load_state_dict", got=got, expected=expected, do=do)

    def _find_digest(self) -> str | None:
        """Return the digest of a reference that checkpoints do not know; None if there is none."""
        if self._start is None and self.teacher is not None:
            self._start = self._digest_reference(self.teacher)
        return self._start

    def _digest_reference(self, reference: nn.Module) -> str:
        """Return a digest of the weights and the configuration that make the reference."""
        weights = {
            name: weight
            for name, weight in reference.named_parameters()
            if not (self._is_adapter_off and "lora_" in name)  # random, and switched off
        }
        digests = [f"{name} {digest_of(weight)}" for name, weight in weights.items()]
        configs: list[Any] = [reference.config]
        if is_peft_model(reference) and not self._is_adapter_off:  # its adapters are part of the reference
            configs += [config for _, config in sorted(reference.peft_config.items())]
        for config in configs:
            values = {name: value for name, value in config.to_dict().items() if name not in _NOT_COMPUTED}
            digests.append(json.dumps(values, sort_keys=True, default=_as_text))
        return xxhash.xxh3_128_hexdigest("\n".join(digests).encode())


def _own(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without the answers to other prompts."""
    own = {name: values for name, values in batch.items() if not name.startswith(OTHER)}
    return own | ({"reference": batch["reference"][:, :1]} if "reference" in batch else {})


def _others(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers to other prompts as a batch."""
    others = {name.removeprefix(OTHER): values for name, values in batch.items() if name.startswith(OTHER)}
    return others | ({"reference": batch["reference"][:, 1:]} if "reference" in batch else {})


def _mean_kl(logits: Tensor, before: Tensor, labels: Tensor) -> Tensor:
    """Return KL(π ‖ π_ref) at the trained tokens: the mean over the tokens of each answer, and over the answers."""
    is_target = labels[..., 1:] != IGNORED
    own, theirs = (losses.in_full_precision(one[..., :-1, :][is_target]) for one in (logits, before))
    per_token = own.new_zeros(is_target.shape)
    per_token[is_target] = losses.divergence(own, theirs, beta=1.0)
    return (per_token.sum(-1) / is_target.sum(-1).clamp(min=1)).mean(1)


def _as_text(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


@contextmanager
def _as_reference(model: Any, *, adapter_off: bool) -> Iterator[None]:
    """Switch dropout off, and the adapter, too, if it is not part of the reference."""
    modes = [(module, module.training) for module in model.modules()]
    is_trained = [(weight, weight.requires_grad) for weight in model.parameters()]

    def keep_trained() -> None:
        for weight, requires_grad in is_trained:
            weight.requires_grad_(requires_grad)

    model.eval()
    try:
        with model.disable_adapter() if adapter_off else nullcontext():
            keep_trained()  # PEFT freezes the adapter meanwhile, and FSDP2 would keep it frozen
            yield
    finally:
        keep_trained()
        restore_modes(modes)


class KTOResults(Metric):
    """The loss and the metrics of all answers in a validation set; the step returns what they depend on.

    The baseline of KTO is a mean over all rows of the set.

    Args:
        objective: The loss and its options.
        loss_name: The name of the loss in the results.
    """

    def __init__(self, objective: Objective, loss_name: str) -> None:
        super().__init__(_KTO, main_metric="accuracy")
        self._objective = objective
        self._loss_name = loss_name

    @staticmethod
    def rows_of(own: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], is_desirable: Tensor) -> dict[str, Any]:
        """Return the entry of the validation step.

        Args:
            own: The log-ratios of the answers, and their weights `[samples]`.
            others: The same for the answers to other prompts.
            is_desirable: 1 for desirable answers, else 0 `[samples]`.
        """
        ratios = {"own": own[0], "others": others[0]}
        return {_KTO: (ratios, {"own": own[1], "others": others[1], "is_desirable": is_desirable})}

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the results, in double precision; without rows that count, they are NaN, and there is no loss."""
        ratios, others = predictions["own"].double(), predictions["others"].double()
        is_desirable, weights = references["is_desirable"] > 0, references["own"].double()
        mean = losses.weighted_mean(others, references["others"].double())
        lost, values = self._objective.score_answers(ratios, is_desirable, mean)
        rewards = self._objective.strength * ratios
        found = {
            **{name: _mean_or_nan(one, weights) for name, one in values.items()},
            "reward_desirable": _mean_or_nan(rewards, weights * is_desirable),
            "reward_undesirable": _mean_or_nan(rewards, weights * ~is_desirable),
        }
        found["margin"] = found["reward_desirable"] - found["reward_undesirable"]
        return found | ({self._loss_name: _mean_or_nan(lost, weights)} if weights.any() else {})


def _mean_or_nan(values: Tensor, weights: Tensor) -> float:
    """Return a weighted mean, NaN if all weights are 0."""
    return float(losses.weighted_mean(values, weights)) if weights.any() else torch.nan
