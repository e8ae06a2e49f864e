"""Sets up batching by a token budget (`max_tokens`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from accmt.addons.token_batches.budget import TokenBudget
from accmt.addons.token_batches.lengths import find_length
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.addons.token_batches.windows import ByPackedRows, ByTokens, ByTokensInEvaluation, keep_samples, take_apart
from accmt.data import Grouping, in_buckets
from accmt.data.collate import collate_or_explain
from accmt.engine.sync_batchnorm import is_batch_norm
from accmt.errors import ArgumentError, fail
from accmt.libraries.private_names import attention_of
from accmt.messages import warn_once
from accmt.module import AcceleratorModule
from accmt.options import Settings


@dataclass(frozen=True, kw_only=True)
class TokenBatcher:
    """Splits samples into micro-batches by a token budget.

    Attributes:
        module: The module.
        settings: The Trainer's settings.
        data: The user's dataset, or a copy of the user's DataLoader without collation.
        options: Options for training and evaluation.
    """

    module: AcceleratorModule
    settings: Settings
    data: Any
    options: dict[str, Any]

    keep_samples = staticmethod(keep_samples)

    def for_training(self, grouping: Grouping) -> ByTokens:
        """Return the maker of micro-batches for training."""
        # Warn about batch norm, whose outputs depend on how samples are split.
        named = next((name for name, part in self.module.model.named_modules() if is_batch_norm(part)), None)
        if named is not None:
            warn_once(
                f"max_tokens: batch norm ({named}) normalizes each micro-batch separately, so its statistics are those "
                "of fewer samples, of similar length; LayerNorm and other norms per sample are not affected",
                about="batch norm and max_tokens",
            )
        kind = ByPackedRows if self.settings.hps.packing else ByTokens
        return kind(self.training_budget, grouping=grouping, **self.training_options)

    def count_tokens(self, samples: list[Any]) -> int:
        """Return the tokens of samples, without padding."""
        return sum(find_length(sample, self.module.length_of) for sample in samples)

    def for_evaluation(self, purpose: str, *, batch_size: int) -> ByTokensInEvaluation:
        """Return the maker of micro-batches for an evaluation."""
        return ByTokensInEvaluation(self._budget, purpose=purpose, batch_size=batch_size, **self.options)

    @property
    def training_budget(self) -> TokenBudget:
        """The limits of a training micro-batch."""
        return replace(self._budget, max_samples=self.settings.hps.micro_batch_limit or sys.maxsize)

    @property
    def training_options(self) -> dict[str, Any]:
        """The options of the training loader."""
        if not self.settings.hps.packing:
            return self.options
        # For flash attention, batches contain the document bounds.
        packer_class = getattr(self.module, "packer_class", DocumentPacker)
        return self.options | {"collate": packer_class(gives_bounds="flash" in str(attention_of(self.module.model)))}

    @property
    def _budget(self) -> TokenBudget:
        return TokenBudget(self.settings.hps.max_tokens or 1, sys.maxsize, self.settings.running.compile_buckets or 1)


def find_token_batcher(
    module: AcceleratorModule,
    data: Any,
    settings: Settings,
    *,
    collate: Callable[[Any], Any] | None,
    seed: int,
    pins_memory: bool,
    kind: str,
) -> TokenBatcher | None:
    """Return the token batcher for some data, or None if a DataLoader builds its own batches.

    Args:
        module: The module.
        data: The data.
        settings: The Trainer's settings.
        collate: The collate function; None uses torch's.
        seed: The seed of the run.
        pins_memory: Whether batches are pinned.
        kind: The name of the data in warnings.
    """
    if kind == "training":
        _reject_conflicts(module, settings)
    if isinstance(data, DataLoader):
        parts = take_apart(data)
        if parts is None and settings.hps.packing and kind == "training":
            _reject("packing", "together with a DataLoader that builds its own batches")
        if parts is None:
            warn_once(
                f"max_tokens has no effect on your DataLoader of {kind} data, which builds its own batches: "
                "pass its dataset instead",
                about=f"max_tokens and a DataLoader: {kind}",
            )
            return None
        pins_memory = pins_memory and data.pin_memory
        data, collate = parts
        bucket = settings.running.compile_buckets
        collate = collate if bucket is None else in_buckets(collate, bucket)
    options = {
        "collate": collate or collate_or_explain,
        "length_of": module.length_of,
        "seed": seed,
        "pins_memory": pins_memory,
        "rejects_long": settings.failures.on_long_sample == "raise",
    }
    return TokenBatcher(module=module, settings=settings, data=data, options=options)


def _reject_conflicts(module: AcceleratorModule, settings: Settings) -> None:
    """Reject other settings that determine the size of training micro-batches."""
    others = {
        "a module with manual optimization": module.uses_manual_optimization,
        "max_micro_batch_size: auto, which splits by samples": settings.hps.halves_micro_batches,
    }
    for got, is_so in others.items():
        if is_so:
            _reject("max_tokens", f"together with {got}")
    collate_fn = settings.data.collate_fn
    collates = module.collate_fn_train or (isinstance(collate_fn, Mapping) and collate_fn.get("train"))
    if settings.hps.packing and collates:
        _reject("packing", "together with a collate function of training data")
    if settings.hps.packing and settings.running.compile_buckets is not None:
        _reject("packing", "together with compile={'buckets': ...}, which pads")


def _reject(name: str, got: str) -> NoReturn:
    where, expected = f"{name} in the hyper-parameters", "one of the two"
    raise fail(ArgumentError, where, got=got, expected=expected, do="leave one of them out")
