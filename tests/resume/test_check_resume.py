"""`check_resume` proves that a module resumes exactly, or names what keeps it from that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accmt.errors import CheckpointError
from tests.resume.unbroken import Augmented, Fragile, make


def check(module, **settings):
    return make("out/m", **settings).check_resume(module, Augmented(), Augmented(9))


def test_an_exact_module_passes_and_is_left_as_it_was():
    module = Fragile()
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    assert check(module) > 20
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.model.state_dict().items())
    assert list(Path().iterdir()) == []


class Counter:
    steps = 0


def test_hidden_state_of_a_module_is_named():
    class Hidden(Fragile):
        def __init__(self):
            super().__init__()
            self.counter = iter(range(100))  # which accmt knows nothing of

        def step(self, batch):
            return super().step(batch) * (1 + next(self.counter))

    with pytest.raises(CheckpointError, match=r"(?s)the result of training_step for batch 3 of epoch 1.*self\.counter"):
        check(Hidden())


def test_hidden_state_that_is_returned_is_no_longer_hidden():
    class Open(Fragile):
        def __init__(self):
            super().__init__()
            self.counter = Counter()

        def step(self, batch):
            self.counter.steps += 1
            return super().step(batch) * (1 + self.counter.steps)

        def state_dict(self):
            return {"steps": self.counter.steps}

        def load_state_dict(self, state):
            self.counter.steps = state["steps"]

    make("out/m", num_sanity_val_steps=0).check_resume(Open(), Augmented())


def test_training_that_is_never_the_same_is_told_apart():
    class Clocked(Fragile):
        generator = torch.Generator()

        def step(self, batch):
            return super().step(batch) * torch.rand((), generator=self.generator)

    with pytest.raises(CheckpointError, match="differs between two runs that were not interrupted"):
        check(Clocked())


def test_an_attribute_of_a_layer_is_found():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)
            self.inner.count = 0

        def forward(self, inputs):
            self.inner.count += 1
            return self.inner(inputs) * self.inner.count

    class Module(Fragile):
        def __init__(self):
            torch.manual_seed(0)
            self.model = Forgetful()

    with pytest.raises(CheckpointError, match=r"the result of training_step(.|\n)*self\.model\.inner\.count"):
        check(Module())


def test_an_attribute_of_a_layer_that_is_the_same_at_the_end_is_found():
    class Starting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)
            self.inner.started = False
            self.register_buffer("center", torch.zeros(3))

        def forward(self, inputs):
            if not self.inner.started:
                self.center.copy_(inputs[0].detach())
                self.inner.started = True
            return self.inner(inputs - self.center)

    class Module(Fragile):
        def __init__(self):
            torch.manual_seed(0)
            self.model = Starting()
            self.losses = []

        def step(self, batch):
            loss = super().step(batch)
            self.losses.append(loss.item())  # differs at the end, but is restored
            return loss

    with pytest.raises(CheckpointError, match=r"return self\.model\.inner\.started from .*register_buffer"):
        check(Module())
