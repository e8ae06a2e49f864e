"""A script that runs in a fork starts, is alone and ends as one that runs in a new process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launching import Fork, launch, python, run_script

SCRIPT = """
import atexit, json, os, random, signal, sys

def leave():
    print("left")

atexit.register(leave)
print(json.dumps([sys.argv[1:], os.getcwd(), sys.path[0], os.environ["FOR_THE_SCRIPT"], __name__]))
match sys.argv[1]:
    case "error":
        raise ValueError("the script's")
    case "exit":
        sys.exit(7)
    case "SIGKILL" | "SIGINT" | "SIGTERM":
        sys.stdout.flush()
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""
CHANCE = """
import random, sys
from pathlib import Path
import numpy, torch

drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(())), str({str(n) for n in range(99)})]
Path(sys.argv[1]).write_text("\\n".join(map(str, drawn)))
"""


@pytest.mark.parametrize("end", ["well", "error", "exit", "SIGKILL", "SIGINT", "SIGTERM"])
def test_a_script_sees_and_ends_as_in_a_new_process(end: str, tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with monkeypatch.context() as patch:
        patch.setenv("FOR_THE_SCRIPT", "told")
        new, forked = python(script, end), run_script(script, end)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_runs_one_after_the_other_share_no_chance(tmp_path: Path) -> None:
    script, drawn = tmp_path / "script.py", []
    script.write_text(CHANCE)
    for index in range(3):
        assert run_script(script, tmp_path / str(index)).returncode == 0
        drawn.append((tmp_path / str(index)).read_text().splitlines())
    *numbers, orders = zip(*drawn, strict=True)
    assert [len(set(kind)) for kind in numbers] == [3, 3, 3]
    assert orders[0] != orders[1], "the order of a set"


def test_what_hangs_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(100)")
    with (tmp_path / "output").open("w") as output:
        fork = Fork(script, files=[output, output])
        assert fork.poll(0.1) is None
        fork.kill()
    assert fork.poll() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(fork.pid, 0)


def test_a_launch_of_which_one_process_fails_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys, pathlib\npathlib.Path(sys.argv[1]).touch()\nsys.exit(int(os.environ['RANK']))")
    result = tmp_path / "result"
    with pytest.raises(AssertionError, match=r"script.py ended with \[0, 1\]"):
        launch(script, str(result), processes=2, result=result)
