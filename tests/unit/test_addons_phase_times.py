"""Each second of a run is that of one phase, and calls are counted as they were made."""

from __future__ import annotations

import pytest
import torch

from accmt import Callback, ExtendedAcceleratorModule, Trainer
from accmt.tracking import read_history
from tests.slow import SlowData, SlowLinear, Ticks
from tests.toys import HPS, Linear, make_points, make_trainer


class SlowTrainer(Trainer):
    clock: Ticks

    def do_backward(self, loss):
        self.clock.now += 4
        super().do_backward(loss)

    def do_opt_step(self):
        self.clock.now += 8
        return super().do_opt_step()


class SlowCallback(Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_before_backward(self):
        self.clock.now += 0.5

    def on_evaluation_end(self):
        self.clock.now += 100

    def on_log(self):
        self.clock.now += 0.125


class SlowCheckpointer:
    def __init__(self, clock):
        self.clock = clock

    def save(self, write, step, *, force):
        self.clock.now += 32

    def load(self):
        return None


def seconds(trainer):
    """Return the seconds of the phases that took any."""
    return {name: phase.seconds for name, phase in trainer.profile.phases.items() if phase.seconds}


def calls(trainer):
    return {name: phase.calls for name, phase in trainer.profile.phases.items() if phase.calls}


def test_every_second_is_that_of_the_phase_it_was_spent_in(clock, monkeypatch):
    monkeypatch.setattr("accmt.addons.model_card.write_card", lambda *_: setattr(clock, "now", clock.now + 16))
    trainer = SlowTrainer(
        {**HPS, "epochs": 2},
        "out/model",
        seed=0,
        verbose=False,
        profiler="simple",
        callbacks=SlowCallback(clock),
        grad_accumulation_steps=2,
        checkpointer=SlowCheckpointer(clock),
        model_saving="best_valid_loss",
    )
    trainer.clock = clock
    trainer.fit(SlowLinear(clock), SlowData(clock, 6), make_points(2))  # 3 batches, so 2 updates an epoch
    assert seconds(trainer) == {
        "data": 12 * 0.25,
        "training_step": 6 * 2,
        "backward": 6 * 4,
        "update": 4 * 8,
        "evaluation": 2 * 3,
        "saving": 2 * 16,
        "checkpoint": 2 * 32,
        "logging": 6 * 0.125,
        "callbacks": 6 * 0.5 + 2 * 100,
    }
    before = 3 + 5 * 2 * 0.25  # the trial evaluation, and five samples that are read twice to compare them at a resume
    assert trainer.profile.total_s == clock.now - before


@pytest.mark.parametrize(("accumulation", "updates"), [(1, 10), (2, 6), (4, 4)])
def test_calls_are_counted_as_they_were_made(accumulation, updates):
    trainer = make_trainer(
        {"epochs": 2},
        profiler="simple",
        grad_accumulation_steps=accumulation,
        evaluate_every_n_steps=2,
        model_saving="best_train_loss",
        checkpoint_every="epoch",
        log_every=2,
    )
    state = trainer.fit(Linear(), make_points(9), make_points(5))
    saved = trainer.profile.calls["saving"]
    assert calls(trainer) == {
        "data": 10,
        "training_step": 10,
        "backward": 10,
        "update": updates,
        "evaluation": state.evaluations_done,
        "saving": saved,
        "checkpoint": 2,
        "logging": sum("values" in row for row in read_history(trainer.log_dir)),
    }
    assert state.global_step == updates
    assert 1 <= saved <= state.evaluations_done >= 2


def test_the_mean_and_the_slowest_call_are_those_of_the_calls(clock):
    class Once(SlowLinear):
        def training_step(self, batch):
            self.clock.now += 6 if self.state.batch_iteration == 2 else 0
            return super().training_step(batch)

    trainer = make_trainer(profiler="simple")
    trainer.fit(Once(clock), make_points(8))
    phase = trainer.profile.phases["training_step"]
    assert (phase.seconds, phase.share, phase.calls, phase.mean_s, phase.slowest_s) == (14, 1.0, 4, 3.5, 8)


def test_what_a_step_logs_at_once_takes_nothing_of_its_time(clock):
    class Logging(SlowLinear):
        def training_step(self, batch):
            for name in ("now", "soon"):
                self.clock.now += 1
                self.log(name, 1.0, instant=True)
            return super().training_step(batch)

    trainer = make_trainer(profiler="simple", callbacks=SlowCallback(clock))
    trainer.fit(Logging(clock), make_points(4))
    assert seconds(trainer) == {"training_step": 2 * 4, "callbacks": 101, "logging": 6 * 0.125}


def test_an_evaluation_in_a_callback_is_the_callbacks(clock):
    class Validates(Callback):
        def on_update_end(self):
            self.trainer.validate(val_dataset=make_points(2), verbose=False)

    trainer = make_trainer(profiler="simple", callbacks=Validates())
    trainer.fit(SlowLinear(clock), make_points(4))
    assert seconds(trainer) == {"training_step": 4, "callbacks": 6}


def test_a_module_that_steps_itself_has_phases_too(clock):
    class Manual(ExtendedAcceleratorModule):
        def __init__(self):
            self.model = Linear().model

        def training_step(self, batch):
            inputs, targets = batch
            clock.now += 2
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            self.backward(loss)
            clock.now += 1
            if self.state.batch_iteration % 2:
                self.step()
                self.zero_grad()
                clock.now += 1
            return loss

    trainer = SlowTrainer(HPS, "out/model", verbose=False, profiler="simple", model_saving=None, checkpoint_every=None)
    trainer.clock = clock
    trainer.fit(Manual(), make_points(8))
    assert seconds(trainer) == {"training_step": 4 * 3 + 2 * 1, "backward": 4 * 4, "update": 2 * 8}
    assert calls(trainer) == {"data": 4, "training_step": 4, "backward": 4, "update": 2, "evaluation": 1, "logging": 2}


def test_a_run_that_fails_inside_a_phase_has_its_time_but_no_call(clock):
    class Failing(SlowLinear):
        def training_step(self, batch):
            loss = super().training_step(batch)
            if self.state.batch_iteration == 2:
                raise RuntimeError("broken")
            return loss

    trainer = make_trainer(profiler="simple")
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Failing(clock), make_points(8))
    phase = trainer.profile.phases["training_step"]
    assert (phase.seconds, phase.calls, phase.mean_s) == (6, 2, 2)


def test_the_device_is_waited_for_at_the_end_of_a_phase(clock, monkeypatch):
    class Device:
        pending = 0.0

        def synchronize(self):
            clock.now += self.pending
            self.pending = 0.0

        def is_available(self):  # torch 2.9 asks it before Accelerate begins
            return False

    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: device)

    class Lazy(Linear):
        def training_step(self, batch):
            device.pending += 2
            return self.step(batch)

    trainer = make_trainer(profiler="simple")
    trainer.fit(Lazy(), make_points(4))
    assert seconds(trainer) == {"training_step": 4}
