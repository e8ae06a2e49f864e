"""Reads rows with preferences in the formats of TRL and axolotl, checks them, and tokenizes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

import torch

from accmt.addons.sft.chat import NO_TARGET, MaskedRow, Problem, is_messages, mask_row, read_number
from accmt.addons.sft.rows import PadRows, TokenizedRows
from accmt.addons.token_batches.packing import DocumentPacker
from accmt.errors import DataError, fail

EQUAL = "with two equal answers, not trained"
EMPTY = "with an empty answer, not trained"

Kind = Literal["pairs", "labels"]
"""Rows with a chosen and a rejected answer, or with one answer and whether it is desirable."""

_FORMS = {
    "pairs": '"prompt", "chosen" and "rejected", as strings or lists of messages; or without "prompt", if both answers '
    "begin with it",
    "labels": '"prompt" and "completion", as strings or lists of messages, and "label", true or false',
}
_LINES = {
    "pairs": '{"prompt": row["question"], "chosen": row["better"], "rejected": row["worse"]}',
    "labels": '{"prompt": row["question"], "completion": row["answer"], "label": row["score"] > 0}',
}
TOKENS = ("input_ids", "labels", "attention_mask")
"""What a batch has for each token."""

OF_PACKED_ROWS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What a model needs of a packed row."""

_OF_ANSWERS = ("labels", "answer_lengths")

OTHER = "other_"
"""Begins the names of what belongs to answers to other prompts, in a batch for KTO."""

_SHARED = ("tools", "chat_template_kwargs")


class AnswersRow(NamedTuple):
    """The answers to one prompt as tokens.

    Attributes:
        answers: The chosen and the rejected answer; or one answer, and one to another prompt.
        weight: How much the row counts.
        values: Further entries of the sample.
        problems: Problems of the row.
    """

    answers: tuple[MaskedRow, ...]
    weight: float
    values: dict[str, float]
    problems: tuple[Problem, ...]

    @property
    def labels(self) -> list[int]:
        """The labels of the first answer."""
        return self.answers[0].labels

    @property
    def weights(self) -> None:
        """Tokens have no weights."""

    @property
    def has_target(self) -> bool:
        """Whether the row is trained."""
        return self.weight > 0

    @property
    def _is_labeled(self) -> bool:
        """Whether the row has one answer and its label, for KTO."""
        return "is_desirable" in self.values

    def sample(self) -> dict[str, Any]:
        """Return the answers, padded to equal length only in a batch; a row that is not trained has short ones."""
        answers = [answer if self.has_target else MaskedRow([], []) for answer in self.answers]
        samples = [answer.sample() for answer in answers]
        return {
            "input_ids": [sample["input_ids"] for sample in samples],
            "labels": [sample["labels"] for sample in samples],
            "weight": self.weight,
            # For `max_tokens`: the answers of a pair are in one forward pass, others in one each.
            "length": (1 if self._is_labeled else len(samples)) * max(len(sample["input_ids"]) for sample in samples),
            **self.values,
        }

    def show(self, tokenizer: Any) -> str:
        """Return the text of the answers, with the trained parts in brackets."""
        shown = self.answers[:1] if self._is_labeled else self.answers
        return "\n\n".join(answer.show(tokenizer) for answer in shown)


