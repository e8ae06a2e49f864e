"""`accmt evaluate`: evaluates the checkpoints of a run in another process, as the run itself would have done."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import accmt.addons.evaluate_beside.evaluations as evaluations
import accmt.addons.evaluate_beside.published as published
from accmt import EMA, AcceleratorModule, Accuracy, BestModels, Callback, Trainer
from accmt.addons.evaluate_beside.program import REQUEST_VARIABLE, Request
from accmt.addons.report import read_run
from accmt.addons.run_folders import find_run_folders
from accmt.addons.trackers.tensorboard import TensorBoard
from accmt.cli.main import main
from accmt.errors import ArgumentError
from accmt.files import dumps
from accmt.registry import FIT_VARIABLE
from accmt.tracking import read_history
from accmt.tracking.history import EVALUATIONS_FOLDER
from tests.launching import ROOT
from tests.raising import raises_at

HPS = {"epochs": 3, "batch_size": 8, "optim": {"type": "AdamW", "lr": 0.05}}
OFF = {"evaluate_every_n_steps": "never", "model_saving": None}
STEPS = [2, 4, 6, 8, 10, 12]


class Noisy(AcceleratorModule):
    """Has what an evaluation has to restore: averages, buffers, dropout and random numbers."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        self.act = act

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch):
        self.act()
        scores = self.model(batch[0] + 0.1 * torch.rand_like(batch[0]))
        return {"loss": nn.functional.cross_entropy(scores, batch[1]), "accuracy": (scores, batch[1])}


class Draw(Callback):
    def on_fit_start(self):
        self.began_at = self.state.global_step

    def on_evaluation_end(self, metrics):
        assert self.began_at <= self.state.global_step
        metrics["draw"] = torch.rand(()).item()


def make_data(count: int) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


VAL_DATA = make_data(13)


def make_trainer(name: str, **arguments: Any) -> Trainer:
    often = {"checkpoint_every": "2 steps", "checkpoint_options": {"max_checkpoints": 99}}
    plain = {
        "metrics": {"accuracy": Accuracy(), "draw": "max"},
        "callbacks": [EMA(), Draw()],
        "run_name": "run",
        "seed": 0,
    }
    return Trainer(HPS, f"out/{name}", **{**OFF, **often, **plain, "verbose": False, **arguments})


def train(name: str, **arguments: Any) -> Trainer:
    trainer = make_trainer(name, **arguments)
    trainer.fit(Noisy(), make_data(32), make_data(13))
    return trainer


def evaluate(
    name: str,
    module: AcceleratorModule | None = None,
    *,
    rule: str | None = None,
    code: int = 0,
    val_data: Any = VAL_DATA,
    model: str | None = None,
    **arguments: Any,
) -> None:
    """Evaluate in this process what `accmt evaluate` evaluates in the program that it starts."""
    folder = Path.cwd()
    request = Request(
        run_folder=str(folder / "logs" / name / "run"),
        run_name="run",
        track_name=name,
        checkpoints=str(folder / "out" / f"checkpoint-{name}"),
        run_model_path=str(folder / "out" / name),
        model_path=str(folder / "out" / name / "evaluated"),
        save_best=rule,
        watches=True,
        wait_s=0.01,
        model=None if model is None else str(folder / model),
        seed=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FIT_VARIABLE, "evaluate")
        patch.setenv(REQUEST_VARIABLE, dumps(asdict(request)))
        with pytest.raises(SystemExit) as ended:
            make_trainer(name, **arguments).fit(module or Noisy(), make_data(32), val_data)
    assert ended.value.code == code


