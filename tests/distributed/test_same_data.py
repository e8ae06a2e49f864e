"""Sharded and split models: the same data on every process are fine, data that the script has divided are an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.launching import SCRIPTS, launch

HAS_PLANS = Version(transformers.__version__) >= Version("5.23")
SPLIT = (pytest.param("tpfsdp-4", marks=pytest.mark.repeats),)
ON_PURPOSE = ("a part of each on purpose", "a stream of each on purpose")
DIVIDED = ("a sampler that divides them", "a stream that datasets divides")
FINE = ("the same", "the same stream", "the same loader", *DIVIDED)
RESUMED = ("others at a resume", "another stream at a resume", "another loader at a resume")


@pytest.mark.slow
@pytest.mark.timeout(460)
@pytest.mark.parametrize("way", ["fsdp-2", *(SPLIT if HAS_PLANS else ())])
def test_only_data_that_differ_between_processes_which_share_them_are_an_error(tmp_path: Path, way: str) -> None:
    path = tmp_path / "result.json"
    launch(SCRIPTS / "same_data.py", str(path), str(tmp_path), processes=way, result=path, timeout_s=400)
    outcomes = json.loads(path.read_text())
    assert outcomes.keys() > {*FINE, *RESUMED}
    for name, messages in outcomes.items():
        said = (
            ""
            if name in FINE
            else "different samples at the same"
            if name in RESUMED
            else "different samples on process 1"
        )
        if name in ON_PURPOSE:  # processes that share batches have no data of their own
            said = 'Trainer(data_options={"shard": False})' if way.startswith("tp") else ""
        assert all((said in message) if said else not message for message in messages), (name, messages)
