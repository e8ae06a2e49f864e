"""A run in which process 1 alone fails, while it is set up or at its very end.

torchrun --nproc-per-node 2 one_fails.py get_optimizer|on_fit_end FOLDER
"""

from __future__ import annotations

import os
import sys

from tests.toys import Linear, make_points, make_trainer


class Failing(Linear):
    def act(self) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the fault of this test")


def main(where: str, folder: str) -> None:
    os.chdir(folder)
    setattr(Failing, where, Failing.act)
    make_trainer().fit(Failing(), make_points())


if __name__ == "__main__":
    main(*sys.argv[1:])
