"""Log-probabilities of a reference model, computed once on all processes and kept in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from accmt.addons.sft.rows import TokenizedRow, TokenizedRows
from accmt.addons.token_batches.budget import TokenBudget, cut_by_tokens
from accmt.errors import DataError, fail
from accmt.files import replace_file, write_text
from accmt.messages import say_once
from accmt.processes import is_main_process, num_processes, process_index, run_on_every_process

_CHUNK = 64
"""Rows in a file."""

MAX_TOKENS = 4096
"""The padded tokens in a forward pass, unless the run has a token budget."""

_FACTS = "reference.json"
_WHERE = "reference_folder"


class ReferencedRows(TokenizedRows):
    """Rows with the log-probabilities of their answers under the reference `[rows, answers]`."""

    def __init__(self, samples: TokenizedRows, log_probs: np.ndarray[Any, Any]) -> None:
        self._samples = samples
        self._log_probs = log_probs
        self.follow(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._samples[index], "reference": self._log_probs[index].tolist()}

    def read(self, index: int) -> TokenizedRow:
        """Return a row and its problems."""
        return self._samples.read(index)


def with_reference(
    samples: TokenizedRows,
    folder: Path,
    facts: Mapping[str, str],
    compute: Callable[[list[dict[str, Any]]], torch.Tensor],
    require_start: Callable[[], None],
    max_tokens: int | None = None,
) -> ReferencedRows:
    """Return rows with the log-probabilities of the reference, computing those that the folder does not have yet.

    Each file has the log-probabilities of some rows, under a digest of all rows, so that an interrupted computation
    continues, on any number of processes.

    Args:
        samples: The rows.
        folder: The folder.
        facts: Digests of the model and of everything that determines tokens and precision, by name.
        compute: Returns the log-probabilities of samples `[samples, answers]`.
        require_start: Raises an error if the model is not the reference any more.
        max_tokens: The padded tokens in a forward pass, those of all answers; None is `MAX_TOKENS`.

    Raises:
        DataError: The folder belongs to another model, tokenizer, length or precision.

    Processes: collective.
    """
    digest = xxhash.xxh3_64()
    for index in range(len(samples)):
        digest.update(json.dumps(samples.raw(index), sort_keys=True, default=str).encode())
    own = folder / digest.hexdigest()
    starts = range(0, len(samples), _CHUNK)
    number_read = 0

    def load() -> dict[int, np.ndarray[Any, Any]]:
        nonlocal number_read
        _check_facts(folder, facts)
        found = {}
        for start in starts[process_index() :: num_processes()]:
            path = own / f"{start:08}.npy"
            if path.is_file():
                found[start] = np.load(path)
                number_read += len(found[start])
                continue
            require_start()
            rows = [samples[index] for index in range(start, min(start + _CHUNK, len(samples)))]
            found[start] = _compute(rows, compute, max_tokens or MAX_TOKENS)
            _write(path, found[start])
        return found

    every: dict[int, np.ndarray[Any, Any]] = {}
    for one in run_on_every_process(load):
        every |= one
    say_once(
        f"log-probabilities of the reference: {len(samples):,} rows in {own}, {number_read:,} read by this process"
    )
    return ReferencedRows(samples, np.concatenate([every[start] for start in starts]))


def _compute(
    rows: list[dict[str, Any]], compute: Callable[[list[dict[str, Any]]], torch.Tensor], max_tokens: int
) -> np.ndarray[Any, Any]:
    """Compute the log-probabilities of rows, those of similar length together."""
    [groups] = cut_by_tokens([row["length"] for row in rows], TokenBudget(max_tokens, len(rows)))
    values = [compute([rows[position] for position in group]).double().cpu().numpy() for group in groups]
    order = np.argsort([position for group in groups for position in group])
    return np.concatenate(values)[order]


def _check_facts(folder: Path, facts: Mapping[str, str]) -> None:
    path = folder / _FACTS
    if not path.is_file():
        if is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(dict(facts), indent=2))
        return
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise fail(
            DataError, _WHERE, got=f"{path}: {error}", expected="a file that accmt wrote", do="delete the folder"
        ) from error
    others = [name for name, value in facts.items() if written.get(name) != value]
    if others:
        got = f"{folder}, with log-probabilities for another {' and '.join(others)}"
        do = "choose another folder, or delete this one to compute them again"
        raise fail(
            DataError, _WHERE, got=got, expected="log-probabilities of the model that training starts from", do=do
        )


def _write(path: Path, array: np.ndarray[Any, Any]) -> None:
    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array)

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save)
