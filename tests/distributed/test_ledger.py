"""The ledger of several processes: the samples, and the checksums of shards, are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accmt.addons.flight_recorder.ledger import LEDGER_FILE, read_ledger
from tests.launching import SCRIPTS, launch, run_together


def ledger_of(folder: Path, processes: int | str, batch_size: int) -> list[dict[str, Any]]:
    folder.mkdir()
    launch(SCRIPTS / "write_ledger.py", str(folder), str(batch_size), processes=processes, result=folder / "result")
    fault, lines = json.loads((folder / "result").read_text())
    assert fault is None
    return list(lines)


def test_one_process_two_and_shards_write_the_same_samples_and_initial_checksums(tmp_path: Path) -> None:
    alone, two, shards = (
        ledger_of(tmp_path / str(number), launched, size)
        for number, (launched, size) in enumerate([(1, 4), (2, 2), ("fsdp-2", 2)])
    )
    for other in (two, shards):
        for one, its in zip(alone, other, strict=True):
            for key in ("step", "epoch", "batches", "samples"):
                assert one.get(key) == its.get(key)
            if one.get("loss"):
                assert abs(float.fromhex(one["loss"]) - float.fromhex(its["loss"])) < 1e-5
        assert [line["sums"] for line in alone if line.get("at") == "start"] == [
            line["sums"] for line in other if line.get("at") == "start"
        ]
    gradients = [
        [line["sums"]["gradients"]["all"] for line in one if line.get("at") == "step"] for one in (two, shards)
    ]
    assert len(gradients[0]) == 12
    assert all(int(value, 16) for value in gradients[1])


def test_steps_before_an_error_of_one_process_are_written(tmp_path: Path) -> None:
    run_together(SCRIPTS / "write_ledger.py", str(tmp_path), "2", "fails", processes=2)
    ledger = read_ledger(tmp_path / "logs" / "model" / "run" / LEDGER_FILE)
    assert ledger.fault is None
    assert [line["step"] for _, line in ledger.effective() if "batches" in line] == [1, 2, 3, 4, 5]
