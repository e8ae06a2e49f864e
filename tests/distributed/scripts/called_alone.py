"""A run in which the main process alone calls what needs every process.

torchrun --nproc-per-node 2 called_alone.py save_model|save_checkpoint|validate FOLDER
"""

from __future__ import annotations

import os
import sys

from accmt import Callback
from tests.toys import Linear, make_points, make_trainer


class Calling(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_update_end(self) -> None:
        if self.trainer.is_main and self.state.global_step == 2:
            getattr(self.trainer, self.name)()


def main(name: str, folder: str) -> None:
    os.chdir(folder)
    make_trainer(callbacks=Calling(name), checkpoint_every="epoch").fit(Linear(), make_points(), make_points(4))


if __name__ == "__main__":
    main(*sys.argv[1:])
