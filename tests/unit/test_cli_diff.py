"""`accmt diff`: two runs that were made to differ in one thing, and the step and cause that the command names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from accmt import Callback
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, LedgerFile, read_ledger
from accmt.cli.main import main
from tests.toys import make_points, make_trainer

PROGRAM = """
from tests.toys import Linear

class Module(Linear):
    factor = {factor}

    def step(self, batch):
        return super().step(batch) * self.factor
"""


class Disturb(Callback):
    """Changes one value of a weight after step 3."""

    def on_update_end(self) -> None:
        if self.state.global_step == 3:
            with torch.no_grad():
                self.module.model.bias += 1e-3


class Stop(Callback):
    def on_update_end(self) -> None:
        if self.state.global_step == 7:
            raise RuntimeError("stop")


def changed_points() -> TensorDataset:
    points = make_points()
    points.tensors[1].mul_(1.5)
    return points


def reversed_points() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(make_points(), batch_size=2, sampler=list(range(7, -1, -1)))


def ordered_points(changed: int | None = None) -> torch.utils.data.DataLoader[Any]:
    points = make_points()
    if changed is not None:
        points.tensors[1][changed] += 1
    return torch.utils.data.DataLoader(points, batch_size=2, sampler=list(range(8)))


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(name: str, *, hps: Any = None, data: Any = None, factor: int = 1, **settings: Any) -> str:
    """Train a module that lies in a file of this folder, and return the run folder."""
    path = Path("program.py").absolute()
    path.write_text(PROGRAM.format(factor=factor))
    sys.modules["planted_program"] = program = ModuleType("planted_program")
    program.__file__ = str(path)
    try:
        exec(path.read_text(), program.__dict__)
        trainer = make_trainer({"epochs": 2, **(hps or {})}, run_name=name, ledger={"every": "2 steps"}, **settings)
        trainer.fit(program.Module(), make_points() if data is None else data)
    finally:
        del sys.modules["planted_program"]
    return str(trainer.log_dir)


@pytest.mark.parametrize(
    ("of_a", "of_b", "expected"),
    [
        ({}, {"seed": 1}, ["diverge at step 1: the order of samples", "seed 0 -> 1"]),
        (
            {},
            {"hps": {"optim": {"type": "SGD", "lr": 0.2}}},
            ["diverge at step 1: the weights of weight", "optim {'type': 'SGD', 'lr': 0.1} ->"],
        ),
        ({}, {"hps": {"batch_size": 4}}, ["diverge at step 1: the order of samples", "batch_size 2 -> 4"]),
        ({}, {"data": changed_points()}, ["diverge at step 1: the content of the batches"]),
        (
            {"data": ordered_points()},
            {"data": reversed_points()},
            ["diverge at step 1: the order of samples", "checksums after step 1: the gradients of weight"],
        ),
        (
            {"data": ordered_points()},
            {"data": ordered_points(changed=5)},
            ["diverge at step 3: the content of the batches", "are equal after step 2"],
        ),
        ({}, {"factor": 2}, ["diverge at step 1: the loss: ", "code: program.py"]),
        (
            {},
            {"callbacks": Disturb()},
            ["at step 4: the loss", "are equal after step 2", "checksums after step 4: the gradients of weight"],
        ),
    ],
    ids=["seed", "learning rate", "batch size", "data", "order", "one row", "program", "disturbed weight"],
)
def test_the_first_step_and_the_cause_are_named(
    of_a: dict[str, Any], of_b: dict[str, Any], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train("a", **of_a), train("b", **of_b)
    capsys.readouterr()
    assert main(["diff", first, second]) == 1
    output = capsys.readouterr().out
    for text in expected:
        assert text in output
    assert ("code: " in output) == ("factor" in of_b)
    assert "run_name" in output


def test_equal_runs_are_identical_and_a_longer_one_is_compared_in_common_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, longer = train("a"), train("b"), train("c", hps={"epochs": 3})
    capsys.readouterr()
    assert main(["diff", first, second]) == 0
    output = capsys.readouterr().out
    assert "no difference in 8 common steps" in output
    assert "cause" not in output
    assert main(["diff", first, longer]) == 0
    assert "epochs 2 -> 3" in capsys.readouterr().out
    assert main(["diff", first, first]) == 0
    assert "same folder" in capsys.readouterr().out


def rewrite(folder: str, factor: float = 1.0, **facts: Any) -> None:
    """Write a ledger as one of a run with other facts at its start, and with losses scaled by a factor."""
    path = Path(folder) / LEDGER_FILE
    lines = [{k: v for k, v in line.items() if k != "chain"} for line in read_ledger(path).lines]
    path.unlink()
    file = LedgerFile(Path(folder))
    for line in lines:
        if "start" in line:
            line["start"] |= facts
        if line.get("loss"):
            line["loss"] = (float.fromhex(line["loss"]) * factor).hex()
        file.add(line)
    file.flush()
    file.close()


@pytest.mark.parametrize(("factor", "code"), [(1 + 1e-5, 0), (1 + 1e-3, 1)])
def test_losses_of_other_numbers_of_processes_are_compared_to_a_tolerance(
    factor: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train("a"), train("b")
    rewrite(second, factor, processes=2)
    capsys.readouterr()
    assert main(["diff", first, second]) == code
    output = capsys.readouterr().out
    assert "relative tolerance of 0.0001" in output
    assert "processes 1 -> 2" in output


def test_runs_of_other_programs_are_compared_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train("a"), train("b", seed=1)
    rewrite(second, program={"other.py": "0" * 16})
    capsys.readouterr()
    assert main(["diff", first, second]) == 1
    output = capsys.readouterr().out
    assert "other programs: program.py " in output
    assert " -> other.py" in output
    assert "at step 1: the order of samples" in output


def test_what_cannot_be_compared_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train("a"), train("b")
    assert main(["diff", first, str(tmp_path)]) == 2
    assert "no ledger.jsonl" in capsys.readouterr().err
    assert main(["diff", first, str(tmp_path / "none")]) == 2
    assert "a run with a ledger" in capsys.readouterr().err
    path = Path(second) / LEDGER_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1]))
    assert main(["diff", first, second]) == 2
    assert "no steps" in capsys.readouterr().err
    path.write_text("".join([*lines[:3], *lines[4:]]))
    assert main(["diff", first, second]) == 2
    assert "line 4 of ledger.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_of_one_folder_the_steps_that_were_made_again_are_reported(
    rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"checkpoint_every": "4 steps"}
    with pytest.raises(RuntimeError, match="stop"):
        train("a", callbacks=Stop(), **settings)
    unbroken = train("b", model_path="out/unbroken")
    folder = train("a", hps={"optim": {"type": "SGD", "lr": rate}}, resume=True, **settings)
    capsys.readouterr()
    assert main(["diff", folder, folder]) == (rate != 0.1)
    output = capsys.readouterr().out
    assert ("step 6: the loss" in output) == (rate != 0.1)
    assert ("no difference after 1 return(s)" in output) == (rate == 0.1)
    assert main(["diff", folder, unbroken]) == (rate != 0.1)
    assert ("diverge at step 6" in capsys.readouterr().out) == (rate != 0.1)


def test_an_environment_variable_that_differs_is_named_without_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for cut in ("0.125", "0.375"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUT", cut)
            patch.setenv("SESSION_TOKEN", f"of {cut}")
            folders.append(train(f"cut-{cut}"))
    main(["diff", *folders])
    printed = capsys.readouterr().out
    assert "environment variable CUT" in printed
    assert "of 0.125" not in printed
    assert "of 0.125" not in Path(folders[0], LEDGER_FILE).read_text()


def test_changed_lines_of_a_program_in_git_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = train("a"), train("b", factor=2)
    rewrite(first, git={"commit": "1" * 40, "diff": "--- a/f\n+++ b/f\n+same = 1\n"})
    rewrite(second, git={"commit": "1" * 40, "diff": "--- a/f\n+++ b/f\n+same = 1\n-factor = 1\n+factor = 2\n"})
    capsys.readouterr()
    assert main(["diff", first, second]) == 1
    output = capsys.readouterr().out
    assert "code: +factor = 2  (in B only)" in output
    assert "same = 1" not in output
