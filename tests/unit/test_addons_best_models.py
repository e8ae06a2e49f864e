"""The best few models of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accmt import ArgumentError, BestModels, ModuleContractError
from accmt.saving import read_status
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer

TOP = Path("out/model/top")


def train(losses, *callbacks, epochs=None, **arguments):
    hps = {"epochs": epochs or len(losses), "batch_size": 4}
    trainer = make_trainer(hps, callbacks=list(callbacks), **arguments)
    trainer.fit(Scripted(losses), Numbers(4), Numbers(2))
    return trainer


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-" + "[0-9]" * 8))


@pytest.mark.parametrize(
    ("losses", "top_k", "expected"),
    [
        ([0.5, 0.3, 0.4, 0.2], 2, [4, 2]),
        ([0.5, 0.5, 0.5], 2, [1, 2]),
        ([0.5, float("nan"), 0.4], 3, [3, 1]),
        ([0.1, 0.2, 0.3], 1, [1]),
    ],
)
def test_the_best_models_are_kept_and_the_others_deleted(losses, top_k, expected):
    best = BestModels(top_k=top_k)
    train(losses, best)
    assert [model.step for model in best.kept] == expected
    assert steps_in(TOP) == sorted(expected)
    assert {read_status(best.folder_of(model))["global_step"] for model in best.kept} == set(expected)


def test_each_folder_has_the_weights_of_its_step():
    seen = {}

    class Watched(Linear):
        def on_evaluation_end(self):
            seen[self.state.global_step] = self.model.weight.detach().clone()

    best = BestModels(top_k=2)
    make_trainer({"epochs": 3, "batch_size": 2}, callbacks=best).fit(Watched(), make_points(8), make_points(4))
    assert len(best.kept) == 2
    for model in best.kept:
        assert torch.equal(load_file(best.folder_of(model) / "model.safetensors")["weight"], seen[model.step])


def test_evaluations_after_the_run_change_nothing_that_it_kept():
    best = BestModels(top_k=2)
    trainer = make_trainer({"epochs": 3, "batch_size": 2}, callbacks=best)
    trainer.fit(Linear(), make_points(8), make_points(4))
    kept, steps = list(best.kept), steps_in(TOP)
    trainer.test(test_dataset=make_points(2))
    trainer.validate(val_dataset=make_points(2))
    assert (best.kept, steps_in(TOP)) == (kept, steps)


def test_a_continued_run_keeps_the_best_of_all():
    losses = [0.2, 0.5, 0.4, 0.3]
    train(losses, BestModels(top_k=2), epochs=2, checkpoint_every="epoch")
    continued = BestModels(top_k=2)
    train(losses, continued, epochs=4, checkpoint_every="epoch", resume=True)
    assert [model.step for model in continued.kept] == [1, 4]
    assert steps_in(TOP) == [1, 4]


def test_models_of_an_earlier_run_are_told_and_stay(caplog):
    train([0.2, 0.5], BestModels(top_k=2), verbose=True)
    assert "models of an earlier run" not in caplog.text
    train([0.4], BestModels(top_k=2), verbose=True)
    assert "out/model/top contains models of an earlier run" in caplog.text
    assert {1, 2} <= set(steps_in(TOP))


def test_which_way_is_better_can_be_said_and_another_folder_be_named(tmp_path):
    best = BestModels(top_k=1, mode="max", folder=tmp_path / "kept")
    train([0.5, 0.75, 0.25], best)
    assert steps_in(tmp_path / "kept") == [2]


def test_a_result_of_which_nobody_knows_what_is_better_is_refused():
    class Sized(Scripted):
        def validation_step(self, batch):
            return {"loss": super().validation_step(batch), "size": batch.mean()}

    trainer = make_trainer({"epochs": 1, "batch_size": 4}, callbacks=BestModels("size"))
    with raises_at(ArgumentError, "BestModels(mode=...)"):
        trainer.fit(Sized([0.5]), Numbers(4), Numbers(2))


def test_a_disk_that_is_full_is_a_warning(monkeypatch, caplog):
    best = BestModels(top_k=1)

    def fail(path=None):
        raise OSError(28, "No space left on device")

    trainer = make_trainer({"epochs": 1, "batch_size": 4}, callbacks=best)
    monkeypatch.setattr(trainer, "save_model", fail)
    assert trainer.fit(Scripted([0.5]), Numbers(4), Numbers(2)).finished
    assert "could not be saved to out/model/top/step-00000001" in caplog.text
    assert best.kept == []


@pytest.mark.parametrize("arguments", [{"top_k": 0}, {"top_k": True}, {"mode": "best"}])
def test_what_makes_no_sense_is_refused(arguments):
    with raises_at(ArgumentError, f"BestModels({next(iter(arguments))}=...)"):
        BestModels(**arguments)


def test_a_result_that_is_not_there_is_named():
    with raises_at(ModuleContractError, "BestModels(monitor=...)"):
        train([0.5], BestModels("accuracy"))
