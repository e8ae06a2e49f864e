"""Kills runs on files with SIGKILL and resumes them: {format} x {1, 2 processes} x {0, 2 loader workers}.

    PYTHONPATH=. python tests/faults/kill_readers.py parquet jsonl stream feather

Each run is killed twice, at other steps, and has to end with the weights of one that was not, and to have trained on
the same rows. In the environment of `make readers`, it also takes mds, litdata and tar. Prints a line for each run; the
exit code is 1 if one differs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tests.files_of_rows import read, stand_in_for_torchvision, train, weights_of, write

ROOT = Path(__file__).parents[2]
KILLS = (3, 9)  # of 14 steps


def run_once(folder: str, kind: str, out: str, workers: str, kill_at: str) -> None:
    """Train in this process; killed before the given step, unless it is 0."""
    from accmt.processes import gather_objects, is_main_process
    from tests import files_of_rows

    if kind == "mds":
        stand_in_for_torchvision()
    processes, before = int(os.environ["WORLD_SIZE"]), int(kill_at)

    class Killed(files_of_rows.Points):
        def training_step(self, batch: Any) -> Any:
            if before and self.state.global_step == before:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch)

    files_of_rows.Points = Killed
    data = read(Path(folder, kind))
    module = train(out, data, processes=processes, dataloader_num_workers=int(workers), resume="auto")
    seen = gather_objects(module.seen)
    if is_main_process():
        Path(f"{out}.json").write_text(json.dumps({"weights": weights_of(module), "seen": seen}))


def launch(processes: int, port: int, *arguments: str) -> None:
    """Start `run_once` on processes, and wait for all."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": f"{processes}", "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--once", *arguments],
            env={**environment, "MASTER_PORT": f"{port}", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]
    for process in started:
        process.wait(timeout=120)


def main() -> int:
    differing = 0
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        kinds = sys.argv[1:]
        for kind in kinds:
            write(kind, Path(temporary))
        for number, (kind, processes, workers) in enumerate(product(kinds, (1, 2), (0, 2))):
            name, port = f"{kind}-{processes}-{workers}", 29800 + 4 * number
            launch(processes, port, temporary, kind, f"{name}-whole", f"{workers}", "0")
            for attempt, kill_at in enumerate((*KILLS, 0)):
                launch(processes, port + 1 + attempt, temporary, kind, f"{name}-killed", f"{workers}", f"{kill_at}")
            whole, killed = (json.loads(Path(f"{name}-{end}.json").read_text()) for end in ("whole", "killed"))
            rest = len(killed["seen"][0])
            ends = [seen[-rest:] for seen in whole["seen"]]
            is_same = whole["weights"] == killed["weights"] and ends == killed["seen"] and rest < len(whole["seen"][0])
            differing += not is_same
            result = "the same" if is_same else "DIFFERS"
            print(f"{kind:8} {processes} processes, {workers} workers: {result}", flush=True)
    return differing > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        run_once(*sys.argv[2:])
    else:
        sys.exit(main())
