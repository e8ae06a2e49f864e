"""Runs in which the main process alone calls what needs every process.

torchrun --nproc-per-node 2 called_alone.py FOLDER HOOK:METHOD...

Each process writes to FOLDER/RANK.json what error ended each run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accmt import Callback
from accmt.errors import AccmtError
from tests.toys import Linear, make_points, make_trainer


class Calling(Callback):
    def __init__(self, hook: str, name: str) -> None:
        self.name = name
        self.first_step = 1 if hook == "on_before_training_step" else 0  # in the first step processes agree on more
        setattr(self, hook, self.act)

    def act(self) -> None:
        if self.trainer.is_main and self.state.global_step >= self.first_step:
            data = {"dataset": make_points(4)} if self.name == "predict" else {}
            getattr(self.trainer, self.name)(**data)


def main(folder: str, *cases: str) -> None:
    os.chdir(folder)
    errors: list[str] = []
    for hook, name in (case.split(":") for case in cases):
        trainer = make_trainer(callbacks=Calling(hook, name), checkpoint_every="epoch", model_path=f"{hook}-{name}")
        try:
            trainer.fit(Linear(), make_points(), make_points(4))
        except AccmtError as error:
            errors.append(f"{type(error).__name__}: {error}")
        Path(f"{os.environ['RANK']}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
