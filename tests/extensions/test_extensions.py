"""Packages outside of accmt each add one thing through the registry; a run that uses them all resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accmt import HyperParameters, Monitor, Trainer
from accmt.errors import AccmtError
from accmt.registry import EXTENSION_POINTS
from tests.launching import launch

HERE = Path(__file__).parent
SITE = HERE / "site"


def train(folder: Path, processes: int, stop: int = 0) -> dict[str, Any]:
    result = folder / f"result-{stop}.json"
    launch(HERE / "scripts" / "run.py", str(result), str(folder), str(stop), processes=processes, result=result)
    return json.loads(result.read_text())


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_uses_what_packages_add_and_resumes_to_the_same_bits(tmp_path: Path, processes: int) -> None:
    whole = train(tmp_path / "whole", processes)
    stopped = train(tmp_path / "broken", processes, stop=5)
    resumed = train(tmp_path / "broken", processes)
    assert (whole["ended"], stopped["ended"], resumed["ended"]) == ("finished", "stopped", "finished")
    assert whole["used"] == resumed["used"] == ["Compressed", "torch.bfloat16"]
    assert whole["state"]["global_step"] == 24 // processes
    assert (resumed["weights"], resumed["state"]) == (whole["weights"], whole["state"])
    assert sorted(path.name for path in (tmp_path / "broken" / "shelf").iterdir())[:2] == ["000002", "000004"]
    steps = [step for step, values in whole["rows"] if "weight_norm" in values]
    assert steps == list(range(1, 24 // processes + 1))
    assert any("bias" in values for _, values in whole["rows"])
    assert all(word in whole["text"] for word in ("train_loss weight_norm", "bias"))


def test_there_is_a_package_for_each_extension_point() -> None:
    groups = {path.read_text().partition("]")[0].removeprefix("[") for path in SITE.rglob("entry_points.txt")}
    assert groups == set(EXTENSION_POINTS)


def test_names_that_no_package_adds_are_errors_that_name_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITE)
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
    with pytest.raises(AccmtError, match="SignedSGD"):
        HyperParameters(optim="SignedSGB")
    with pytest.raises(AccmtError, match="Halving"):
        HyperParameters(optim="SGD", scheduler="Halvin")
    for wrong, nearest in (
        ({"metrics": "bia"}, "bias"),
        ({"monitor": ["weight_nor"]}, "weight_norm"),
        ({"checkpointer": "shel"}, "shelf"),
        ({"log_with": "text_fil"}, "text_file"),
        ({"mixed_precision": "coars"}, "coarse"),
        ({"parallelism": {"engine": "compresed"}}, "compressed"),
        ({"grad_accumulation_steps": "growin"}, "growing"),
    ):
        with pytest.raises(AccmtError, match=nearest):
            Trainer(hps, "out/model", **wrong)
    assert Monitor.from_config({"weight_norm": True}).added == ("weight_norm",)
    assert Monitor.from_config({"weight_norm": False}).added == ()
