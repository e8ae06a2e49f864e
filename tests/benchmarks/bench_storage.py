"""accmt's storage beside the libraries' own: model folder, sharded checkpoint file, and copy in host memory.

    python tests/benchmarks/bench_storage.py [--megabytes 1000] [--rounds 5]

The state is a dict of float32 tensors of 4 MB. Each measurement is a process of its own, in alternating order: the
median seconds of a call after the first one, and the peak of memory above the state. A library that costs more than
20 % is not used:

- a model folder: `save_weights` (digest, fsync, published at once) and `huggingface_hub.save_torch_state_dict`;
- a checkpoint file: `write_pieces` and `torch.distributed.checkpoint.save` with `HuggingFaceStorageWriter`;
- the copy that a thread writes while training goes on: `HostSnapshot` and torch's `DefaultStager`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from accmt.checkpoint.contents import HostSnapshot, Pieces, write_pieces
from accmt.saving import save_weights

State = dict[str, torch.Tensor]
CALLS = 4
_TENSOR_MB = 4


def _write_with_torch(state: State, folder: Path) -> None:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True), no_dist=True)


def _copier(name: str) -> Callable[[State, Path], object]:
    snapshot = HostSnapshot()
    if name == "accmt":
        return lambda state, _: snapshot.take(state)
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    return lambda state, _: stager.stage(state)


CONTESTS: dict[str, dict[str, Callable[[str], Callable[[State, Path], object]]]] = {
    "model folder": {
        "accmt": lambda _: save_weights,
        "huggingface_hub": lambda _: save_torch_state_dict,
    },
    "checkpoint file": {
        "accmt": lambda _: lambda state, folder: write_pieces(Pieces.whole(state), folder),
        "torch": lambda _: _write_with_torch,
    },
    "copy in memory": {"accmt": _copier, "torch": _copier},
}


def measure(contest: str, contestant: str, megabytes: int) -> None:
    """Print the median seconds of a call and the peak of memory, as JSON."""
    state = {f"layer{number}": torch.randn(_TENSOR_MB << 18) for number in range(megabytes // _TENSOR_MB)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    function = CONTESTS[contest][contestant](contestant)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(CALLS):
            begin = time.perf_counter()
            function(state, Path(folder))
            times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak_mb": peak / 1024}))


def main() -> None:
    """Compare accmt and the libraries, and print a table."""
    parser = argparse.ArgumentParser(description="Time storage beside the libraries' own.")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.megabytes)
        return
    results: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for contest, contestants in CONTESTS.items():
            for contestant in contestants:
                command = [sys.executable, __file__, "--megabytes", str(options.megabytes)]
                command += ["--measure", contest, contestant]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results[contest, contestant].append(json.loads(output))
    print("| what | by | seconds | times accmt's | peak of memory, MB |\n|---|---|---|---|---|")
    for (contest, contestant), rows in results.items():
        seconds = statistics.median(row["seconds"] for row in rows)
        base = statistics.median(row["seconds"] for row in results[contest, "accmt"])
        peak = statistics.median(row["peak_mb"] for row in rows)
        print(f"| {contest} | {contestant} | {seconds:.2f} | {seconds / base:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
