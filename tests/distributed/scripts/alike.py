"""Processes that were given different data or settings; writes how each ended.

torchrun --nproc-per-node 2 alike.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import tests.many_runs  # noqa: F401
from accmt.errors import AccmtError
from accmt.processes import gather_objects, is_main_process
from tests.toys import Linear, Numbers, make_points, make_trainer

RANK = int(os.environ.get("RANK", "0"))


def fit(*data: Any, hps: dict[str, Any] | None = None, **settings: Any) -> None:
    make_trainer(hps, settings.pop("path", "out/model"), **settings).fit(Linear(), *data)


def raises() -> Any:
    if RANK:
        raise OSError("no such file on this machine")
    return make_points()


class Made(Linear):
    def get_train_dataloader(self) -> Any:
        return raises()


CASES: dict[str, Callable[[], Any]] = {
    "training data": lambda: fit(make_points(8 + 4 * RANK)),
    "validation data": lambda: fit(make_points(), make_points(4 + RANK)),
    "a named set": lambda: fit(make_points(), {"a": make_points(4), "b": make_points(4 + RANK)}),
    "names of sets": lambda: fit(make_points(), {f"set{RANK}": make_points(4)}),
    "validation on one": lambda: fit(make_points(), make_points(4) if RANK else None),
    "none on one": lambda: fit(make_points() if RANK else None),
    "kinds": lambda: fit(DataLoader(make_points(), 2) if RANK else make_points()),
    "loaders": lambda: fit(DataLoader(make_points(), 2 + 2 * RANK)),
    "streams": lambda: fit(iter(Numbers(8)) if RANK else make_points()),
    "an error on one": lambda: make_trainer().fit(Made()),
    "batch size": lambda: fit(make_points(), hps={"batch_size": 2 + RANK}),
    "accumulation": lambda: fit(make_points(), grad_accumulation_steps=1 + RANK),
    "when to save": lambda: fit(make_points(), checkpoint_every="epoch" if RANK else "step"),
    "test data": lambda: make_trainer().test(Linear(), make_points(4 + RANK)),
    "seeds": lambda: fit(make_points(), seed=RANK),
    "data of their own": lambda: fit(make_points(8 + 4 * RANK), shard_dataloaders=False),
    "the same": lambda: fit(make_points(), {"a": make_points(4), "b": DataLoader(make_points(3), 2)}),
}


def outcome(case: Callable[[], Any]) -> str:
    try:
        case()
    except (AccmtError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    outcomes = {name: gather_objects(outcome(case)) for name, case in CASES.items()}
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
