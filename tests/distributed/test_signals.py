"""Signals in every stage, with every engine: all processes leave at one agreed point, with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SCRIPTS, run_together

# DDP at all its moments: tests/distributed/test_failures.py.
OF = {
    "fsdp-2": ("sanity_check", "on_evaluation_start", "on_save_model", "predict_step", "generating"),
    "hsdp-4": ("on_before_validation_step", "on_evaluation_start"),
    "tp-2": ("predict_step", "on_evaluation_start"),
}


@pytest.mark.parametrize("engine", OF)
def test_a_signal_to_one_process_or_all_is_one_checkpoint_and_a_killed_one_is_named(
    tmp_path: Path, engine: str
) -> None:
    forks, printed = run_together(SCRIPTS / "signals.py", str(tmp_path), *OF[engine], "killed", processes=engine)
    outcomes: list[list[Any]] = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(len(forks))]
    for index, moment in enumerate(OF[engine]):
        step = outcomes[0][index][2]
        assert step in ((1,) if moment == "sanity_check" else (2, 3) if moment == "on_save_model" else (2,))
        expected = [moment, "Preempted 143", step, [f"step-{step:08d}"]]
        assert [of_one[index] for of_one in outcomes] == [expected] * len(forks), printed[-3000:]
    for *_, (moment, ended, _, _) in outcomes[:-1]:
        assert moment == "killed"
        assert ended.startswith(f"ProcessFailedError process {len(forks) - 1}\n")
