"""Parts of a checkpoint whose loss shows late: each is looked at where it makes a difference."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

from accmt import Callback
from accmt.errors import NonFiniteError
from tests.resume.unbroken import Fragile, assert_same, make, state_of, train
from tests.toys import InterruptAt, InterruptionError, Numbers, Scripted


class Weighted(Fragile):
    """Gives each batch a weight, known only when the step has run."""

    def training_step(self, batch):
        return {"loss": self.step(batch), "weight": 1.0 + batch[0].abs().sum().detach()}


def test_the_reference_weight_of_windows_is_resumed():
    settings = {"grad_accumulation_steps": 3, "checkpoint_every": "1 step", "hps": {"batch_size": 2}}
    unbroken = train("out/a", module=Weighted(), **settings)
    train("out/b", stop=5, module=Weighted(), **settings)
    assert_same(state_of(*train("out/b", module=Weighted(), resume=True, **settings)), state_of(*unbroken))


class Spiking(Scripted):
    """Has one loss that stands far above the others."""

    def training_step(self, batch):
        noise = 1 + 0.01 * (self.state.global_step % 3)
        return 0 * super().training_step(batch) + (1000.0 if self.state.global_step == 34 else noise)


def test_the_spike_guard_knows_the_losses_before_an_interruption():
    settings = {
        "failures": {"spike_guard": 5, "on_nonfinite": "stop"},
        "checkpoint_every": "10 steps",
        "model_saving": None,
    }
    hps = {"epochs": 1, "batch_size": 1, "optim": {"type": "SGD", "lr": 0.1}, "scheduler": None}

    with pytest.raises(InterruptionError):
        make("out/m", hps, callbacks=InterruptAt(31), **settings).fit(Spiking(), Numbers(40))
    again = make("out/m", hps, resume=True, **settings)
    with pytest.raises(NonFiniteError):
        again.fit(Spiking(), Numbers(40))
    assert 34 <= again.state.global_step <= 40


class Drawing(IterableDataset):
    """Draws its samples at random, from torch's own generator."""

    def __iter__(self):
        for _ in range(12):
            yield torch.rand(1)[0]


def test_a_stream_that_draws_at_random_goes_on_with_what_it_would_have_drawn():
    settings = {"checkpoint_every": "1 step", "model_saving": None}
    hps = {"epochs": 2, "batch_size": 2, "scheduler": None}
    whole, first, rest = Scripted(), Scripted(), Scripted()
    make("out/a", hps, **settings).fit(whole, Drawing())

    with pytest.raises(InterruptionError):
        make("out/b", hps, callbacks=InterruptAt(3), **settings).fit(first, Drawing())
    make("out/b", hps, resume=True, **settings).fit(rest, Drawing())
    assert rest.seen == whole.seen[3:]


@pytest.mark.parametrize("optimizer", ["SGD", "tests.low_bit.TensorRates"])
def test_a_safe_checkpoint_has_the_rate_of_its_step_and_not_one_that_was_set_since(optimizer):
    class Setting(Callback):
        def on_before_optimizer_step(self):
            if self.state.global_step == 3:
                for group in self.module.optimizer.param_groups:
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"].fill_(99.0)
                    else:
                        group["lr"] = 99.0
                raise InterruptionError

    settings = {"handlers": "all", "checkpoint_every": None, "model_saving": None, "log_every": 1}
    hps = {"epochs": 1, "batch_size": 1, "optim": {"type": optimizer, "lr": 0.1}, "scheduler": None}
    with pytest.raises(InterruptionError):
        make("out/m", hps, callbacks=Setting(), **settings).fit(Scripted(), Numbers(8))
    again = make("out/m", hps, resume=True, **settings)
    again.fit(Scripted(), Numbers(8))
    assert again.state.global_step == 8
    assert [float(group["lr"]) for group in again.run.stepper.optimizer.param_groups] == [pytest.approx(0.1)]
