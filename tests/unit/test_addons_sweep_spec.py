"""What a sweep searches, read from YAML: every mistake in one error, before the first trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accmt import Sweep
from accmt.errors import ArgumentError
from tests.raising import raises_at

SPACE = {"optim.lr": {"log_uniform": [1e-3, 1.0]}}


def read(**keys: Any) -> Any:
    return Sweep(**{"space": SPACE, "objective": "accuracy", "trials": 4, **keys}).spec


WRONG = [
    ({"space": {"optm.lr": [1, 2]}}, "write `optim.lr`"),
    ({"space": {"clip_grad": [1.0, 2.0]}}, "write `trainer.clip_grad`"),
    ({"space": {"trainer.model_path": ["a", "b"]}}, "remove `trainer.model_path`"),
    ({"space": {"script": [1, 2]}}, "script.hidden"),
    ({"space": {"optim.lr": {"log_uniform": [0, 1]}}}, "above 0"),
    ({"space": {"optim.lr": {"uniform": [1, 0]}}}, "the lower one first"),
    ({"space": {"epochs": {"int": [1.5, 3]}}}, "two whole numbers"),
    ({"space": {"optim.lr": {"log_uniform": [1e-3, 1], "step": 0.1}}}, "no step with a logarithmic range"),
    ({"space": {"batch_size": [16, 16]}}, "a list of different values"),
    ({"space": {"batch_size": 16}}, "a key with several values"),
    ({"space": {"optim.lr": {"uniform": [0, 1], "when": {"optim.typ": "SGD"}}}}, "move it above this one"),
    ({"space": {"optim.type": ["SGD", "AdamW"], "optim.lr": {"int": [1, 2], "when": {"optim.type": "sgd"}}}}, "`SGD`"),
    ({"space": None}, "got: nothing"),
    ({"objective": "reward"}, "`objective: {reward: max}` if higher is"),
    ({"objective": {"reward": "up"}}, "`min` or `max`"),
    ({"objective": ["accuracy", "val_loss"], "take": "best"}, "write `take: last`"),
    ({"objective": ["accuracy", "val_loss"], "pruner": "median"}, "no pruner with several objectives"),
    ({"trials": None}, "a limit: trials, max_steps or max_hours"),
    ({"sampler": "tpee"}, "write `tpe`"),
    ({"pruner": {"type": "percentile", "percentile": 200}}, "between 0 and 100"),
    ({"sampler": "grid"}, "a grid is finite"),
    ({"storage": "mysql://somewhere"}, "a PostgreSQL database"),
    ({"trails": 20}, "write `trials`"),
    ({"halving": {"steps": [300, 100]}}, "ascending steps"),
    ({"halving": {"steps": [100]}, "pruner": "median"}, "got: halving and pruner"),
    ({"halving": {"steps": [100]}, "objective": ["accuracy", "f1"]}, "one objective"),
    ({"population": {"members": 4}}, "write `population: {members: 8, every: 100, rounds: 5}`"),
    ({"population": {"members": 4, "every": 5, "rounds": 2, "replace": 2}}, "a fraction up to 0.5"),
    ({"space": {"script.x": [1, 2]}, "population": {"members": 4, "every": 5, "rounds": 2}}, "may change during a run"),
    ({"population": {"members": 3, "every": 5, "rounds": 2}}, "remove `trials`"),
    ({"name": "a b"}, "write `name: my-sweep`"),
    ({"space": None, "trials": [{"trainer.clip_grad": 1}, {"trainer.clip_grad": True}]}, "values of one kind"),
    ({"trials": [{"optim.lr": 1}]}, "`space` and a list of trials"),
]


def test_mistakes_are_named_with_what_to_write_instead():
    missed = []
    for keys, expected in WRONG:
        try:
            read(**keys)
        except ArgumentError as error:
            missed += [] if expected in str(error) else [f"{keys}: {error}"]
        else:
            missed.append(f"{keys}: no error")
    assert not missed, "\n\n".join(missed)


def test_a_file_names_all_its_errors_with_their_lines(tmp_path: Path):
    file = tmp_path / "sweep.yaml"
    file.write_text("space:\n  optm.lr: [1, 2]\n  batch_size: [16, 16]\nobjective: accuracy\ntrails: 3\n")
    with pytest.raises(ArgumentError) as raised:
        Sweep.from_yaml(file)
    message = str(raised.value)
    assert all(part in message for part in ("4 errors", "sweep.yaml:2", "sweep.yaml:3", "sweep.yaml:5"))
    with raises_at(ArgumentError, "sweep "):
        Sweep.from_yaml(tmp_path / "swep.yaml")
    file.write_text("space: [\n")
    with raises_at(ArgumentError, "sweep.yaml:2"):
        Sweep.from_yaml(file)


def test_numbers_are_read_as_people_write_them_and_flags_replace_keys(tmp_path: Path):
    file = tmp_path / "news.yaml"
    file.write_text("space: {optim.lr: {log_uniform: [1e-5, 1e-3]}}\nobjective: f1\ntrials: 1e1\nfolder: out/x\n")
    spec = Sweep.from_yaml(file, parallel=2).spec
    assert (spec.name, spec.trials, spec.parallel) == ("news", 10, 2)
    assert (spec.parameters[0].distribution.low, spec.parameters[0].distribution.high) == (1e-5, 1e-3)


def test_directions_of_losses_and_metrics_are_known():
    for name, maximizes in (("accuracy", True), ("val_loss", False), ("rmse", False), ("f1__en", True), ("r2", True)):
        assert read(objective=name).objectives[0].maximizes == maximizes, name
    assert read(objective={"reward": "max"}).objectives[0].maximizes
    assert read(objective={"reward": "maximize"}).objectives[0].maximizes
    assert not read(objective={"accuracy": "minimize"}).objectives[0].maximizes


def test_the_number_of_trials_of_a_grid_and_of_a_list_is_theirs():
    grid = {"batch_size": [8, 16, 32], "epochs": {"int": [1, 4]}}
    assert read(space=grid, sampler="grid", trials=None).trials == 12
    assert read(space=grid, sampler="grid", trials=5).trials == 5
    assert read(space=None, trials=[{"optim.lr": 0.1}, {"optim.lr": 0.2, "epochs": 2}]).trials == 2
