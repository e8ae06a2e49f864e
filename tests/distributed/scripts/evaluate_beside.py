"""Evaluates the checkpoints of a run on several processes, in place of its fit; writes the rows of both ways.

torchrun --nproc-per-node 2 evaluate_beside.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import tests.many_runs  # noqa: F401
from accmt.processes import is_main_process
from tests.unit.test_addons_evaluate_beside import evaluate, evaluated, train


def main(result: Path, folder: Path) -> None:
    os.chdir(folder)
    train("plain", evaluate_every_n_steps=2, model_saving=None)
    train("off", model_saving="last")
    if is_main_process():
        shutil.rmtree("out/checkpoint-off/step-00000006")  # the model of this step is still there
    evaluate("off", rule="best_accuracy")
    if is_main_process():
        found = {"inside": evaluated("plain"), "beside": evaluated("off")}
        result.write_text(json.dumps({**found, "saved": Path("out/off/evaluated/status.json").exists()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
