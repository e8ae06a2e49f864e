import pytest
import torch

from accmt.errors import HyperParameterError
from accmt.options import HyperParameters
from accmt.options.changes import Change, changed_arguments, compare, require_allowed
from tests.tables import each

WARM = {"type": "LinearWithWarmup", "warmup_ratio": 0.1}


class Halving(torch.optim.lr_scheduler.ExponentialLR):
    """A schedule of the user's own."""

    def __init__(self, optimizer, gamma=0.5):
        super().__init__(optimizer, gamma)


def of(**hps):
    """What `to_dict` gives for hyper-parameters."""
    return HyperParameters.from_config({"epochs": 3, "batch_size": 16, "optim": "AdamW", **hps}).to_dict()


def said(old, new, **options):
    return [str(change) for change in compare(old, new, **options)]


def adam(**arguments):
    return {"type": "AdamW", **arguments}


def test_equal_settings_have_no_changes():
    assert compare(of(scheduler=WARM), of(scheduler=dict(WARM))) == []


def test_a_change_says_key_old_value_new_value_and_what_becomes_of_it():
    changes = compare(of(optim=adam(lr=1e-3)), of(optim=adam(lr=5e-4)))
    assert changes == [Change("optim.lr", 0.001, 0.0005, "apply")]
    assert str(changes[0]) == "optim.lr: 0.001 -> 0.0005 (applied)"
    assert str(Change("seed", 1, None, "keep")) == "seed: 1 -> not set (not applied: the checkpoint's value stays)"


@each(
    ("old", "new", "line"),
    [
        ({}, {"epochs": 5}, "epochs: 3 -> 5 (applied)"),
        ({"max_steps": 100}, {}, "max_steps: 100 -> not set (applied)"),
        ({}, {"batch_size": [16, 32]}, "batch_size: 16 -> [16, 32] (applied)"),
        ({"batch_size": [16, 32]}, {"batch_size": 16}, "batch_size: [16, 32] -> 16 (applied)"),
        ({}, {"step_scheduler_per_epoch": True}, "step_scheduler_per_epoch: False -> True (rejected)"),
        ({}, {"optim": "SGD"}, "optim.type: AdamW -> SGD (rejected)"),
        ({}, {"optim": adam(weight_decay=0)}, "optim.weight_decay: 0.01 -> 0 (applied)"),
        ({}, {"optim": adam(fused=False)}, "optim.fused: not set -> False (applied)"),
        ({}, {"scheduler": "Constant"}, "scheduler.type: not set -> Constant (rejected)"),
        ({"scheduler": WARM}, {"scheduler": "LinearWithWarmup"}, "scheduler.warmup_ratio: 0.1 -> 0 (rejected)"),
    ],
)
def test_each_key_has_its_rule(old, new, line):
    assert said(of(**old), of(**new)) == [line]


@each(
    ("old", "new"),
    [
        ({}, {"optim": adam(lr=1e-3, betas=[0.9, 0.999], foreach=None)}),
        ({}, {"batch_size": [16, 16]}),
        ({}, {"batch_size": [16, 16, 16]}),
        ({"batch_size": [16, 32]}, {"batch_size": [16, 32, 32]}),
        ({}, {"optim": adam(weight_decay=0.01)}),
        ({"scheduler": "LinearWithWarmup"}, {"scheduler": {"type": "LinearWithWarmup", "num_warmup_steps": 0}}),
        ({"scheduler": "LinearLR"}, {"scheduler": {"type": "LinearLR", "total_iters": 5}}),
        ({}, {"max_steps": -1, "step_scheduler_per_epoch": False}),
    ],
)
def test_writing_a_default_is_no_change(old, new):
    assert compare(of(**old), of(**new)) == []
    assert compare(of(**new), of(**old)) == []


def test_a_key_that_the_checkpoint_did_not_know_counts_as_its_default():
    old = {key: value for key, value in of()["hps"].items() if key not in ("step_scheduler_per_epoch", "max_steps")}
    assert compare(old, of()) == []
    assert said(old, of(max_steps=7)) == ["max_steps: not set -> 7 (applied)"]


