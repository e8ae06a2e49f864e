"""Makes runs that differ in one thing, and shows that `accmt diff` names it.

    python tests/faults/planted_differences.py

Each difference is planted into a run of its own, some of two or four processes, which is compared with a run without
it. Versions, hardware and threads cannot be changed here: what a run records of them is, and its loss is scaled as
another library would scale it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from accmt.cli.main import main as accmt
from tests.launching import run_together

SCRIPT = Path(__file__).parent / "scripts" / "compared_run.py"
_RECIPE = "FACTOR = 1.0\n"


@dataclass(frozen=True)
class Planted:
    """A difference, and what has to be said about it.

    Attributes:
        expected: Texts of the output.
        settings: Settings of the second run.
        first: Settings of the first.
        plant: What the second run does without a record of it.
        recipe: A file of the second run's program.
        is_git: Whether the programs lie in a git repository.
        processes: Of the first and the second run.
        kind: "two runs"; "resumed" compares a killed and resumed run with an unbroken one, "itself" with itself.
        code: The exit code.
    """

    expected: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] = field(default_factory=dict)
    plant: str = ""
    recipe: str = _RECIPE
    is_git: bool = False
    processes: tuple[int, int] = (1, 1)
    kind: str = "two runs"
    code: int = 1


def _hps(**values: Any) -> dict[str, Any]:
    return {"hps": values}


def _adamw(**values: Any) -> dict[str, Any]:
    return _hps(optim={"type": "AdamW", "lr": 0.01, "betas": [0.9, 0.999], **values})


_OTHER_RATE = _adamw(lr=0.02)
_SPARSE = {"ledger": {"every": None, "on_difference": "warn"}}

DIFFERENCES: dict[str, Planted] = {
    "nothing": Planted(("no difference in 12 common steps",), code=0),
    "version": Planted(("at step 1: the loss", "numpy ", "-> 0.1"), plant="version"),
    "hardware": Planted(("at step 1: the loss", "hardware ", "(AVX1024)"), plant="hardware"),
    "threads": Planted(("at step 1: the loss", "threads 1 -> 2"), plant="threads"),
    "line in git": Planted(
        ("at step 1: the loss", "code: recipe.py", "code: +FACTOR = 2.0  (in B only)"),
        recipe="FACTOR = 2.0\n",
        is_git=True,
    ),
    "file of the program": Planted(("at step 1: the loss", "code: recipe.py"), recipe="FACTOR = 2.0\n"),
    "learning rate": Planted(("at step 1: the weights of", "'lr': 0.01", "'lr': 0.02"), _OTHER_RATE),
    "betas": Planted(("at step 1: the ", "optim {", "'betas': [0.5, 0.999]"), _adamw(betas=[0.5, 0.999])),
    "weight decay": Planted(("at step 1: the weights of", "'weight_decay': 0.5"), _adamw(weight_decay=0.5)),
    "optimizer": Planted(("'type': 'SGD'",), _hps(optim={"type": "SGD", "lr": 0.01})),
    "scheduler": Planted(("scheduler None ->",), _hps(scheduler={"type": "LinearWithWarmup", "num_warmup_steps": 4})),
    "batch size": Planted(("at step 1: the order of samples", "batch_size 4 -> 6"), _hps(batch_size=6)),
    "accumulation": Planted(
        ("at step 1: the batches: 0-1 in A, 0-2 in B", "grad_accumulation_steps None -> 2"),
        {**_hps(batch_size=2), "grad_accumulation_steps": 2},
    ),
    "clipping": Planted(("at step 1: the weights of", "clip_grad None -> 0.01"), {"clip_grad": 0.01}),
    "seed": Planted(("at step 1: the order of samples", "seed 3 -> 4"), {"seed": 4}),
    "precision": Planted(("at step 1: the loss", "precision no -> bf16"), {"mixed_precision": "bf16"}),
    "type of the weights": Planted(
        ("at their start: the weights of", "weights float32 -> float64"), plant="type of the weights"
    ),
    "another row": Planted(("at step 1: the order of samples", "data samples", "24  |  25"), plant="another row"),
    "sample order": Planted(("at step 1: the order of samples", "sampler None ->"), plant="order"),
    "value in the data": Planted(("the content of the batches",), plant="value in the data"),
    "initial weight": Planted(("at their start: the weights of 2.bias",), plant="initial weight"),
    "loss": Planted(("at step 4: the loss", "equal after step 3"), plant="loss"),
    "gradient": Planted(("at step 4: the gradients of 0.bias", "equal after step 3"), plant="gradient"),
    "optimizer state": Planted(("at step 4: the optimizer state of 2.weight",), plant="optimizer state"),
    "two processes": Planted(
        ("relative tolerance of 0.0001", "no difference in 12 common steps", "processes 1 -> 2"),
        _hps(batch_size=2),
        processes=(1, 2),
        code=0,
    ),
    "four processes": Planted(
        ("relative tolerance of 0.0001", "no difference in 12 common steps", "processes 1 -> 4"),
        _hps(batch_size=1),
        processes=(1, 4),
        code=0,
    ),
    "four processes and the loss": Planted(
        ("relative tolerance of 0.0001", "at step 4: the loss", "processes 1 -> 4"),
        _hps(batch_size=1),
        plant="loss",
        processes=(1, 4),
    ),
    "seed of two processes": Planted(("at step 1: the order", "seed 3 -> 4"), {"seed": 4}, processes=(2, 2)),
    "batch of one of two processes": Planted(
        ("at step 4: the content of the batches", "equal after step 3"), plant="batch of process 1", processes=(2, 2)
    ),
    "resume": Planted(("no difference in 12 common steps",), kind="resumed", code=0),
    "resume with another rate": Planted(
        ("step 5: the weights of", "changed: optim", "'lr': 0.02"), _OTHER_RATE, kind="itself"
    ),
}


def compare(planted: Planted, folder: Path) -> str:
    """Make the runs, compare them, and return what is wrong with the answer; "" if it is as expected."""
    first = _train(folder / "a", planted, planted.first, processes=planted.processes[0])
    if planted.kind == "two runs":
        second = _train(folder / "b", planted, planted.settings, planted.plant, planted.recipe, planted.processes[1])
    else:
        _train(folder / "b", planted, {}, "killed")
        second = _train(folder / "b", planted, {**planted.settings, "resume": True})
        first = second if planted.kind == "itself" else first
    printed = StringIO()
    with redirect_stdout(printed):
        code = accmt(["diff", str(first), str(second)])
    output = printed.getvalue()
    missing = [text for text in planted.expected if text not in output]
    wrong = f"exit code {code}" if code != planted.code else f"not said: {missing}" if missing else ""
    return f"{wrong}\n{output}" if wrong else ""


def _train(
    folder: Path,
    planted: Planted,
    settings: Mapping[str, Any],
    plant: str = "",
    recipe: str = _RECIPE,
    processes: int = 1,
) -> Path:
    """Train in a project folder, and return the run folder."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(SCRIPT.read_text())
        (folder / "recipe.py").write_text(_RECIPE)
        if planted.is_git:
            own = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
            dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
            for arguments in (["init", "-q"], ["add", "train.py", "recipe.py"], ["commit", "-q", "-m", "start"]):
                subprocess.run(["git", *own, *arguments], cwd=folder, env={**os.environ, **dates}, check=True)
        (folder / "recipe.py").write_text(recipe)
    environment = {"ACCMT_TEST_PLANT": plant}
    before = Path.cwd()
    os.chdir(folder)  # where the processes run
    os.environ.update(environment)
    try:
        forks, printed = run_together(folder / "train.py", json.dumps(settings), processes=processes)
    finally:
        os.chdir(before)
        for name in environment:
            del os.environ[name]
    codes = {fork.poll() for fork in forks}
    assert codes == {9 if plant == "killed" else 0}, f"the run ended with {codes}:\n{printed}"
    return folder / "logs" / "model" / "run"


def main() -> int:
    """Compare all, and print a line for each."""
    parser = argparse.ArgumentParser(description="Plant differences into runs, and compare them.")
    parser.add_argument("names", nargs="*", help="differences; default: all")
    names = parser.parse_args().names or list(DIFFERENCES)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    num_named = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            wrong = compare(DIFFERENCES[name], Path(folder, name.replace(" ", "-")))
            num_named += not wrong
            logging.info("%-30s %s", name, wrong or "named")
    logging.info("%s of %s differences named", num_named, len(names))
    return int(num_named < len(names))


if __name__ == "__main__":
    sys.exit(main())
