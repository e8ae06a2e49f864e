"""The flight recorder: what the ledger holds, and that what a resumed run makes again is compared with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import ArgumentError, Callback, Ledger, StepDiffersError, Trainer
from accmt.addons.flight_recorder import checksums, recorder
from accmt.addons.flight_recorder import replay as replaying
from accmt.addons.flight_recorder.examiner import Examination
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, LedgerFile, read_ledger
from tests.raising import raises_at
from tests.toys import Linear, logged, make_points, make_trainer

HPS = {"epochs": 3, "optim": {"type": "AdamW", "lr": 0.1}}


def trainer_of(**settings: Any) -> Trainer:
    return make_trainer(HPS, run_name="run", **{"checkpoint_every": "3 steps", "ledger": True, **settings})


def lines_of(trainer: Trainer, kind: str = "batches") -> list[dict[str, Any]]:
    ledger = read_ledger(Path(trainer.log_dir) / LEDGER_FILE)
    assert ledger.fault is None
    return [line for _, line in ledger.effective() if kind in line]


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_update_end(self) -> None:
        if self.state.global_step == self.step:
            raise RuntimeError("stop")


def interrupt(step: int = 5, **settings: Any) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(callbacks=StopAt(step), **settings).fit(Linear(), make_points(8))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_checksum_does_not_depend_on_where_a_tensor_is_cut() -> None:
    tensor = torch.randn(37, 5, 411)
    [whole] = checksums.sums_of([tensor])
    bits = checksums._bits(tensor)
    for cut in (1, 8191, 8192, 8193, 30000):
        parts = checksums._add_run(bits[:cut], 0) + checksums._add_run(bits[cut:], cut)
        assert sum(part.item() for part in parts) % 2**64 == whole
    columns = [tensor[:, begin:end] for begin, end in ((0, 2), (2, 4), (4, 5))]
    starts = [torch.arange(37) * 5 * 411 + begin * 411 for begin in (0, 2, 4)]
    runs = [checksums._bits(part).view(37, -1) for part in columns]
    sums = [checksums._add_runs(run, start)[0].item() for run, start in zip(runs, starts, strict=True)]
    assert sum(sums) % 2**64 == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
def test_a_checksum_shows_one_changed_bit_and_two_exchanged_values(dtype: torch.dtype) -> None:
    tensor = torch.arange(20_000).remainder(7).to(dtype)
    changed, exchanged = tensor.clone(), tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    exchanged[[3, 15_004]] = tensor[[15_004, 3]]
    sums = checksums.sums_of([tensor, changed, exchanged])
    assert sums[0] != sums[1]
    assert (sums[0] != sums[2]) == (tensor[3] != tensor[15_004])


def test_each_step_has_a_line_with_the_bits_of_its_loss_and_its_samples() -> None:
    trainer = trainer_of()
    trainer.fit(Linear(), make_points(8))
    lines = lines_of(trainer)
    assert [(line["step"], line["epoch"], line["batches"]) for line in lines][:6] == [
        (1, 0, [0, 1]), (2, 0, [1, 2]), (3, 0, [2, 3]), (4, 0, [3, 4]), (5, 1, [0, 1]), (6, 1, [1, 2]),
    ]  # fmt: skip
    assert [float.fromhex(line["loss"]) for line in lines] == [value for _, value in logged(trainer, "train_loss")]
    assert len({line["samples"] for line in lines[:4]}) == 4
    assert {line["at"] for line in lines_of(trainer, "sums")} == {"start", "step", "checkpoint"}


def test_a_resumed_run_supersedes_the_lines_after_its_checkpoint_and_agrees_with_them() -> None:
    interrupt()
    resumed = trainer_of(resume=True)
    resumed.fit(Linear(), make_points(8))
    unbroken = trainer_of(model_path="out/unbroken")
    unbroken.fit(Linear(), make_points(8))
    ledger = read_ledger(Path(resumed.log_dir) / LEDGER_FILE)
    assert [line["rewind"]["step"] for line in ledger.lines if "rewind" in line] == [3]
    assert not any("differs" in line for line in ledger.lines)
    keys = ("step", "epoch", "batches", "samples", "loss")
    assert [[line[key] for key in keys] for line in lines_of(resumed)] == [
        [line[key] for key in keys] for line in lines_of(unbroken)
    ]


class Drifting(Linear):
    """Computes differently when `drift` is set, as a faulty machine does."""

    drift = 0.0

    def step(self, batch: Any) -> torch.Tensor:
        return super().step(batch) + self.drift * (self.state.global_step == 3)


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_step_that_is_made_again_with_another_result_is_an_error_that_names_it(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(callbacks=StopAt(5)).fit(Drifting(), make_points(8))
    module = Drifting()
    module.drift = 1e-3
    trainer = trainer_of(resume=True, ledger=Ledger(on_difference=policy), callbacks=StopAt(99))
    if policy == "stop":
        with pytest.raises(StepDiffersError, match=r"step 4, repeated[\s\S]*the loss: "):
            trainer.fit(module, make_points(8))
    else:
        trainer.fit(module, make_points(8))
        assert "step 4, repeated" in caplog.text


def test_changed_settings_explain_a_difference() -> None:
    interrupt()
    changed = make_trainer(
        {**HPS, "optim": {"type": "AdamW", "lr": 0.05}},
        run_name="run",
        checkpoint_every="3 steps",
        ledger=True,
        resume=True,
    )
    changed.fit(Linear(), make_points(8))
    ledger = read_ledger(Path(changed.log_dir) / LEDGER_FILE)
    [differs] = [line["differs"] for line in ledger.lines if "differs" in line]
    assert any("lr" in change for change in differs["because"])


def test_another_callback_alone_explains_no_difference_but_is_named() -> None:
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(callbacks=StopAt(5)).fit(Drifting(), make_points(8))
    module = Drifting()
    module.drift = 1e-3
    with pytest.raises(StepDiffersError, match=r"callbacks \[?'?StopAt'?\]? -> None"):
        trainer_of(resume=True).fit(module, make_points(8))


@pytest.mark.parametrize("edit", ["edited", "removed"])
def test_an_edited_or_removed_line_shows(edit: str) -> None:
    trainer = trainer_of()
    trainer.fit(Linear(), make_points(8))
    path = Path(trainer.log_dir) / LEDGER_FILE
    lines = path.read_text().splitlines(keepends=True)
    lines[5] = lines[5].replace('"epoch": 0', '"epoch": 7') if edit == "edited" else ""
    path.write_text("".join(lines) + '{"an incomplete')
    fault = read_ledger(path).fault
    assert fault is not None
    assert fault[0] == 6


def test_a_resume_survives_a_ledger_that_is_missing_cut_or_not_writable() -> None:
    for number, damage in enumerate(("missing", "cut", "folder")):
        settings = {"model_path": f"out/{number}"}
        interrupt(**settings)
        path = Path("logs") / str(number) / "run" / LEDGER_FILE
        content = path.read_text().splitlines(keepends=True)
        path.unlink()
        if damage == "cut":
            path.write_text("".join(content[:3]))
        elif damage == "folder":
            path.mkdir()
        trainer_of(resume=True, **settings).fit(Linear(), make_points(8))
        if damage != "folder":
            assert read_ledger(path).fault is None


def test_the_ledger_can_be_off_and_its_arguments_are_checked() -> None:
    trainer = trainer_of(ledger=False)
    trainer.fit(Linear(), make_points(8))
    assert not (Path(trainer.log_dir) / LEDGER_FILE).exists()
    with raises_at(ArgumentError, 'Trainer(ledger={"evry": ...})'):
        trainer_of(ledger={"evry": 3})
    with raises_at(ArgumentError, "Ledger(every=...)"):
        trainer_of(ledger=Ledger(every="2 epochs"))
    trainer = trainer_of(ledger={"every": 2}, model_path="out/often")
    trainer.fit(Linear(), make_points(8))
    assert [line["step"] for line in lines_of(trainer, "sums") if line["at"] == "step"] == [1, 2, 4, 6, 8, 10, 12]
    assert json.loads(json.dumps(trainer.config()))["ledger"] == {"every": 2}


@pytest.mark.parametrize(
    ("every", "keep_every", "kept"),
    [(1, "5 steps", [5, 10, 12]), (3, "1 epoch", [6, 9, 12]), (1, "4 steps", [4, 8, 12]), (4, "1 epoch", [4, 8, 12])],
)
def test_keyframes_are_kept_for_good(every: int, keep_every: str, kept: list[int]) -> None:
    """Four steps make an epoch; a run that resumes goes on as an unbroken one."""
    options = {"checkpoint_every": every, "checkpoint_options": {"keep_every": keep_every}}
    interrupt(step=7, **options)
    trainer_of(resume=True, **options).fit(Linear(), make_points(8))
    folders = sorted(path for path in Path("out/checkpoint-model").iterdir() if path.is_dir())
    assert [path.name for path in folders] == [f"step-{step:08d}" for step in kept]
    assert [(path / "PINNED").exists() for path in folders] == [True, True, keep_every != "5 steps"]
    with raises_at(ArgumentError, 'Trainer(checkpoint_options={"keep_every": ...})'):
        trainer_of(checkpoint_options={"keep_every": "2 evals"})


def test_a_run_that_cannot_be_replayed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(step=5, ledger=False)
    trainer = trainer_of(resume=True, checkpoint_options={"max_checkpoints": 9})
    trainer.fit(Linear(), make_points(8))
    folder = Path(trainer.log_dir)
    replay = replaying.replay

    def again(_folder: Path, start: dict[str, Any], request: Path) -> str:
        """Write what a program writes that now has more processes."""
        place = request.parent
        file = LedgerFile(place)
        file.add({"start": {**start, "processes": 2}})
        file.flush()
        file.close()
        (place / "done").touch()
        return ""

    monkeypatch.setattr(replaying, "_run_program", again)
    with raises_at(ArgumentError, "replay of "):
        replay(folder, 12)
    shutil.rmtree("out/checkpoint-model")
    with raises_at(ArgumentError, "replay of "):
        replay(folder, 12)
    for step, to in ((3, None), (13, None), (12, 11), (0, None)):  # it was recorded from step 4 on
        with raises_at(ArgumentError, "replay of "):
            replay(folder, step, to)
    ledger = folder / LEDGER_FILE
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-4]))  # cut at its end: shorter, but whole
    with raises_at(ArgumentError, "replay of "):
        replay(folder, 12)
    ledger.write_text("".join([*lines[:3], lines[3].replace('"loss"', '"lost"'), *lines[4:]]))
    with raises_at(ArgumentError, "replay of "):
        replay(folder, 12)


def test_a_step_that_is_missing_now_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(checkpoint_every=None)
    trainer.fit(Linear(), make_points(8))
    folder = Path(trainer.log_dir)

    def again(_folder: Path, _start: dict[str, Any], request: Path) -> str:
        lines = (folder / LEDGER_FILE).read_text().splitlines(keepends=True)
        (request.parent / LEDGER_FILE).write_text("".join(lines[:6]))
        (request.parent / "done").touch()
        return ""

    monkeypatch.setattr(replaying, "_run_program", again)
    found = trainer.replay(2)
    assert found.is_identical
    assert "bit-for-bit identical" in str(found)
    assert "step 5: this step no longer exists" in str(replaying.replay(folder, 5, 6).difference)
    found = replaying.replay(folder, 5, 6, without=[1, 2])  # all samples of a step: it is skipped
    assert (found.is_identical, found.curve) == (True, [])


class NotDeterministic(Drifting):
    """Uses an operation that has no deterministic implementation, on the CPU too."""

    def step(self, batch: Any) -> torch.Tensor:
        zeros = super().step(batch) * torch.zeros(2)
        return super().step(batch) + zeros.put_(torch.tensor([0]), torch.tensor([0.0])).sum()


def test_operations_without_a_deterministic_form_are_named_and_losses_compared_to_a_tolerance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describe = recorder.describe_start
    monkeypatch.setattr(recorder, "describe_start", lambda run: {**describe(run), "is_deterministic": False})
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(callbacks=StopAt(5)).fit(NotDeterministic(), make_points(8))
    module = NotDeterministic()
    module.drift = 1e-3
    trainer = trainer_of(resume=True, callbacks=StopAt(99))
    trainer.fit(module, make_points(8))
    folder = Path(trainer.log_dir)
    [differs] = [line["differs"] for line in read_ledger(folder / LEDGER_FILE).lines if "differs" in line]
    assert "no deterministic implementation on cpu: put_" in differs["because"]

    def again(_folder: Path, start: dict[str, Any], request: Path) -> str:
        asked = Examination(every=1, folder=str(request.parent), first=2, last=2, examines=False)
        made = NotDeterministic()
        made.drift = drifts.pop(0)
        logs = str(request.parent / "logs")
        made_by = trainer_of(ledger=asked, model_path="out/again", logging_dir=logs, seed=start["seed"])
        made_by.fit(made, make_points(8))
        (request.parent / "done").touch()
        return ""

    monkeypatch.setattr(replaying, "_run_program", again)
    drifts = [1e-3, 1.1e-3, 1.0]
    for is_same, tolerance in ((True, 0.0), (True, 1e-4), (False, 1e-4)):
        found = replaying.replay(folder, 4)
        assert (found.is_identical, found.tolerance) == (is_same, tolerance)
        assert found.operations == ["put_"]
        assert "no deterministic implementation on this device: put_" in str(found)
