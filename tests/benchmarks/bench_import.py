"""What `from accmt import Trainer, AcceleratorModule` costs over `import torch`, in seconds.

    make bench

Each round starts a fresh interpreter, in which the one follows the other. The least of the rounds is what the machine
needs when nothing else keeps it busy; the median tells how busy it was.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

ROUNDS = 7
TIMED = """
from time import perf_counter
import torch
before_s = perf_counter()
from accmt import AcceleratorModule, Trainer
print(perf_counter() - before_s)
"""


def time_import() -> float:
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    time_import()  # compiles what is not compiled yet
    seconds = [time_import() for _ in range(ROUNDS)]
    median = statistics.median(seconds)
    print(f"import accmt, over import torch: {min(seconds):.3f} s (median of {ROUNDS}: {median:.3f} s)")
