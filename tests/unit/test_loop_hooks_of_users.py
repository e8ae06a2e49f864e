"""What hooks of users return, and weights that they put in place for an evaluation."""

import math

import pytest
import torch

from accmt import EMA, SWA, Callback, LambdaCallback
from tests.toys import Linear, make_points, make_trainer


def fit(callback=None, module=None, **settings):
    trainer = make_trainer({"epochs": 2, "batch_size": 4}, callbacks=callback, **settings)
    trainer.fit(module or Linear(), make_points(), make_points(4))
    return trainer


class Returns(Callback):
    def on_before_training_step(self, batch):
        return [part + 1 for part in batch]

    def on_before_backward(self, loss):
        return loss * 2

    def on_evaluation_end(self, metrics):
        return {**metrics, "mine": 1.0}

    def on_log(self, values, step):
        return None


def test_what_a_hook_returns_and_is_dropped_is_said_once(caplog):
    fit(Returns())
    said = [message for message in caplog.messages if "it is ignored" in message]
    assert len(said) == 3
    assert said[0].startswith("Returns.on_before_training_step\n  got: the hook returned a list; it is ignored")
    assert 'do: metrics["name"] = number' in said[2]


def test_after_the_first_call_a_hook_is_called_itself():
    callback = Returns()
    hooks = fit(callback).run.hooks
    assert callback.on_before_training_step.__func__ in [
        getattr(hook, "__func__", None) for hook in hooks.on_before_training_step
    ]


def test_what_returns_nothing_that_was_meant_is_not_mentioned(caplog):
    class Silent(Linear):
        def on_before_training_step(self, batch):
            if batch is None:
                return
            batch[0].add_(1)

        def on_after_training_step(self, outputs):
            return len(str(outputs))

    rows = []
    fit([LambdaCallback(on_log=lambda values: rows.append(values), on_epoch_end=lambda trainer: trainer)], Silent())
    assert rows
    assert "ignored" not in caplog.text


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
