"""Forks: a run of its own that is another one up to a step, and continues with changed settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import Trainer
from accmt.addons.flight_recorder.ledger import read_ledger
from accmt.addons.fork.beginning import Fork, place_fork
from accmt.addons.fork.lineage import Origin, family_of, find_forks, find_parent, read_origin
from accmt.addons.launches import read_launches
from accmt.checkpoint.retention import list_published
from accmt.errors import AccmtError, ArgumentError, StepDiffersError
from accmt.tracking import read_history
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

HPS = {"epochs": 2, "batch_size": 2, "optim": {"type": "AdamW", "lr": 0.1}}
SLOWER = {"optim": {"type": "AdamW", "lr": 0.01}}


def build(folder: Path, hps: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    own = {"checkpoint_every": "3 steps", "checkpoint_options": {"max_checkpoints": 9}, "run_name": "run", "seed": 5}
    return make_trainer(
        {**HPS, **(hps or {})},
        str(folder / "model"),
        logging_dir=str(folder / "logs"),
        ledger={"every": 1},
        **{**own, **arguments},
    )


def train(folder: Path, hps: dict[str, Any] | None = None, **arguments: Any) -> tuple[Trainer, list[torch.Tensor]]:
    trainer, module = build(folder, hps, **arguments), Linear()
    trainer.fit(module, make_points())
    return trainer, [value.clone() for value in module.model.state_dict().values()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A run of 8 steps with checkpoints at 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("parent")
    return folder, train(folder)[1]


@pytest.fixture
def parent(trained: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> Path:
    """Move the run to a folder of its own for a test."""
    return Path(shutil.copytree(trained[0], tmp_path / "project"))


def at(folder: Path, step: int) -> str:
    return f"{folder / 'logs' / 'model' / 'run'}@{step}"


def steps_of(run: Path) -> dict[int, str]:
    """Return the loss of each step in the ledger of a run."""
    return {
        line["step"]: line["loss"] for _, line in read_ledger(run / "ledger.jsonl").effective() if "batches" in line
    }


def content_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "forks")
    return {str(path): path.read_bytes() for path in files}


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("step", [3, 4, 5, 6, 8])
def test_without_a_change_a_fork_ends_as_its_parent(
    trained: tuple[Path, list[torch.Tensor]], parent: Path, step: int
) -> None:
    before = content_of(parent)
    trainer, weights = train(parent, fork=at(parent, step))
    assert is_same(weights, trained[1])
    assert {path: content for path, content in content_of(parent).items() if path in before} == before
    name = f"run-at-{step}"
    fork = parent / "logs" / "model" / name
    assert trainer.log_dir == fork
    assert trainer.settings.model_folder == parent / f"model-{name}"
    assert list_published(parent / f"checkpoint-model-{name}")
    if step < 8:  # the end, where there is nothing left to train
        own, recorded = steps_of(fork), steps_of(parent / "logs" / "model" / "run")
        assert own == {number: loss for number, loss in recorded.items() if number > step // 3 * 3}
        rows = [row["step"] for row in read_history(fork) if "values" in row]
        assert rows == sorted(set(rows))


def test_a_changed_rate_applies_after_the_step_and_the_fork_is_resumed_by_the_same_call(
    trained: tuple[Path, list[torch.Tensor]], parent: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = parent / "logs" / "model" / "run"
    trainer, weights = train(parent, SLOWER, fork=at(parent, 5), verbose=True, enable_progress_bar=False)
    assert "making steps 4 to 5 of run again" in caplog.text
    assert "up to step 5, the fork is its parent: 4 lines of the ledgers are identical" in caplog.text
    own, recorded = steps_of(run.with_name("run-at-5")), steps_of(run)
    assert [own[step] == recorded[step] for step in (4, 5, 6, 7, 8)] == [True, True, True, False, False]
    assert [line["hps"]["optim"]["lr"] for line in read_launches(run.with_name("run-at-5"))] == [0.1, 0.01]
    assert trainer.hps.optim_kwargs == {"lr": 0.01}
    train(parent, SLOWER, fork=at(parent, 5), verbose=True, enable_progress_bar=False)
    assert "this run is complete (step 8" in caplog.text
    other, _ = train(parent, {"optim": {"type": "AdamW", "lr": 0.03}}, fork=at(parent, 5))
    assert other.log_dir.name == "run-at-5-2"
    named, same = train(parent, SLOWER, fork=at(parent, 5), run_name="slower")
    assert named.log_dir.name == "slower"
    assert is_same(same, weights)


def test_forks_and_parents_name_each_other_also_when_they_are_moved(parent: Path, tmp_path: Path) -> None:
    train(parent, SLOWER, fork=at(parent, 3))
    train(parent, fork=f"{parent / 'logs' / 'model' / 'run-at-3'}@6")
    run = parent / "logs" / "model" / "run"
    forks = [run.with_name("run-at-3"), run.with_name("run-at-3-at-6")]
    assert find_forks(run) == forks[:1]
    assert find_parent(forks[1]) == forks[0]
    assert family_of(forks[1]) == [run, *forks]
    origin = read_origin(forks[0])
    assert origin is not None
    assert origin.changes == ["optim.lr: 0.1 -> 0.01"]
    assert json.loads((run / "forks" / "run-at-3.json").read_text())["run_folder"] == str(forks[0])
    assert [row["config"]["fork"] for row in read_history(forks[0]) if "config" in row] == [
        {"parent": "run", "step": 3}
    ]
    project = parent.rename(tmp_path / "elsewhere")
    moved = project / "logs" / "model"
    assert family_of(moved / "run") == [moved / "run", moved / "run-at-3", moved / "run-at-3-at-6"]
    before = content_of(project)
    trainer, _ = train(project, SLOWER, fork=at(project, 3))
    assert trainer.log_dir == moved / "run-at-3"
    assert trainer.checkpoint_path == project / "checkpoint-model-run-at-3"
    train(project, fork=at(project, 5))
    assert {path: content for path, content in content_of(project).items() if path in before} == before


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_fork_that_was_stopped_continues_also_while_it_makes_steps_again(
    trained: tuple[Path, list[torch.Tensor]], parent: Path, stop: int
) -> None:
    """With `callbacks`, the steps could not be made again; the module stops it."""
    _, expected = train(parent, SLOWER, fork=at(parent, 5), run_name="unbroken")
    shutil.rmtree(parent / "logs" / "model" / "unbroken" / "ledger.jsonl", ignore_errors=True)

    class Stopped(Linear):
        def on_update_end(self) -> None:
            if self.state.global_step == stop:
                raise KeyboardInterrupt

    arguments = {"fork": at(parent, 5), "checkpoint_every": "step"}
    with pytest.raises(KeyboardInterrupt):
        build(parent, SLOWER, **arguments).fit(Stopped(), make_points())
    (parent / "logs" / "model" / "run").rename(parent / "gone")  # no longer needed
    _, weights = train(parent, SLOWER, **arguments)
    assert is_same(weights, expected)


def test_an_optimizer_that_is_reset_is_reset_once(parent: Path) -> None:
    arguments = {"checkpoint_options": {"max_checkpoints": 9, "reset_optimizer_on_resume": True}, "run_name": "reset"}
    other = {"optim": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
    _, expected = train(parent, other, fork=at(parent, 5), **arguments)

    class Stopped(Linear):
        def on_update_end(self) -> None:
            if self.state.global_step == 7:
                raise KeyboardInterrupt

    again = {"fork": at(parent, 5), **arguments, "run_name": "stopped"}
    with pytest.raises(KeyboardInterrupt):
        build(parent, other, **again).fit(Stopped(), make_points())
    _, weights = train(parent, other, **again)
    assert is_same(weights, expected)


def test_a_run_that_has_ended_is_continued_for_longer(parent: Path) -> None:
    trainer, _ = train(parent, {"epochs": 3}, fork=at(parent, 8))
    assert trainer.state.global_step == 12
    shutil.rmtree(parent / "checkpoint-model" / "step-00000008")  # so the parent's end is made again, too
    trainer, _ = train(parent, {"epochs": 3}, fork=at(parent, 8), run_name="again")
    assert trainer.state.global_step == 12
    run = parent / "logs" / "model" / "again"
    assert [line["step"] for line in read_launches(run)] == [6, 8]


def test_steps_that_come_out_otherwise_are_an_error_and_nothing_continues_from_them(parent: Path) -> None:
    class Other(Linear):
        def step(self, batch: Any) -> torch.Tensor:
            return 2 * super().step(batch)

    for _ in range(2):
        with raises_at(StepDiffersError, "/run at step 5", "step 4: the loss: "):
            build(parent, fork=at(parent, 5)).fit(Other(), make_points())
    assert [path.name for path in list_published(parent / "checkpoint-model-run-at-5")] == ["step-00000003"]


def test_a_checkpoint_that_vanishes_while_it_is_copied_is_replaced_by_the_one_before(
    trained: tuple[Path, list[torch.Tensor]], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accmt.addons.fork import beginning

    copy = beginning.fork_checkpoint

    def vanish(source: Path, *others: Any, **names: Any) -> Path:
        if source.name == "step-00000006":
            shutil.rmtree(source)
        return copy(source, *others, **names)

    monkeypatch.setattr(beginning, "fork_checkpoint", vanish)
    _, weights = train(parent, fork=at(parent, 7))
    assert is_same(weights, trained[1])
    assert json.loads((parent / "logs/model/run-at-7/fork.json").read_text())["checkpoint_step"] == 3


def without_launches(parent: Path) -> None:
    (parent / "logs/model/run/launches.jsonl").unlink()


def with_another_run(parent: Path) -> None:
    train(parent, run_name="taken", checkpoint=str(parent / "other"))


def resumed_with_another_rate(parent: Path) -> None:
    train(parent, SLOWER, resume=str(parent / "checkpoint-model" / "step-00000006"))
    shutil.rmtree(parent / "checkpoint-model" / "step-00000006")


def launched_on_two(parent: Path) -> None:
    path = parent / "logs/model/run/launches.jsonl"
    path.write_text(path.read_text().replace('"processes": 1', '"processes": 2'))


Prepare = Callable[[Path], None]


@pytest.mark.parametrize(
    ("step", "hps", "arguments", "prepare", "got"),
    [
        (9, {}, {}, None, "8 steps"),
        (2, {}, {}, None, "3, 6, 8"),
        (5, {"optim": {"type": "SGD", "lr": 0.1}}, {}, None, "optim.type: AdamW -> SGD"),
        (5, {}, {"grad_accumulation_steps": 2}, None, "steps 4 to 5 were made with: grad_accumulation_steps"),
        (5, {}, {"mixed_precision": "bf16"}, None, "mixed_precision"),
        (5, {"model": "some/model"}, {}, None, "model.path"),
        (5, {}, {"run_name": "taken"}, with_another_run, "model/taken is a run"),
        (3, {}, {}, without_launches, "launches.jsonl"),
        (7, {}, {}, resumed_with_another_rate, "changed at step 6, after the checkpoint of step 3"),
        (5, {}, {}, launched_on_two, "1 processes; steps 4 to 5 were made by 2"),
    ],
)
def test_what_cannot_be_forked_is_an_error_before_anything_is_written(
    parent: Path, step: int, hps: dict[str, Any], arguments: dict[str, Any], prepare: Prepare | None, got: str
) -> None:
    if prepare is not None:
        prepare(parent)
    before = content_of(parent)
    with raises_at(AccmtError, f"/run at step {step}", got):
        train(parent, hps, fork=at(parent, step), **arguments)
    assert content_of(parent) == before


def test_what_only_tries_a_training_makes_no_fork(parent: Path) -> None:
    before = content_of(parent)
    trainer = build(parent, fork=at(parent, 5))
    assert trainer.check_resume(Linear(), make_points()) > 0
    build(parent, fork=at(parent, 5), fast_dev_run=True).fit(Linear(), make_points())
    assert content_of(parent) == before


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (("m", None), ("m-fork", "checkpoint-m-fork")),
        (("m", "c"), ("m-fork", "c-fork")),
        (("other", "c"), ("other", "c-fork")),
        (("other", None), ("other", "checkpoint-other")),
        (("s3://bucket/m", "s3://bucket/c"), ("s3://bucket/m-fork", "s3://bucket/c-fork")),
        (("s3://bucket/other", "s3://bucket/d"), ("s3://bucket/other", "s3://bucket/d")),
    ],
)
def test_only_places_of_the_parent_get_the_name_of_the_fork(
    places: tuple[str, str | None], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = [str(tmp_path / name) for name in ("m", "c", "checkpoint-m")] + ["s3://bucket/m", "s3://bucket/c"]
    parent = {"run_name": "run", "run_folder": "logs/model/run", "run_ids": {}, "taken": taken}
    origin = Origin("fork", "logs/model/fork", parent, 3, 3, {}, {}, {})
    settings = make_trainer(model_path=places[0], checkpoint=places[1], fork="logs/model/run@3").settings
    placed = place_fork(settings, Fork(tmp_path, origin))
    assert str(placed.saving.model_path) == expected[0]
    assert (placed.checkpoints.url or str(placed.checkpoint_folder)) == expected[1]
    assert placed.tracking.track_name == "model"


@pytest.mark.parametrize(
    ("fork", "arguments"),
    [
        ("logs/model/run", {}),
        ("logs/model/run@soon", {}),
        (3, {}),
        ("s3://bucket/run@3", {}),
        ("logs/model/run@3", {"resume": "out/checkpoint"}),
    ],
)
def test_a_fork_that_cannot_be_meant_is_an_error_of_the_trainer(fork: Any, arguments: Any) -> None:
    with raises_at(
        ArgumentError, f"Trainer({'resume' if arguments else 'fork'}=...)", repr(arguments.get("resume", fork))
    ):
        make_trainer(fork=fork, **arguments)
