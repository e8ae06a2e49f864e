"""What a built wheel holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.feature("D33")
def test_the_wheel_holds_only_the_package(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("accmt-*.whl"))).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"accmt"}
    assert "accmt/loop/fit.py" in names
