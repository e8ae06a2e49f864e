"""Losses that are not finite, and losses that stand out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, LambdaCallback, Trainer
from accmt.errors import ArgumentError, NonFiniteError
from accmt.features.loss_guard import MAX_ROLLBACKS, LossGuard
from accmt.state import Place
from tests.checkpoints import names_in
from tests.raising import raises_at
from tests.toys import Linear, Recorder, logged, make_trainer

SAMPLES = 24
NO_LOSS = float("nan")
NO_RUN: Any = None


def find_guard(run: Any) -> LossGuard:
    return next(feature for feature in run.features.all if isinstance(feature, LossGuard))


def make_data(bad: dict[int, float]) -> TensorDataset:
    """Make points `[3]` and targets of a linear function, some of which are replaced."""
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    for index, target in bad.items():
        targets[index] = target
    return TensorDataset(inputs, targets)


class Fit(AcceleratorModule):
    """A linear function with momentum, so that an update that is not made differs from one with gradients of 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)


HPS = {"epochs": 2, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.02, "momentum": 0.9}}


def train(data: TensorDataset, tmp_path: Any, **settings: Any) -> tuple[Trainer, Fit]:
    settings = {"shuffle_train": False, "log_every": 4, "model_path": str(tmp_path / "model"), **settings}
    module, trainer = Fit(), make_trainer({**HPS, **settings.pop("hps", {})}, **settings)
    trainer.fit(module, data)
    return trainer, module


def train_by_hand(data: TensorDataset, left_out: set[tuple[int, int]], accumulation: int = 1) -> nn.Module:
    """Train in plain torch, and leave out the windows that begin at (epoch, batch)."""
    model = Fit().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs, targets = data.tensors
    size = 2 * accumulation
    for epoch in range(2):
        for number, begin in enumerate(range(0, SAMPLES, size)):
            if (epoch, number) in left_out:
                continue
            part = slice(begin, begin + size)
            nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_at_the_next_row_and_names_the_batch(
    value: float, tmp_path: Any
) -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(make_data({10: value}), tmp_path)
    message = str(caught.value)
    assert "at step 6 (epoch 1, batch 5) on process 0, samples [10, 11]" in message
    assert ("nan" if math.isnan(value) else "inf") in message
    assert 'failures={"on_nonfinite": "skip"}' in message


def test_the_row_of_a_loss_that_is_not_finite_shows_the_gap(tmp_path: Any) -> None:
    recorder = Recorder()
    with pytest.raises(NonFiniteError):
        train(make_data({10: NO_LOSS}), tmp_path, callbacks=recorder)
    assert [step for step, _ in recorder.rows] == [4, 8]
    assert math.isfinite(recorder.rows[0][1]["train_loss"])
    assert math.isnan(recorder.rows[1][1]["train_loss"])


def test_no_checkpoint_holds_what_a_loss_that_is_not_finite_made_of_the_weights(tmp_path: Any) -> None:
    with raises_at(NonFiniteError, "the training loss", "step 6 ", "samples [10, 11]"):
        train(make_data({10: NO_LOSS}), tmp_path, checkpoint_every="1 step", log_every=100, handlers="ALL")
    data = make_data({})
    trainer, module = train(data, tmp_path, checkpoint_every="1 step", resume=True)
    assert trainer.run.is_resumed
    assert_equal_weights(module.model, train_by_hand(data, set()))


@pytest.mark.parametrize("is_asked", [False, True], ids=["due", "asked for"])
def test_no_checkpoint_holds_what_a_spike_made_of_the_weights(is_asked: bool, tmp_path: Any) -> None:
    asking = LambdaCallback(on_update_end=lambda trainer: trainer.save_checkpoint(tmp_path / "own"))
    settings = {"checkpoint_every": "100 steps" if is_asked else "1 step", "callbacks": [asking] if is_asked else []}
    with raises_at(NonFiniteError, "the training loss", "a spike", "step 23 "):
        train(
            make_data({22: 1e4}),
            tmp_path,
            hps={"batch_size": 1},
            log_every=100,
            failures={"on_nonfinite": "stop", "spike_guard": 8.0},
            **settings,
        )
    folder = tmp_path / ("own" if is_asked else "checkpoint-model")
    assert names_in(folder)[-1] == "step-00000022"


