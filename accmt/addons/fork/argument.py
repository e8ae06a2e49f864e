"""Checks the argument `fork`."""

from __future__ import annotations

from typing import Any

from accmt.options.checks import raise_wrong_value
from accmt.options.saving import CheckpointSettings


def check_fork(settings: CheckpointSettings) -> None:
    """Check that a fork names a run on this machine and a step, and has its own checkpoint folder.

    Raises:
        ArgumentError: It does not.
    """
    fork: Any = settings.fork
    run, _, step = fork.rpartition("@") if isinstance(fork, str) else ("", "", "")
    if not run or not step.isdecimal():
        raise_wrong_value("fork", fork, "a run folder, @ and a step", 'fork="logs/news/run-a@1200"')
    if "://" in run:
        raise_wrong_value("fork", fork, "a run folder on this machine", "copy the run and its checkpoints here")
    if settings.resume not in (True, False, None, "auto"):
        expected = "one of the two: a fork begins from the other run, and resumes from its own checkpoints"
        raise_wrong_value("resume", settings.resume, expected, "remove `resume`")
    if settings.checkpointer is not None:
        raise_wrong_value("checkpointer", settings.checkpointer, "a checkpoint folder for a fork", "checkpointer=None")
