"""Every kind of model, form of file and launch: saved as a Trainer saves, loaded by a fresh process, equal bits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch, python

LAUNCHES = {"two processes": "trained", "fully_shard": "sharded"}  # one process: `saved` in test_sharded.py
MODELS = (
    *("plain", "tied", "shared-view", "bfloat16", "compiled", "compiled-by-hand", "compiled-in-part"),
    *("bert", "compiled-layer", "gpt2", "t5", "lora"),
)
CELLS = [f"{split}-{form}" for split in ("one", "three") for form in ("safetensors", "bin")]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """What a fresh process found wrong with each saved model, by launch and cell."""
    root, script = tmp_path_factory.mktemp("grid"), SCRIPTS / "saving.py"
    result = root / "saved.json"
    launch(script, "save", str(result), str(root), processes=2, result=result, timeout_s=240)
    result = root / "found.json"
    run = python(script, "load", result, *(root / folder for folder in LAUNCHES.values()), timeout_s=240)
    assert result.exists(), run.stdout + run.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return {name: found[str(root / folder)] for name, folder in LAUNCHES.items()}


RUNS = [
    (launched, model)
    for launched in LAUNCHES
    for model in MODELS
    # compiled as a whole and then sharded, a model is the plain one sharded
    if launched != "fully_shard" or model not in ("compiled", "compiled-by-hand")
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("launched", "model"), RUNS)
def test_a_saved_model_is_the_same_in_a_fresh_process(faults, launched: str, model: str):
    found = faults[launched]
    assert {cell: found[f"{model}/{cell}"] for cell in CELLS} == dict.fromkeys(CELLS, [])


@pytest.mark.slow
def test_the_grid_has_no_other_models(faults):
    assert {tuple(key.split("/")) for key in faults["two processes"]} == {(m, c) for m in MODELS for c in CELLS}