@pytest.mark.parametrize("log_every", [1, 2, 3])
def test_a_window_that_is_left_out_adds_no_row(log_every: int, tmp_path: Any) -> None:
    """The step before it has been logged already, and the next one will be."""
    recorder = Recorder()
    data, failures = make_data({10: NO_LOSS, 12: NO_LOSS}), {"on_nonfinite": "skip"}
    train(data, tmp_path, failures=failures, log_every=log_every, callbacks=recorder, hps={"epochs": 1})
    rows = [step for step, row in recorder.rows if "train_loss" in row]
    assert rows == [step for step in range(1, 11) if step % log_every == 0] + [10] * (10 % log_every > 0)


def test_an_evaluation_is_not_made_with_weights_that_are_not_finite(tmp_path: Any) -> None:
    recorder = Recorder()
    module = Fit()
    trainer = make_trainer(
        HPS,
        str(tmp_path / "model"),
        shuffle_train=False,
        evaluate_every_n_steps=7,
        num_sanity_val_steps=0,
        log_every=100,
        callbacks=recorder,
    )
    with raises_at(NonFiniteError, "the training loss", "step 6 ", "samples [10, 11]"):
        trainer.fit(module, make_data({10: NO_LOSS}), make_data({}))
    assert recorder.names("on_evaluation_start") == []


