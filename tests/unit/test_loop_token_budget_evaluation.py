"""Evaluations and predictions that are cut by a budget of tokens: the same values, in the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, Accuracy, Callback, Metric, Trainer
from accmt.errors import ModuleContractError
from tests import toys
from tests.raising import raises_at
from tests.toys import pad_texts as pad
from tests.unit.test_loop_token_budget import build_model, compute_loss

NUMBER = 150
BATCH = 4
TOKENS = 90
LENGTHS = [1 + (37 * index) % 29 for index in range(NUMBER)]


class Texts(toys.Texts):
    """Texts of unequal lengths."""

    def __init__(self, number: int = NUMBER) -> None:
        super().__init__(LENGTHS[:number])


class InOrder(Metric):
    """Depends on the order of the samples."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        assert predictions["index"].tolist() == references
        return {self.name: float(sum((place + 1) * index for place, index in enumerate(references)))}


class Tokens(Metric):
    """Takes one entry for each token, so that its samples have no order to get back."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        assert torch.equal(predictions, references)
        return {self.name: float(predictions.sum())}


class Classifier(AcceleratorModule):
    """Writes down what each of its steps gets."""

    def __init__(self) -> None:
        self.model = build_model()
        self.shapes: list[tuple[int, int]] = []
        self.places: list[int] = []
        self.draws: list[float] = []

    def training_step(self, batch: Any) -> Any:
        return compute_loss(self.model, batch, weighted=False)[0]

    def scores(self, batch: Any) -> torch.Tensor:
        self.shapes.append(tuple(batch["input_ids"].shape))
        self.places.append(self.state.val_step)
        self.draws.append(float(torch.rand(())))
        mask = batch["input_ids"] != 0
        means = (self.model["embed"](batch["input_ids"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.model["head"](means)

    def validation_step(self, batch: Any) -> Any:
        scores, ids = self.scores(batch), batch["input_ids"]
        return {
            "loss": nn.functional.cross_entropy(scores.double(), batch["label"]),
            "accuracy": (scores, batch["label"]),
            "in_order": ({"index": batch["index"]}, batch["index"].tolist()),
            "tokens": (ids[ids != 0], ids[ids != 0]),
        }

    def predict_step(self, batch: Any) -> Any:
        scores, index = self.scores(batch), batch["index"]
        texts = [f"text {number}" for number in index.tolist()]
        return {"scores": scores, "pair": (index, texts), "ids": batch["input_ids"]}


def make_trainer(folder: Path, max_tokens: int | None = TOKENS, **settings: Any) -> Trainer:
    hps = {"epochs": 1, "batch_size": BATCH, "optim": {"type": "SGD", "lr": 0.1}, "max_tokens": max_tokens}
    base = {"model_saving": None, "logging_dir": folder, "collate_fn": pad, "verbose": False, "seed": 3}
    metrics = [Accuracy(), InOrder("in_order"), Tokens("tokens")]
    return Trainer(hps, folder / "model", **{"metrics": metrics} | base | settings)


@pytest.mark.parametrize("make_data", [Texts, lambda: toys.Stream(Texts())], ids=["sized", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", ["validate", "test"])
def test_losses_and_metrics_are_those_without_a_budget(
    tmp_path: Path, function: str, workers: int, make_data: Any
) -> None:
    results, modules = [], []
    for max_tokens in (None, TOKENS):
        modules.append(Classifier())
        trainer = make_trainer(tmp_path, max_tokens, dataloader_num_workers=workers)
        results.append(getattr(trainer, function)(modules[-1], {"a": make_data(), "b": Texts(7)}))
    plain, cut = modules
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert results[1]["in_order__a"] == sum((place + 1) * place for place in range(NUMBER))
    assert all(rows * width <= TOKENS for rows, width in cut.shapes)
    assert sum(r * w for r, w in cut.shapes) < 0.8 * sum(r * w for r, w in plain.shapes)
    assert len(cut.shapes) < len(plain.shapes)
    assert len(set(cut.draws)) >= len(cut.draws) - 2  # each batch has randomness of its own; both sets have the same


@pytest.mark.parametrize("make_data", [Texts, lambda: toys.Stream(Texts())], ids=["sized", "stream"])
def test_predictions_are_in_the_order_of_the_data(tmp_path: Path, make_data: Any) -> None:
    plain = make_trainer(tmp_path, None).predict(Classifier(), make_data())
    got = make_trainer(tmp_path).predict(Classifier(), make_data())
    torch.testing.assert_close(got["scores"], plain["scores"])
    assert got["pair"][0].tolist() == list(range(NUMBER))
    assert got["pair"][1] == [f"text {number}" for number in range(NUMBER)]
    assert [int((row != 0).sum()) for row in got["ids"]] == LENGTHS


def test_predictions_that_are_not_one_for_each_sample_are_rejected(tmp_path: Path) -> None:
    def drop(samples: list[Any]) -> Any:
        return pad(samples[:-1] or samples)

    with raises_at(ModuleContractError, "predict_step"):
        make_trainer(tmp_path, collate_fn=drop).predict(Classifier(), Texts())


def test_each_sample_is_read_once(tmp_path: Path) -> None:
    data = Texts()
    make_trainer(tmp_path).predict(Classifier(), data)
    assert set(data.reads.values()) == {1}
    assert len(data.reads) == NUMBER


class Counting(Callback):
    """Writes down the counters after the evaluations of a run."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def on_evaluation_end(self, metrics: Any) -> None:
        self.counts.append((self.state.val_step, self.state.eval_global_step))


