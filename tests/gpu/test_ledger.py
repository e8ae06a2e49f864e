"""Two runs have the same ledger with deterministic kernels; without them, a replay names the operations that have none.

The first thing to run on a new kind of device: a difference names the step and the first tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accmt.addons.flight_recorder.compare import compare_runs
from accmt.addons.flight_recorder.examiner import Examination
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, read_ledger
from tests.gpu.toys import Classifier, make_data, train

FP16 = pytest.mark.cuda_only("a CPU has no fp16 arithmetic worth using")


@pytest.mark.parametrize("precision", ["no", "bf16", pytest.param("fp16", marks=FP16)])
def test_two_runs_have_the_same_ledger(precision: str, settings: dict[str, Any]) -> None:
    others = {**settings, "mixed_precision": precision, "torch_flags": {"deterministic": True}, "ledger": {"every": 1}}
    folders = [Path(train(Classifier("device"), make_data(), others, folder=name).log_dir) for name in ("one", "other")]
    found = compare_runs(*folders)
    assert found.num_steps > 0
    assert (found.step, found.difference) == (None, None)


class WithPut(Classifier):
    """Uses an operation that has no deterministic implementation on any device."""

    def training_step(self, batch: Any) -> Any:
        made = super().training_step(batch)
        device = made["loss"].device
        zeros = made["loss"] * torch.zeros(2, device=device)
        put = zeros.put_(torch.tensor([0], device=device), torch.zeros(1, device=device))
        return {**made, "loss": made["loss"] + put.sum()}


def test_a_replay_names_operations_without_a_deterministic_form(
    settings: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    asked = Examination(every=1, folder=str(tmp_path), first=1, last=1, examines=False)
    trainer = train(WithPut("device"), make_data(), {**settings, "ledger": asked}, folder="named")
    lines = read_ledger(Path(trainer.log_dir) / LEDGER_FILE).lines
    found = [name for line in lines for name in line.get("operations", ())]
    assert ("put_" in found) == (device.type != "cpu")  # a CPU computes deterministically without any setting
