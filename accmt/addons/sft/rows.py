"""Reads rows, tokenizes them on the fly, and checks some at the start of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from accmt.addons.readers.rows import FileRows
from accmt.addons.sft.chat import (
    IGNORED,
    LOSS_WEIGHTS,
    NO_TARGET,
    STARTS_AFTER,
    MaskedRow,
    Problem,
    find_answers,
    find_messages,
    mask_row,
)
from accmt.addons.sft.images import ImageReader
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.data.samplers import call_set_epoch
from accmt.errors import ArgumentFileError, DataError, MissingPackageError, fail
from accmt.huggingface.model_kinds import is_peft_model
from accmt.messages import say_once, warn_once

_LOOKED_AT = 512
_NAMED = 3
_STATE = ("state_dict", "load_state_dict")
_DOS = "print a rendered row: tokenizer.apply_chat_template(row['messages'], tokenize=False)"


class TokenizedRow(Protocol):
    """A row as tokens.

    Attributes:
        labels: The token id for each target, else -100; of a row with several answers, those of the first.
        problems: Problems of the row.
        weights: The weight of each token's loss; None if each target has weight 1.
    """

    @property
    def labels(self) -> list[int]: ...
    @property
    def weights(self) -> list[float] | None: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...
    @property
    def has_target(self) -> bool: ...
    def sample(self) -> dict[str, Any]: ...
    def show(self, tokenizer: Any) -> str: ...


class RowReader(Protocol):
    """Makes samples of rows.

    Attributes:
        tokenizer: The tokenizer.
        purpose: What the rows are for, in messages.
        max_length: The maximum number of tokens per row; None keeps all.
        reads_all: Whether to read every row at the start: it may become several samples, or is checked.
    """

    @property
    def tokenizer(self) -> Any: ...
    @property
    def purpose(self) -> str: ...
    @property
    def max_length(self) -> int | None: ...
    @property
    def reads_all(self) -> bool: ...

    def turns_of(self, row: Any, where: str) -> list[int | None]:
        """Return the indices of the messages that become separate samples; [None] means the whole row."""

    def read(self, row: Any, turn: int | None, where: str) -> TokenizedRow:
        """Return the tokens of a row, or of the row up to a turn."""


class Masking(NamedTuple):
    """How rows become samples of supervised fine-tuning.

    Attributes:
        tokenizer: The tokenizer.
        max_length: The maximum number of tokens per row; None keeps all.
        per_turn: Whether each assistant turn is a separate sample, rendered with the messages before it.
        images: Reads the images of messages; None rejects them.
    """

    tokenizer: Any
    max_length: int | None = None
    per_turn: bool = False
    images: ImageReader | None = None

    @property
    def purpose(self) -> str:
        """What the rows are for, in messages."""
        return "supervised fine-tuning"

    @property
    def reads_all(self) -> bool:
        """Every row is read if each assistant turn is a sample."""
        return self.per_turn

    def turns_of(self, row: Any, where: str) -> list[int | None]:
        """Return the indices of the messages that become separate samples; [None] means the whole row."""
        messages, first = find_messages(row, where) if self.per_turn else (None, 0)
        if messages is None:
            return [None]
        return [*find_answers(messages, first)]

    def read(self, row: Any, turn: int | None, where: str) -> MaskedRow:
        """Return the tokens of a row, or of the row up to a turn."""
        length, images = self.max_length, self.images
        return mask_row(self.tokenizer, row, max_length=length, turn=turn, images=images, where=where)


def _is_table(rows: Any) -> bool:
    """Return whether rows come from `datasets`, possibly concatenated: all have the same keys, with None if missing."""
    datasets = sys.modules.get("datasets")  # if it is not imported, it made no rows
    if isinstance(rows, ConcatDataset):
        return any(map(_is_table, rows.datasets))
    if isinstance(rows, FileRows):
        return rows.has_columns
    return datasets is not None and isinstance(rows, datasets.Dataset | datasets.IterableDataset)


def _without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nothing(entry) for name, entry in value.items() if entry is not None}
    return [_without_nothing(entry) for entry in value] if isinstance(value, list) else value


class TokenizedRows(Dataset[dict[str, Any]]):
    """Rows read by index and tokenized. A row without targets has weight 0."""

    def __init__(self, rows: Any, reader: RowReader) -> None:
        self._rows = rows
        self._reader = reader
        self._is_table = _is_table(rows)
        turns = ((at, turn) for at in range(len(rows)) for turn in reader.turns_of(self._row(at), self._name(at)))
        self._turns = list(turns) if reader.reads_all else None
        self.follow(rows, has_same_order=self._turns is None or len(self._turns) == len(rows))

    def follow(self, rows: Any, *, has_same_order: bool = True) -> None:
        """Use the order of rows that are slow to read in any order, and the descriptions of their files."""
        if has_same_order and hasattr(rows, "shuffle_rows"):
            self.shuffle_rows, self.spread = rows.shuffle_rows, rows.spread
        if hasattr(rows, "describe_files"):
            self.describe_files = rows.describe_files

    def __len__(self) -> int:
        return len(self._rows) if self._turns is None else len(self._turns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(index).sample()

    def read(self, index: int) -> TokenizedRow:
        """Return a row and its problems."""
        row, turn = (index, None) if self._turns is None else self._turns[index]
        return self._reader.read(self._row(row), turn, self._name(row))

    def raw(self, index: int) -> Any:
        """Return the row of a sample, before it is tokenized."""
        return self._row(index if self._turns is None else self._turns[index][0])

    def _row(self, index: int) -> Any:
        return _without_nothing(self._rows[index]) if self._is_table else self._rows[index]

    def _name(self, index: int) -> str:
        return f"row {index} for {self._reader.purpose}"

    def sample(self) -> Iterator[tuple[int, TokenizedRow]]:
        """Yield rows from all parts of the data, starting with the first."""
        evenly = range(0, len(self), max(1, len(self) // _LOOKED_AT))
        for index in self.spread(_LOOKED_AT) if hasattr(self, "spread") else evenly:
            yield index, self.read(index)


class TokenizedStream(IterableDataset[dict[str, Any]]):
    """Rows read in order and tokenized. Rows without targets are skipped.

    `make_stream` returns a resumable one if the rows have a state.
    """

    def __init__(self, rows: Iterable[Any], reader: RowReader) -> None:
        self._rows = rows
        self._reader = reader
        self._is_table = _is_table(rows)
        self._where = f"a row for {reader.purpose}"
        self._start = 0  # samples of the first row to skip
        self._taken = 0  # samples of the current row yielded so far

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _STATE:  # during unpickling; and the state is not only that of the rows
            raise AttributeError(name)
        return getattr(self._rows, name)  # a generator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the rows."""
        call_set_epoch(self._rows, epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._read():
            if row.has_target:
                yield row.sample()

    def _read(self) -> Iterator[TokenizedRow]:
        skipped, self._start = self._start, 0
        for read in self._read_rows():
            row = self._clean(read)
            turns = self._reader.turns_of(row, self._where)
            for index in range(skipped, len(turns)):
                self._taken = index + 1
                yield self._reader.read(row, turns[index], self._where)
            skipped = 0

    def _read_rows(self) -> Iterator[Any]:
        return iter(self._rows)

    def _clean(self, row: Any) -> Any:
        return _without_nothing(row) if self._is_table else row

    def sample(self) -> Iterator[tuple[int, TokenizedRow]]:
        """Yield the first rows; nothing from an iterator, which can be read only once."""
        if not isinstance(self._rows, Iterator):
            reader, where = self._reader, self._where
            rows = map(self._clean, self._rows)
            read = (reader.read(row, turn, where) for row in rows for turn in reader.turns_of(row, where))
            yield from enumerate(islice(read, _LOOKED_AT // 8))


class StatefulTokenizedStream(TokenizedStream):
    """An `TokenizedStream` of rows with a state: it resumes at the row that was read last."""

    _loaded: Any = None
    _at_row: Any = None  # the state of the rows before the current one; None at the start

    def _read_rows(self) -> Iterator[Any]:
        self._at_row, self._loaded = self._loaded, None
        for row in iter(self._rows):
            yield row
            self._at_row, self._taken = deepcopy(self._rows.state_dict()), 0  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rows before the current one, and the number of samples yielded from it."""
        return {"rows": deepcopy(self._at_row), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter` continue after the samples that were yielded."""
        self._loaded, self._start = deepcopy(state["rows"]), state["taken"]
        if self._loaded is not None:
            self._rows.load_state_dict(deepcopy(self._loaded))  # type: ignore[attr-defined]


def make_stream(rows: Iterable[Any], reader: RowReader) -> TokenizedStream:
    """Return a stream of samples, resumable if the rows are."""
    is_stateful = all(hasattr(rows, name) for name in _STATE)
    return (StatefulTokenizedStream if is_stateful else TokenizedStream)(rows, reader)


def padding_id(tokenizer: Any) -> int:
    """Return the token with which to pad; the attention mask and the labels exclude it."""
    return (tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id) or 0


class PackRows(DocumentPacker):
    """Packs rows of tokens; if some rows have weights, the tokens of the others have weight 1."""

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a row."""
        if any(LOSS_WEIGHTS in sample for sample in samples):
            samples = [{LOSS_WEIGHTS: [1.0] * len(sample["input_ids"]), **sample} for sample in samples]
        return super().__call__(samples)


class PadRows:
    """Pads samples on the right to the longest sample of a batch.

    Shapes:
        `input_ids`, `labels` and `attention_mask` `[samples, longest]`, and further entries with one value per token,
        if a sample has them; entries of images, such as `pixel_values`, along their first dimension.

    Args:
        pad_id: The id of the padding token.
        images: Reads images. A batch without any gets a small one after the shortest sample, without labels, because
            all processes have to run the same layers: those of a sharded model, and those that DDP reduces.
    """

    def __init__(self, pad_id: int, images: ImageReader | None = None) -> None:
        self.pad_to_multiple_of: int | None = None
        self._pad_id = pad_id
        self._images = images
        self._filler: dict[str, Any] | None = None

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Raises:
            DataError: Images have different shapes.
        """
        has_image = any(isinstance(entry, torch.Tensor) for sample in samples for entry in sample.values())
        if self._images is not None and not has_image:
            samples = self._with_image(self._images, samples)
        batch = self.pad([sample["input_ids"] for sample in samples], [sample["labels"] for sample in samples])
        for name in dict.fromkeys(name for sample in samples for name in sample if name not in ("input_ids", "labels")):
            own: list[Any] = [sample.get(name) for sample in samples]
            tensors = [one for one in own if isinstance(one, torch.Tensor)]
            if tensors:
                if len({tensor.shape[1:] for tensor in tensors}) > 1:
                    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:_NAMED])
                    expected = "the same shape for all images, but for the first dimension"
                    do = "write `batch_size: 1` and accumulate; or let the processor resize all images to one size"
                    raise fail(
                        DataError, "a batch with images", got=f"{name} of the shapes {shapes}", expected=expected, do=do
                    )
                batch[name] = torch.cat(tensors)
                continue
            default = 1.0 if name == LOSS_WEIGHTS else 0
            rows = [
                [default] * len(sample["labels"]) if one is None else one
                for one, sample in zip(own, samples, strict=True)
            ]
            width = batch["labels"].shape[1]
            batch[name] = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        return batch

    def _with_image(self, images: ImageReader, samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        self._filler = images.draw_filler() if self._filler is None else self._filler
        number = len(self._filler["input_ids"])
        shortest = min(range(len(samples)), key=lambda index: len(samples[index]["input_ids"]))
        sample = dict(samples[shortest])
        length = len(sample["input_ids"])
        filled = {"labels": [IGNORED] * number, LOSS_WEIGHTS: [0.0] * number, **self._filler}
        for name, value in filled.items():
            if isinstance(value, torch.Tensor):
                sample[name] = value
            elif name in sample or name != LOSS_WEIGHTS:
                sample[name] = [*sample.get(name, [0] * length), *value]
        return [*samples[:shortest], sample, *samples[shortest + 1 :]]

    def pad(self, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return rows of tokens as tensors, with their mask."""
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(map(len, input_ids)) // multiple) * multiple

        def fill(rows: Iterable[Sequence[int]], value: int) -> torch.Tensor:
            return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

        return {
            "input_ids": fill(input_ids, self._pad_id),
            "labels": fill(labels, IGNORED),
            "attention_mask": fill(([1] * len(row) for row in input_ids), 0),
        }


def look_at(data: TokenizedRows | TokenizedStream, tokenizer: Any, model: Any = None, *, purpose: str) -> None:
    """Show the first row with its trained parts, and warn about problems in a sample of the rows.

    Args:
        data: The rows.
        tokenizer: The tokenizer.
        purpose: What the rows are for, in messages.
        model: The model; its generation config is changed so that it stops at the token that ends answers.

    Raises:
        DataError: None of the rows has a target.
    """
    if "strftime_now(" in str(tokenizer.chat_template):
        say_once(
            "the chat template inserts the current date, so tokens change if the run is resumed on another day; "
            'to fix the date, add it to the rows: "chat_template_kwargs": {"date_string": "01 Jan 2026"}'
        )
    found: dict[str, list[str]] = {}
    weights = set[float]()
    number = targets = 0
    for index, row in data.sample():
        number, targets = number + 1, targets + row.has_target
        if row.has_target and targets == 1:
            say_once(f"row {index}, with the trained text between ⟦ and ⟧:\n{row.show(tokenizer)}")
            _stop_at_end(row.labels, tokenizer, model)
        weights.update(row.weights or ())
        for kind, detail in {problem.kind: problem.detail for problem in row.problems}.items():
            found.setdefault(kind, []).append(f"row {index}" + (f": {detail}" if detail else ""))
    reasons = "; ".join(
        f"{len(rows)} {kind} ({', '.join(rows[:_NAMED])}{', ...' if len(rows) > _NAMED else ''})"
        for kind, rows in found.items()
    )
    if number and not targets:
        got = f"{number} rows, none of them with tokens to train on: {reasons}"
        do = _DOS if NO_TARGET in found else "correct the program that wrote the rows"
        if all(STARTS_AFTER in row for row in found.get(NO_TARGET, [""])):
            do = "set a larger max_length, or shorten the prompts"
        raise fail(DataError, purpose, got=got, expected="rows with answers to train on", do=do)
    if weights := weights - {0.0}:
        say_once(f"tokens of {purpose} have weights from {min(weights):g} to {max(weights):g}, where rows or turns do")
    if found:
        warn_once(f"of {number} rows checked: {reasons}", about=f"rows of {purpose}")


def _stop_at_end(labels: Sequence[int], tokenizer: Any, model: Any) -> None:
    """Make `model.generate` stop at the token that ends answers, which depends on the chat template."""
    end = next((label for label in reversed(labels) if label != IGNORED), IGNORED)
    config = getattr(model, "generation_config", None)
    if config is None or end not in tokenizer.added_tokens_decoder:
        return
    stops = config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if end not in stops:
        config.eos_token_id = [*stops, end]
        place = "not saved with an adapter" if is_peft_model(model) else "saved with the model"
        say_once(
            f"answers end with {tokenizer.decode([end])!r} (token {end}), so model.generate now also stops there "
            f"(generation_config.eos_token_id = {config.eos_token_id}, {place})"
        )


# ---- Rows from files: those that `read_files` reads, and others that `datasets` reads.


_KINDS = {".json": "json", ".csv": "csv"}
_EXPECTED = "a file (.jsonl, .parquet, .arrow, .json, .csv), a glob, or a folder of them"
_SAVED = ("state.json", "dataset_dict.json")  # in a folder written by `save_to_disk`


def read_rows(where: str, paths: Sequence[str] | Mapping[str, Sequence[str]], split: str) -> Any:
    """Return the rows of files, folders, globs and URLs, by index.

    Args:
        where: The setting that names them, for error messages.
        paths: Files, folders, globs and URLs; their rows are concatenated. If they have names, so have the rows.
        split: The set to read from a folder with several sets.

    Raises:
        ArgumentFileError: A path does not exist.
        DataError: A file has another format, or no rows.
    """
    if isinstance(paths, Mapping):
        return {name: read_rows(f"{where}.{name}", own, split) for name, own in paths.items()}
    if not any(map(_needs_datasets, paths)):
        return FileRows(where, paths, arrays=False)
    parts = [
        _read_with_datasets(where, Path(path), split)
        if _needs_datasets(path)
        else FileRows(where, [path], arrays=False)
        for path in paths
    ]
    for path, part in zip(paths, parts, strict=True):
        if not len(part):
            raise fail(
                DataError,
                where,
                got=f"{path}, which has no rows",
                expected="at least one row",
                do="check the program that wrote it",
            )
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _needs_datasets(path: str) -> bool:
    if Path(path).is_dir():
        return any(Path(path, name).is_file() for name in _SAVED)
    return Path(path).suffix in _KINDS and "://" not in path


def _read_with_datasets(where: str, path: Path, split: str) -> Any:
    if not path.exists():
        got = f"{path}: no such file; the working directory is {Path.cwd()}"
        raise fail(ArgumentFileError, where, got=got, expected=_EXPECTED, do="correct the path")
    try:
        import datasets
    except ImportError as error:
        got, do = f"{path}, but datasets is not installed", 'pip install "datasets>=5.1"; or write JSON lines (.jsonl)'
        raise fail(MissingPackageError, where, got=got, expected="the package datasets", do=do) from error
    if path.is_file():
        try:
            return datasets.load_dataset(_KINDS[path.suffix], data_files=str(path), split="train")
        except (datasets.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
            reason = error.__cause__ or error
            got = f"{path}: {reason}" if str(reason) else f"{path}, which has no rows"
            expected = f"a valid {path.suffix} file"
            raise fail(
                DataError, where, got=got, expected=expected, do="check the program that wrote it, or use JSON lines"
            ) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise fail(DataError, where, got=f"{path}: {error}", expected=_EXPECTED, do="pass a file in it") from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        got, do = f"{path} with the sets {', '.join(found)}", f"pass one of them: {path / next(iter(found))}"
        raise fail(DataError, where, got=got, expected=f"a set named `{split}`", do=do)
    return found[split]