class AnswersReader(NamedTuple):
    """How rows with preferences become samples.

    Attributes:
        tokenizer: The tokenizer.
        kind: What the rows have.
        max_length: The maximum number of tokens of a prompt with its answer; None keeps all.
    """

    tokenizer: Any
    kind: Kind = "pairs"
    max_length: int | None = None

    @property
    def purpose(self) -> str:
        """What the rows are for, in messages."""
        return "preference tuning"

    @property
    def reads_all(self) -> bool:
        """Every row is checked at the start."""
        return True

    def turns_of(self, row: Any, where: str) -> list[int | None]:
        """Check the format of a row, which is one sample."""
        self._split(row, where)
        return [None]

    def read(self, row: Any, turn: int | None, where: str) -> AnswersRow:
        """Return the tokens of a row."""
        rows, weight, values = self._split(row, where)
        answers = [mask_row(self.tokenizer, one, max_length=self.max_length, where=where) for one in rows]
        if any(answer.weights is not None for answer in answers):
            got = "a message of an answer with a weight other than 0 and 1"
            expected = "whole answers, whose log-probabilities are compared"
            raise fail(
                DataError, where, got=got, expected=expected, do='write "weight" beside the answers, for the whole row'
            )
        # The answer to another prompt has a row of its own, in which its problems are counted.
        own = 2 if self.kind == "pairs" else 1
        problems = {problem.kind: problem for answer in answers[:own] for problem in answer.problems}
        has_targets = all(answer.has_target for answer in answers[:own])
        if any(map(_is_empty, rows[:own])):
            problems = {EMPTY: Problem(EMPTY), **{k: one for k, one in problems.items() if k != NO_TARGET}}
        elif has_targets and self.kind == "pairs" and answers[0].input_ids == answers[1].input_ids:
            problems = {EQUAL: Problem(EQUAL), **problems}
        is_trained = has_targets and EMPTY not in problems and EQUAL not in problems
        weight = weight if is_trained else 0.0
        for number in range(own, len(answers)):
            is_valid = answers[number].has_target and not _is_empty(rows[number])
            answers[number] = answers[number] if is_valid else MaskedRow([], [])
            values[f"{OTHER}weight"] = weight if is_valid else 0.0
        return AnswersRow(tuple(answers), weight, values, tuple(problems.values()))

    def _split(self, row: Any, where: str) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
        """Return the answers of a row as rows for `mask_row`, the weight of the row, and its further values."""
        if not isinstance(row, Mapping):
            raise self._reject(type(row).__name__, where, row)
        # TRL's "prompt", or one of axolotl's names; None if the answers contain it.
        prompt, asked = row.get("prompt", row.get("messages")), row.get("question", row.get("instruction"))
        if prompt is None and asked is not None:
            system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
            prompt = [*system, {"role": "user", "content": asked}]
        names = ("chosen", "rejected") if self.kind == "pairs" else ("completion",)
        found = [row.get(name, row.get(f"{name}_response")) for name in names]
        if self.kind == "labels" and "other" in row:
            found.append(row["other"])
        answers: list[Any] = [[one] if isinstance(one, Mapping) else one for one in found]
        if any(answer is None for answer in answers):
            raise self._reject(f"the keys {', '.join(map(str, row))}", where, row)
        if all(isinstance(answer, str) for answer in answers):
            split = _split_strings(prompt, answers)
        elif all(map(is_messages, answers)):
            split = _split_messages(prompt, answers)
        else:
            split = None
        if split is None:
            kinds = [f'"{name}" {_describe(row[name])}' for name in ("prompt", *names) if row.get(name) is not None]
            raise self._reject(" and ".join(kinds), where, row)
        shared = {name: row[name] for name in _SHARED if row.get(name) is not None}
        rows = [{"prompt": before, "completion": answer, **shared} for before, answer in split]
        weight = read_number(row, "weight", 1.0, where, least=0.0)
        if self.kind == "pairs":
            return rows, weight, {"margin": read_number(row, "margin", 0.0, where)}
        label = row.get("label")
        if label not in (True, False, 0, 1):
            expected = '"label": true for an answer that is desirable, else false'
            do = "row['label'] = row['label'] in ('good', 1)"
            raise fail(DataError, where, got=f'"label": {label!r}', expected=expected, do=do)
        return rows, weight, {"is_desirable": float(label)}

    def _reject(self, got: str, where: str, row: Any) -> DataError:
        """Return the error for a row in another format, with the line that converts it."""
        line = _LINES[self.kind]
        names = set(row) if isinstance(row, Mapping) else set()
        if self.kind == "labels" and {"chosen", "rejected"} <= names:
            line = '{"prompt": row["prompt"], "completion": row["chosen"], "label": True}, and the same for "rejected"'
        elif self.kind == "pairs" and {"completion", "label"} <= names:
            line = "write `loss: kto`, which trains on single answers with labels"
            return fail(DataError, where, got=got, expected=_FORMS[self.kind], do=line)
        elif "conversations" in names and {"chosen", "rejected"} <= names:
            turns = '[{"role": {"human": "user", "gpt": "assistant"}[one["from"]], "content": one["value"]} for one in '
            line = f'{{"prompt": {turns}row["conversations"]], "chosen": row["chosen"]["value"], "rejected": '
            line += 'row["rejected"]["value"]}'
        elif {"instruction", "output"} <= names:
            line = '{"prompt": row["instruction"], "chosen": row["output"][0], "rejected": row["output"][1]}'
        return fail(
            DataError, where, got=got, expected=_FORMS[self.kind], do=f"convert each row, for example to {line}"
        )


def _split_strings(prompt: Any, answers: Sequence[str]) -> list[tuple[Any, Any]] | None:
    """Return prompt and answer of each, where the answers are strings."""
    if isinstance(prompt, str):
        return [(prompt, answer) for answer in answers]
    if prompt is None and len(answers) > 1:
        shared = commonprefix(list(answers))
        shared = shared[: -1 if shared.endswith(" ") else None]  # a word's token begins with its space
        return [(shared, answer[len(shared) :]) for answer in answers] if shared else None
    if is_messages(prompt):
        return [(prompt, [{"role": "assistant", "content": answer}]) for answer in answers]
    return None


