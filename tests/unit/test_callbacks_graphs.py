"""Compiled models and ragged text: few graphs, each of them named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, Trainer
from accmt.data.collate import CollateChain, in_buckets
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.unit.test_loop_token_budget import Break, BrokenError, Texts

BUCKET = 8
COMPILE = {"backend": "eager", "buckets": BUCKET}


class Padder:
    """Pads texts as the collate functions of transformers do."""

    pad_to_multiple_of: int | None = None

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        multiple = self.pad_to_multiple_of or 1
        longest = -(-max(len(sample["input_ids"]) for sample in samples) // multiple) * multiple
        rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"input_ids": torch.tensor(rows), "label": labels}


class Model(nn.Module):
    """Embeds texts and takes their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(40, 6, padding_idx=0), nn.Dropout(0.1), nn.Linear(6, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = (input_ids != 0)[..., None]
        return self.head(self.drop((self.embed(input_ids) * mask).sum(1) / mask.sum(1)))


class Classifier(AcceleratorModule):
    """Writes down the shapes that it gets."""

    def __init__(self) -> None:
        self.model = Model()
        self.shapes: list[tuple[int, int]] = []

    def step(self, batch: Any) -> torch.Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        return nn.functional.cross_entropy(self.model(batch["input_ids"]), batch["label"])


def count_graphs() -> int:
    """Return the number of graphs that the compiler has created in this process."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(folder: Path, *, compiling: Any = COMPILE, data: Any = None, hps: Any = None, **settings: Any) -> Any:
    base = {"epochs": 2, "batch_size": 16, "optim": {"type": "SGD", "lr": 0.1}, "max_tokens": 64}
    module = Classifier()
    trainer = Trainer(
        base | (hps or {}),
        folder / "model",
        compile=compiling,
        **{"collate_fn": Padder(), "model_saving": None, "logging_dir": folder, "verbose": False, "seed": 3} | settings,
    )
    trainer.fit(module, Texts() if data is None else data)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [64, None])
def test_lengths_are_rounded_up_and_each_needs_one_graph(tmp_path: Path, max_tokens: int | None) -> None:
    before = count_graphs()
    module = train(tmp_path, hps={"max_tokens": max_tokens}, verbose=True)
    widths = {width for _, width in module.shapes}
    assert widths <= {8, 16, 24}
    assert max_tokens is None or all(rows * width <= 64 for rows, width in module.shapes)
    lone = {width for rows, width in module.shapes if rows == 1}
    assert max_tokens is None or len(set(module.shapes)) > len(widths) + 1 + len(lone)
    assert len(widths) <= count_graphs() - before <= len(widths) + 1 + len(lone)


class Stacked(Model):
    """The same with three layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's own look at its inputs
def test_repeated_layers_share_their_graphs_and_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for each length serves all three layers: those are all that is compiled."""
    monkeypatch.setattr("tests.unit.test_callbacks_graphs.Model", Stacked)
    whole = train(tmp_path / "whole")
    torch._dynamo.reset()
    before = count_graphs()
    module = train(tmp_path / "regional", compiling={**COMPILE, "regional": True}, verbose=True, model_saving="always")
    for expected, got in zip(whole.model.parameters(), module.model.parameters(), strict=True):
        assert torch.equal(expected, got)
    assert [name for name, _ in module.model.named_parameters()] == [name for name, _ in whole.model.named_parameters()]
    lone = {width for rows, width in module.shapes if rows == 1}
    assert 0 < count_graphs() - before <= len({width for _, width in module.shapes}) + 1 + len(lone)


def test_a_model_that_repeats_no_layers_has_no_regions(tmp_path: Path) -> None:
    with raises_at(ArgumentError, 'Trainer(compile={"regional": True})'):
        train(tmp_path, compiling={"backend": "eager", "regional": True})


@pytest.mark.slow
def test_the_budget_counts_rounded_lengths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = [Texts()[index] for index in range(45)]
    module = train(tmp_path, data=data, verbose=True, hps={"epochs": 1})
    assert max(rows * width for rows, width in module.shapes) <= 64  # max_tokens
    assert "correct the lengths" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 11])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path: Path, after: int) -> None:
    settings = {"checkpoint_every": "1 step"}
    whole = train(tmp_path / "whole", **settings)
    torch._dynamo.reset()
    with pytest.raises(BrokenError):
        train(tmp_path / "broken", **settings, callbacks=[Break(after)])
    torch._dynamo.reset()
    resumed = train(tmp_path / "broken", **settings, resume="auto")
    for expected, got in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.slow
def test_a_users_loader_is_rounded_with_a_budget(tmp_path: Path) -> None:
    module = train(tmp_path, data=DataLoader(Texts(), 16, collate_fn=Padder()), collate_fn=None)
    assert {width for _, width in module.shapes} <= {8, 16, 24}


def test_a_copy_of_the_collate_function_is_changed() -> None:
    own = Padder()
    assert in_buckets(own, 8).pad_to_multiple_of == 8
    assert own.pad_to_multiple_of is None
    chain = in_buckets(CollateChain([list, own]), 8)
    assert [getattr(one, "pad_to_multiple_of", None) for one in chain.functions] == [None, 8]
    own.pad_to_multiple_of = 8
    assert in_buckets(own, 8).pad_to_multiple_of == 8


@pytest.mark.parametrize(
    ("collate", "got"),
    [
        (None, "none, which has no"),
        (list, "list, which has no"),
        (CollateChain([list]), "functions without `pad_to_multiple_of`"),
    ],
)
def test_a_collate_function_that_cannot_round_is_rejected(collate: Any, got: str) -> None:
    with raises_at(ArgumentError, 'Trainer(compile={"buckets": 8}): the collate function'):
        in_buckets(collate, 8)
