"""Times `read_files`: opening, resuming, memory at the start, and rows per second in order and shuffled.

Each line is a process of its own. `python tests/benchmarks/bench_readers.py` takes a few minutes and 4 GB of disk in
the temporary folder; --rows changes the numbers of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

READ = 200_000
BATCH = 64
CHUNK = 100_000
FORMATS = ("parquet", "jsonl", "arrow")


def write(kind: str, folder: Path, number: int) -> None:
    """Write rows of an id, a number and a text to files of a million."""
    folder.mkdir(parents=True)
    for part, first in enumerate(range(0, number, 10 * CHUNK)):
        path, last = folder / f"part-{part:03}.{kind}", min(number, first + 10 * CHUNK)
        if kind == "jsonl":
            with path.open("w") as file:
                for row in range(first, last):
                    file.write(f'{{"id": {row}, "value": {row / 7:.4f}, "text": "the text of row {row}"}}\n')
            continue
        import pyarrow as pa
        from pyarrow import parquet

        ids = list(range(first, last))
        columns = {"id": ids, "value": [row / 7 for row in ids], "text": [f"the text of row {row}" for row in ids]}
        table = pa.table(columns)
        if kind == "parquet":
            parquet.write_table(table, path, row_group_size=CHUNK // 2)
        else:
            with pa.OSFile(str(path), "wb") as target, pa.ipc.new_stream(target, table.schema) as writer:
                writer.write_table(table, 1000)


def memory() -> float:
    """Return the memory of this process in MB that is its own: files mapped into memory can be dropped."""
    kept = [
        line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    ]
    return int(kept[0]) / 1000


def measure_reading(folder: str) -> dict[str, float]:
    """Open files, and read some rows of them."""
    import torch

    from accmt import read_files

    if not folder.endswith("jsonl"):
        import pyarrow.parquet  # noqa: F401
    before, began = memory(), perf_counter()
    rows = read_files(folder)
    found = {"open_s": perf_counter() - began, "memory_mb": memory() - before}
    began = perf_counter()
    order = rows.shuffle_rows(torch.Generator().manual_seed(0))
    found["order_s"] = perf_counter() - began
    read = min(READ, len(rows))
    for name, indices in (("in_order", range(read)), ("shuffled", order[:read].tolist())):
        began = perf_counter()
        for first in range(0, read, BATCH):
            rows.__getitems__(list(indices[first : first + BATCH]))
        found[name] = read / (perf_counter() - began)
    return found


def measure_resume(folder: str, position: str) -> dict[str, float]:
    """Read a few batches, as a run does; the second time, resume, and time it up to the first batch."""
    from accmt import read_files
    from accmt.data import SourceOptions, build_source

    saved = Path(position)
    if not folder.endswith("jsonl"):
        import pyarrow.parquet  # noqa: F401
    began, began_cpu = perf_counter(), process_time()
    rows = read_files(folder)
    source = build_source(rows, SourceOptions(purpose="train", batch_size=BATCH, shuffle=True))
    first = 0
    if saved.exists():
        first = 100
        source.resume_from(0, first, json.loads(saved.read_text()))
    next(source.micro_batches(0, first))
    found = {"resume_s": perf_counter() - began, "resume_cpu_s": process_time() - began_cpu}
    saved.write_text(json.dumps(source.position(0, 100)))
    return found


def call(function: str, *arguments: str, cache: str) -> dict[str, float]:
    """Run a function of this file in another process."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    typed = [sys.executable, "-W", "ignore", __file__, "--call", function, *arguments]
    printed = subprocess.run(typed, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--call", nargs="+")
    options = parser.parse_args()
    if options.call:
        print(json.dumps(globals()[options.call[0]](*options.call[1:])))
        return
    head = "format  rows  first open s  open s  memory MB  order s  resume s  CPU s  rows/s in order  rows/s shuffled"
    print(head)
    for kind in FORMATS:
        for number in options.rows:
            with tempfile.TemporaryDirectory() as temporary:
                folder, out, cache = (str(Path(temporary, name)) for name in (kind, "position.json", "cache"))
                write(kind, Path(folder), number)
                first, again = (call("measure_reading", folder, cache=cache) for _ in range(2))
                resumed = [call("measure_resume", folder, out, cache=cache) for _ in range(2)][1]
            print(
                f"{kind:7} {number:10,} {first['open_s']:8.2f} {again['open_s']:8.3f} {again['memory_mb']:8.1f} "
                f"{again['order_s']:8.2f} {resumed['resume_s']:8.2f} {resumed['resume_cpu_s']:8.2f} "
                f"{again['in_order']:12,.0f} {again['shuffled']:12,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