def evaluated(name: str) -> list[tuple[int, dict[str, float]]]:
    rows = read_history(Path("logs", name, "run"))
    return [(row["step"], row["values"]) for row in rows if "val_loss" in row.get("values", {})]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_and_best_model_are_those_of_evaluations_in_the_run(project: Path, capsys: pytest.CaptureFixture) -> None:
    plain = train("plain", evaluate_every_n_steps=2, model_saving="best_draw")
    trainer = train("off", log_with="tensorboard")
    assert evaluated("off") == []
    before = {path: path.read_bytes() for path in trainer.log_dir.iterdir() if path.is_file()}
    evaluate("off", rule="best_draw", log_with="tensorboard")
    inside = evaluated("plain")
    assert evaluated("off") == inside
    assert [step for step, _ in inside] == STEPS
    assert max(inside, key=lambda pair: pair[1]["draw"])[0] not in (STEPS[0], STEPS[-1])
    assert "6 checkpoints evaluated" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}  # the run has its files for itself
    saved, best = (load_file(Path(place, "model.safetensors")) for place in ("out/plain", "out/off/evaluated"))
    assert all(torch.equal(saved[name], best[name]) for name in saved)
    record = read_run(trainer.log_dir)
    assert record.evaluations == inside
    assert record.status == "finished"
    assert find_run_folders(Path("logs/off")) == [trainer.log_dir]
    assert sorted(path.name for path in Path("out").iterdir()) == ["checkpoint-off", "checkpoint-plain", "off", "plain"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(trainer.log_dir / EVALUATIONS_FOLDER)).Reload().Scalars("val_loss")
    assert [point.step for point in points] == STEPS
    status = json.loads(Path("out/off/evaluated/status.json").read_text())
    assert status["best"] == dict(plain.state.best)
    evaluate("off", rule="best_draw", log_with="tensorboard")
    assert evaluated("off") == inside
    assert "0 checkpoints evaluated" in capsys.readouterr().out


def test_evaluations_at_the_end_of_an_epoch_are_those_before_it_is_counted(project: Path) -> None:
    train("plain", evaluate_every_n_steps=None, model_saving=None)
    train("off", checkpoint_every="epoch")
    evaluate("off")
    assert evaluated("off") == evaluated("plain") != []


def test_an_evaluation_that_a_kill_interrupted_is_repeated_without_double_rows(project: Path) -> None:
    train("off")
    record = evaluations._Evaluations._record

    def record_until(self: Any, found: Any, *rest: Any) -> None:
        if found.step == 8:
            raise OSError("killed")
        record(self, found, *rest)

    with pytest.MonkeyPatch.context() as patch:  # a kill records nothing of this checkpoint
        patch.setattr(evaluations._Evaluations, "_record", record_until)
        with pytest.raises(OSError, match="killed"):
            evaluate("off", rule="best_valid_loss")
    assert [step for step, _ in evaluated("off")] == STEPS[:4]
    evaluate("off", rule="best_valid_loss")
    assert [step for step, _ in evaluated("off")] == STEPS
    lines = Path("logs/off/run", EVALUATIONS_FOLDER, "history.jsonl").read_text().splitlines()
    assert sum('"val_loss"' in line for line in lines) == 7


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_evaluated_from_its_links(
    project: Path, capsys: pytest.CaptureFixture
) -> None:
    train("off")
    evaluate("off", Noisy(lambda: shutil.rmtree("out/checkpoint-off", ignore_errors=True)))
    assert [step for step, _ in evaluated("off")] == STEPS[:1]
    assert not Path("out/checkpoint-off.evaluated").exists()


def test_a_checkpoint_that_is_deleted_before_it_is_linked_is_skipped_with_a_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train("off")
    link = published._link

    def delete_first(source: Path, target: Path, names: Any) -> None:
        if source.name.endswith("4"):
            shutil.rmtree(source)
        link(source, target, names)

    monkeypatch.setattr(published, "_link", delete_first)
    evaluate("off")
    assert [step for step, _ in evaluated("off")] == [2, 6, 8, 10, 12]
    assert "step 4 is not evaluated: the run has deleted it meanwhile" in caplog.text