@pytest.mark.parametrize("accumulation", [1, 3])
def test_skip_leaves_the_update_out_before_it_is_made(accumulation: int, tmp_path: Any) -> None:
    data = make_data({10: NO_LOSS})
    trainer, module = train(data, tmp_path, failures={"on_nonfinite": "skip"}, grad_accumulation_steps=accumulation)
    window = 5 // accumulation
    expected = train_by_hand(data, {(0, window), (1, window)}, accumulation)
    assert_equal_weights(module.model, expected)
    assert trainer.state.skipped_steps == 2
    assert trainer.state.global_step == 2 * (12 // accumulation) - 2
    assert trainer.state.samples_seen == 2 * SAMPLES


class InfiniteGradient(Fit):
    """The gradient of the square root of 0 is infinite, and the loss is not."""

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        predictions = self.model(inputs)
        is_marked = (targets > 90).any()
        trap = (predictions * 0).sum().sqrt() if is_marked else 0.0
        return nn.functional.mse_loss(predictions, targets.clamp(max=1.0)) + trap


def test_skip_sees_gradients_that_are_not_finite_under_a_finite_loss(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = InfiniteGradient()
    trainer = make_trainer(
        HPS, str(tmp_path / "model"), shuffle_train=False, log_every=4, failures={"on_nonfinite": "skip"}
    )
    trainer.fit(module, make_data({10: 99.0}))
    assert trainer.state.skipped_steps == 2
    assert all(parameter.isfinite().all() for parameter in module.model.parameters())
    assert "the gradients of step 6 are not finite, although its losses are" in caplog.text
    assert caplog.text.count("is skipped") == 2, "once in each epoch"


@pytest.mark.parametrize("every", ["1 step", "5 steps", "epoch"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_rollback_goes_on_as_if_the_update_had_never_been(every: str, accumulation: int, tmp_path: Any) -> None:
    data = make_data({10: NO_LOSS})
    trainer, module = train(
        data,
        tmp_path,
        failures={"on_nonfinite": "rollback"},
        checkpoint_every=every,
        grad_accumulation_steps=accumulation,
    )
    window = 5 // accumulation
    assert_equal_weights(module.model, train_by_hand(data, {(0, window), (1, window)}, accumulation))
    assert trainer.state.skipped_steps == 2
    assert trainer.state.finished


def test_rollback_leaves_one_point_at_each_step(tmp_path: Any) -> None:
    trainer, _ = train(
        make_data({10: NO_LOSS}), tmp_path, failures={"on_nonfinite": "rollback"}, checkpoint_every="2 steps"
    )
    steps = [step for step, loss in logged(trainer, "train_loss") if math.isfinite(loss)]
    assert steps == sorted(set(steps))
    assert steps[-1] == trainer.state.global_step == 22


def test_a_run_that_is_resumed_still_skips_what_it_was_rolled_back_for(tmp_path: Any) -> None:
    data = make_data({10: NO_LOSS})
    settings = {"failures": {"on_nonfinite": "rollback"}, "checkpoint_every": "1 step"}
    train(data, tmp_path, hps={"max_steps": 9}, **settings)
    trainer, module = train(data, tmp_path, resume=True, **settings)
    assert_equal_weights(module.model, train_by_hand(data, {(0, 5), (1, 5)}))
    assert trainer.run.recovery.rollbacks == 1, "the first epoch's was known"


def test_rollbacks_to_ever_newer_checkpoints_end_no_run(tmp_path: Any) -> None:
    data = make_data(dict.fromkeys(range(0, SAMPLES, 4), NO_LOSS))  # every second update
    trainer, module = train(data, tmp_path, failures={"on_nonfinite": "rollback"}, checkpoint_every="1 step")
    bad = {(epoch, number) for epoch in range(2) for number in range(0, 12, 2)}
    assert trainer.state.skipped_steps == len(bad) > MAX_ROLLBACKS
    assert_equal_weights(module.model, train_by_hand(data, bad))


def test_rollbacks_that_lead_nowhere_end(tmp_path: Any) -> None:
    bad = dict.fromkeys(range(4, SAMPLES), NO_LOSS)
    settings = {"hps": {"batch_size": 1}, "failures": {"on_nonfinite": "rollback"}, "checkpoint_every": "2 steps"}
    with raises_at(NonFiniteError, "the training loss", "10 rollbacks to step 4"):
        train(make_data(bad), tmp_path, **settings)


def test_none_goes_on_with_a_warning(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = train(make_data({10: NO_LOSS}), tmp_path, failures={"on_nonfinite": None})
    assert trainer.state.finished
    assert module.model.weight.isnan().all()
    assert caplog.text.count("samples [10, 11]") == 1


def test_a_batch_of_weight_0_may_have_a_loss_that_is_not_finite(tmp_path: Any) -> None:
    class Masked(Fit):
        def step(self, batch: Any) -> Any:
            inputs, targets = batch
            mask = targets.isfinite().float()
            loss = ((self.model(inputs) - targets.nan_to_num()) ** 2 * mask).sum() / mask.sum()
            return {"loss": loss, "weight": mask.sum()}

    trainer = make_trainer(HPS, str(tmp_path / "model"), shuffle_train=False, log_every=4)
    trainer.fit(Masked(), make_data({10: NO_LOSS, 11: NO_LOSS}))
    assert trainer.state.skipped_steps == 2


@pytest.mark.parametrize(("index", "count", "found"), [(0, 2, 1), (1, 2, 0), (0, 3, 0)])
def test_each_process_compares_with_its_own_losses_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, index: int, count: int, found: int
) -> None:
    """With another number of processes nobody knows whose losses they were, and the comparison starts again."""
    monkeypatch.setattr("accmt.features.loss_guard.num_data_processes", lambda: count)
    monkeypatch.setattr("accmt.features.loss_guard.data_index", lambda: index)
    guard = LossGuard(NO_RUN, "stop", 8.0)
    guard.load_state_dict({"recent": [[1.0, 1.1] * 10, [100.0, 101.0] * 10]})
    guard.after_batch(torch.tensor(50.0), 1, Place(21, 0, 20, 20))
    assert len(guard.find()) == found


def test_ordinary_losses_are_no_spikes(tmp_path: Any) -> None:
    trainer, _ = train(
        make_data({}), tmp_path, failures={"on_nonfinite": "skip", "spike_guard": 8.0}, hps={"epochs": 8}
    )
    assert trainer.state.skipped_steps == 0


@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_a_spike_after_enough_losses_is_left_out(reaction: str, tmp_path: Any) -> None:
    inputs, targets = make_data({}).tensors
    inputs, targets = torch.cat([inputs, inputs]), torch.cat([targets, targets])
    targets[44] = 1e4  # in the 23rd batch
    module = Fit()
    trainer = make_trainer(
        {**HPS, "epochs": 1},
        str(tmp_path / "model"),
        shuffle_train=False,
        log_every=1,
        failures={"on_nonfinite": reaction, "spike_guard": 8.0},
        checkpoint_every="2 steps",
    )
    trainer.fit(module, TensorDataset(inputs, targets))
    assert trainer.state.skipped_steps == 1
    assert module.model.weight.abs().max() < 2


@pytest.mark.parametrize(("before", "found"), [(19, 0), (20, 1), (21, 1)])
def test_the_21st_loss_is_the_first_that_may_be_a_spike(before: int, found: int) -> None:
    guard = LossGuard(NO_RUN, "stop", 3.0)
    for number in range(before):
        guard.after_batch(torch.tensor(1.0 + 0.1 * (number % 2)), 1, Place(number, 0, number, number))
    guard.after_batch(torch.tensor(100.0), 1, Place(before, 0, before, before))
    assert len(guard.find()) == found


def test_losses_are_compared_with_the_hundred_before_them() -> None:
    guard = LossGuard(NO_RUN, "stop", 3.0)
    for number in range(200):
        guard.after_batch(torch.tensor(1.0 + 0.1 * (number % 2)), 1, Place(number, 0, number, number))
    assert guard.find() == []
    guard.after_batch(torch.tensor(1.19), 1, Place(200, 0, 200, 200))
    guard.after_batch(torch.tensor(1.35), 1, Place(201, 0, 201, 201))
    ((place, _, what),) = guard.find()
    assert place.step == 201
    assert what.startswith("loss 1.35, a spike above 1.2")


def test_a_thousand_losses_between_two_looks_are_all_looked_at() -> None:
    guard = LossGuard(NO_RUN, "stop", None)
    for number in range(1000):
        guard.after_batch(torch.tensor(NO_LOSS if number == 300 else 1.0), 1, Place(number, 0, number, number))
    assert [place.micro_batch for place, _, _ in guard.find()] == [300]
    assert guard.find() == []


def test_rollback_without_checkpoints_is_refused(tmp_path: Any) -> None:
    with raises_at(ArgumentError, "Trainer(failures={\"on_nonfinite\": 'rollback'})"):
        train(make_data({}), tmp_path, failures={"on_nonfinite": "rollback"})


@pytest.mark.parametrize("is_async", [True, False])
def test_weights_that_gradients_made_nan_under_a_finite_loss_are_in_no_checkpoint(
    is_async: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "shuffle_train": False,
        "log_every": 4,
        "checkpoint_every": "1 step",
        "checkpoint_options": {"async_checkpointing": is_async},
    }
    module = InfiniteGradient()
    trainer = make_trainer(HPS, str(tmp_path / "model"), failures={"on_nonfinite": "rollback"}, **settings)
    trainer.fit(module, make_data({10: 99.0}))
    assert trainer.state.finished
    assert "NaN" in caplog.text
    assert all(parameter.isfinite().all() for parameter in module.model.parameters())


def test_weights_that_are_tensors_tell_which_losses_count() -> None:
    guard = LossGuard(NO_RUN, "stop", None)
    weights = [torch.tensor(0.0), 1.0, torch.tensor(2.0), 0.0]
    for number, weight in enumerate(weights):
        guard.after_batch(torch.tensor(NO_LOSS), weight, Place(number, 0, number, number))
    assert [place.micro_batch for place, _, _ in guard.find()] == [1, 2]


@pytest.mark.parametrize("spike_guard", [None, 5.0])
def test_losses_are_kept_no_longer_than_until_the_next_row(spike_guard: float | None) -> None:
    kept = []

    class Look(Callback):
        def on_update_end(self) -> None:
            kept.append(len(find_guard(self.trainer.run)._places))

    settings = {"failures": {"spike_guard": spike_guard}, "log_every": 4, "callbacks": Look()}
    make_trainer({"epochs": 3}, **settings).fit(Linear(), make_data({}))
    assert len(kept) == 3 * SAMPLES // 2
    assert max(kept) == 4
