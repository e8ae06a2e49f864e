"""Runs on files of each format, whole, and interrupted and resumed; writes what came of it.

torchrun --nproc-per-node 2 readers.py RESULT.json FOLDER KIND ...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from accmt.processes import gather_objects, is_main_process, num_processes
from tests.files_of_rows import read, stand_in_for_torchvision, train, weights_of


def run(folder: Path, kind: str, *, processes: int = 1, workers: int = 2) -> dict[str, Any]:
    """Train on the files of a format in a folder."""
    results = {}
    for name, stop in (("whole", None), ("parts", 3), ("parts", None)):
        module = train(
            folder / f"{kind}-{processes}-{name}",
            read(folder / kind),
            stop=stop,
            processes=processes,
            dropout=0,
            dataloader_num_workers=workers,
            resume="auto",
        )
        results[name] = {"weights": weights_of(module), "seen": gather_objects(module.seen)}
    return results


def main() -> None:
    path, folder, *kinds = sys.argv[1:]
    if "mds" in kinds:
        stand_in_for_torchvision()
    processes = int(os.environ["WORLD_SIZE"])
    results = {kind: run(Path(folder), kind, processes=processes) for kind in kinds}
    if is_main_process():
        assert num_processes() == processes
        Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
