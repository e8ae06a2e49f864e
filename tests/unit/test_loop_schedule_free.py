"""Optimizers with weights to train and others to evaluate, such as schedule-free ones."""

import pytest
import torch
from torch import nn

from accmt import BestModels, Callback, ChainedOptimizer, LambdaCallback
from tests.schedule_free import FreeSGD
from tests.toys import Linear, Record, make_points, make_trainer


class Free(Linear):
    """Keeps what each evaluation saw."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen = Record()

    def get_optimizer(self):
        return FreeSGD(self.model.parameters(), lr=0.05)

    def validation_step(self, batch):
        self.seen.append([weight.clone() for weight in self.model.parameters()])
        return self.step(batch)


class ByHand(Free):
    """Switches by itself, as Accelerate's example does: before saving."""

    def on_fit_start(self):
        self.optimizer.train()

    def on_evaluation_start(self):
        self.optimizer.eval()

    def on_evaluation_end(self):
        self.optimizer.train()


class Chained(Free):
    def get_optimizer(self):
        first, *others = self.model.parameters()
        return ChainedOptimizer([FreeSGD([first], lr=0.05), torch.optim.SGD(others, lr=0.05)])


def by_hand(steps, evaluate_after):
    """Return the weights that a loop in plain torch evaluates, and those that it trains at the end."""
    module, points = Free(), make_points(8)
    optimizer, evaluated = module.get_optimizer(), []
    optimizer.train()
    for step in range(1, steps + 1):
        inputs, targets = points[:]
        nn.functional.mse_loss(module.model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in evaluate_after:
            trained = [weight.detach().clone() for weight in module.model.parameters()]
            optimizer.eval()
            evaluated.append([weight.detach().clone() for weight in module.model.parameters()])
            optimizer.train()
            with torch.no_grad():
                for weight, value in zip(module.model.parameters(), trained, strict=True):
                    weight.copy_(value)
    return evaluated


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fit(module, epochs=3, points=8, **settings):
    settings = {"model_saving": "always", "num_sanity_val_steps": 0, **settings}
    trainer = make_trainer({"epochs": epochs, "batch_size": 8}, shuffle_train=False, **settings)
    trainer.fit(module, make_points(points), make_points(points))
    return trainer


def loaded(folder, kind=Free):
    module = kind()
    module.load_weights(folder)
    return list(module.model.parameters())


@pytest.mark.parametrize("kind", [Free, ByHand])
def test_what_is_saved_is_what_was_evaluated_and_training_is_that_of_plain_torch(kind):
    module = kind()
    fit(module, model_saving=["always", "last"])
    expected = by_hand(3, (1, 2, 3))
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for one, other in zip(module.seen, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert equal(loaded("out/model"), module.seen[-1])
    assert equal(loaded("out/model/last"), module.seen[-1])
    assert equal(list(module.model.parameters()), module.seen[-1]), "after the run the model is the evaluated one"


def test_evaluations_do_not_change_what_is_trained():
    often, seldom = Free(), Free()
    fit(often, epochs=4)
    fit(seldom, epochs=4, evaluate_every_n_steps="4 epochs")
    assert len(often.seen) == 4
    assert len(seldom.seen) == 1
    assert equal(often.seen[-1], seldom.seen[-1])


@pytest.mark.parametrize("kind", [Free, Chained])
def test_a_resumed_run_is_the_unbroken_one(kind, caplog):
    whole, first, second = kind(), kind(), kind()
    fit(whole, epochs=4, checkpoint_every="epoch", model_path="out/whole")
    fit(first, epochs=2, checkpoint_every="epoch")
    fit(second, epochs=4, checkpoint_every="epoch", resume=True)
    assert equal([w for seen in whole.seen[2:] for w in seen], [w for seen in second.seen for w in seen])
    assert equal(loaded("out/whole", kind), loaded("out/model", kind))
    assert "parameter group" not in caplog.text


@pytest.mark.parametrize("evaluation", [1, 2])
def test_a_run_that_fails_in_an_evaluation_resumes_exactly(evaluation):
    class Fails(Callback):
        def on_validation_start(self):
            if self.state.evaluations_done == evaluation:
                raise RuntimeError("in an evaluation")

    whole, first, second = Free(), Free(), Free()
    settings = {"checkpoint_every": "1 steps", "handlers": "all"}
    fit(whole, epochs=3, model_path="out/whole", **settings)
    with pytest.raises(RuntimeError, match="in an evaluation"):
        fit(first, epochs=3, callbacks=Fails(), **settings)
    fit(second, epochs=3, resume=True, **settings)
    assert equal(whole.seen[-1], second.seen[-1])
    assert equal(loaded("out/whole"), loaded("out/model"))


def test_models_that_hooks_save_and_validate_are_the_evaluated_ones():
    module, saved = Free(), []

    def save(trainer):
        trainer.save_model("out/own")
        saved.append(loaded("out/own"))
        trainer.validate(verbose=False)

    best = BestModels("val_loss", top_k=9)
    fit(module, callbacks=[LambdaCallback(on_epoch_end=save), best])
    evaluated, again = module.seen[0::2], module.seen[1::2]
    for own, seen, of_hook in zip(saved, evaluated, again, strict=True):
        assert equal(own, seen)
        assert equal(seen, of_hook)
    assert equal(loaded(best.folder_of(best.kept[0])), evaluated[-1])
