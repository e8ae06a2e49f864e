"""What follows a step is a list of stages: a run that was interrupted in it resumes there, and repeats none."""

from __future__ import annotations

import pytest

from accmt.loop.stages import AFTER_EPOCH, AFTER_STEP, BEFORE_TRAINING, STAGES, TRAINING
from tests.resume.unbroken import Fragile, assert_same, state_of, train
from tests.toys import Recorder

HOOKS = ("on_update_end", "on_log", "on_evaluation_end", "on_epoch_end")


def test_the_stages_stand_in_the_order_of_the_documented_loop():
    names = [stage.__name__.strip("_") for stage in STAGES]
    assert names[BEFORE_TRAINING] == "evaluate_before_training"
    assert names[AFTER_STEP:AFTER_EPOCH] == ["call_step_hooks", "log_step", "evaluate_step"]
    assert names[AFTER_EPOCH:TRAINING] == ["log_epoch", "evaluate_epoch", "count_epoch", "call_epoch_hooks"]


@pytest.mark.parametrize("settings", [{"evaluate_every_n_steps": 3}, {}], ids=["after a step", "after an epoch"])
def test_a_run_that_failed_in_an_evaluation_repeats_neither_hooks_nor_the_row_before_it(settings):
    class Failing(Fragile):
        def validation_step(self, batch):
            if self.state.global_step == 6:
                raise ValueError("broken")
            return self.step(batch)

    settings |= {"log_every": 1, "checkpoint_every": "100 epochs"}
    unbroken, broken, resumed = Recorder(), Recorder(), Recorder()
    whole = state_of(*train("out/a", callbacks=[unbroken], **settings))
    with pytest.raises(ValueError, match="broken"):
        train("out/b", callbacks=[broken], module=Failing(), handlers="all", **settings)
    continued = train("out/b", callbacks=[resumed], resume=True, **settings)
    assert_same(whole, state_of(*continued))
    assert broken.names(*HOOKS) + resumed.names(*HOOKS) == unbroken.names(*HOOKS)
