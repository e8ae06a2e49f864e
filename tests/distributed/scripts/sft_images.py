"""The gradient of one step on conversations with images, on some processes; writes its difference to plain torch.

torchrun --nproc-per-node 2 sft_images.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tests.many_runs  # noqa: F401
from accmt.processes import is_main_process
from tests.pictures import draw_picture_conversations, gradient_of_step, plain_gradient


def main(result: str, folder: str) -> None:
    rows, number = draw_picture_conversations(8), int(os.environ["WORLD_SIZE"])
    rows.sort(key=lambda row: "image" in str(row["messages"]))  # batches with images on some processes only
    expected, found = plain_gradient(rows), {}
    for name, accumulation, hps in (("one", 1, {}), ("accumulated", 4, {}), ("cut", 1, {"max_tokens": 300})):
        gradient = gradient_of_step(Path(folder) / name, rows, accumulation * number, accumulation=accumulation, **hps)
        found[name] = float((gradient - expected).norm() / expected.norm())
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
