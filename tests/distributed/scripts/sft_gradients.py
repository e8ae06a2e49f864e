"""The gradient of one step on conversations with weights, and with images; writes its difference to plain torch.

torchrun --nproc-per-node 2 sft_gradients.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tests.many_runs  # noqa: F401
from accmt.processes import is_main_process
from tests import pictures, turn_weights

PROCESSES = int(os.environ["WORLD_SIZE"])
CASES_OF_IMAGES = {"whole": (1, {}), "accumulated": (4, {}), "cut": (1, {"max_tokens": 300})}


def of_images(folder: Path) -> dict[str, float]:
    rows = pictures.draw_picture_conversations(8)
    rows.sort(key=lambda row: "image" in str(row["messages"]))  # batches with images on some processes only
    expected, differences = pictures.plain_gradient(rows), {}
    for name, (accumulation, hps) in CASES_OF_IMAGES.items():
        sizes = {"accumulation": accumulation, **hps}
        gradient = pictures.gradient_of_step(folder / name, rows, accumulation * PROCESSES, **sizes)
        differences[f"images, {name}"] = float((gradient - expected).norm() / expected.norm())
    return differences


def of_weights(folder: Path) -> dict[str, float]:
    rows = turn_weights.weighted_rows()
    expected, differences = turn_weights.expected_gradient(rows), {}
    for shape in turn_weights.SHAPES:
        for accumulation in (1, 4):
            name = f"weights, {shape}, {accumulation}"
            gradient = turn_weights.gradient_of_step(folder / name, rows, shape, accumulation, PROCESSES)
            differences[name] = float((gradient - expected).norm() / expected.norm())
    return differences


def main(result: str, folder: str) -> None:
    differences = of_images(Path(folder) / "images")
    if "ACCELERATE_USE_FSDP" not in os.environ:
        differences |= of_weights(Path(folder) / "weights")
    if is_main_process():
        Path(result).write_text(json.dumps(differences))


if __name__ == "__main__":
    main(*sys.argv[1:])