def _split_messages(prompt: Any, answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[Any, Any]] | None:
    """Return prompt and answer of each, where the answers are lists of messages."""
    if isinstance(prompt, str):
        user = {"role": "user", "content": prompt}
        if all(answer[0].get("role") == "assistant" for answer in answers):
            return [([user], answer) for answer in answers]
    elif is_messages(prompt):
        return [(prompt, answer) for answer in answers]
    if len(answers) < 2:
        return None
    number = 0
    for first, *others in zip(*answers, strict=False):
        if any(other != first for other in others):
            break
        number += 1
    number = min(number, *(len(answer) - 1 for answer in answers))  # where they are equal, the last is the answer
    return [(answer[:number], answer[number:]) for answer in answers] if number else None


def _is_empty(row: Mapping[str, Any]) -> bool:
    answer = row["completion"]
    if isinstance(answer, str):
        return not answer.strip()
    return not any(one.get("content") or one.get("tool_calls") for one in answer)


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return "as a string"
    return "as messages" if is_messages(value) else f"of type {type(value).__name__}"


class LabeledRows(TokenizedRows):
    """Rows with single answers, each with the answer of the next row, from which the baseline of KTO is estimated."""

    def _row(self, index: int) -> Any:
        row = super()._row(index)
        other = super()._row((index + 1) % len(self._rows))
        if not (isinstance(row, Mapping) and isinstance(other, Mapping)) or "completion" not in other:
            return row  # rejected when it is checked
        return {**row, "other": other["completion"]}


class PadAnswers(PadRows):
    """Pads the answers of samples on the right to the longest answer of a batch.

    Shapes:
        `input_ids`, `labels` and `attention_mask` `[samples, answers, longest]`; `weight` and the other values
        `[samples]`.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch."""
        padded = self.pad(
            [row for sample in samples for row in sample["input_ids"]],
            [row for sample in samples for row in sample["labels"]],
        )
        batch = {name: rows.view(len(samples), -1, rows.shape[-1]) for name, rows in padded.items()}
        return batch | _collate_values(samples)


class PadLabeled(PadAnswers):
    """Pads answers and, separately, the answers to other prompts.

    Shapes:
        As in `PadAnswers`, with one answer per sample; and the same with "other_" before their names.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch."""
        own, others = (super(PadLabeled, self).__call__(half) for half in _halves(samples))
        return own | {f"{OTHER}{name}": others[name] for name in TOKENS}


class PackAnswers(DocumentPacker):
    """Packs the answers of samples into one row: those of the first sample, then those of the next one.

    Shapes:
        As in `DocumentPacker`; `answer_lengths`, a list of the tokens of each answer; `weight` and the other values
        `[samples]`.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a row."""
        answers = [
            {"input_ids": ids, "labels": labels}
            for sample in samples
            for ids, labels in zip(sample["input_ids"], sample["labels"], strict=True)
        ]
        row = {**super().__call__(answers), "answer_lengths": [len(answer["input_ids"]) for answer in answers]}
        return row | _collate_values(samples)


class PackLabeled(PackAnswers):
    """Packs answers into one row and, separately, the answers to other prompts.

    Shapes:
        As in `PackAnswers`; and the same with "other_" before the names of what belongs to tokens.
    """

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a row."""
        own, others = (super(PackLabeled, self).__call__(half) for half in _halves(samples))
        return own | {f"{OTHER}{name}": others[name] for name in others if name in (*OF_PACKED_ROWS, *_OF_ANSWERS)}


def _halves(samples: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return samples with their own answers only, and with those to other prompts."""
    return [
        [{**sample, **{name: [sample[name][at]] for name in ("input_ids", "labels")}} for sample in samples]
        for at in (0, 1)
    ]


def _collate_values(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return what samples have besides their tokens."""
    others = [name for name in samples[0] if name not in ("input_ids", "labels", "length")]
    return {name: torch.tensor([sample[name] for sample in samples]) for name in others}


def length_of_pair(module: Any, sample: Mapping[str, Any]) -> int | None:
    """Return the tokens of both answers of a pair, if the run packs them; otherwise None, for the padded ones."""
    is_packed = getattr(module, "trainer", None) is not None and module.trainer.hps.packing
    return sum(map(len, sample["input_ids"])) if is_packed else None
