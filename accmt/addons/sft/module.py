"""`SFTModule`: supervised fine-tuning of a causal model; the base class of modules on rows; what their data are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt.addons.made_modules import HuggingFaceModule
from accmt.addons.mix.sources import MixedStream, Mixture, mix_sources
from accmt.addons.sft.chat import IGNORED, LOSS_WEIGHTS
from accmt.addons.sft.images import split_processor
from accmt.addons.sft.rows import (
    Masking,
    PackRows,
    PadRows,
    RowReader,
    TokenizedRows,
    TokenizedStream,
    look_at,
    make_stream,
    padding_id,
)
from accmt.addons.text_tables import align
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.addons.token_losses import weigh_tokens
from accmt.data import is_stream
from accmt.data.samplers import Order
from accmt.errors import ArgumentError, DataError, fail, join_errors
from accmt.huggingface.model_kinds import begins_with_prompt

if TYPE_CHECKING:
    from accmt.addons.sft.section import SFTSection
    from accmt.options import HyperParameters, Settings


def _count_rows(batch: Any) -> int:
    return len(batch["input_ids"])


class RowModule(HuggingFaceModule):
    """A transformers model that is trained on rows, which are tokenized when they are read.

    Args:
        model: The model, or a function that builds it at the start of a run.
        tokenizer: A fast tokenizer; it is saved with the model.
        reader: Makes samples of rows.
        collate_fn: Makes batches of samples.

    Attributes:
        section_name: The section of the hyper-parameters about the rows.

    Raises:
        ArgumentError: The reader's `max_length` is below 2.
    """

    section_name: ClassVar[str] = "sft"

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        tokenizer: Any,
        reader: RowReader,
        collate_fn: Callable[..., Any],
    ) -> None:
        super().__init__(model, tokenizer)
        if reader.max_length is not None and reader.max_length < 2:
            got, expected = repr(reader.max_length), "a number from 2: each token is predicted from the previous ones"
            where = f"{type(self).__name__}(max_length=...)"
            raise fail(ArgumentError, where, got=got, expected=expected, do="for example max_length=1024")
        self.collate_fn = collate_fn
        self._reader = reader

    @classmethod
    def from_hps(
        cls,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        *,
        in_fit: bool = False,
        processor: Any = None,
        **arguments: Any,
    ) -> Self:
        """Create a module from the section `model` of the hyper-parameters, and the section about its rows.

        Args:
            hps_config: See `AcceleratorModule.from_hps`.
            in_fit: Whether to build the model at the start of a run instead of now.
            processor: The tokenizer; None loads that of the model, with the chat template of the section.
            **arguments: Other arguments of the class, in place of those in the section; None uses the section.

        Raises:
            HyperParameterError: The section `model` is missing or invalid.
            FileNotFoundError: The tokenizer or the chat template does not exist.
            MissingPackageError: A required package is not installed.
        """
        from accmt.addons.model_from_hps import build_from_hps, load_tokenizer
        from accmt.options import HyperParameters

        hps = HyperParameters.from_config(hps_config)
        section = hps.section(cls.section_name)
        of_section = {} if section is None else cls.arguments_of(section)
        given = {name: value for name, value in arguments.items() if value is not None}
        tokenizer = load_tokenizer(hps, cls.section_name) if processor is None else processor
        make: Any = cls  # each class has arguments of its own
        module: Self = make(partial(build_from_hps, hps), tokenizer, **of_section | given)
        module.hps = hps
        if not in_fit:
            module.configure_model()
        return module

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, which a processor has in addition to other parts."""
        return self._reader.tokenizer

    @property
    def packer_class(self) -> type[DocumentPacker]:
        """What packs samples into rows."""
        return PackRows

    @classmethod
    def arguments_of(cls, section: Any) -> dict[str, Any]:
        """Return the arguments of the class that a section of the hyper-parameters sets."""
        raise NotImplementedError

    def get_train_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples, after checking some of them; several sources are returned by name."""
        if isinstance(dataset, dict):
            return {name: self._make_checked(rows, f" ({name})") for name, rows in dataset.items()}
        return self._make_checked(dataset)

    def _make_checked(self, rows: Any, of_source: str = "") -> Any:
        data = self.make_samples(rows)
        if isinstance(data, TokenizedRows | TokenizedStream):
            look_at(data, self.tokenizer, self.model, purpose=self._reader.purpose + of_source)
        return data

    def get_validation_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples; several sets are returned by name."""
        return self._make_evaluated(dataset, "validation data")

    def get_test_dataloader(self, dataset: Any = None) -> Any:
        """Return the rows as samples; several sets are returned by name."""
        return self._make_evaluated(dataset, "test data")

    def _make_evaluated(self, dataset: Any, what: str) -> Any:
        if isinstance(dataset, dict):
            return {name: self._make_evaluated(rows, f"{what} {name!r}") for name, rows in dataset.items()}
        try:
            return self.make_samples(dataset)
        except DataError as error:
            of_set = [fault._replace(where=f"{what}, {fault.where}") for fault in error.faults]
            raise join_errors([fail(DataError, **fault._asdict()) for fault in of_set]) from error

    def make_samples(self, rows: Any) -> Any:
        """Return rows as samples; what is None, a loader, a mixture or already samples is returned as it is."""
        if rows is None or isinstance(rows, DataLoader | TokenizedRows | TokenizedStream | Mixture | MixedStream):
            return rows
        return (make_stream if is_stream(rows) else TokenizedRows)(rows, self._reader)


