"""Rows of files on two processes: the run of one process, and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.scripts import readers
from tests.files_of_rows import write
from tests.launching import SCRIPTS, launch

pytestmark = pytest.mark.feature("N106")
KINDS = ("parquet", "jsonl", "stream")


def test_two_processes_train_on_the_rows_of_one_and_resume_bit_for_bit(tmp_path: Path):
    for kind in KINDS:
        write(kind, tmp_path)
    result = tmp_path / "result.json"
    launch(SCRIPTS / "readers.py", str(result), str(tmp_path), *KINDS, processes=2, result=result)
    for kind, together in json.loads(result.read_text()).items():
        alone = readers.run(tmp_path, kind, workers=0)
        assert together["parts"]["weights"] == together["whole"]["weights"]
        for ours, theirs in zip(together["whole"]["weights"], alone["whole"]["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
        seen = [sum(batches, []) for batches in zip(*together["whole"]["seen"], strict=True)]
        assert seen == alone["whole"]["seen"][0]
