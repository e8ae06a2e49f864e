"""Language models on 2 processes: recomputation changes no bit, and `generate` works in the validation step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by kind of run."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    result = folder / "result.json"
    script = SCRIPTS / "fine_tuning.py"
    launch(script, str(result), str(folder), processes=2, result=result, timeout_s=240)
    found: list[dict[str, Any]] = json.loads(result.read_text())
    assert len(found) == 2
    return found


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_give_the_same_weights_bit_for_bit(every, lora: bool):
    digests = {own[f"lora={lora} checkpointing={on}"]["digest"] for own in every for on in (False, True)}
    assert len(digests) == 1


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_prompt_is_continued_once_as_one_process_would(every, lora: bool, checkpointing: bool):
    runs = [own[f"lora={lora} checkpointing={checkpointing}"] for own in every]
    written = [prompt for run in runs for prompt in run["written"]]
    assert sorted(written) == sorted(runs[0]["after"])
    for run in runs:
        assert run["written"].items() <= run["after"].items()
        assert all(len(row) > 2 for row in run["written"].values())


def test_frozen_weights_that_are_made_of_other_tensors_are_those_of_the_main_process(every):
    main, *others = (own["around quantized"] for own in every)
    assert all(other == main for other in others)
    assert main["ignored"] is None
