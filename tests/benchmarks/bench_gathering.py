"""Memory and seconds of gathering predictions on the main process, by the size of the chunks they travel in.

    .venv/bin/python tests/benchmarks/bench_gathering.py

Two processes hold 200 MB of predictions each, in batches of 1 MB, and the main one gets all. Shown is by how much its
memory rose at the peak; the 400 MB that it gets are among it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from accmt.metrics.gathering import gather_on_main_process
from accmt.processes import is_main_process

SIZES = (None, 128_000_000, 32_000_000, 8_000_000, 1_000_000)
NUM_BATCHES = 200
BATCH_BYTES = 1_000_000


def peak_megabytes() -> float:
    """Return the most memory that this process ever had (Linux counts it in kibibytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def gather(chunk_bytes: int | None, result: Path) -> None:
    """Gather, in one of several processes, and let the main one write how it was."""
    dist.init_process_group("gloo")
    predictions = [torch.full((BATCH_BYTES // 4,), float(index)) for index in range(NUM_BATCHES)]
    gather_on_main_process([0], chunk_bytes)
    before, start = peak_megabytes(), time.perf_counter()
    gathered = gather_on_main_process(predictions, chunk_bytes)
    seconds = time.perf_counter() - start
    if is_main_process():
        digest = [float(tensor.sum()) for of_process in gathered for tensor in of_process]
        result.write_text(json.dumps({"MB": peak_megabytes() - before, "s": seconds, "sum": sum(digest)}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Gather with each size in processes of their own."""
    print("| chunks | MB more at the peak | seconds |\n|---|---|---|")
    sums = set()
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            result = Path(name) / "result.json"
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(size or 0)]
            subprocess.run([sys.executable, *command, str(result)], check=True, capture_output=True)
            found = json.loads(result.read_text())
        sums.add(found["sum"])
        title = "all at once" if size is None else f"{size // 1_000_000} MB"
        print(f"| {title} | {found['MB']:.0f} | {found['s']:.2f} |", flush=True)
    if len(sums) > 1:
        raise ValueError(f"the predictions differ: {sums}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(int(sys.argv[1]) or None, Path(sys.argv[2]))
    else:
        main()
