"""`SFTModule`: supervised fine-tuning of a causal model on conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt.addons.sft.chat import IGNORED
from accmt.addons.sft.rows import Masking, PadRows, SFTRows, SFTStream, is_table, look_at, make_stream
from accmt.data import is_stream
from accmt.errors import ArgumentError, explain
from accmt.huggingface.model_kinds import begins_with_prompt
from accmt.module import HuggingFaceModule

if TYPE_CHECKING:
    from accmt.options import HyperParameters


class SFTModule(HuggingFaceModule):
    """A causal transformers model that learns to answer: of each row only what the assistant writes is trained.

    Data for `fit` are rows: `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or `{"text": ...}`, in a list,
    a `datasets.Dataset`, or a stream. They are tokenized when they are read. A batch weighs its target tokens.

    Args:
        model: The model, or a function that builds it at the start of a run.
        tokenizer: A fast tokenizer, with a chat template for conversations; it is saved beside the model.
        max_length: How many tokens of a row are kept; None is all.
        per_turn: Whether each turn of the assistant is a sample of its own, with all that comes before it. So every
            turn is trained where the chat template rewrites earlier ones, such as by leaving out their reasoning.

    Raises:
        ArgumentError: `max_length` is below 2.

    Examples:
        With a causal language model of transformers, and its tokenizer:

            Trainer("hps.yaml", "out/chat").fit(SFTModule(model, tokenizer), rows)
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        tokenizer: Any,
        *,
        max_length: int | None = None,
        per_turn: bool = False,
    ) -> None:
        super().__init__(model, tokenizer)
        if max_length is not None and max_length < 2:
            expected = "2 or more: a token is predicted from those before it"
            raise ArgumentError(
                explain("SFTModule(max_length=...)", repr(max_length), expected, "max_length=1024, say")
            )
        self._masking = Masking(tokenizer, max_length, per_turn)
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.collate_fn = PadRows(pad_id or 0)

    @classmethod
    def from_hps(
        cls,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        *,
        in_fit: bool = False,
        processor: Any = None,
        max_length: int | None = None,
        per_turn: bool | None = None,
    ) -> SFTModule:
        """Make a module of the model that the section `model` of hyper-parameters describes.

        Args:
            hps_config: As in `AcceleratorModule.from_hps`, and so `in_fit`.
            in_fit: Whether the model is built at the start of a run instead of now.
            processor: The tokenizer; None is that of the model's folder, with the chat template of the section `sft`.
            max_length: How many tokens of a row are kept; None is that of the section `sft`.
            per_turn: Whether each turn of the assistant is a sample of its own; None is that of the section `sft`.

        Raises:
            HyperParameterError: There is no section `model`, or something in it is wrong.
            FileNotFoundError: There is no tokenizer, or no such chat template.
            MissingPackageError: A package that it asks for is not installed.
        """
        from accmt.addons.model_from_hps import build_from_hps, load_tokenizer
        from accmt.options import HyperParameters
        from accmt.options.sft_section import SFTSection

        hps = HyperParameters.from_config(hps_config)
        section = hps.sft_section or SFTSection()
        module = cls(
            partial(build_from_hps, hps),
            load_tokenizer(hps) if processor is None else processor,
            max_length=section.max_length if max_length is None else max_length,
            per_turn=section.per_turn if per_turn is None else per_turn,
        )
        module.hps = hps
        if not in_fit:
            module.configure_model()
        return module

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the target tokens, and how many there are."""
        labels = batch["labels"]
        weight = (labels[:, 0 if begins_with_prompt(self.unwrapped_model) else 1 :] != IGNORED).sum()
        # The mean over no token is NaN, and 0 * NaN is NaN: without a target the loss is that of any tokens.
        anything = batch["input_ids"]
        if "position_ids" in batch:  # packed documents, the first token of which is no target
            anything = anything.masked_fill(batch["position_ids"] == 0, IGNORED)
        batch = {**batch, "labels": torch.where(weight > 0, labels, anything)}
        return {**super().step(batch), "weight": weight}

    def get_train_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples, once they have been looked at."""
        data = self._make_samples(dataset)
        if isinstance(data, SFTRows | SFTStream):
            look_at(data, self.processor, self.model)
        return data

    def get_validation_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples, those of several sets by name."""
        if isinstance(dataset, dict):
            return {name: self._make_samples(rows) for name, rows in dataset.items()}
        return self._make_samples(dataset)

    def get_test_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples, those of several sets by name."""
        return self.get_validation_dataloader(dataset)

    def _make_samples(self, rows: Any) -> Any:
        if rows is None or isinstance(rows, DataLoader | SFTRows | SFTStream):
            return rows
        masking = self._masking._replace(is_table=is_table(rows))
        return (make_stream if is_stream(rows) else SFTRows)(rows, masking)