def test_a_key_of_another_version_is_applied_and_said():
    old = {"hps": {**of()["hps"], "warp": 9}}
    assert said(old, of()) == ["warp: 9 -> not set (applied)"]


def test_a_rate_given_to_transformers_adafactor_turns_its_own_off_too():
    lines = said(of(optim="Adafactor"), of(optim={"type": "Adafactor", "lr": 1e-3}))
    assert lines == ["optim.lr: not set -> 0.001 (applied)", "optim.relative_step: True -> False (applied)"]


def test_classes_compare_by_what_they_are_called():
    by_class = HyperParameters(3, 16, torch.optim.AdamW, {"lr": 1e-3}, Halving)
    assert compare(by_class.to_dict(), of(scheduler=f"{__name__}.Halving")) == []
    by_class = HyperParameters(3, 16, "AdamW", scheduler=Halving, scheduler_kwargs={"gamma": 0.9}).to_dict()
    assert said(by_class, of(scheduler=Halving)) == ["scheduler.gamma: 0.9 -> 0.5 (rejected)"]


def test_a_class_that_only_the_checkpoint_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "runs_when_imported.py").write_text("raise SystemExit('code of the checkpoint ran')")
    monkeypatch.syspath_prepend(tmp_path)
    old = of()
    old["hps"]["optim"] = {"type": "runs_when_imported.Optimizer"}
    assert said(old, of()) == ["optim.type: runs_when_imported.Optimizer -> AdamW (rejected)"]


def test_a_reset_of_the_optimizer_allows_everything():
    old, new = of(), of(optim={"type": "SGD", "momentum": 0.9}, scheduler=WARM, step_scheduler_per_epoch=True)
    assert {change.rule for change in compare(old, new)} == {"apply", "reject"}
    changes = compare(old, new, resets_optimizer=True)
    assert [change.key for change in changes] == [
        "step_scheduler_per_epoch",
        "optim.type",
        "optim.momentum",
        "scheduler.type",
        "scheduler.warmup_ratio",
    ]
    assert {change.rule for change in changes} == {"apply"}
    require_allowed(changes, "hps/news.yaml")


def test_all_rejected_changes_are_reported_at_once_with_what_to_do():
    changes = compare(of(scheduler=WARM), of(epochs=5, optim="SGD", scheduler={**WARM, "warmup_ratio": 0.2}))
    with pytest.raises(HyperParameterError) as caught:
        require_allowed(changes, "hps/news.yaml")
    assert str(caught.value) == (
        "hps/news.yaml\n"
        "  got: changed since the checkpoint: optim.type: AdamW -> SGD, scheduler.warmup_ratio: 0.1 -> 0.2\n"
        "  expected: the checkpoint's values, which match the saved optimizer and scheduler state\n"
        "  do: restore the old values, start a new run with `resume=False`, or reset optimizer and scheduler: "
        'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
    )


def test_the_optimizers_arguments_are_handed_on_by_their_own_names():
    changes = compare(of(), of(epochs=4, optim=adam(lr=0.1, eps=1e-6)))
    assert changed_arguments(changes) == {"lr": (0.001, 0.1), "eps": (1e-8, 1e-6)}
    assert "type" not in changed_arguments(compare(of(), of(optim="SGD")))


def test_what_changed_in_a_section_is_said_key_by_key():
    old = of(model={"path": "out/base", "type": "AutoModel", "lora": {"r": 8, "targets": ["q"]}}, sft="a.jsonl")
    new = of(model={"path": "out/base", "lora": {"r": 16, "targets": ["q"]}}, sft={"data": "a.jsonl", "merge": True})
    assert set(said(old, new)) == {
        "model.type: AutoModel -> not set (applied)",
        "model.lora.r: 8 -> 16 (applied)",
        "sft.merge: not set -> True (applied)",
    }
    assert said(of(model="out/base"), of(model={"path": "out/base"})) == []
    assert said(of(), of(model="out/base")) == ["model.path: not set -> out/base (applied)"]