def test_counters_count_batches_as_planned(tmp_path: Path) -> None:
    module, counting = Classifier(), Counting()
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0, callbacks=counting)
    state = trainer.fit(module, Texts(8), Texts())
    assert counting.counts == [(-(-NUMBER // BATCH), -(-NUMBER // BATCH))]
    assert module.places == sorted(module.places)
    assert {0, 2, 6, 14, 30} <= set(module.places)  # windows grow
    assert state.metrics["accuracy"] == make_trainer(tmp_path, None).validate(module, Texts())["accuracy"]


def test_the_trial_before_training_reads_no_more_batches_than_it_needs(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_fit_start(self) -> None:
            raise InterruptedError

    data = Texts()
    trainer = make_trainer(tmp_path, callbacks=Stop())
    with pytest.raises(InterruptedError):
        trainer.fit(Classifier(), Texts(8), data)
    assert sorted(data.reads) == list(range(2 * BATCH))


def test_bad_samples_are_skipped_and_the_rest_is_evaluated(tmp_path: Path) -> None:
    class Faulty(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index in (3, 11):
                raise OSError("gone")
            return super().__getitem__(index)

    predictions = make_trainer(tmp_path, failures={"on_bad_sample": "skip"}).predict(Classifier(), Faulty())
    assert predictions["pair"][0].tolist() == [index for index in range(NUMBER) if index not in (3, 11)]


def test_losses_that_are_logged_batch_by_batch_are_those_of_batches_as_read(tmp_path: Path) -> None:
    module = Classifier()
    make_trainer(tmp_path, report_loss_after_eval=False, num_sanity_val_steps=0).fit(module, Texts(8), Texts(9))
    assert [rows for rows, _ in module.shapes] == [4, 4, 1]


def test_the_batches_of_a_loader_of_the_users_are_cut_too(tmp_path: Path) -> None:
    predictions = make_trainer(tmp_path, collate_fn=None).predict(Classifier(), DataLoader(Texts(), 5, collate_fn=pad))
    assert predictions["pair"][0].tolist() == list(range(NUMBER))
    module = Classifier()
    results = make_trainer(tmp_path, collate_fn=None).validate(module, DataLoader(Texts(), 5, collate_fn=pad))
    assert results == pytest.approx(make_trainer(tmp_path, None).validate(Classifier(), Texts()), rel=1e-6)
    assert all(rows * width <= TOKENS for rows, width in module.shapes)
