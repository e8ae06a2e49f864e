"""Starts scripts in several processes with the real launcher, and judges them by what they wrote.

A gloo run sometimes aborts at interpreter exit, after everything was done ("terminate called without an active
exception"; seen without accmt too). So a script writes its results before it leaves, and an abort after that is told
apart from a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "distributed" / "scripts"
ABORTED = 134
LAST_LINES = 50


def launch(
    script: Path,
    *arguments: str,
    processes: int,
    result: Path,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
) -> str:
    """Run a script with torchrun and return what it printed.

    Args:
        script: The script.
        arguments: Its arguments.
        processes: How many processes run it.
        result: A file that the script writes last.
        timeout_s: Seconds after which the run counts as hung.
        env: Further environment variables.

    Raises:
        AssertionError: The run failed, hung, or wrote no result; the message holds its last lines.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        str(script),
    ]
    environment = {**_environment(), "PYTHONWARNINGS": "default", **(env or {})}
    try:
        run = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode() + (error.stderr or b"").decode()
        raise AssertionError(f"{script.name} hung for {timeout_s} s:\n{_tail(printed)}") from None
    printed = run.stdout + run.stderr
    assert result.exists(), f"{script.name} wrote no result (exit code {run.returncode}):\n{_tail(printed)}"
    is_known_abort = "terminate called without an active exception" in printed or "SIGABRT" in printed
    assert run.returncode == 0 or is_known_abort, f"{script.name} ended with {run.returncode}:\n{_tail(printed)}"
    return printed


def python(
    *command: Sequence[str] | str, timeout_s: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])
