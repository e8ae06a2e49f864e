"""Protects the best model from `trainer.save_model()` without a folder, which writes the last weights over it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from accmt.errors import ArgumentError, fail
from accmt.processes import run_on_main_process
from accmt.run import Run
from accmt.saving import read_status
from accmt.saving.model_folder import RUN_KEY


def reject_replacing_best(run: Run) -> None:
    """Check that the model folder does not have the best model of a finished run with other weights.

    Processes: collective.

    Raises:
        ArgumentError: It does.
    """
    run_on_main_process(partial(_reject, run))  # the others do not know the model's run


def _reject(run: Run) -> None:
    folder, state, status = run.settings.model_folder, run.state, {}
    with suppress(FileNotFoundError):
        status = read_status(folder)
    is_best = status.get(RUN_KEY) == run.saver.run_id and str(status["model_saving"]).startswith("best")
    # During the run, a hook may save as it likes: an error would end the training.
    if not (state.finished and is_best) or status["global_step"] == state.global_step:
        return
    raise fail(
        ArgumentError,
        "trainer.save_model()",
        got=f"weights after step {state.global_step}, and the best model, after step {status['global_step']}, "
        f"is already in {folder}",
        expected="another folder",
        do=f'leave it out to keep the best model, or write trainer.save_model("{folder}-last")',
    )