class SFTModule(RowModule):
    """Supervised fine-tuning of a causal transformers model: only the assistant's tokens are trained.

    Pass `fit` rows: `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or `{"text": ...}`, as a list, a
    `datasets.Dataset` or a stream. They are tokenized on the fly. Batches are weighted by their target tokens.

    Args:
        model: The model, or a function that builds it at the start of a run.
        tokenizer: A fast tokenizer, with a chat template for conversations, or a processor with one, for messages with
            images; it is saved with the model.
        max_length: The maximum number of tokens per row, with those of images; None keeps all.
        per_turn: Whether each assistant turn is a separate sample, with all messages before it. Use this if the chat
            template rewrites earlier turns, for example by removing their reasoning.

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
        of_text, images = split_processor(tokenizer)
        masking = Masking(of_text, max_length, per_turn, images)
        super().__init__(model, tokenizer, masking, PadRows(padding_id(of_text), images))
        if images is not None:  # whose first dimensions are not those of samples
            self.get_batch_size = _count_rows  # type: ignore[method-assign]

    @classmethod
    def arguments_of(cls, section: SFTSection) -> dict[str, Any]:
        """Return the arguments that a section sets."""
        return {"max_length": section.max_length, "per_turn": section.per_turn}

    def step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss over the target tokens, and their number as weight; or both by the weights of tokens."""
        if LOSS_WEIGHTS in batch:
            inputs = {name: value for name, value in batch.items() if name not in (LOSS_WEIGHTS, "labels")}
            outputs = self._call_model({**inputs, "use_cache": False})
            per_sample = self.wants_sample_losses and torch.is_grad_enabled()
            return weigh_tokens(self.unwrapped_model, outputs, batch, batch[LOSS_WEIGHTS], per_sample=per_sample)
        labels = batch["labels"]
        weight = (labels[:, 0 if begins_with_prompt(self.unwrapped_model) else 1 :] != IGNORED).sum()
        # The mean over no tokens is NaN, and 0 * NaN is NaN: without targets, use the loss of all tokens with weight 0.
        anything = batch["input_ids"]
        if "position_ids" in batch:  # packed documents: their first tokens are not targets
            anything = anything.masked_fill(batch["position_ids"] == 0, IGNORED)
        batch = {**batch, "labels": torch.where(weight > 0, labels, anything)}
        result = {**super().step(batch), "weight": weight}
        if "weights" in result:  # of samples
            result["weights"] = result["weights"] * (weight > 0)
        return result

    def predict_step(self, batch: Any) -> Any:
        """Return the logits."""
        return super().predict_step({name: value for name, value in batch.items() if name != LOSS_WEIGHTS})


