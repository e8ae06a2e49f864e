"""`accmt diff` names what two real runs differ in: a line in git, a gradient, and what one of two processes does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accmt.cli.main import main
from tests.launching import run_together

SCRIPT = Path(__file__).parent / "scripts" / "compared_run.py"
pytestmark = pytest.mark.slow


def train(folder: Path, plant: str = "", *, factor: str = "1.0", batch_size: int = 4, processes: int = 1) -> str:
    """Train in a project folder, and return the run folder.

    Args:
        folder: A git repository is made of it.
        plant: What the run does without a record of it.
        factor: What a file of the program changes after the commit.
        batch_size: Of each process.
        processes: How many there are.
    """
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.read_text())
    (folder / "recipe.py").write_text("FACTOR = 1.0\n")
    own = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    for arguments in (["init", "-q"], ["add", "train.py", "recipe.py"], ["commit", "-q", "-m", "start"]):
        subprocess.run(["git", *own, *arguments], cwd=folder, env={**os.environ, **dates}, check=True)
    (folder / "recipe.py").write_text(f"FACTOR = {factor}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where the processes run
        settings = json.dumps({"plant": plant, "batch_size": batch_size})
        forks, printed = run_together(folder / "train.py", settings, processes=processes)
    assert {fork.poll() for fork in forks} == {0}, printed
    return str(folder / "logs" / "model" / "run")


@pytest.mark.parametrize(
    ("settings", "processes", "code", "expected"),
    [
        ({"factor": "2.0"}, 1, 1, ["at step 1: the loss", "code: recipe.py", "code: +FACTOR = 2.0  (in B only)"]),
        ({"plant": "gradient"}, 1, 1, ["at step 4: the gradients of 0.bias", "equal after step 3"]),
        (
            {"processes": 2, "batch_size": 2},
            1,
            0,
            ["relative tolerance of 0.0001", "no difference in 12 common steps", "processes 1 -> 2"],
        ),
        (
            {"plant": "batch of process 1", "processes": 2},
            2,
            1,
            ["at step 4: the content of the batches", "equal after step 3"],
        ),
    ],
    ids=["line in git", "gradient", "two processes", "batch of one of two processes"],
)
def test_a_planted_difference_is_named(
    settings: dict[str, Any],
    processes: int,
    code: int,
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = train(tmp_path / "a", processes=processes), train(tmp_path / "b", **settings)
    assert main(["diff", first, second]) == code
    output = capsys.readouterr().out
    assert [text for text in expected if text not in output] == [], output
