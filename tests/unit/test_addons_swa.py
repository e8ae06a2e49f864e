"""Stochastic weight averaging, against torch's own; and EMA after steps that were skipped."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from accmt import EMA, SWA, ArgumentError, Callback
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Linear, Record, Stream, make_points, make_trainer

ROWS = 10  # in batches of 4, 4 and 2


def build_model(*, norm=True):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh(), nn.Linear(4, 1)]
    return nn.Sequential(*layers)


class Net(Linear):
    def __init__(self, *, norm=True):
        self.model = build_model(norm=norm)
        self.seen = Record()

    def validation_step(self, batch):
        self.seen.append({name: value.clone() for name, value in self.model.state_dict().items()})
        return self.step(batch)


def by_hand(epochs, start, *, norm=True):
    """Return what torch's recipe evaluates after each epoch."""
    model, data, evaluated = build_model(norm=norm), DataLoader(make_points(ROWS), batch_size=4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    for epoch in range(epochs):
        model.train()
        for inputs, targets in data:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch >= start:
            averaged.update_parameters(model)
            update_bn(data, averaged)
        of = averaged.module if epoch >= start else model
        evaluated.append({name: value.clone() for name, value in of.state_dict().items()})
    return evaluated


def fit(module, callback, epochs=5, **settings):
    trainer = make_trainer(
        {"epochs": epochs, "batch_size": 4}, callbacks=callback, shuffle_train=False, num_sanity_val_steps=0, **settings
    )
    trainer.fit(module, make_points(ROWS), make_points(3))
    return trainer


def assert_equal(states, others, **tolerance):
    for state, other in zip(states, others, strict=True):
        for name, value in state.items():
            is_equal = torch.allclose if tolerance else torch.equal
            assert is_equal(value, other[name], **tolerance), name


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("start", [2, 0.6])
def test_it_is_that_of_torch_with_its_statistics_of_batch_norm(norm, start):
    module = Net(norm=norm)
    fit(module, SWA(start), model_saving="always")
    first = 2  # 0.6 of 15 steps is step 9, the end of the third epoch
    assert_equal(module.seen, by_hand(5, first, norm=norm), rtol=1e-5, atol=1e-6)
    saved = Net(norm=norm)
    saved.load_weights("out/model")
    assert_equal([saved.model.state_dict()], module.seen[-1:])


def test_training_goes_on_with_its_own_weights_and_statistics():
    module, plain = Net(), Net()
    fit(module, SWA(1))
    fit(plain, None)
    assert_equal([module.model.state_dict()], [plain.model.state_dict()])


@pytest.mark.parametrize("epochs", [1, 3, 4])
def test_a_resumed_run_is_the_unbroken_one(epochs):
    settings = {"checkpoint_every": "epoch"}
    whole, first, second = Net(), Net(), Net()
    fit(whole, SWA(2), model_path="out/whole", **settings)
    fit(first, SWA(2), epochs=epochs, **settings)
    fit(second, SWA(2), resume=True, **settings)
    assert_equal(whole.seen[epochs:], second.seen)


def test_a_layer_that_is_kept_in_evaluation_mode_keeps_its_statistics():
    class Frozen(Net):
        def on_epoch_start(self):
            self.model[1].eval()

    module = Frozen()
    fit(module, SWA(0))
    assert torch.equal(module.seen[-1]["1.running_mean"], torch.zeros(4))
    assert module.seen[-1]["1.num_batches_tracked"] == 0


def test_steps_apart_and_evaluations_within_an_epoch_and_after_the_run():
    module = Net()
    trainer = fit(module, SWA(0, every=2), epochs=2, evaluate_every_n_steps=3)
    assert trainer.get_callback(SWA).num_averaged == 3
    trainer.validate(verbose=False)
    assert_equal(module.seen[-2:-1], module.seen[-1:])


@each("wrong", [{"start": 1.0}, {"start": -1}, {"start": True}, {"every": 0}, {"update_bn": 1}])
def test_arguments_that_cannot_be_are_refused(wrong):
    with raises_at(ArgumentError, f"SWA({next(iter(wrong))}=...)"):
        SWA(**wrong)


def test_statistics_that_cannot_be_computed_again_are_refused():
    def train(module, **arguments):
        make_trainer({"max_steps": 4, "epochs": -1, "batch_size": 4}, callbacks=SWA(0, **arguments)).fit(
            module, Stream(make_points(ROWS))
        )

    with raises_at(ArgumentError, "batch norm statistics"):
        train(Net())
    train(Net(), update_bn=False)
    train(Net(norm=False))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_skipped_step_does_not_enter_an_average(kind):
    class Skips(Linear):
        def training_step(self, batch):
            is_skipped = self.state.batch_iteration in (1, 2)
            return {"loss": self.step(batch), "weight": torch.tensor(0.0 if is_skipped else 1.0)}

    class Count(Callback):
        weights = ()

        def on_update_end(self):
            self.weights = (*self.weights, self.module.model.weight.detach().clone())

    average = EMA(0.5, warmup=False) if kind == "ema" else SWA(0, every=1)
    count, module = Count(), Skips()
    trainer = make_trainer({"epochs": 1, "batch_size": 2}, callbacks=[average, count])
    trainer.fit(module, make_points(10), make_points(2))
    assert trainer.state.skipped_steps == 2
    assert (len(count.weights), average.num_averaged) == (5, 3)
    stepped = [count.weights[0], *count.weights[3:]]
    torch.manual_seed(0)
    expected = Linear().model.weight.detach() if kind == "ema" else torch.stack(stepped).mean(0)
    for weight in stepped if kind == "ema" else ():
        expected = 0.5 * expected + 0.5 * weight
    assert torch.allclose(average.average["weight"], expected, rtol=1e-5)
