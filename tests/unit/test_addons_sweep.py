"""Sweeps whose trials are functions in this process; `tests/faults/test_sweeps.py` kills the real ones."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy.exc import OperationalError
from torch.utils.data import DataLoader

from accmt import Callback, LambdaCallback, Sweep, Trainer, read_files
from accmt.addons.fork.lineage import find_parent
from accmt.addons.sweep.results import LiveTable, write_table
from accmt.addons.sweep.spec import grid_of
from accmt.addons.sweep.study import JOURNAL_FILE, SweepStudy, perturb
from accmt.addons.sweep.worker import share_of
from accmt.cli.main import main
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import HPS, Linear, make_points

pytestmark = pytest.mark.usefixtures("in_folder")
SPACE = {"optim.lr": {"log_uniform": [1e-3, 0.5]}, "trainer.clip_grad": [1.0, 5.0]}


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(**keys: Any) -> Sweep:
    return Sweep(**{"space": SPACE, "objective": "val_loss", "trials": 4, "name": "toy", **keys})


def trainer(**arguments: Any) -> Trainer:
    hps = {**HPS, "epochs": 2}
    return Trainer(hps, "out/model", **{"verbose": False, "evaluate_every_n_steps": 4, "seed": 1, **arguments})


def train(**arguments: Any) -> None:
    trainer(**arguments).fit(Linear(), make_points(16), make_points(8))


def read(sweep: Sweep) -> list[Any]:
    study = SweepStudy(sweep.spec)
    return [(one.params, one.state, one.values, one.intermediate_values) for one in study.trials()]


def test_trials_get_their_values_and_folders_and_the_best_one_is_ready_to_use() -> None:
    space = {**SPACE, "script.hidden": [4, 8], "epochs": 1}
    lrs = []

    def run(hidden: int) -> None:
        own = trainer()
        lrs.append((own.hps.optim_kwargs["lr"], own.settings.optimization.clip_grad, hidden, own.hps.epochs))
        own.fit(Linear(), make_points(16), make_points(8))

    sweep = make(space=space)
    result = sweep.run(run)
    of_trials = [
        tuple(one.values[key] for key in ("optim.lr", "trainer.clip_grad", "script.hidden", "epochs"))
        for one in result.trials
    ]
    assert lrs == of_trials
    assert len({lr for lr, *_ in lrs}) == 4
    best = min(result.trials, key=lambda one: one.objectives["val_loss"])
    assert result.is_finished
    assert result.best == best
    assert best.state == "complete"
    assert best.objectives["val_loss"] == min(SweepStudy(sweep.spec).trial(best.number).intermediate_values.values())
    assert (sweep.spec.folder / "best").resolve() == best.folder
    again = Trainer(best.folder / "hps.yaml", "out/again")
    assert again.hps.optim_kwargs["lr"] == best.values["optim.lr"]
    assert load_file(best.model / "model.safetensors").keys() == {"weight", "bias"}
    table = write_table(result)
    assert table.splitlines()[1].split()[:3] == [str(best.number), "complete", f"{best.objectives['val_loss']:.5g}"]
    assert str(best.folder / "hps.yaml") in table
    page = sweep.report().read_text()
    for title in ("Curves", "History", "Parallel coordinates", "Importance of parameters", "Slices", "Trials"):
        assert f"<h2>{title}</h2>" in page, title
    assert not re.findall(r'<(?:script|link)[^>]*(?:src|href)="http', page)  # it needs no network
    lrs.clear()
    assert sweep.run(run).trials == result.trials
    assert lrs == []  # nothing is run again


def test_the_suggestions_are_those_of_the_seed():
    drawn = {}
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        sweep = make(name=name, seed=seed, trials=3, sampler={"type": "tpe", "n_startup_trials": 2})
        sweep.run(train)
        drawn[name] = read(sweep)
    assert drawn["one"] == drawn["two"] != drawn["other"]


def run_to_the_end(sweep: Sweep, places: list[int]) -> int:
    """Run a sweep that is interrupted after these steps of its trials, and return how often it was started."""

    class Interrupting(Callback):
        def on_update_end(self) -> None:
            if places and self.state.global_step == places[0]:
                del places[0]
                raise KeyboardInterrupt

    for start in range(1, 30):
        try:
            sweep.run(lambda: train(callbacks=Interrupting(), checkpoint_every=1))
        except KeyboardInterrupt:
            continue
        return start
    raise AssertionError


@pytest.mark.parametrize("sampler", ["tpe", "qmc"])
def test_a_sweep_that_was_interrupted_anywhere_ends_like_one_that_was_not(sampler: str):
    kinds = {"sampler": {"type": sampler}, "pruner": {"type": "median", "n_startup_trials": 1}, "trials": 4}
    unbroken = make(name="unbroken", **kinds)
    unbroken.run(train)
    broken = make(name="broken", **kinds)
    assert run_to_the_end(broken, [3, 9, 14, 2]) == 5
    assert read(broken) == read(unbroken)
    weights = [load_file(one.result().best.model / "model.safetensors") for one in (unbroken, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_pruned_trials_end_at_the_evaluation_and_keep_their_best_value():
    sweep = make(trials=6, pruner={"type": "median", "n_startup_trials": 1})
    result = sweep.run(train)
    pruned = [one for one in result.trials if one.state == "pruned"]
    assert pruned
    for one in pruned:
        reports = SweepStudy(sweep.spec).trial(one.number).intermediate_values
        assert one.steps == max(reports) < 16
        assert one.objectives["val_loss"] == min(reports.values())
        assert one.model is not None
        assert (one.model / "model.safetensors").exists()


def test_a_decision_to_prune_is_made_once():
    sweep = make(pruner={"type": "halving", "min_resource": 4, "reduction_factor": 2})
    study = SweepStudy(sweep.spec)
    study.begin()
    for value in (3.0, 1.0):
        number = study.create().number
        assert not study.report(number, 4, value)
    last = study.create().number
    assert study.report(last, 4, 9.0)  # behind both at the first rung
    study.finish(0, {"state": "failed", "error": ""})
    study.finish(1, {"state": "failed", "error": ""})
    assert SweepStudy(sweep.spec).report(last, 4, 9.0)  # as a resumed trial does
    assert [list(one.system_attrs) for one in study.trials()] == [["completed_rung_0"]] * 3


@pytest.mark.parametrize(
    ("sampler", "space", "trials", "expected"),
    [
        ("grid", {"optim.lr": [0.1, 0.2], "batch_size": [2, 4]}, None, {(0.1, 2), (0.1, 4), (0.2, 2), (0.2, 4)}),
        ("tpe", None, [{"optim.lr": 0.1}, {"optim.lr": 0.2, "batch_size": 4}], {(0.1, None), (0.2, 4)}),
    ],
)
def test_a_grid_and_a_list(sampler: str, space: Any, trials: Any, expected: set[Any]):
    result = make(sampler=sampler, space=space, trials=trials).run(train)
    assert {(one.values["optim.lr"], one.values.get("batch_size")) for one in result.trials} == expected
    assert [one.state for one in result.trials] == ["complete"] * len(expected)


def test_conditions_and_choices_that_are_lists():
    space = {
        "optim.type": ["SGD", "AdamW"],
        "optim.momentum": {"uniform": [0.1, 0.9], "when": {"optim.type": "SGD"}},
        "optim.betas": {"choice": [[0.9, 0.99], [0.8, 0.9]], "when": {"optim.type": ["AdamW"]}},
    }
    sweep = make(space=space, trials=6, sampler="random")
    result = sweep.run(train)
    assert {one.state for one in result.trials} == {"complete"}
    for one in result.trials:
        assert ("optim.momentum" in one.values) == (one.values["optim.type"] == "SGD")
        assert one.values.get("optim.betas", [0.9, 0.99]) in ([0.9, 0.99], [0.8, 0.9])
    assert {one.values["optim.type"] for one in result.trials} == {"SGD", "AdamW"}


def test_several_objectives_give_the_trials_that_no_other_one_beats():
    class Size(Callback):
        def on_evaluation_end(self, metrics: dict[str, float]) -> None:
            metrics["size"] = 1 / self.trainer.hps.optim_kwargs["lr"]

    result = make(objective={"val_loss": "min", "size": "min"}, trials=5).run(lambda: train(callbacks=Size()))
    best = {one.number for one in result.pareto}
    for one in result.trials:
        beaten = [
            other
            for other in result.trials
            if all(other.objectives[name] < one.objectives[name] for name in ("val_loss", "size"))
        ]
        assert (one.number in best) == (not beaten)


def test_budgets_in_steps_and_hours():
    halving = make(name="halving", trials=None, max_steps=24, halving={"steps": [4], "keep": 8}).run(train)
    assert [one.steps for one in halving.trials] == [4] * 6  # steps of paused trials count, too
    assert len(make(name="steps", trials=None, max_steps=40).run(train).trials) == 3  # of 16 steps each
    assert len(make(name="hours", trials=None, max_hours=1e-9).run(train).trials) == 1


def test_successive_halving_lets_the_best_trials_continue_as_the_same_runs():
    whole = make(name="whole", trials=6, sampler="random")
    whole.run(train)
    kinds = {"trials": 6, "sampler": "random", "halving": {"steps": [4, 8], "keep": 2}}
    halved, broken = make(name="halved", **kinds), make(name="broken", **kinds)
    result = halved.run(train)
    assert run_to_the_end(broken, [3, 7, 6, 13]) == 5
    assert sorted(one.steps for one in result.trials) == [4, 4, 4, 8, 16, 16]  # one in two continues, as they come
    assert sorted(one.state for one in result.trials) == ["complete"] * 2 + ["pruned"] * 4
    assert result.best is not None
    assert read(broken) == read(halved)
    reports = [{one.number: one.intermediate_values for one in SweepStudy(s.spec).trials()} for s in (whole, halved)]
    for number, values in reports[1].items():
        assert values == {step: reports[0][number][step] for step in values}
    firsts = {number: values[4] for number, values in reports[0].items()}
    assert {number for number, values in reports[1].items() if 8 in values} == {0, 2, 4}
    assert all(min(firsts[i], firsts[i + 1]) == firsts[i] for i in (0, 2, 4))


def test_the_worst_members_of_a_population_are_replaced_by_forks_of_the_best():
    kinds = {
        "space": {"optim.lr": {"log_uniform": [1e-3, 0.5]}, "trainer.clip_grad": [1.0, 2.0, 5.0]},
        "trials": None,
        "population": {"members": 4, "every": 4, "rounds": 3},
    }
    population, broken = make(name="population", **kinds), make(name="broken", **kinds)
    result = population.run(train)
    forks = [one for one in result.trials if one.parent is not None]
    assert len(result.trials) == 7
    assert len(forks) == 3
    assert sorted(one.state for one in result.trials) == ["complete"] * 4 + ["pruned"] * 3
    study = SweepStudy(population.spec)
    for one in forks:
        parent = result.trials[one.parent]
        begin = min(study.trial(one.number).intermediate_values) - 4  # it begins where its parent was
        assert begin in study.trial(parent.number).intermediate_values
        ratio = one.values["optim.lr"] / parent.values["optim.lr"]
        assert ratio == pytest.approx(0.8) or ratio == pytest.approx(1.2) or one.values["optim.lr"] in (1e-3, 0.5)
        logs = population.spec.folder / "logs" / "model"
        assert find_parent(logs / f"population-{one.number:04d}") == logs / f"population-{parent.number:04d}"
    places = [3, 6, 5, 11, 15]
    assert run_to_the_end(broken, places) >= 5
    assert read(broken) == read(population)
    assert [one.parent for one in broken.result().trials] == [one.parent for one in result.trials]


def test_no_worker_touches_a_population_while_another_one_changes_it(monkeypatch: pytest.MonkeyPatch):
    sweep = make(trials=None, space={"optim.lr": [0.01, 0.1]}, population={"members": 2, "every": 4, "rounds": 1})
    fork, evolve, has_paused = Sweep._fork, SweepStudy.evolve, []

    def fork_slowly(self: Sweep, parent: int, child: int) -> None:
        study = SweepStudy(sweep.spec)
        assert not any(study.has_to_run(trial) for trial in study.trials())  # the checkpoint is not there yet
        fork(self, parent, child)

    def pause_after(self: SweepStudy, *given: Any) -> bool:
        """Say once that not all have paused, as if the last one paused just after that."""
        if not has_paused and len(self.trials()) == 2 and all(self.paused(trial) for trial in self.trials()):
            has_paused.append(True)
            return False
        return evolve(self, *given)

    monkeypatch.setattr(Sweep, "_fork", fork_slowly)
    monkeypatch.setattr(SweepStudy, "evolve", pause_after)
    assert sorted(one.state for one in sweep.run(train).trials) == ["complete", "complete", "pruned"]
    assert has_paused


def test_values_of_forks_change_within_the_search_space():
    space = {"optim.weight_decay": {"uniform": [0.0, 0.3], "step": 0.1}, "batch_size": {"int": [1, 8]}}
    for one in make(space=space).spec.parameters:
        for value in grid_of(one):
            near = {perturb(one, value, random.Random(seed)) for seed in range(20)}
            assert near - {value}, (one.key, value)
            assert all(one.distribution._contains(each) for each in [value, *near])


@pytest.mark.parametrize("method", ["create", "finish"])
def test_an_outage_of_the_database_at_any_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch, method: str):
    once, own = [OperationalError("", {}, ConnectionError())], getattr(SweepStudy, method)

    def fail_once(self: SweepStudy, *given: Any) -> Any:
        if once:
            raise once.pop()
        return own(self, *given)

    monkeypatch.setattr(SweepStudy, method, fail_once)
    result = make(trials=2).run(train)
    assert [one.state for one in result.trials] == ["complete"] * 2
    assert sorted(path.name for path in result.trials[0].folder.parent.iterdir()) == ["0000", "0001"]


def failing(error: Exception, at: set[int]) -> Callable[[], None]:
    number = iter(range(100))

    def run() -> None:
        if next(number) in at:
            raise error
        train()

    return run


def test_failed_trials_do_not_end_a_sweep_unless_several_in_a_row_fail():
    result = make().run(failing(RuntimeError("out of luck"), {1, 2}))
    assert [one.state for one in result.trials] == ["complete", "failed", "failed", "complete"]
    assert result.trials[1].error == "RuntimeError: out of luck"
    assert result.is_finished
    stopped = make(name="all", trials=9).run(failing(RuntimeError("out of luck"), set(range(9))))
    assert [one.state for one in stopped.trials] == ["failed"] * 3
    assert stopped.why is not None
    assert stopped.why.count("out of luck") == 1
    assert not stopped.is_finished
    wrong = [{"epochs": 2}, {"trainer.clip_grad": -1.0}, {"epochs": 1}]
    some = make(name="some", space=None, trials=wrong).run(train)  # the first one shows that not all would fail
    assert [one.state for one in some.trials] == ["complete", "failed", "complete"]
    repaired = make(name="all", trials=2, space={"optim.lr": [0.1, 0.2]}).run(
        train
    )  # nothing was learned: it may change
    assert [one.state for one in repaired.trials] == ["complete"] * 2


class NaN(Linear):
    def validation_step(self, batch: Any) -> torch.Tensor:
        return self.step(batch) * math.nan


def test_objectives_that_are_not_finite_are_bad_trials_not_failures():
    result = make(trials=2).run(lambda: trainer().fit(NaN(), make_points(16), make_points(8)))
    assert [one.state for one in result.trials] == ["diverged"] * 2
    assert result.best is None
    assert {one.state for one in SweepStudy(make().spec).trials()} == {optuna.trial.TrialState.PRUNED}

    def diverge() -> None:
        trainer(clip_grad=None).fit(Linear(), make_points(16), make_points(8))

    space = {"optim.lr": [1e30, 0.1]}
    states = {
        one.values["optim.lr"]: one.state
        for one in make(name="lr", space=space, sampler="grid", trials=None).run(diverge).trials
    }
    assert states == {1e30: "diverged", 0.1: "complete"}


class Own(Linear):
    def get_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def sets_it_itself() -> None:
    own = trainer()
    own.hps.set_learning_rate(0.1)
    own.fit(Linear(), make_points(16), make_points(8))


def passes_loader() -> None:
    trainer().fit(Linear(), DataLoader(make_points(16), 4), make_points(8))


WRONG: list[tuple[dict[str, Any], Callable[[], Any], str]] = [
    ({}, lambda: trainer().fit(Own(), make_points(16), make_points(8)), "Own.get_optimizer: the script sets it itself"),
    ({}, sets_it_itself, "0.1: the script sets it itself"),
    ({"space": {"batch_size": [2, 16]}}, passes_loader, "a DataLoader with batch_size=4: the script sets it itself"),
    ({}, lambda: None, "without a call of Trainer.fit"),
    ({}, lambda: trainer().fit(Linear(), make_points(16)), "pass validation data to fit"),
    ({"objective": {"val_los": "min"}}, train, "write `objective: val_loss`"),
    ({"objective": {"reward": "max"}}, train, "self.log('reward', value)"),
    ({"space": {"trainer.clip_grad": [-1.0, -2.0]}}, train, "clip_grad"),
    ({}, lambda: (train(), train()), "a second call of `fit`"),
    ({}, lambda: train(checkpointer=object()), "checkpointer"),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_what_would_make_every_trial_fail_ends_the_sweep_at_the_first(index: int):
    keys, function, expected = WRONG[index]
    result = make(**keys).run(function)
    assert [one.state for one in result.trials] == ["failed"]
    assert result.why is not None
    assert expected in result.why


@pytest.mark.parametrize("is_in_fit", [True, False])
def test_a_file_that_one_trial_lacks_does_not_end_a_sweep(is_in_fit: bool):
    Path("rows.jsonl").write_text('{"x": 1}\n')

    def run(file: str) -> None:
        if is_in_fit:
            train(callbacks=LambdaCallback(on_fit_start=lambda: read_files(file)))
        else:
            read_files(file)
            train()

    trials = [{"script.file": "missing.jsonl"}, {"script.file": "rows.jsonl"}]
    result = make(space=None, trials=trials).run(run)
    assert [one.state for one in result.trials] == ["failed", "complete"]


def test_a_study_of_another_search_space_or_one_that_is_damaged_is_rejected(tmp_path: Path):
    make(trials=1).run(train)
    for keys, got in (
        ({"space": {**SPACE, "optim.lr": {"uniform": [0.1, 0.2]}}}, "space: optim.lr differs"),
        ({"seed": 5}, "seed: 0 -> 5"),
        ({"objective": "train_loss"}, "train_loss is new"),
    ):
        with raises_at(ArgumentError, "the study of sweep 'toy'", got):
            make(trials=2, **keys).run(train)
    journal = tmp_path / "out" / "toy" / JOURNAL_FILE
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "stu')  # a write that a full disk has cut off
    assert len(make(trials=2).run(train).trials) == 2
    with journal.open("ab") as file:
        file.write(b"no journal\n{}\n")
    with raises_at(ArgumentError, "the study "):
        make(trials=3).run(train)
    journal.unlink()
    journal.mkdir()
    with raises_at(ArgumentError, "the study "):
        make(trials=3).run(train)


def test_cores_and_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as changed:
        changed.delenv("OMP_NUM_THREADS", raising=False)
        changed.setattr("os.sched_getaffinity", lambda _: set(range(8)))
        changed.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert share_of(1, 2) == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "6,7"}
        assert share_of(5, 8)["CUDA_VISIBLE_DEVICES"] == "5"
        assert share_of(0, 1) == {}
        changed.setenv("OMP_NUM_THREADS", "3")
        assert "OMP_NUM_THREADS" not in share_of(0, 2)


def test_the_command_needs_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"space": SPACE, "objective": "val_loss", "trials": 1}))
    assert main(["sweep", str(file)]) == 2
    assert "-- python train.py" in capsys.readouterr().err
    assert main(["sweep", str(file), "--", "no-such-program"]) == 2
    assert "No such file" in capsys.readouterr().err


FAILING = """
from accmt import Trainer
from tests.toys import HPS, Linear, make_points

class Failing(Linear):
    def training_step(self, batch):
        raise RuntimeError("out of luck")

Trainer(HPS, "model", verbose=False).fit(Failing(), make_points(), make_points())
"""


def test_a_sweep_whose_trials_all_failed_has_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sweep.yaml").write_text("space: {optim.lr: [0.1, 0.2]}\nobjective: val_loss\ntrials: 1\n")
    Path("train.py").write_text(FAILING)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        assert main(["sweep", "sweep.yaml", "--", sys.executable, "train.py"]) == 1
    assert "no trial ended with a value" in capsys.readouterr().out


def test_the_table_in_a_terminal_is_drawn_again_in_its_place(capsys: pytest.CaptureFixture[str]):
    view = LiveTable()
    make(trials=2).run(train, view=view)
    view.show(make().result())
    shown = capsys.readouterr().err
    assert "2 complete; about" in shown
    assert shown.count("\x1b[4A\x1b[J") == shown.count("val_loss  step") - 1  # each but the last is removed
