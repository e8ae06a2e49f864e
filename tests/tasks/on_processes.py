"""Evaluates tasks on some processes; writes the scores, and those of the harness for the saved model on one process.

torchrun --nproc-per-node 2 on_processes.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from accmt.processes import is_main_process
from tests.tasks.test_tasks import NAMES, SCORES, make_module, score_by_hand, train, write_tasks


def main(result: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if int(os.environ["RANK"]) == 0:
        write_tasks(folder)
    while not (folder / "tasks" / "plain.yaml").exists():
        pass
    trainer, module = train({"names": NAMES, "path": "tasks"}, model_saving="last")
    found: dict[str, Any] = {name: trainer.state.metrics[name] for name in SCORES}
    if is_main_process():
        alone = make_module()
        alone.load_weights("model/last")
        by_hand = score_by_hand(alone)
        result.write_text(json.dumps({"scores": found, "by_hand": by_hand}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
