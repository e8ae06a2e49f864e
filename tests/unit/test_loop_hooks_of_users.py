"""What hooks of users return, and weights that they put in place for an evaluation."""

import math

import pytest
import torch

from accmt import EMA, SWA, Callback
from tests.toys import Linear, make_points, make_trainer


def fit(callback=None, module=None, **settings):
    trainer = make_trainer({"epochs": 2, "batch_size": 4}, callbacks=callback, **settings)
    trainer.fit(module or Linear(), make_points(), make_points(4))
    return trainer


class OwnAverage(Callback):
    """Evaluates weights of 0."""

    def on_evaluation_start(self):
        self.kept = self.module.unwrapped_model.weight.detach().clone()
        self.module.unwrapped_model.weight.zero_()

    def on_evaluation_end(self):
        self.module.unwrapped_model.weight.copy_(self.kept)


class OwnAverageInOrder(OwnAverage):
    order = math.inf


@pytest.mark.parametrize(("kind", "is_said"), [(OwnAverage, True), (OwnAverageInOrder, False)])
def test_weights_that_are_given_back_before_they_are_saved_are_warned_of(kind, is_said, caplog):
    fit(kind(), model_saving="always")
    assert ("on_evaluation_end has changed the weights" in caplog.text) == is_said
    saved = Linear()
    saved.load_weights("out/model")
    assert bool((saved.model.weight == 0).all()) != is_said


@pytest.mark.parametrize("average", [EMA(0.5), SWA(0)], ids=["ema", "swa"])
def test_the_last_weights_are_those_that_were_evaluated(average, caplog):
    module = Linear()
    fit(average, module, model_saving=["always", "last"])
    best, last = Linear(), Linear()
    best.load_weights("out/model")
    last.load_weights("out/model/last")
    assert torch.equal(best.model.weight, last.model.weight)
    assert not torch.equal(last.model.weight, module.model.weight)
    assert "changed the weights" not in caplog.text
