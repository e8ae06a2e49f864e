"""With `same_bits`, a run has the same bits on 1, 2 and 4 processes, under DDP and FSDP2, also if resumed on others.

The quick tests have each engine and each number of processes once; the slow ones have the rest. A new kind of run is a
row of `CELLS` in `scripts/same_bits.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accmt.cli.main import main
from tests.distributed.scripts.same_bits import CELLS, cells_of
from tests.launching import SCRIPTS, launch

pytestmark = pytest.mark.timeout(300)
EXAMPLE = Path(__file__).parents[2] / "examples" / "same_bits.py"
STOPS = {4: 2, 2: 5, 1: 7}
"""By processes, in this order: after which step the run is interrupted; all are within an epoch."""

Digests = dict[str, dict[str, dict[str, str]]]


def launch_cells(folder: Path, processes: int, plan: dict[str, Any]) -> Digests:
    """Run cells, and interrupted runs, in one launch; return their digests."""
    path = folder / f"{processes}.json"
    path.unlink(missing_ok=True)
    arguments = str(path), str(folder), json.dumps(plan)
    launch(SCRIPTS / "same_bits.py", *arguments, processes=processes, result=path, timeout_s=250)
    digests: Digests = json.loads(path.read_text())
    return digests


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """Return digests by launch and cell; the interrupted runs go through all launches."""
    folder = tmp_path_factory.mktemp("same-bits")
    stops = {number: {"resumed": stop} for number, stop in STOPS.items()}
    on_4 = launch_cells(folder, 4, {"ddp": (cells_of("ddp"), stops[4]), "fsdp": ([], stops[4])})
    on_2 = launch_cells(folder, 2, {"ddp": ([], stops[2]), "fsdp": (cells_of("fsdp"), stops[2])})
    on_1 = launch_cells(folder, 1, {"ddp": (list(CELLS), stops[1] | {"unbroken": None}), "fsdp": ([], stops[1])})
    ends = launch_cells(folder, 4, {engine: ([], {"resumed": None}) for engine in ("ddp", "fsdp")})
    return {"1": on_1["ddp"], "ddp-4": on_4["ddp"], "fsdp-2": on_2["fsdp"]} | {
        f"resumed {engine}": of_engine for engine, of_engine in ends.items()
    }


QUICK = [(engine, name) for engine in ("ddp-4", "fsdp-2") for name in cells_of(engine.split("-")[0])]


@pytest.mark.parametrize(("way", "name"), QUICK)
def test_a_run_has_the_bits_of_one_process(digests: Any, way: str, name: str) -> None:
    assert digests[way][name] == digests["1"][name]


def test_no_two_kinds_of_runs_are_the_same(digests: Any) -> None:
    ends = {(of_cell["weights"], of_cell["best model"]) for of_cell in digests["1"].values() if of_cell}
    assert len(ends) == len(CELLS) + 1  # and the unbroken run of those that are resumed


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_run_resumed_on_4_2_1_and_4_processes_has_the_bits_of_an_uninterrupted_one(digests: Any, engine: str) -> None:
    assert digests[f"resumed {engine}"]["resumed"] == digests["1"]["unbroken"]


def test_a_step_of_two_processes_is_replayed_on_one_and_compared_with_it(tmp_path: Path) -> None:
    folders = []
    for number in (2, 1):
        command = [sys.executable, str(EXAMPLE), "--output", str(tmp_path / str(number)), "--until", "6"]
        if number > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=200)
        folders.append(str(*(tmp_path / "logs" / str(number)).iterdir()))
    assert main(["replay", folders[0], "--step", "5", "--processes", "1", "--top", "0"]) == 0
    assert main(["diff", *folders]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "fsdp"])
def test_samples_of_a_step_have_the_same_numbers_and_gradients_on_two_processes(
    tmp_path: Path, kind: str, capsys: Any
) -> None:
    script = SCRIPTS / "replayed_units.py"
    subprocess.run([sys.executable, str(script), str(tmp_path), kind], check=True, timeout=200)
    printed = []
    for processes in ("1", "2"):
        folder = str(tmp_path / "logs" / "model" / "run")
        assert main(["replay", folder, "--step", "2", "--processes", processes, "--top", "16"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "of 16 samples" in printed[0]


def test_a_proof_of_bits_names_what_depends_on_the_process(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "train.py"
    wrong = EXAMPLE.read_text().replace("= DigitClassifier()", "= ByProcess()").replace("def main()", BY_PROCESS, 1)
    path = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})"
    script.write_text(wrong.replace("import argparse", f"import argparse\n{path}", 1))
    arguments = ["--", "--output", str(tmp_path / "model")]
    assert main(["prove", "--bits", "--steps", "2", str(EXAMPLE), *arguments]) == 0
    assert main(["prove", "--bits", "--steps", "2", str(script), *arguments]) == 1
    assert "0.weight differs after step 1" in capsys.readouterr().out


BY_PROCESS = """class ByProcess(DigitClassifier):
    def training_step(self, batch):
        return super().training_step(batch) * (1 + self.trainer.run.accelerator.process_index)


def main()"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "engine"), [(2, "ddp"), (4, "fsdp")])
def test_other_launches_have_the_bits_of_one_process(digests: Any, tmp_path: Path, processes: int, engine: str) -> None:
    others = launch_cells(tmp_path, processes, {engine: (cells_of(engine), {})})[engine]
    assert others == {name: digests["1"][name] for name in cells_of(engine)}