# ---- What the data are, before a model is built: lengths, shares, and the first batches


_HEAD = ("source", "rows", "tokens: mean", "95 %", "longest", "trained", "weights", "first epoch", "passes")


def describe_data(module: Any, data: Any, settings: Settings, *, num_batches: int, seed: int) -> Iterator[str]:
    """Yield lines about training rows, and the first batches of a run on one process.

    Args:
        module: The module, without its model.
        data: The rows, or several sources by name.
        settings: The settings of the run.
        num_batches: The number of batches to show.
        seed: The seed of the run.
    """
    sources = data if isinstance(data, Mapping) else {"": data}
    rows: dict[str, TokenizedRows] = {name: module.make_samples(own) for name, own in sources.items()}
    samples: Any = next(iter(rows.values()))
    sampler = None
    if isinstance(data, Mapping):
        samples = mix_sources(rows, settings.hps)
        rows = {name: rows[name] for name in samples.names}
        sampler = samples.order_run(module, settings, num_shards=1, seed=seed)
    drawn = Order(len(samples), seed, shuffle=settings.data.shuffle_train, sampler=sampler).at(0).tolist()
    numbers = samples.sources_of(drawn) if isinstance(samples, Mixture) else np.zeros(len(drawn), np.int64)
    used = np.bincount(numbers, minlength=len(rows)).tolist()
    yield from _table(rows, used)
    names, begins = list(rows), np.cumsum([0, *map(len, rows.values())]).tolist()
    size = settings.hps.train_batch_size
    for batch in range(min(num_batches, -(-len(drawn) // size))):
        yield f"\nbatch {batch + 1}, with the trained text between ⟦ and ⟧"
        for index, number in zip(drawn[batch * size :][:size], numbers[batch * size :][:size], strict=True):
            place = index - begins[number]
            row = rows[names[number]].read(place)
            yield f"\n{f'{names[number]}, ' if names[number] else ''}row {place}:\n{row.show(module.tokenizer)}"


_SHOWN_PLACES = 10


def _table(rows: Mapping[str, TokenizedRows], used: list[int]) -> Iterator[str]:
    """Yield the table of the sources, and the problems of their rows."""
    table, problems = [_HEAD], []
    for (name, own), number in zip(rows.items(), used, strict=True):
        read = list(own.sample())
        lengths = np.array([len(row.labels) for _, row in read])
        weights = {weight for _, row in read for weight in row.weights or ([1.0] if row.has_target else [])} - {0.0}
        targets = sum(label != IGNORED for _, row in read for label in row.labels[1:])
        table.append(
            (
                name or "all",
                f"{len(own):,}",
                f"{lengths.mean():.0f}",
                f"{np.percentile(lengths, 95):.0f}",
                f"{lengths.max()}",
                f"{targets / max(1, lengths.sum()):.0%}",
                f"{min(weights):g}-{max(weights):g}" if len(weights) > 1 else f"{weights.pop():g}" if weights else "",
                f"{number:,}",
                f"{number / len(own):.2f}",
            )
        )
        places: dict[str, list[int]] = {}
        for place, row in read:
            for kind in sorted({problem.kind for problem in row.problems}):
                places.setdefault(kind, []).append(place)
        for kind, found in places.items():
            shown = [f"row {place}" for place in found[:_SHOWN_PLACES]]
            shown += ["..."] if len(found) > _SHOWN_PLACES else []
            problems.append(f"{name or 'all'}: {len(found)} of {len(read)} rows {kind}: {', '.join(shown)}")
    yield from align(table)
    yield from problems
