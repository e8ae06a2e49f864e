"""Writes texts in evaluations on some processes, which have other numbers of batches; writes the tables and the scores.

torchrun --nproc-per-node 2 generation.py RESULT.json FOLDER BATCH_SIZE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tests.many_runs  # noqa: F401
from accmt.processes import is_main_process
from tests.unit.test_addons_generation import ROWS, make_module, read_tables, train


def main(result: Path, folder: Path, batch_size: int) -> None:
    os.chdir(folder)
    settings = {"evaluate_every_n_steps": 1}
    trainer = train(make_module(), ROWS, ROWS[:7], metrics="rouge", batch_size=[batch_size, 2], settings=settings)
    if is_main_process():
        found = {"tables": read_tables(), "rouge": trainer.state.metrics["rouge"]}
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
