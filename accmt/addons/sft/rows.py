"""Rows for supervised fine-tuning as samples, tokenized on the fly and checked at the start of a run."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from accmt.addons.sft.chat import IGNORED, MaskedRow, find_answers, find_messages, mask_row
from accmt.data.samplers import call_set_epoch
from accmt.errors import DataError, MissingPackageError, explain
from accmt.huggingface.model_kinds import is_peft_model
from accmt.messages import say_once, warn_once

_LOOKED_AT = 512
_NAMED = 3
_STATE = ("state_dict", "load_state_dict")
_WHERE = "a row for supervised fine-tuning"
_DOS = "print one row as the template renders it: tokenizer.apply_chat_template(row['messages'], tokenize=False)"


class Masking(NamedTuple):
    """How rows become samples.

    Attributes:
        tokenizer: The tokenizer.
        max_length: How many tokens of a row are kept; None is all.
        per_turn: Whether each turn of the assistant is a sample of its own, rendered as when it was written.
        is_table: Whether rows have all entries that any has, with None in those that they lack, as in `datasets`.
    """

    tokenizer: Any
    max_length: int | None = None
    per_turn: bool = False
    is_table: bool = False

    def turns_of(self, row: Any, where: str = _WHERE) -> list[int | None]:
        """Return the messages that are samples of their own; [None] is the row as a whole."""
        row = _without_nothing(row) if self.is_table else row
        messages, first = find_messages(row, where) if self.per_turn else (None, 0)
        if messages is None:
            return [None]
        return [*find_answers(messages, first)]

    def mask(self, row: Any, turn: int | None, where: str = _WHERE) -> MaskedRow:
        """Return the tokens of a row, or of it up to a turn."""
        row = _without_nothing(row) if self.is_table else row
        return mask_row(self.tokenizer, row, max_length=self.max_length, turn=turn, where=where)


def is_table(rows: Any) -> bool:
    """Return whether rows come from `datasets`, perhaps one set after the other."""
    datasets = sys.modules.get("datasets")  # not imported, it made no rows
    if isinstance(rows, ConcatDataset):
        return any(map(is_table, rows.datasets))
    return datasets is not None and isinstance(rows, datasets.Dataset | datasets.IterableDataset)


def _without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nothing(entry) for name, entry in value.items() if entry is not None}
    return [_without_nothing(entry) for entry in value] if isinstance(value, list) else value


def _name(index: int) -> str:
    return f"row {index} for supervised fine-tuning"


class SFTRows(Dataset[dict[str, list[int]]]):
    """Rows that can be read by index. One without a target becomes two tokens without labels, which weigh nothing."""

    def __init__(self, rows: Any, masking: Masking) -> None:
        self._rows = rows
        self._masking = masking
        turns = ((at, turn) for at in range(len(rows)) for turn in masking.turns_of(rows[at], _name(at)))
        self._turns = list(turns) if masking.per_turn else None

    def __len__(self) -> int:
        return len(self._rows) if self._turns is None else len(self._turns)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        masked = self.read(index)
        if not masked.has_target:
            return {"input_ids": [*masked.input_ids, 0, 0][:2], "labels": [IGNORED, IGNORED]}
        return {"input_ids": masked.input_ids, "labels": masked.labels}

    def read(self, index: int) -> MaskedRow:
        """Return a row with what is odd about it."""
        row, turn = (index, None) if self._turns is None else self._turns[index]
        return self._masking.mask(self._rows[row], turn, _name(row))

    def sample(self) -> Iterator[tuple[int, MaskedRow]]:
        """Yield rows that lie evenly over the data, the first among them."""
        step = max(1, len(self) // _LOOKED_AT)
        for index in range(0, len(self), step):
            yield index, self.read(index)


class SFTStream(IterableDataset[dict[str, list[int]]]):
    """Rows that are read in order. Those without a target are left out.

    `make_stream` makes one with a state of rows that keep their own position.
    """

    def __init__(self, rows: Iterable[Any], masking: Masking) -> None:
        self._rows = rows
        self._masking = masking
        self._start = 0  # samples of the first row that are taken already
        self._taken = 0  # samples of the current row that are taken

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in _STATE:  # while it is unpickled; or what the rows alone cannot do
            raise AttributeError(name)
        return getattr(self._rows, name)  # a generator

    def set_epoch(self, epoch: int) -> None:
        """Let the rows be those of an epoch."""
        call_set_epoch(self._rows, epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for masked in self._read():
            if masked.has_target:
                yield {"input_ids": masked.input_ids, "labels": masked.labels}

    def _read(self) -> Iterator[MaskedRow]:
        skipped, self._start = self._start, 0
        for row in self._read_rows():
            turns = self._masking.turns_of(row)
            for index in range(skipped, len(turns)):
                self._taken = index + 1
                yield self._masking.mask(row, turns[index])
            skipped = 0

    def _read_rows(self) -> Iterator[Any]:
        return iter(self._rows)

    def sample(self) -> Iterator[tuple[int, MaskedRow]]:
        """Yield the first rows; none of an iterator, which can be read only once."""
        if not isinstance(self._rows, Iterator):
            rows = iter(self._rows)
            masked = (self._masking.mask(row, turn) for row in rows for turn in self._masking.turns_of(row))
            yield from enumerate(islice(masked, _LOOKED_AT // 8))


class StatefulSFTStream(SFTStream):
    """The same for rows that keep their own position: it resumes at the row that was read last."""

    _loaded: Any = None
    _at_row: Any = None  # the state of the rows before the current one; None is that of their beginning

    def _read_rows(self) -> Iterator[Any]:
        self._at_row, self._loaded = self._loaded, None
        for row in iter(self._rows):
            yield row
            self._at_row, self._taken = deepcopy(self._rows.state_dict()), 0  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return where reading is: the state of the rows before the current one, and how much of that is taken."""
        return {"rows": deepcopy(self._at_row), "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter` continue after what was taken."""
        self._loaded, self._start = deepcopy(state["rows"]), state["taken"]
        if self._loaded is not None:
            self._rows.load_state_dict(deepcopy(self._loaded))  # type: ignore[attr-defined]


def make_stream(rows: Iterable[Any], masking: Masking) -> SFTStream:
    """Return rows as samples, with a state where the rows have one."""
    is_stateful = all(hasattr(rows, name) for name in _STATE)
    return (StatefulSFTStream if is_stateful else SFTStream)(rows, masking)


class PadRows:
    """Pads samples on the right to the longest of a batch.

    Shapes:
        `input_ids`, `labels` and `attention_mask` `[samples, longest]`.

    Args:
        pad_id: Stands where there is no token; the attention mask hides it.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_to_multiple_of: int | None = None
        self._pad_id = pad_id

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Make a batch."""
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(len(sample["input_ids"]) for sample in samples) // multiple) * multiple

        def pad(rows: Iterable[Sequence[int]], value: int) -> torch.Tensor:
            return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

        return {
            "input_ids": pad((sample["input_ids"] for sample in samples), self._pad_id),
            "labels": pad((sample["labels"] for sample in samples), IGNORED),
            "attention_mask": pad(([1] * len(sample["input_ids"]) for sample in samples), 0),
        }


def look_at(data: SFTRows | SFTStream, tokenizer: Any, model: Any = None) -> None:
    """Show the first row with its trained parts, and warn about problems in a sample of the rows.

    Args:
        data: The rows.
        tokenizer: The tokenizer.
        model: The model; its generation config is changed so that it stops at the token that ends answers.

    Raises:
        DataError: None of the rows has a target.
    """
    if "strftime_now(" in str(tokenizer.chat_template):
        say_once(
            "the chat template inserts the current date, so a run that is resumed on another day has other tokens; "
            'to fix the date, add it to the rows: "chat_template_kwargs": {"date_string": "01 Jan 2026"}'
        )
    found: dict[str, list[str]] = {}
    number = targets = 0
    for index, masked in data.sample():
        number, targets = number + 1, targets + masked.has_target
        if masked.has_target and targets == 1:
            say_once(f"row {index}, what is trained of it between ⟦ and ⟧:\n{show(masked, tokenizer)}")
            _stop_at_end(masked.labels, tokenizer, model)
        for kind, detail in {problem.kind: problem.detail for problem in masked.problems}.items():
            found.setdefault(kind, []).append(f"row {index}" + (f": {detail}" if detail else ""))
    reasons = "; ".join(
        f"{len(rows)} {kind} ({', '.join(rows[:_NAMED])}{', ...' if len(rows) > _NAMED else ''})"
        for kind, rows in found.items()
    )
    if number and not targets:
        got = f"{number} rows, none with anything to train on: {reasons}"
        raise DataError(explain("supervised fine-tuning", got, "answers of the assistant in the rows", _DOS))
    if found:
        warn_once(f"of {number} rows that were looked at: {reasons}", about="odd rows of supervised fine-tuning")


def _stop_at_end(labels: Sequence[int], tokenizer: Any, model: Any) -> None:
    """Let `model.generate` stop at the token that ends an answer, such as that of another template than the model's."""
    end = next((label for label in reversed(labels) if label != IGNORED), IGNORED)
    config = getattr(model, "generation_config", None)
    if config is None or end not in tokenizer.added_tokens_decoder:
        return
    stops = config.eos_token_id
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if end not in stops:
        config.eos_token_id = [*stops, end]
        place = "which an adapter's folder does not hold" if is_peft_model(model) else "which is saved with the model"
        say_once(
            f"answers end with {tokenizer.decode([end])!r}, the token {end}: model.generate stops there now, too "
            f"(generation_config.eos_token_id = {config.eos_token_id}, {place})"
        )


def show(masked: MaskedRow, tokenizer: Any) -> str:
    """Return the text of a row, what is trained of it between brackets."""
    text, stretch, is_trained = "", list[int](), False
    for token, label in [*zip(masked.input_ids, masked.labels, strict=True), (None, None)]:
        if token is None or (label != IGNORED) != is_trained:
            part = tokenizer.decode(stretch)
            text, stretch, is_trained = text + (f"⟦{part}⟧" if is_trained else part), [], not is_trained
        if token is not None:
            stretch.append(token)
    return text


# ---- Rows of supervised fine-tuning from files: JSON lines, what `datasets` writes, and other files that it reads.


_KINDS = {".jsonl": "json lines", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_EXPECTED = f"a file ({', '.join(_KINDS)}), or a folder that `Dataset.save_to_disk` wrote"


def read_rows(where: str, paths: Sequence[str], split: str) -> Any:
    """Return the rows of files and folders, by index.

    Args:
        where: Which setting names them, for messages.
        paths: Of several, the rows come one after the other.
        split: What is taken of a folder that holds several sets.

    Raises:
        FileNotFoundError: One is not there.
        DataError: One is something else, or holds no rows.
    """
    parts = [_read(where, Path(path), split) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if not len(part):
            raise DataError(explain(where, f"{path}, without a row", "rows", "look at what wrote it"))
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _read(where: str, path: Path, split: str) -> Any:
    if not path.exists():
        got = f"{path}: no such file, seen from {Path.cwd()}"
        raise FileNotFoundError(explain(where, got, _EXPECTED, "correct the path"))
    if path.suffix == ".jsonl" and path.is_file():
        return JsonLines(where, path)
    try:
        import datasets
    except ImportError as error:
        got, do = f"{path}, and datasets is not installed", 'pip install "datasets>=5.1"; or write JSON lines (.jsonl)'
        raise MissingPackageError(explain(where, got, "the package datasets", do)) from error
    if path.is_file() and path.suffix in _KINDS:
        try:
            return datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train")
        except (datasets.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
            reason = error.__cause__ or error
            got = f"{path}: {reason}" if str(reason) else f"{path}, without a row"
            expected = f"rows in the form of {path.suffix}"
            raise DataError(explain(where, got, expected, "look at what wrote it; or write JSON lines")) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(explain(where, f"{path}: {error}", _EXPECTED, "name a file in it")) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        got, do = f"{path} with {', '.join(found)}", f"name one of them: {path / next(iter(found))}"
        raise DataError(explain(where, got, f"the set `{split}`", do))
    return found[split]


class JsonLines(Dataset[dict[str, Any]]):
    """The rows of a file of JSON lines, as they are written, each read when it is asked for.

    `datasets` would give all rows the entries of all others, such as the arguments of every tool, and None in them.
    """

    def __init__(self, where: str, path: Path) -> None:
        self._where = where
        self._path = path
        self._starts = array("q")
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(start)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._path.open("rb") as file:  # opened each time: processes that read must not share a position
            file.seek(self._starts[index])
            line = file.readline()
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            got, expected = f"row {index} of {self._path}: {error}", "one JSON object on each line"
            raise DataError(explain(self._where, got, expected, "correct that line")) from error
        return row
