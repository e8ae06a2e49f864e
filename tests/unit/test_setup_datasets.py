"""Runs whose training data change with the updates."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accmt import ExtendedAcceleratorModule, RangeCurriculum, RatioCurriculum, StepsCurriculum
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, assert_same, state_of, train
from tests.toys import Numbers, Scripted, make_trainer

EASY, HARD = Numbers(range(5)), Numbers(range(100, 107))
STAGES = {
    "steps": StepsCurriculum([(3, EASY), (-1, HARD)]),
    "ratio": RatioCurriculum([(0.3, EASY), (0.7, HARD)]),
    "range": RangeCurriculum([(range(3), EASY), (range(3, 10), HARD)]),
}


def run(curriculum, hps=None, **settings):
    """Train on a curriculum, and return for each batch whether it is of the second stage only (or a mixture: None)."""
    module = Scripted()
    trainer = make_trainer({"epochs": -1, "max_steps": 10, **(hps or {})}, **settings)
    trainer.fit(module, curriculum)
    assert trainer.state.global_step == trainer.hps.max_steps
    stages = [{value >= 100 for value in batch} for batch in module.seen]
    return [stage.pop() if len(stage) == 1 else None for stage in stages]


@pytest.mark.parametrize("curriculum", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_batches_come_of_the_first_data_for_three_updates_and_then_of_the_second(curriculum, accumulation):
    stages = run(curriculum, grad_accumulation_steps=accumulation)
    assert stages == [False] * 3 * accumulation + [True] * 7 * accumulation


def test_micro_batches_leave_the_stages_as_they_are():
    stages = run(STAGES["steps"], {"batch_size": 4, "max_micro_batch_size": 2}, grad_accumulation_steps=2)
    assert stages == [False] * 12 + [True] * 28


@pytest.mark.parametrize("epochs", [1, 3, -1])
def test_the_run_has_max_steps_updates_whatever_epochs_say(epochs):
    assert run(STAGES["steps"], {"epochs": epochs}) == [False] * 3 + [True] * 7


def test_accumulation_that_changes_with_the_epoch_is_that_of_the_first():
    stages = run(STAGES["steps"], {"epochs": 2}, grad_accumulation_steps={0: 2, 1: 4})
    assert stages == [False] * 6 + [True] * 14


def test_without_shuffling_each_stage_is_read_in_its_order():
    module = Scripted()
    make_trainer({"max_steps": 6, "epochs": 1}, shuffle_train=False).fit(module, STAGES["steps"])
    assert module.seen == [[0, 1], [2, 3], [4, 0], [100, 101], [102, 103], [104, 105]]


def test_updates_that_were_left_out_are_made_up_for_with_the_last_stage():
    class Weightless(Scripted):
        def training_step(self, batch):
            weight = 0.0 if len(self.seen) in (1, 2) else 1.0
            return {"loss": super().training_step(batch), "weight": weight}

    module = Weightless()
    trainer = make_trainer({"max_steps": 5, "epochs": -1})
    trainer.fit(module, StepsCurriculum([(3, EASY), (2, HARD)]))
    assert trainer.state.global_step == 5
    assert [batch[0] >= 100 for batch in module.seen] == [False] * 3 + [True] * 4


class Shifted(Augmented):
    """Other points, with noise of their own."""

    def __getitem__(self, index):
        point, target = super().__getitem__(index)
        return point + 5, target - 5


@pytest.mark.parametrize("stop", [2, 5, 6, 11])
def test_a_run_continues_in_any_stage_bit_for_bit(tmp_path, stop):
    def go(path, **settings):
        data: Dataset = StepsCurriculum([(6, Augmented(10)), (-1, Shifted())])
        hps = {"epochs": -1, "max_steps": 14}
        return train(str(tmp_path / path), hps=hps, data=data, grad_accumulation_steps=2, **settings)

    unbroken = state_of(*go("unbroken/model"))
    go("broken/model", stop=stop)
    assert_same(unbroken, state_of(*go("broken/model", resume=True)))


@pytest.mark.usefixtures("without_fingerprints")
def test_a_run_continues_in_other_batches_where_updates_keep_their_size(tmp_path):
    def go(path, **settings):
        hps = {"epochs": -1, "max_steps": 10, "batch_size": 4, **settings.pop("hps", {})}
        easy, hard = Augmented(10), Shifted()
        train(str(tmp_path / path), hps=hps, data=StepsCurriculum([(6, easy), (-1, hard)]), **settings)
        return easy.fetched, hard.fetched

    easy, hard = go("unbroken/model", grad_accumulation_steps=2)
    assert (len(easy), len(hard)) == (48, 32)
    go("broken/model", grad_accumulation_steps=2, stop=5)  # the checkpoint is that of update 4
    rest = go("broken/model", hps={"batch_size": 8}, resume=True)
    assert rest == (easy[32:], hard)


@pytest.mark.usefixtures("without_fingerprints")
def test_a_run_continues_under_another_size_of_its_updates_with_its_stages_at_the_same_steps(tmp_path):
    def go(**settings):
        easy, hard = Augmented(10), Shifted()
        data = StepsCurriculum([(6, easy), (-1, hard)])
        train(str(tmp_path / "model"), hps={"epochs": -1, "max_steps": 14}, data=data, **settings)
        return len(easy.fetched), len(hard.fetched)

    assert go(stop=5)[1] == 0
    of_step = 4  # the samples of a step before
    assert go(resume=True, grad_accumulation_steps=2) == (2 * 2 * of_step, 8 * 2 * of_step)


def test_stages_that_the_run_does_not_reach_are_told(caplog):
    with caplog.at_level(logging.WARNING, "accmt"):
        assert run(STAGES["steps"], {"max_steps": 3}) == [False] * 3
    assert "max_steps=3 leaves no steps for stage 2 of the curriculum" in caplog.text


def test_a_fast_dev_run_takes_the_first_batches_of_a_curriculum():
    module = Scripted()
    make_trainer({"max_steps": 10}, fast_dev_run=4).fit(module, STAGES["steps"])
    assert [batch[0] >= 100 for batch in module.seen] == [False] * 3 + [True]


class ByHand(ExtendedAcceleratorModule):
    """Makes its updates itself."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("got", "data", "settings"),
    [
        ("a run without max_steps", STAGES["steps"], {"hps": {}}),
        ("a sampler or batch_sampler", STAGES["steps"], {"sampler": [0, 1]}),
        ("a sampler or batch_sampler", STAGES["steps"], {"data_options": {"batch_sampler": [[0, 1]]}}),
        ("limit_batches= or overfit_batches=", STAGES["steps"], {"limit_batches": {"train": 0.5}}),
        ("limit_batches= or overfit_batches=", STAGES["steps"], {"limit_batches": {"train": 1}}),
        ("limit_batches= or overfit_batches=", STAGES["steps"], {"overfit_batches": 1}),
        ("a module with manual optimization", STAGES["steps"], {"module": ByHand}),
    ],
)
def test_what_does_not_go_with_a_curriculum_is_refused(got, data, settings):
    settings = {"hps": {"max_steps": 10, "epochs": -1}, "module": Scripted, **settings}
    module = settings.pop("module")()
    with raises_at(ArgumentError, "training on a curriculum"):
        make_trainer(settings.pop("hps"), **settings).fit(module, data)


def test_a_data_loader_around_a_curriculum_is_refused():
    with raises_at(ArgumentError, "the training data", "StepsCurriculum"):
        make_trainer({"max_steps": 10, "epochs": -1}).fit(Scripted(), DataLoader(STAGES["steps"]))