def test_a_damaged_checkpoint_is_skipped_with_a_line(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    train("off")
    weights = next(Path("out/checkpoint-off/step-00000006").glob("**/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    evaluate("off")
    assert [step for step, _ in evaluated("off")] == [step for step in STEPS if step != 6]
    assert "step 6 is not evaluated" in caplog.text


def test_rows_of_steps_that_the_run_has_made_again_are_superseded(project: Path) -> None:
    train("off")
    evaluate("off", rule="best_valid_loss")
    first = evaluated("off")
    train("off", resume="out/checkpoint-off/step-00000008", callbacks=[EMA(0.5), Draw()])
    evaluate("off", rule="best_valid_loss", callbacks=[EMA(0.5), Draw()])
    second = evaluated("off")
    assert [step for step, _ in second] == STEPS
    assert second[:4] == first[:4]
    assert all(now != before for now, before in zip(second[4:], first[4:], strict=True))


def test_rows_wait_for_the_end_of_the_run_if_only_one_process_can_log_to_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train("off", log_with="tensorboard")
    monkeypatch.setattr(TensorBoard, "is_exclusive", True)
    monkeypatch.setattr(evaluations, "sync_run", lambda _: [])
    evaluate("off", log_with="tensorboard")
    place = trainer.log_dir / EVALUATIONS_FOLDER
    assert not list(place.glob("events.*"))
    monkeypatch.undo()
    monkeypatch.chdir(project)
    assert main(["sync", str(place)]) == 0
    assert len(list(place.glob("events.*"))) == 1


def test_mlflow_gets_the_rows_in_the_run_of_the_training(project: Path) -> None:
    import mlflow

    trainer = train("off", log_with="mlflow")
    evaluate("off", log_with="mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{project}/logs/mlflow.db")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "val_loss")] == STEPS
    assert len(client.get_metric_history(run.info.run_id, "train_loss")) == 12
    assert trainer.state.global_step == 12


def test_after_ctrl_c_the_same_command_continues(project: Path, capsys: pytest.CaptureFixture) -> None:
    train("off")
    seen: list[int] = []

    def interrupt() -> None:
        seen.append(1)
        if len(seen) == 6:  # in the third checkpoint: each has two batches
            raise KeyboardInterrupt

    evaluate("off", Noisy(interrupt), code=130)
    assert "stopped; the same command continues" in capsys.readouterr().out
    assert [step for step, _ in evaluated("off")] == STEPS[:2]
    evaluate("off")
    assert [step for step, _ in evaluated("off")] == STEPS


def test_a_program_without_validation_data_is_an_error(project: Path) -> None:
    train("off")
    with raises_at(ArgumentError, "evaluation of "):
        evaluate("off", val_data=None)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ({"model_saving": "best_valid_loss"}, "model_saving='best_valid_loss'"),
        ({"patience": 3}, "patience"),
        ({"checkpoint_every": "1 eval"}, "checkpoint_every"),
        ({"eval_when_start": True}, "eval_when_start=True"),
    ],
)
def test_a_run_that_never_evaluates_rejects_what_waits_for_evaluations(arguments: dict[str, Any], got: str) -> None:
    with raises_at(ArgumentError, 'Trainer(evaluate_every_n_steps="never")', got):
        Trainer(HPS, "out/never", **{**OFF, **arguments})


def test_a_run_that_never_evaluates_rejects_a_scheduler_that_monitors_a_result() -> None:
    with raises_at(ArgumentError, 'Trainer(evaluate_every_n_steps="never")'):
        Trainer({**HPS, "scheduler": {"type": "ReduceLROnPlateau"}}, "out/never", **OFF)


# ---- Models


class SaveOften(Callback):
    """Saves a model in a folder of its own after every second step."""

    def on_update_end(self):
        step = self.state.global_step
        if step % 2 == 0:
            self.trainer.save_model(f"{self.trainer.settings.model_folder}/step-{step}")


NO_CHECKPOINTS = {"checkpoint_every": None, "callbacks": [Draw(), SaveOften()]}


