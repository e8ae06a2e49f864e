"""Manual optimization gives the automatic loop's bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accmt import ExtendedAcceleratorModule
from tests.toys import Linear, Recorder, logged, make_points, make_trainer

HPS = {"epochs": 2, "batch_size": 3, "optim": {"type": "AdamW", "lr": 0.05}, "scheduler": {"type": "CosineAnnealingLR"}}


class Manual(ExtendedAcceleratorModule):
    """The module of the automatic loop, by hand."""

    def __init__(self):
        self.model = Linear().model

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.backward(loss)
        self.step()
        self.zero_grad()
        return loss

    def validation_step(self, batch):
        return self.loss(batch)


@pytest.mark.feature("N29")
def test_the_manual_loop_gives_the_bits_of_the_automatic_one():
    outcomes = []
    for module in (Linear(), Manual()):
        trainer = make_trainer(HPS, clip_grad=0.5)
        state = trainer.fit(module, make_points(8), make_points(4))
        rate = module.optimizer.param_groups[0]["lr"]
        outcomes.append(
            (
                module.model.weight.tolist(),
                rate,
                state.state_dict(),
                logged(trainer, "train_loss"),
                logged(trainer, "val_loss"),
            )
        )
    assert outcomes[0] == outcomes[1]


@pytest.mark.feature("N29", "L106")
def test_several_steps_of_one_batch_count_as_one_update():
    class Twice(Manual):
        def training_step(self, batch):
            super().training_step(batch)
            return super().training_step(batch)

    recorder = Recorder()
    state = make_trainer({**HPS, "scheduler": None}, callbacks=recorder).fit(Twice(), make_points(8))
    assert (state.global_step, state.samples_seen, recorder.calls.count("on_after_optimizer_step")) == (6, 16, 12)


@pytest.mark.feature("N29")
def test_accumulation_by_hand_counts_the_updates_that_were_made():
    class Every(Manual):
        def training_step(self, batch):
            self.backward(self.loss(batch))
            if self.state.train_step % 2:
                self.step_optimizer()
                self.zero_grad()

    module = Every()
    before = module.model.weight.detach().clone()
    state = make_trainer({**HPS, "batch_size": 2, "scheduler": None}).fit(module, make_points(8))
    assert (state.global_step, state.batch_iteration) == (4, 8)
    assert not torch.equal(module.model.weight, before)


@pytest.mark.feature("N29")
def test_step_is_no_shared_logic_of_a_manual_module():
    class Incomplete(ExtendedAcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(1, 1)

    with pytest.raises(TypeError, match="neither training_step nor step"):
        make_trainer().fit(Incomplete(), make_points())
