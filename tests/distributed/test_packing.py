"""Packed documents on several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.scripts.packed import LENGTHS, NUMBER, STEP, TOKENS
from tests.distributed.scripts.packed_on_one import STEPS
from tests.launching import SCRIPTS, launch, run_together

pytestmark = pytest.mark.slow

ON_ONE = SCRIPTS / "packed_on_one.py"
PLACES = {"ddp-2": [0, 1], "fsdp-2": [1, 1]}
"""How often each process tries the model: alone where it sees packed rows, and together where all hold a part of it."""


@pytest.mark.parametrize("way", PLACES)
@pytest.mark.parametrize("kind", ["llama", "nested"])
def test_rows_that_are_packed_on_one_process_alone_are_trained_on(tmp_path: Path, way: str, kind: str) -> None:
    path = tmp_path / "result.json"
    launch(ON_ONE, kind, str(path), str(tmp_path), processes=way, result=path)
    found = json.loads(path.read_text())
    assert found["packed"]["trials"] == PLACES[way]
    assert found["plain"]["trials"] == ([0, 0] if way == "ddp-2" else PLACES[way])
    for one in found.values():
        assert one["steps"] == STEPS
        assert one["isolated"]
        assert one["modes"]
    assert found["plain"]["total"] != found["packed"]["total"]


@pytest.mark.parametrize("way", PLACES)
def test_all_processes_end_where_one_alone_has_packed_rows_that_its_model_mixes(tmp_path: Path, way: str) -> None:
    path = tmp_path / "result.json"
    forks, printed = run_together(ON_ONE, "opt", str(path), str(tmp_path), processes=way)
    assert all(fork.poll() for fork in forks)
    assert "packed documents in" in printed
    assert "mixed documents with attn_implementation='sdpa'" in printed
    assert not path.exists()


@pytest.mark.parametrize("way", [3, "fsdp-2"])
def test_packed_documents_give_the_weights_of_each_document_by_itself(tmp_path: Path, way: int | str) -> None:
    path = tmp_path / "result.json"
    launch(SCRIPTS / "packed.py", str(path), str(tmp_path), processes=way, result=path)
    found = json.loads(path.read_text())
    assert found["difference"] < 1e-7  # transformers computes the loss in float32
    assert found["counters"] == [-(-NUMBER // STEP), NUMBER]
    assert all(tokens <= TOKENS for own in found["tokens"] for tokens in own)
    sums = list(map(sum, found["tokens"]))
    assert sum(sums) >= sum(LENGTHS)
    assert max(sums) - min(sums) < 0.1 * max(sums)
