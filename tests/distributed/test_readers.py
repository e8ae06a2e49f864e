"""Rows of files on two processes: the run of one process, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.files_of_rows import check_processes

KINDS = ("parquet", "jsonl", "stream")


@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_one_and_resume_bit_for_bit(tmp_path: Path):
    check_processes(KINDS, tmp_path)
