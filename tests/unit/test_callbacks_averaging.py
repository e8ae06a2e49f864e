"""The moving average of the weights: its formula, where it is used, and that it survives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accmt import EMA, Callback
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.resume.unbroken import Fragile, assert_same, state_of, train
from tests.toys import Linear, make_points, make_trainer


class Watching(Callback):
    def __init__(self):
        self.weights = []
        self.evaluated = []

    def on_fit_start(self):
        self.weights.append(self.now())

    def on_update_end(self):
        self.weights.append(self.now())

    def on_before_validation_step(self):
        self.evaluated.append(self.now())

    def now(self):
        return self.module.unwrapped_model.weight.detach().clone()


def run(*, warmup=False, **settings):
    ema, watching = EMA(decay=0.9, warmup=warmup), Watching()
    module = Linear()
    trainer = make_trainer({"epochs": 2}, callbacks=[ema, watching], model_saving="always", **settings)
    trainer.fit(module, make_points(), make_points(2))
    return ema, watching, module


class TestAverage:
    def test_it_follows_the_formula(self):
        ema, watching, _ = run()
        expected = watching.weights[0].clone()
        for weight in watching.weights[1:]:
            expected = 0.9 * expected + 0.1 * weight
        assert torch.allclose(ema.average["weight"], expected, rtol=1e-6)

    def test_that_of_weights_in_16_bits_is_in_float32(self):
        class Halves(Linear):
            def step(self, batch):
                return super().step([part.bfloat16() for part in batch])

        module, ema, watching = Halves(), EMA(decay=0.999, warmup=False), Watching()
        module.model.bfloat16()
        make_trainer({"epochs": 5}, callbacks=[ema, watching]).fit(module, make_points(), make_points(2))
        expected = watching.weights[0].double()
        for weight in watching.weights[1:]:
            expected = 0.999 * expected + 0.001 * weight.double()
        assert ema.average["weight"].dtype == torch.float32
        assert torch.allclose(ema.average["weight"].double(), expected, rtol=1e-6)
        assert torch.equal(watching.evaluated[-1], ema.average["weight"].bfloat16())
        assert module.model.weight.dtype == torch.bfloat16

    def test_the_decay_warms_up_unless_told_otherwise(self):
        def averaged(ema):
            watching = Watching()
            make_trainer({"epochs": 3}, callbacks=[ema, watching]).fit(Linear(), make_points())
            return watching.weights

        ema = EMA(decay=0.5)  # reached at the 8th of 12 updates
        first, *weights = averaged(ema)
        expected = first.clone()
        for n, weight in enumerate(weights, start=1):
            decay = min(0.5, (1 + n) / (10 + n))
            expected = decay * expected + (1 - decay) * weight
        assert len(weights) == ema.num_averaged == 12
        assert torch.allclose(ema.average["weight"], expected, rtol=1e-6)

    def test_evaluations_and_saved_models_use_it(self):
        ema, watching, module = run()
        assert torch.equal(watching.evaluated[-1], ema.average["weight"])
        saved = Linear()
        saved.load_weights("out/model")
        assert torch.equal(saved.model.weight, ema.average["weight"])
        assert torch.equal(module.model.weight, watching.weights[-1])
        assert not torch.equal(module.model.weight, ema.average["weight"])

    def test_training_is_what_it_is_without_it(self):
        _, watching, _ = run()
        plain = Watching()
        make_trainer({"epochs": 2}, callbacks=plain).fit(Linear(), make_points(), make_points(2))
        assert all(map(torch.equal, watching.weights, plain.weights))

    @pytest.mark.parametrize("warmup", [True, False])
    def test_it_survives_an_interruption(self, warmup):
        def of(path, **more):
            ema = EMA(decay=0.8, warmup=warmup)
            trainer, module = train(path, callbacks=[ema], **more)
            return ema, state_of(trainer, module)

        whole, end = of("out/a")
        of("out/b", stop=7)
        resumed, resumed_end = of("out/b", resume=True)
        assert_same(end, resumed_end)
        assert all(torch.equal(value, resumed.average[name]) for name, value in whole.average.items())
        assert whole.num_averaged == resumed.num_averaged > 7

    def test_a_layer_that_is_unfrozen_during_the_run_is_averaged_from_then_on(self):
        class Unfreeze(Callback):
            def on_epoch_start(self):
                if self.state.epoch == 1:
                    self.module.unwrapped_model.weight.requires_grad_(True)

        ema, watching, module = EMA(decay=0.9, warmup=False), Watching(), Linear()
        module.model.weight.requires_grad_(False)
        trainer = make_trainer({"epochs": 3}, callbacks=[ema, watching, Unfreeze()])
        trainer.fit(module, make_points(), make_points(2))
        first, *weights = watching.weights[5:]  # an epoch has four updates; it begins as the weight is after the fifth
        expected = first.clone()
        for weight in weights:
            expected = 0.9 * expected + 0.1 * weight
        assert torch.allclose(ema.average["weight"], expected, rtol=1e-6)
        assert torch.equal(watching.evaluated[-1], ema.average["weight"])
        assert torch.equal(module.model.weight, weights[-1])

    def test_a_broken_evaluation_leaves_the_trained_weights(self):
        class Failing(Linear):
            def validation_step(self, batch):
                if self.state.global_step:
                    raise ValueError("broken")
                return self.step(batch)

        watching, module = Watching(), Failing()
        with pytest.raises(ValueError, match="broken"):
            make_trainer(callbacks=[EMA(0.5), watching]).fit(module, make_points(), make_points(2))
        assert torch.equal(module.model.weight, watching.weights[-1])
        assert not Path("out/model").exists()

    def test_a_checkpoint_out_of_a_broken_evaluation_holds_the_trained_weights(self):
        class Failing(Fragile):
            def validation_step(self, batch):
                if self.state.global_step == 12:
                    raise ValueError("broken")
                return self.step(batch)

        def of(path, **more):
            return train(path, callbacks=[EMA(0.8)], checkpoint_every="epoch", **more)

        whole = state_of(*of("out/a"))
        with pytest.raises(ValueError, match="broken"):
            of("out/b", module=Failing(), handlers="all")
        trainer, module = of("out/b", resume=True)
        assert trainer.run.is_resumed
        assert_same(whole, state_of(trainer, module))

    def test_a_second_run_begins_anew(self):
        ema = EMA(0.5)
        module = Linear()
        make_trainer(callbacks=[ema]).fit(module, make_points())
        watching = Watching()
        make_trainer({"max_steps": 1}, callbacks=[ema, watching]).fit(module, make_points())
        first, second = watching.weights
        assert torch.allclose(ema.average["weight"], (2 * first + 9 * second) / 11)

    @pytest.mark.parametrize("decay", [0, 1, -0.5, 1.5, True, "0.9", float("nan")])
    def test_a_decay_that_cannot_be_is_refused(self, decay):
        with raises_at(ArgumentError, "EMA(decay=...)"):
            EMA(decay)