def rows_beside(name: str) -> list[tuple[int, dict[str, float]]]:
    lines = Path("logs", name, "run", EVALUATIONS_FOLDER, "history.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return [(row["step"], row["values"]) for row in rows if "val_loss" in row.get("values", {})]


def test_models_without_checkpoints_have_the_rows_of_evaluations_in_the_run(
    project: Path, capsys: pytest.CaptureFixture
) -> None:
    train("plain", evaluate_every_n_steps=2, model_saving="best_draw", callbacks=[Draw()])
    train("off", model_saving="last", **NO_CHECKPOINTS)
    evaluate("off", rule="best_draw", **NO_CHECKPOINTS)
    assert evaluated("off") == evaluated("plain")
    assert "0 checkpoints and 6 models evaluated" in capsys.readouterr().out
    saved, best = (load_file(Path(place, "model.safetensors")) for place in ("out/plain", "out/off/evaluated"))
    assert all(torch.equal(saved[name], best[name]) for name in saved)
    assert not Path("out/off.evaluated").exists()
    evaluate("off", rule="best_draw", **NO_CHECKPOINTS)
    assert "0 checkpoints evaluated" in capsys.readouterr().out


def test_models_that_the_run_has_chosen_by_its_averaged_weights_have_the_rows_of_the_run(project: Path) -> None:
    class Count(Callback):
        def on_evaluation_end(self, metrics):
            metrics["evaluations"], metrics["batches"] = self.state.evaluations_done, self.state.eval_global_step

    arguments = {"checkpoint_every": None, "evaluate_every_n_steps": 2, "model_saving": "best_draw"}
    callbacks = [EMA(0.5), Draw(), Count(), BestModels("val_loss", top_k=2)]
    train("off", callbacks=callbacks, **arguments)
    own = {step: values for step, values in evaluated("off")}
    kept = {json.loads(path.read_text())["global_step"] for path in Path("out/off").rglob("status.json")}
    evaluate("off", callbacks=[EMA(0.5), Draw(), Count()], **arguments)
    assert rows_beside("off") == [(step, own[step]) for step in sorted(kept)]
    assert len(kept) >= 2


def test_a_step_with_a_checkpoint_and_a_model_is_evaluated_once(project: Path, capsys: pytest.CaptureFixture) -> None:
    rare = {"checkpoint_every": "4 steps", "callbacks": [Draw(), SaveOften()]}
    train("off", model_saving="last", **rare)
    train("plain", evaluate_every_n_steps=2, callbacks=[Draw()])
    evaluate("off", **rare)
    assert "3 checkpoints and 3 models evaluated" in capsys.readouterr().out
    assert rows_beside("off") == evaluated("plain")


def test_a_model_does_not_get_the_averages_of_the_checkpoint_before_it(project: Path) -> None:
    rare = {"checkpoint_every": "4 steps", "callbacks": [EMA(), Draw(), SaveOften()]}
    train("off", **rare)
    evaluate("off", **rare)
    together = dict(rows_beside("off"))
    train("alone", **{**rare, "checkpoint_every": None})
    evaluate("alone", **{**rare, "checkpoint_every": None})
    alone = dict(rows_beside("alone"))
    assert [together[step] for step in (2, 6, 10)] == [alone[step] for step in (2, 6, 10)]


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_model_that_is_replaced_while_it_is_read_is_read_again(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_pickled: bool
) -> None:
    arguments = {**NO_CHECKPOINTS, "safe_serialization": not is_pickled}
    train("off", **arguments)
    name = "pytorch_model.bin" if is_pickled else "model.safetensors"
    newer = project / "newer"
    Path("out/off/step-12").rename(newer)
    for step in (4, 6, 8, 10):
        shutil.rmtree(f"out/off/step-{step}")
    link, status = published._link, newer / "status.json"

    def replace(file: Path) -> None:
        shutil.copy(file, "out/off/new")
        Path("out/off/new").rename(Path("out/off/step-2", file.name))

    def link_meanwhile(source: Path, target: Path, names: Any) -> None:
        if status.exists() and source.name == "step-2":
            replace(newer / name)  # the run publishes weights, and then their status
        link(source, target, names)

    def wait(_: float) -> None:
        if status.exists():
            replace(status)
            status.unlink()

    monkeypatch.setattr(published, "_link", link_meanwhile)
    monkeypatch.setattr(published.time, "sleep", wait)
    evaluate("off", **arguments)
    assert "the run has replaced the model meanwhile" in caplog.text
    train("plain", evaluate_every_n_steps=2, callbacks=[Draw()])
    assert evaluated("off") == evaluated("plain")[-1:]


def test_a_model_whose_weights_and_status_were_saved_at_different_steps_is_skipped_with_a_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(published, "_BETWEEN_TRIES_S", 0.0)
    train("off", **NO_CHECKPOINTS)
    shutil.copy("out/off/step-4/model.safetensors", "out/off/step-6/model.safetensors")
    evaluate("off", **NO_CHECKPOINTS)
    assert [step for step, _ in evaluated("off")] == [2, 4, 8, 10, 12]
    assert "step 6, model" in caplog.text
    assert "its weights are not those of its status.json" in caplog.text


def test_a_named_model_adds_its_row_once_to_the_history_of_its_run(
    project: Path, capsys: pytest.CaptureFixture
) -> None:
    train("off", **NO_CHECKPOINTS)
    evaluate("off", model="out/off/step-6", **NO_CHECKPOINTS)
    ((step, values),) = evaluated("off")
    shown = capsys.readouterr().out
    assert step == 6
    assert f"step 6, model {project}/out/off/step-6: val_loss {values['val_loss']:.5g}" in shown
    assert "evaluated\n" not in shown
    evaluate("off", model="out/off/step-6", **NO_CHECKPOINTS)
    assert "(it was evaluated before)" in capsys.readouterr().out
    evaluate("off", **NO_CHECKPOINTS)
    assert [row[0] for row in evaluated("off")] == STEPS
    shutil.copytree("out/off/step-6", "copied")
    evaluate("off", model="copied", **NO_CHECKPOINTS)
    assert "(it was evaluated before)" in capsys.readouterr().out


def test_a_model_of_another_run_is_evaluated_without_a_row(project: Path, capsys: pytest.CaptureFixture) -> None:
    train("off", **NO_CHECKPOINTS)
    train("plain", evaluate_every_n_steps=2, model_saving="best_draw", callbacks=[Draw()])
    plain = Path("plain")
    plain.mkdir()
    shutil.copy("out/plain/model.safetensors", plain)  # without what accmt has written beside it
    for folder in ("out/plain", "plain"):
        evaluate("off", model=folder, **NO_CHECKPOINTS)
        assert "(it is not part of the history of the run)" in capsys.readouterr().out
    assert evaluated("off") == []


def test_models_of_steps_that_the_run_makes_again_are_not_evaluated(project: Path) -> None:
    class Stop(Callback):
        def on_update_end(self):
            self.trainer.should_stop = self.state.global_step == 6

    both = {"checkpoint_every": "4 steps", "callbacks": [Draw(), SaveOften()]}
    train("off", **both)
    train("off", resume="out/checkpoint-off/step-00000004", **{**both, "callbacks": [Draw(), SaveOften(), Stop()]})
    assert Path("out/off/step-10").exists()
    evaluate("off", **both)
    assert [step for step, _ in evaluated("off")] == [2, 4, 6]


# ---- The command line


PROGRAM = """
import os
import signal
import sys

import torch
from torch import nn

from accmt import AcceleratorModule, Trainer


def kill_at(variable, step):
    if str(step) == os.environ.get(variable):
        os.kill(os.getpid(), signal.SIGKILL)


class Linear(AcceleratorModule):
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)

    def training_step(self, batch):
        kill_at("KILL_TRAINING", self.state.global_step)
        return (self.model(batch) - 3 * batch).square().mean()

    def validation_step(self, batch):
        kill_at("KILL_EVALUATION", self.state.global_step)
        return (self.model(batch) - 3 * batch).square().mean()


hps = {"epochs": 4, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.01}}
options = {"max_checkpoints": 9, "async_checkpointing": False}
often = {"checkpoint_every": "3 steps", "checkpoint_options": options, "resume": "auto"}
every = {"evaluate_every_n_steps": sys.argv[2], "model_saving": None}
data = torch.arange(8.0).reshape(8, 1) / 8
Trainer(hps, sys.argv[1], run_name="run", seed=0, **every, **often).fit(Linear(), data, data)
"""


def start(*command: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=own, stdout=output, stderr=subprocess.STDOUT
        )


def wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    try:
        return process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError((folder / "output.txt").read_text()) from None


@pytest.mark.slow
def test_the_run_and_the_process_beside_it_survive_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("-m", "accmt.cli.main", "evaluate", "logs/off/run", "--watch", "--wait", "120s")
    first = start("program.py", "out/off", "never", folder=tmp_path, KILL_TRAINING="8")
    assert wait(first, tmp_path) == -signal.SIGKILL
    killed = start(*command, folder=tmp_path, KILL_EVALUATION="6")
    assert wait(killed, tmp_path) == -signal.SIGKILL
    beside = start(*command, folder=tmp_path)  # waits for the run, which a kill has ended, to be resumed
    deadline = time.monotonic() + 60
    while beside.poll() is None and '"step": 6' not in read(tmp_path / "logs/off/run/evaluations/history.jsonl"):
        if time.monotonic() > deadline:
            beside.kill()
        time.sleep(0.05)
    resumed = start("program.py", "out/off", "never", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py", "out/on", "1 step"])
    runpy.run_path("program.py")
    codes = [wait(process, tmp_path) for process in (resumed, beside)]
    assert codes == [0, 0], read(tmp_path / "output.txt")
    found = {name: losses(tmp_path / "logs" / name / "run") for name in ("off", "on")}
    assert found["off"] == [pair for pair in found["on"] if pair[0] in (3, 6, 9, 12, 15, 16)]
    assert len(found["off"]) == 6


SAVE = """
class Save(Callback):
    def on_update_end(self):
        if self.state.global_step % 4 == 0:
            self.trainer.save_model(f"{sys.argv[1]}/step-{self.state.global_step}")

    def on_evaluation_end(self, metrics):
        kill_at("KILL_AT_ROW", self.state.global_step)


class Linear"""
MODELS = PROGRAM.replace("import AcceleratorModule", "import AcceleratorModule, Callback").replace("class Linear", SAVE)
MODELS = MODELS.replace("**often", "callbacks=Save(), checkpoint_every=None")


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [row for row in read_history(folder) if "val_loss" in row.get("values", {})]
    return [(row["step"], row["values"]["val_loss"]) for row in rows]


LAUNCH = {
    "run_id": "a",
    "step": 0,
    "argv": ["python", "program.py"],
    "environment": {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "3"},
    "processes": 2,
    "machines": 1,
    "is_launched": True,
    "settings": {},
    "hps": {},
    "run_name": "run",
    "track_name": "line",
}


def make_launch(folder: Path, **changes: Any) -> Path:
    run = folder / "logs" / "line" / "run"
    run.mkdir(parents=True)
    (run / "history.jsonl").write_text('{"time": 0, "config": {}}\n')
    places = {"cwd": str(folder), "model_path": str(folder / "out/line"), "checkpoints": str(folder / "out/ck")}
    (folder / "out").mkdir(exist_ok=True)
    (run / "launches.jsonl").write_text(json.dumps({**LAUNCH, **places, "run_folder": str(run), **changes}) + "\n")
    return run


@pytest.mark.parametrize(
    ("changes", "flags", "got"),
    [
        ({"settings": {"checkpointer": "Bucket"}}, (), "got: checkpoints in a Bucket"),
        ({"settings": {"checkpoint_every": None}}, (), "got: a run without checkpoints"),
        ({"checkpoints": "/nowhere/at/all"}, (), "got: no such folder: /nowhere/at/all"),
        ({"machines": 2, "processes": 16}, (), "do: --processes 1"),
        ({}, ("--run", "logs/x/y"), "got: --run with a folder that is no model"),
        ({}, ("--model-path", "best"), "got: --model-path without --save-best"),
        ({}, ("--wait", "soon"), '--wait "10 minutes"'),
        ({"run_name": None, "hps": None, "argv": []}, (), "a notebook or an interactive session"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any], flags: tuple[str, ...], got: str
) -> None:
    assert main(["evaluate", str(make_launch(tmp_path, **changes)), *flags]) == 2
    assert got in capsys.readouterr().err


def test_a_url_and_a_run_of_an_older_version_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", "s3://bucket/run"]) == 2
    assert "got: a URL" in capsys.readouterr().err
    run = make_launch(tmp_path)
    launches = run / "launches.jsonl"
    launches.write_text(launches.read_text().replace("run_id", "id"))
    assert main(["evaluate", str(run)]) == 2
    assert "got: a run that an older version of accmt has started" in capsys.readouterr().err
    launches.unlink()
    assert main(["evaluate", str(run)]) == 2
    assert "there is no launches.jsonl in it" in capsys.readouterr().err


def make_model(folder: Path, **status: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "status.json").write_text(json.dumps({"run_id": "a", "digest": "b", "global_step": 3, **status}))
    return folder


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (("out/line/last",), "a model whose run folder is not there: "),
        (("out/line",), "do: accmt evaluate out/line/last"),
        (("out/old",), r"do: accmt evaluate out/old --run logs/<track>/<run>"),
        (("out/line/last", "--run", "logs/line/run", "--watch"), "got: --watch with a model folder"),
        (("out/line/last", "--run", "logs/line"), "choose one of them"),
    ],
)
def test_a_model_folder_that_cannot_be_evaluated_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    flags: tuple[str, ...],
    got: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_launch(tmp_path)
    make_model(Path("out/line/last"), run_folder="../../../logs/line/elsewhere")
    make_model(Path("out/old"))
    assert main(["evaluate", *flags]) == 2
    assert got in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the command and the environment of the program that would run in the place of this one."""
    started: list[Any] = []

    def become(_: str, command: list[str], environment: dict[str, str]) -> None:
        started.extend((command, environment))
        raise SystemExit

    monkeypatch.setattr(os, "execvpe", become)
    return started


@pytest.mark.parametrize(
    ("saved_by", "flags"),
    [("run", ()), ("run/evaluations", ()), ("elsewhere", ("--run", "logs/line/run"))],
)
def test_a_model_folder_is_evaluated_by_the_program_of_its_run(
    project: Path, started: list[Any], saved_by: str, flags: tuple[str, ...]
) -> None:
    run = make_launch(project)
    make_model(Path("out/line/last"), run_folder=f"../../../logs/line/{saved_by}")
    with pytest.raises(SystemExit):
        main(["evaluate", "out/line/last", *flags])
    request = json.loads(started[1][REQUEST_VARIABLE])
    assert (request["run_folder"], request["model"]) == (str(run), str(project / "out/line/last"))


@pytest.mark.parametrize(("flags", "is_launched"), [((), True), (("--processes", "1"), False)])
def test_the_program_runs_on_other_gpus_and_as_many_processes_as_asked(
    project: Path, started: list[Any], flags: tuple[str, ...], is_launched: bool
) -> None:
    run = make_launch(project)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.raises(SystemExit):
            main(["evaluate", str(run), *flags])
    command, environment = started
    assert ("torch.distributed.run" in command) == is_launched
    assert command[-1] == "program.py"
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("7", "3")
    assert json.loads(environment[REQUEST_VARIABLE])["model_path"] == str(project / "out/line/evaluated")
