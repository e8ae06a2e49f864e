"""The gradient of one step on conversations with weights, on some processes; writes its difference to plain torch.

torchrun --nproc-per-node 2 sft_weights.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tests.many_runs  # noqa: F401
from accmt.processes import is_main_process
from tests.turn_weights import SHAPES, expected_gradient, gradient_of_step, weighted_rows


def main(result: str, folder: str) -> None:
    rows, number = weighted_rows(), int(os.environ["WORLD_SIZE"])
    expected, found = expected_gradient(rows), {}
    for shape in SHAPES:
        for accumulation in (1, 4):
            name = f"{shape}, {accumulation}"
            gradient = gradient_of_step(Path(folder) / name, rows, shape, accumulation, number)
            found[name] = float((gradient - expected).norm() / expected.norm())
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
