"""`validate`, `test` and `predict`: what they compute, with whose weights, and that they leave everything as it was."""

from __future__ import annotations

import copy
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accmt import EMA, AcceleratorModule, Accuracy, Callback, LambdaCallback, Trainer, read_history
from accmt.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    DataError,
    ModuleContractError,
    NoCheckpointError,
    SavingError,
    WeightsError,
)
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Recorder, Scripted, Stream, logged, make_points, make_trainer

EVALUATION_HOOKS = [
    "on_evaluation_start",
    "on_validation_start",
    "on_before_validation_step",
    "on_after_validation_step",
    "on_validation_end",
    "on_evaluation_end",
]


class Noisy(Linear):
    """Has all that could make an evaluation differ: batch norm, dropout, and a step that draws."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def validation_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        scores = self.model(inputs)
        signs = (scores > 0).long(), (targets > 0).long()
        return {"loss": self.step(batch), "noise": torch.rand(()), "accuracy": signs}

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch[0])


class Predicting(Linear):
    """Predicts the numbers themselves, in every form."""

    def __init__(self, form: Any = lambda batch: batch) -> None:
        super().__init__()
        self.form = form

    def predict_step(self, batch: torch.Tensor) -> Any:
        return self.form(batch)


def weights_of(module: AcceleratorModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.model.state_dict().items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(**settings: Any) -> tuple[Trainer, Linear]:
    """Train for two epochs, of which the first is the best."""
    module = Linear()

    def worsen() -> None:
        if module.state.epoch == 1:
            module.model.bias.data.add_(3.0)

    callback = LambdaCallback(on_epoch_end=worsen)
    told = {"model_saving": "best_valid_loss", "checkpoint_every": "epoch", "callbacks": callback, **settings}
    trainer = make_trainer({"epochs": 2}, **told)
    trainer.fit(module, make_points(), make_points(5))
    return trainer, module


# The values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mixed_precision": "bf16"},
        {"shuffle_validation": True},
        {"inference_mode": False},
        {"limit_batches": {"val": 2}},
        {"report_loss_after_eval": False},
        {"dataloader_num_workers": 1},
        {"callbacks": EMA(0.5)},
    ],
    ids=lambda settings: next(iter(settings), "default"),
)
@pytest.mark.parametrize("sets", [1, 2])
def test_validate_gives_the_bits_that_were_logged_in_training(settings: dict[str, Any], sets: int):
    trainer = make_trainer({"epochs": 2, "batch_size": [2, 4]}, metrics=Accuracy(), **settings)
    data = make_points(9) if sets == 1 else {"a": make_points(9), "b": make_points(5)}
    state = trainer.fit(Noisy(), make_points(), data)
    values = dict(state.metrics)
    assert len(values) == 3 * sets
    assert trainer.validate() == values
    assert trainer.validate(val_dataset=data) == values


def test_evaluate_is_another_name_of_validate():
    trainer = make_trainer()
    module = Linear()
    assert trainer.evaluate(module, make_points(3)) == trainer.validate(module, make_points(3))
    assert all(hasattr(trainer, name) for name in ("fit", "validate", "test", "predict"))


def test_a_module_that_was_never_trained_is_evaluated_without_training_data():
    class Ready(AcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(3, 1).requires_grad_(requires_grad=False)

        def validation_step(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    module, (inputs, targets) = Ready(), make_points(5).tensors
    expected = nn.functional.mse_loss(module.model(inputs), targets).item()
    assert make_trainer().validate(module, make_points(5)) == {"val_loss": pytest.approx(expected)}
    assert not hasattr(module, "optimizer")


def test_modes_and_graphs_are_those_of_an_evaluation_and_modes_come_back():
    seen = []

    class Looking(Linear):
        def validation_step(self, batch):
            seen.append((self.model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return self.step(batch)

        def predict_step(self, batch):
            return self.validation_step(batch).expand(2)

    for inference_mode in (True, False):
        module, trainer = Looking(), make_trainer(inference_mode=inference_mode)
        trainer.validate(module, make_points(2))
        trainer.test(module, make_points(2))
        trainer.predict(module, make_points(2))
        assert module.model.training
        assert seen == [(False, False, inference_mode)] * 3
        seen.clear()


def test_training_is_the_same_whether_or_not_something_was_evaluated_before():
    def fit(*, evaluates: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any], float]:
        torch.manual_seed(3)
        trainer, module = make_trainer(metrics=Accuracy()), Noisy()
        if evaluates:
            trainer.validate(module, make_points(5))
            trainer.predict(module, make_points(3))
        state = trainer.fit(module, make_points(), make_points(5))
        return weights_of(module), {**state.state_dict(), **state.metrics}, torch.rand(()).item()

    without, with_evaluations = fit(evaluates=False), fit(evaluates=True)
    assert are_equal(without[0], with_evaluations[0])
    assert without[1:] == with_evaluations[1:]


# Test


def test_a_test_step_is_used_and_its_loss_is_the_test_loss():
    class Tested(Scripted):
        def test_step(self, batch):
            return {"loss": batch.mean() + 100, "accuracy": (batch > 1, batch > 1)}

    results = make_trainer(metrics=Accuracy()).test(Tested(), Numbers([1, 1, 4]))
    assert results == {"test_loss": pytest.approx(102.0), "accuracy": 1.0}


@pytest.mark.parametrize("module", [Scripted(), Linear()], ids=["validation_step", "step"])
def test_without_a_test_step_the_validation_step_stands_in_its_place(module: AcceleratorModule):
    data = Numbers(3) if isinstance(module, Scripted) else make_points(3)
    trainer = make_trainer()
    assert trainer.test(module, data)["test_loss"] == trainer.validate(module, data)["val_loss"]


def test_test_batches_have_a_size_and_a_limit_of_their_own():
    module = Scripted()
    trainer = make_trainer({"batch_size": [1, 2, 3]}, limit_batches={"test": 2, "val": 1})
    trainer.test(module, Numbers(9))
    assert module.validated == [[0, 1, 2], [3, 4, 5]]
    trainer.validate(module, Numbers(9))
    assert module.validated[2:] == [[0, 1]]


def test_a_limit_is_of_each_set():
    module, trainer = Scripted(), make_trainer(limit_batches={"val": 1, "test": 1, "predict": 1})
    sets = {"a": Numbers(8), "b": Numbers([5, 6, 7])}
    assert trainer.validate(module, sets) == {"val_loss__a": 0.5, "val_loss__b": 5.5}
    assert trainer.test(module, list(sets.values())) == {"test_loss__0": 0.5, "test_loss__1": 5.5}
    predicted = trainer.predict(Predicting(), sets)
    assert {name: values.tolist() for name, values in predicted.items()} == {"a": [0, 1], "b": [5, 6]}


# Predict

FORMS = {
    "tensor": (lambda batch: batch, torch.arange(5.0)),
    "matrix": (lambda batch: torch.stack([batch, -batch], 1), torch.stack([torch.arange(5.0), -torch.arange(5.0)], 1)),
    "list": (lambda batch: [str(int(number)) for number in batch], ["0", "1", "2", "3", "4"]),
    "dict": (lambda batch: {"n": batch, "s": list(batch)}, {"n": torch.arange(5.0), "s": list(torch.arange(5.0))}),
    "tuple": (lambda batch: (batch, batch > 2), (torch.arange(5.0), torch.arange(5) > 2)),
    "array": (lambda batch: batch.numpy(), torch.arange(5.0)),
    "list of dicts": (lambda batch: [{"n": int(n)} for n in batch], [{"n": n} for n in range(5)]),
    "padded to the longest": (
        lambda batch: batch[:, None].repeat(1, int(batch.max()) + 1),
        [torch.full((width,), float(number)) for number, width in enumerate((2, 2, 4, 4, 5))],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_there_is_one_prediction_for_each_sample_in_the_order_of_the_data(form: str):
    make, expected = FORMS[form]
    predicted = make_trainer().predict(Predicting(make), Numbers(5))
    assert type(predicted) is type(expected)
    assert str(predicted) == str(expected)


def test_predictions_can_be_trained_on():
    predicted = make_trainer().predict(Noisy(), make_points(5))
    assert not predicted.is_inference()
    assert not predicted.requires_grad


def test_predictions_are_not_changed_by_later_batches():
    buffer = torch.zeros(1)
    predicted = make_trainer({"batch_size": 1}).predict(Predicting(lambda batch: buffer.copy_(batch)), Numbers(3))
    assert predicted.tolist() == [0, 1, 2]


def test_without_a_predict_step_forward_predicts():
    module = Linear()
    inputs = make_points(5).tensors[0]
    torch.testing.assert_close(make_trainer().predict(module, list(inputs)), module.model(inputs).detach())


def test_nothing_is_kept_where_predictions_are_not_wanted():
    seen: list[float] = []
    module = Predicting(lambda batch: seen.extend(batch.tolist()))
    assert make_trainer().predict(module, Numbers(3), return_predictions=False) is None
    assert seen == [0, 1, 2]


def test_nothing_is_predicted_of_data_that_are_limited_to_nothing():
    assert make_trainer(limit_batches={"predict": 0}).predict(Predicting(), Numbers(3)) == {}


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Numbers(5), batch_size=3),
        Stream([0.0, 1.0, 2.0, 3.0, 4.0]),
        [torch.tensor(float(n)) for n in range(5)],
    ],
    ids=["loader", "stream", "list"],
)
def test_every_kind_of_data_is_predicted(data: Any):
    assert make_trainer().predict(Predicting(), data).tolist() == [0, 1, 2, 3, 4]


def test_a_predict_step_may_ask_for_key_and_batch_index():
    class Keyed(Linear):
        def predict_step(self, key, batch, batch_idx):
            return [f"{key}{batch_idx}"] * len(batch)

    sets = {"a": Numbers(3), "b": Numbers(1)}
    assert make_trainer().predict(Keyed(), sets) == {"a": ["a0", "a0", "a1"], "b": ["b0"]}


def test_a_transformers_model_predicts_its_logits_without_labels():
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    from accmt.addons.made_modules import HuggingFaceModule

    config = BertConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    rows = [{"input_ids": torch.tensor([1, 2, n]), "labels": torch.tensor(n % 2)} for n in range(3)]
    module = HuggingFaceModule(BertForSequenceClassification(config))
    inputs = torch.stack([row["input_ids"] for row in rows])
    expected = module.model.eval()(input_ids=inputs).logits.detach()
    torch.testing.assert_close(make_trainer().predict(module, rows), expected)
    parts = make_trainer().predict(HuggingFaceModule(BertModel(config)), rows)
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "last_hidden_state": (3, 3, 8),
        "pooler_output": (3, 8),
    }


@pytest.mark.parametrize(
    ("form", "got", "do"),
    [
        (lambda batch: batch.mean(), "predictions: Tensor tensor(0.5", "squeeze(-1)"),
        (lambda batch: batch[:1], "1 predictions for a batch of 2", "squeeze(-1)"),
        (lambda batch: torch.cat([batch, batch]), "4 predictions for a batch of 2", ""),
        (lambda batch: None, "predictions: NoneType None", ""),
        (lambda batch: {"loss": batch.mean(), "n": batch}, "predictions['loss']", ""),
        (lambda batch: (batch, batch[:1]), "{'predictions[0]': 2, 'predictions[1]': 1}", ""),
        (lambda batch: "ab", "predictions: str 'ab'", ""),
        (lambda batch: torch.stack([batch, -batch, batch], 1).squeeze(), "", ""),  # of a last batch of one
    ],
)
def test_what_is_no_prediction_for_each_sample_is_refused(form: Any, got: str, do: str):
    with raises_at(ModuleContractError, "predict_step", got, do=do):
        make_trainer().predict(Predicting(form), Numbers(5))


def test_predictions_are_of_the_samples_that_were_read_or_that_the_module_counts():
    def cut(samples):
        return torch.stack(samples)[:1]

    class Counted(Predicting):
        def get_batch_size(self, batch):
            return len(batch)

    with raises_at(ModuleContractError, "predict_step"):
        make_trainer(collate_fn=cut).predict(Predicting(lambda batch: batch.clone()), Numbers(4))
    assert len(make_trainer(collate_fn=cut).predict(Counted(lambda batch: batch.clone()), Numbers(4))) == 2
    assert len(make_trainer(collate_fn=cut).predict(Predicting(lambda batch: torch.zeros(2)), Numbers(4))) == 4


def test_batches_that_forward_does_not_take_need_a_predict_step():
    with raises_at(ModuleContractError, "Linear"):
        make_trainer().predict(Linear(), make_points(3))
    rows = [{"number": torch.ones(3)}] * 2
    with raises_at(ModuleContractError, "Linear", do="self.model(**batch).logits"):
        make_trainer().predict(Linear(), rows)


def test_an_error_in_a_predict_step_is_the_users_own():
    def fail(batch: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine\nThis happened in prediction"):
        make_trainer().predict(Predicting(fail), make_points(3))


# Whose weights


def test_the_best_and_the_last_weights_are_others_and_the_modules_own_come_back():
    trainer, module = trained(model_saving=["best_valid_loss", "last"])
    own = weights_of(module)
    losses = dict(logged(trainer, "val_loss"))
    best, last = losses[4], losses[8]
    assert best < last
    checkpoints = trainer.checkpoint_path
    paths = ("best", "last", "out/model", "out/model/last")
    of = {path: trainer.validate(ckpt_path=path)["val_loss"] for path in paths}
    assert of == {"best": best, "last": last, "out/model": best, "out/model/last": last}
    assert trainer.validate(ckpt_path=checkpoints)["val_loss"] == last
    assert trainer.validate(ckpt_path=next(checkpoints.glob("step-*")))["val_loss"] == last
    assert are_equal(own, weights_of(module))
    assert trainer.test(test_dataset=make_points(5), ckpt_path="best")["test_loss"] == best


def test_saved_weights_are_found_without_fit():
    trained()
    fresh, module = make_trainer(), Linear()
    module.model.weight.data.zero_()
    before = weights_of(module)
    best = fresh.validate(module, make_points(5), ckpt_path="best")["val_loss"]
    assert best < fresh.validate(module, make_points(5))["val_loss"]
    assert are_equal(before, weights_of(module))


def test_predictions_are_those_of_the_chosen_weights():
    trainer, module = trained()
    inputs = make_points(3).tensors[0]
    best = Linear()
    best.load_weights("out/model")
    torch.testing.assert_close(
        trainer.predict(dataset=list(inputs), ckpt_path="best"), best.model(inputs).detach(), rtol=0, atol=0
    )


def test_last_is_the_last_model_where_no_checkpoints_are_written():
    trainer = make_trainer({"epochs": 2}, model_saving="last")
    state = trainer.fit(Linear(), make_points(), make_points(5))
    assert trainer.validate(ckpt_path="last") == state.metrics


def test_last_is_what_a_checkpointer_has():
    class Kept:
        folder = None

        def save(self, write, step, *, force):
            self.folder = Path("kept")
            self.folder.mkdir(exist_ok=True)
            for file in self.folder.iterdir():
                file.unlink()
            write(self.folder)

        def load(self):
            return self.folder

    trainer = make_trainer(checkpoint_every="epoch", checkpointer=Kept())
    state = trainer.fit(Linear(), make_points(), make_points(5))
    assert trainer.validate(ckpt_path="last") == state.metrics


def test_an_evaluation_that_fails_leaves_weights_modes_and_state_as_they_were():
    trainer, module = trained()
    own, state = weights_of(module), {**trainer.state.state_dict(), **vars(trainer.state.now)}

    module.validation_step = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.validate(ckpt_path="best")
    assert are_equal(own, weights_of(module))
    assert module.model.training
    assert {**trainer.state.state_dict(), **vars(trainer.state.now)} == state
    assert "_is_accelerate_prepared" not in vars(module.model)


@pytest.mark.parametrize("ckpt_path", ["best", "last", "nowhere", "."])
def test_weights_that_are_not_there_are_an_error_that_names_the_place(ckpt_path: str):
    with raises_at(NoCheckpointError, f"validate(ckpt_path='{ckpt_path}')", "no weights"):
        make_trainer(checkpoint_every="epoch").validate(Linear(), make_points(3), ckpt_path=ckpt_path)


def test_of_several_rules_the_error_names_the_folders():
    trainer = make_trainer(model_saving=["best_valid_loss", "best_train_loss"])
    trainer.fit(Linear(), make_points(), make_points(5))
    with raises_at(NoCheckpointError, "validate(ckpt_path='best')", do="train_loss' or 'out/model/best_valid_loss'"):
        trainer.validate(ckpt_path="best")
    assert trainer.validate(ckpt_path="out/model/best_valid_loss") == trainer.validate()


class Wider(Linear):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)


@pytest.mark.parametrize(("ckpt_path", "error"), [("best", WeightsError), ("last", CheckpointError)])
def test_weights_of_another_model_are_refused_and_change_nothing(ckpt_path: str, error: type[Exception]):
    trained()
    module = Wider()
    before = weights_of(module)
    with raises_at(error, "model", "2, 3"):
        make_trainer(checkpoint_every="epoch").validate(module, make_points(3), ckpt_path=ckpt_path)
    assert are_equal(before, weights_of(module))


def test_a_damaged_checkpoint_is_refused():
    trainer, _ = trained()
    folder = next(trainer.checkpoint_path.glob("step-*"))
    next(folder.glob("*.safetensors")).write_bytes(b"")
    with raises_at(CheckpointCorruptError, f"checkpoint {folder}", "tensors-00001-of-00001.safetensors has 0 bytes"):
        trainer.validate(ckpt_path=folder)


def test_a_running_average_is_evaluated_predicted_with_and_saved_but_not_put_over_chosen_weights():
    average = EMA(0.5)
    trainer, module = make_trainer({"epochs": 2}, model_saving="best_valid_loss", callbacks=average), Linear()
    state = trainer.fit(module, make_points(), make_points(5))
    own = weights_of(module)
    assert not are_equal(own, average.average)
    assert trainer.validate() == state.metrics
    inputs = make_points(3).tensors[0]
    expected = nn.functional.linear(inputs, average.average["weight"], average.average["bias"])
    torch.testing.assert_close(trainer.predict(dataset=list(inputs)), expected)
    assert are_equal(own, weights_of(module))
    average.average["bias"].fill_(100.0)
    assert trainer.validate(ckpt_path="best") == state.metrics


# What is left alone, and what is told


def test_steps_and_hooks_see_what_is_going_on_and_the_state_is_that_of_training_again():
    seen = []

    class Looking(Linear):
        def step(self, batch):
            seen.append((self.state.fn, self.state.stage, self.state.status, self.state.val_step))
            return super().step(batch)

        def predict_step(self, batch):
            return self.step(batch).expand(2)

    trainer, module = make_trainer(), Looking()
    trainer.fit(module, make_points(), make_points(2))
    before = copy.deepcopy(vars(trainer.state))
    seen.clear()
    trainer.validate(val_dataset=make_points(4))
    trainer.test(test_dataset=make_points(2))
    trainer.predict(dataset=make_points(2))
    assert seen == [
        ("validate", "validate", "running", 0),
        ("validate", "validate", "running", 1),
        ("test", "test", "running", 0),
        ("predict", "predict", "running", 0),
    ]
    assert vars(trainer.state) == before


def test_hooks_of_evaluations_are_called_nothing_is_saved_and_no_row_is_logged():
    recorder = Recorder()
    trainer = make_trainer(callbacks=recorder, model_saving="always", checkpoint_every="eval")
    trainer.validate(Linear(), make_points(2))
    assert recorder.calls == EVALUATION_HOOKS
    recorder.calls.clear()
    trainer.fit(Linear(), make_points(), make_points(2))
    rows = list(read_history(trainer.log_dir))
    recorder.calls.clear()
    trainer.test(test_dataset=make_points(2))
    assert recorder.calls == EVALUATION_HOOKS
    recorder.calls.clear()
    trainer.predict(dataset=list(make_points(2).tensors[0]))
    assert recorder.calls == []
    assert list(read_history(trainer.log_dir)) == rows


def test_what_a_step_logs_is_in_the_results_and_in_no_log():
    class Logging(Scripted):
        def validation_step(self, batch):
            self.log("size", float(len(batch)))
            self.log("at_once", 1.0, instant=True)
            return batch.mean()

    trainer, module = make_trainer(num_sanity_val_steps=0), Logging()
    assert trainer.validate(module, Numbers(4)) == {"size": 2.0, "val_loss": 1.5}
    trainer.fit(module, Numbers(2), Numbers(4))
    rows = list(read_history(trainer.log_dir))
    assert trainer.validate() == {"size": 2.0, "val_loss": 1.5}
    assert list(read_history(trainer.log_dir)) == rows


def test_another_module_than_that_of_fit_is_evaluated_with_callbacks_and_data_of_its_own():
    ours, theirs = Recorder(), Recorder()

    class With(Linear):
        def __init__(self, recorder: Recorder):
            super().__init__()
            self.recorder = recorder

        def get_callbacks(self):
            return self.recorder

    trainer, other = make_trainer(callbacks=EMA(0.5)), With(theirs)
    trainer.fit(With(ours), make_points(), make_points(2))
    before = list(ours.calls)
    with torch.no_grad():
        other.model.weight.add_(1.0)
    assert trainer.test(other, make_points(2)) == make_trainer().test(other, make_points(2))
    assert theirs.calls == 2 * EVALUATION_HOOKS
    assert ours.calls == before


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_update_end", "on_evaluation_end", "on_fit_end"])
@pytest.mark.parametrize("ckpt_path", [None, "out/other"])
def test_a_hook_of_a_run_may_evaluate_without_any_effect_on_training(hook: str, ckpt_path: str | None):
    def fit(callbacks: Any) -> tuple[Trainer, Noisy]:
        trainer, module = make_trainer({"epochs": 2}, metrics=Accuracy(), callbacks=callbacks), Noisy()
        trainer.fit(module, make_points(), make_points(5))
        return trainer, module

    plain, plain_module = fit(None)
    plain.save_model("out/other")
    results: list[dict[str, float]] = []

    def test() -> None:
        if testing.state.fn == "fit":
            results.append(testing.trainer.test(test_dataset=make_points(7), ckpt_path=ckpt_path))

    testing = LambdaCallback(**{hook: test})
    trainer, module = fit(testing)
    assert are_equal(weights_of(module), weights_of(plain_module))
    assert trainer.state.state_dict() == plain.state.state_dict()
    assert logged(trainer, "train_loss") == logged(plain, "train_loss")
    assert logged(trainer, "val_loss") == logged(plain, "val_loss")
    assert [value for _, value in logged(trainer, "test_loss")] == [result["test_loss"] for result in results]
    assert results
    if ckpt_path is not None or hook == "on_fit_end":
        assert results[-1] == plain.test(plain_module, make_points(7))


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
@pytest.mark.parametrize("hook", ["on_before_validation_step", "on_after_validation_step"])
def test_an_evaluation_between_the_batches_of_another_is_an_error_that_names_the_hooks_for_it(
    hook: str, function: str
) -> None:
    callback = LambdaCallback(**{hook: lambda **_: getattr(trainer, function)(None, make_points(3))})
    trainer = make_trainer(callbacks=callback)
    with raises_at(ArgumentError, f"trainer.{function}", do="on_evaluation_end"):
        trainer.fit(Linear(), make_points(), make_points(4))
    assert trainer.state.now.in_evaluation_batches is False


def test_an_evaluation_inside_an_evaluation_of_the_average_keeps_the_weights_that_are_trained():
    class Testing(Callback):
        def on_evaluation_end(self):
            if self.state.fn == "fit":
                self.trainer.test(test_dataset=make_points(3))

    finals = []
    for callbacks in ([EMA(0.9)], [Testing(), EMA(0.9)]):
        trainer, module = make_trainer({"epochs": 2}, callbacks=callbacks), Linear()
        trainer.fit(module, make_points(), make_points(5))
        finals.append(weights_of(module))
    assert are_equal(*finals)


def test_another_module_cannot_be_evaluated_while_one_is_trained():
    class Testing(Callback):
        def on_epoch_end(self):
            self.trainer.test(Linear(), make_points(2))

    with raises_at(ArgumentError, "test(module)"):
        make_trainer(callbacks=Testing()).fit(Linear(), make_points())


def test_a_model_can_be_trained_on_after_an_evaluation():
    trainer, module = trained()
    model, names = module.model, set(vars(module.model))
    trainer.validate(ckpt_path="best")
    trainer.test(test_dataset=make_points(3))
    assert module.model is model
    assert set(vars(module.model)) == names
    trainer.fit(module, make_points(), make_points(5))
    assert trainer.validate() == trainer.state.metrics


def test_a_users_accelerator_is_used_and_holds_nothing_afterwards():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module = Linear()
    make_trainer(accelerator=accelerator).validate(module, make_points(3))
    assert module.accelerator is accelerator
    assert accelerator._models == []


def test_results_can_be_written_to_a_file():
    class Lost(Scripted):
        def validation_step(self, batch):
            return {"loss": torch.tensor(torch.nan), "size": float(len(batch))}

    make_trainer().validate(Lost(), Numbers(2), results_output="out/of/results.json")
    assert json.loads(Path("out/of/results.json").read_text()) == {"val_loss": "NaN", "size": 2.0}


def test_a_place_for_results_that_cannot_be_written_is_refused_before_anything_is_evaluated(tmp_path):
    (tmp_path / "file").write_text("")
    module = Scripted()
    with raises_at(SavingError, "Trainer(results_output="):
        make_trainer().validate(module, Numbers(2), results_output=tmp_path / "file" / "results.json")
    assert module.validated == []


def test_results_are_said_unless_told_otherwise(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "accmt")
    trainer, module = make_trainer(verbose=True), Scripted()
    trainer.validate(module, Numbers([1, 3]))
    trainer.test(module, Numbers([1, 3]))
    assert [line for line in caplog.messages if "loss" in line] == ["validate: val_loss 2", "test: test_loss 2"]
    caplog.clear()
    trainer.validate(module, Numbers([1, 3]), verbose=False)
    assert caplog.messages == []


# Where the data come from


class WithData(Scripted):
    def get_validation_dataloader(self):
        return Numbers([1.0])

    def get_test_dataloader(self):
        return Numbers([2.0])

    def get_predict_dataloader(self):
        return {"a": Numbers([3.0]), "b": Numbers([4.0])}

    def predict_step(self, batch):
        return batch


def test_data_of_the_module_come_before_those_that_are_given():
    trainer, module = make_trainer(), WithData()
    for given in (None, Numbers(7)):
        assert trainer.validate(module, given) == {"val_loss": 1.0}
        assert trainer.test(module, given) == {"test_loss": 2.0}
        assert {name: value.item() for name, value in trainer.predict(module, given).items()} == {"a": 3.0, "b": 4.0}


def test_a_sampler_for_validation_data_is_not_used_for_others():
    module = Scripted()
    trainer = make_trainer(sampler={"val": [2, 0]})
    trainer.validate(module, Numbers(3))
    trainer.test(module, Numbers(3))
    assert module.validated == [[2, 0], [0, 1], [2]]


def test_data_are_collated_as_validation_data_are():
    module = Scripted()
    trainer = make_trainer(collate_fn={"val": lambda samples: torch.stack(samples) + 10})
    trainer.test(module, Numbers(2))
    assert module.validated == [[10, 11]]


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_a_module_and_data_are_needed(function: str):
    trainer = make_trainer()
    with raises_at(ArgumentError, function, "no module", do=f"trainer.{function}(module, ...)"):
        getattr(trainer, function)()
    with raises_at(DataError, function, "no data", do=f"get_{function[:4]}"):
        getattr(trainer, function)(Linear())
    with raises_at(DataError, "data", "length 0"):
        getattr(trainer, function)(Linear(), TensorDataset(torch.empty(0, 3)))


@pytest.mark.parametrize("function", ["validate", "test"])
def test_a_module_without_a_step_for_it_is_refused(function: str):
    class OnlyTrained(AcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(1, 1)

        def training_step(self, batch):
            return self.model(batch).mean()

    with raises_at(ModuleContractError, "OnlyTrained"):
        getattr(make_trainer(), function)(OnlyTrained(), Numbers(2))


def test_a_dataset_that_draws_gives_the_same_whatever_the_workers():
    class Drawing(Dataset[torch.Tensor]):
        def __getitem__(self, index):
            return torch.rand(())

        def __len__(self):
            return 6

    values = [make_trainer(dataloader_num_workers=n).predict(Predicting(), Drawing()).tolist() for n in (0, 2)]
    assert values[0] == values[1]


# The bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn_by(monkeypatch: pytest.MonkeyPatch, function: str, settings: dict[str, Any], **told: Any) -> str:
    trainer = make_trainer(**settings)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    data = {"a": make_points(9), "b": make_points(5)}
    getattr(trainer, function)(Noisy(), data, **told)
    return stream.getvalue()


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluations_by_hand_draw_a_bar_for_each_set(monkeypatch: pytest.MonkeyPatch, function: str):
    drawn = drawn_by(monkeypatch, function, {"verbose": True, "metrics": Accuracy()})
    assert f"{function} a: 100%" in drawn
    assert f"{function} b: 100%" in drawn
    assert "5/5" in drawn
    assert "3/3" in drawn


@pytest.mark.parametrize(
    ("settings", "told", "is_drawn"),
    [
        ({"verbose": False}, {}, False),
        ({"verbose": True}, {"verbose": False}, False),
        ({"verbose": True, "enable_progress_bar": False}, {}, False),
        ({"verbose": False, "enable_progress_bar": True}, {"verbose": False}, True),
    ],
    ids=["a quiet trainer", "a quiet call", "refused", "asked for"],
)
def test_the_bar_is_left_out_where_nothing_is_to_be_said(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: dict[str, Any], *, is_drawn: bool
):
    drawn = drawn_by(monkeypatch, "validate", {**settings, "metrics": Accuracy()}, **told)
    assert ("validate a: 100%" in drawn) is is_drawn
