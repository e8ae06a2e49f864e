"""Runs on data of which some samples cannot be read, in one process."""

import logging

import pytest
import torch
from torch import nn

from accmt import ExtendedAcceleratorModule
from accmt.errors import DataError
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, assert_same, state_of, train
from tests.toys import Linear, Numbers, Scripted, logged, make_trainer


class Unreadable(Numbers):
    """Numbers of which some cannot be read."""

    def __init__(self, values, bad):
        super().__init__(values)
        self.bad = set(bad)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        return super().__getitem__(index)


def fit(data, validation=None, **settings):
    trainer = make_trainer(failures={"on_bad_sample": "skip"}, shuffle_train=False, **settings)
    module = Scripted()
    trainer.fit(module, data, validation)
    return trainer, module


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_read_is_left_out_counted_and_logged(workers, caplog):
    with caplog.at_level(logging.WARNING):
        trainer, module = fit(Unreadable(8, {1, 4, 5}), log_every=2, dataloader_num_workers=workers)
    assert module.seen == [[0.0], [2.0, 3.0], [6.0, 7.0]]
    state = trainer.state
    assert (state.global_step, state.skipped_steps, state.samples_seen, state.bad_samples) == (3, 1, 5, 3)
    assert logged(trainer, "bad_samples") == [(2, 1.0), (3, 3.0)]
    assert logged(trainer, "train_loss") == [(2, pytest.approx(5 / 3)), (3, 6.5)]
    assert [record.message for record in caplog.records] == [
        "1 sample of the training data could not be read, and skipped: 1 (OSError: cannot read 1)",
        "2 samples of the training data could not be read, and skipped: "
        "4 (OSError: cannot read 4), 5 (OSError: cannot read 5)",
    ]


def test_a_row_without_bad_samples_does_not_speak_of_them():
    trainer, _ = fit(Unreadable(8, ()))
    assert trainer.state.bad_samples == 0
    assert logged(trainer, "bad_samples") == []


def test_a_warning_names_the_first_few_only(caplog):
    with caplog.at_level(logging.WARNING):
        fit(Unreadable(80, range(10, 30)), log_every=-1)
    (record,) = caplog.records
    assert record.message.startswith("20 samples of the training data")
    assert record.message.endswith("14 (OSError: cannot read 14), ...")


def test_it_is_an_error_unless_skipping_is_asked_for():
    with pytest.raises(OSError, match="cannot read 4") as caught:
        make_trainer(shuffle_train=False).fit(Scripted(), Unreadable(8, {4}))
    assert "reading sample 4 of Unreadable" in caught.value.__notes__[0]


def test_training_data_of_which_nothing_can_be_read_end_the_run():
    with raises_at(DataError, "the training data", "8 unreadable", "sample 7"):
        fit(Unreadable(8, range(8)))


def test_validation_counts_the_others(caplog):
    with caplog.at_level(logging.WARNING):
        trainer, _ = fit(Numbers(4), {"a": Unreadable(6, {0, 1, 2}), "b": Numbers(2)}, hps={"epochs": 2})
    assert trainer.state.metrics == {"val_loss__a": 4.0, "val_loss__b": 0.5}
    assert logged(trainer, "val_bad_samples__a") == [(2, 3.0), (4, 3.0)]
    assert logged(trainer, "val_bad_samples__b") == []
    (record,) = caplog.records
    assert record.message.startswith("3 samples of the validation set 'a' data could not be read")
    assert trainer.state.bad_samples == 0


def test_the_trial_evaluation_skips_batches_without_anything_left():
    trainer, module = fit(Numbers(2), Unreadable(12, range(8)))
    assert module.validated[0] == [8.0, 9.0]
    assert trainer.state.metrics == {"val_loss": 9.5}


def test_a_validation_set_of_which_nothing_can_be_read_is_an_error():
    with raises_at(DataError, "the validation data", "3 unreadable", "sample 2"):
        fit(Numbers(2), Unreadable(3, range(3)))


def test_evaluation_and_prediction_by_hand_count_the_others(caplog):
    trainer, module = make_trainer(failures={"on_bad_sample": "skip"}), Linear()
    inputs = torch.arange(15.0).reshape(5, 3)

    class Points(Unreadable):
        def __getitem__(self, index):
            super().__getitem__(index)
            return inputs[index], inputs[index, :1]

    class Bare(Points):
        def __getitem__(self, index):
            return super().__getitem__(index)[0]

    with caplog.at_level(logging.WARNING):
        results = trainer.validate(module, Points(5, {1}))
        predictions = trainer.predict(module, Bare(5, {1}))
    left = [0, 2, 3, 4]
    with torch.no_grad():
        expected = module.model(inputs[left])
    assert results["val_loss"] == pytest.approx(nn.functional.mse_loss(expected, inputs[left, :1]).item())
    assert torch.allclose(predictions, expected)
    assert ["validation" in r.message or "predict" in r.message for r in caplog.records] == [True, True]


class Manual(ExtendedAcceleratorModule):
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1, bias=False)
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch.tolist())
        loss = (self.model.weight * batch).mean()
        self.backward(loss)
        self.step_optimizer()
        self.zero_grad()
        return loss


def test_manual_steps_skip_a_batch_without_anything_left():
    module = Manual()
    trainer = make_trainer(failures={"on_bad_sample": "skip"}, shuffle_train=False, checkpoint_every="1 step")
    trainer.fit(module, Unreadable(8, {2, 3, 4}))
    assert module.seen == [[0.0, 1.0], [5.0], [6.0, 7.0]]
    assert (trainer.state.global_step, trainer.state.samples_seen, trainer.state.bad_samples) == (3, 5, 3)


class Torn(Augmented):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index in (3, 20):
            raise ValueError("torn")
        return sample


@pytest.mark.parametrize("stop", [1, 4, 8, 11, 17])
def test_an_interrupted_run_goes_on_with_the_same_bits_and_counts(stop):
    settings = {"failures": {"on_bad_sample": "skip"}, "model_saving": None, "grad_accumulation_steps": 1}
    whole = state_of(*train("out/whole", data=Torn(24), **settings))
    train("out/broken", stop=stop, data=Torn(24), **settings)
    continued = state_of(*train("out/broken", data=Torn(24), resume="auto", **settings))
    assert whole["counters"]["bad_samples"] == 6
    assert_same(whole, continued)
