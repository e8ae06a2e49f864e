"""Runs that end after so many samples or target tokens."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, HyperParameterError, LambdaCallback
from accmt.errors import DataError
from tests.raising import raises_at
from tests.toys import HPS, Linear, make_points, make_trainer


class Weighted(Linear):
    """Has three target tokens a sample."""

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.step(batch), "weight": 3 * len(batch[0])}

    def validation_step(self, batch: Any) -> Any:
        return self.step(batch)


def fit(module: AcceleratorModule, limits: dict[str, Any], **settings: Any) -> Any:
    trainer = make_trainer({**HPS, "epochs": -1, **limits}, **{"seed": 0, **settings})
    trainer.fit(module, make_points(11))
    return trainer.state


@pytest.mark.parametrize(
    ("limits", "steps", "samples", "tokens"),
    [
        ({"max_samples": 15}, 8, 15, 45),  # the sixth batch of an epoch holds one sample
        ({"max_samples": 14}, 8, 15, 45),
        ({"max_samples": 11}, 6, 11, 33),
        ({"max_target_tokens": 36}, 7, 13, 39),
        ({"max_target_tokens": 36, "max_samples": 4}, 2, 4, 12),
        ({"max_samples": 100, "max_steps": 3}, 3, 6, 18),
        ({"max_samples": 100, "epochs": 1}, 6, 11, 33),
    ],
)
def test_the_run_ends_with_the_step_that_reaches_a_limit(limits, steps, samples, tokens):
    state = fit(Weighted(), limits)
    assert (state.global_step, state.samples_seen, state.target_tokens_seen) == (steps, samples, tokens)
    assert state.finished


@pytest.mark.parametrize("limits", [{"max_samples": 15}, {"max_target_tokens": 45, "scheduler": "Constant"}])
def test_a_run_that_is_resumed_ends_at_the_same_sample(limits):
    scheduler = {} if "scheduler" in limits else {"scheduler": "LinearLR"}
    settings = {"checkpoint_every": "1 step", "model_path": "out/a"}
    whole = Weighted()
    fit(whole, {**scheduler, **limits})
    fit(Weighted(), {**scheduler, **limits, "max_steps": 4}, **settings)
    part = Weighted()
    state = fit(part, {**scheduler, **limits}, resume=True, **settings)
    assert (state.global_step, state.samples_seen) == (8, 15)
    if "max_target_tokens" in limits:  # else the scheduler of the first part was planned for fewer steps
        assert part.model.weight.tolist() == whole.model.weight.tolist()


def test_a_scheduler_spans_the_steps_that_hold_so_many_samples():
    module = Weighted()
    fit(module, {"max_samples": 8, "scheduler": "LinearWithWarmup"})  # which ends at 0
    assert module.optimizer.param_groups[0]["lr"] == 0.0
    fit(module, {"max_samples": 8, "max_steps": 3, "scheduler": "LinearWithWarmup"})
    assert module.optimizer.param_groups[0]["lr"] == 0.0


def test_samples_are_counted_in_batches_of_a_users_loader():
    module, seen = Weighted(), []
    watching = LambdaCallback(on_update_end=lambda: seen.append(module.optimizer.param_groups[0]["lr"]))
    hps = {**HPS, "epochs": -1, "max_samples": 8, "scheduler": "LinearWithWarmup", "batch_size": 4}
    make_trainer(hps, callbacks=watching).fit(module, DataLoader(make_points(11), batch_size=1))
    assert len(seen) == 8
    assert seen[-1] == 0.0
    assert 0.0 not in seen[:-1]


def test_what_would_never_end_is_an_error():
    with raises_at(DataError, "training until max_target_tokens", do="max_samples"):
        fit(Linear(), {"max_target_tokens": 5})
    with raises_at(HyperParameterError, "hps_config scheduler"):
        fit(Weighted(), {"max_target_tokens": 5, "scheduler": "CosineAnnealingLR"})
    with raises_at(HyperParameterError, "hps_config max_samples"):
        fit(Weighted(), {"max_samples": 0})
    make_trainer({**HPS, "epochs": None, "max_samples": 4}).fit(Weighted(), make_points(8))
