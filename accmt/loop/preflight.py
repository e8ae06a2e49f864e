"""What is tried before training, because it would otherwise show after hours."""

from __future__ import annotations

import torch

from accmt.checkpoint.size_estimate import estimate_size, find_shortage
from accmt.checkpoint.trial import try_model
from accmt.errors import CheckpointError
from accmt.files import format_bytes, free_space
from accmt.huggingface import is_peft_model
from accmt.loop.evaluation import evaluate
from accmt.messages import warn
from accmt.processes import run_on_every_process
from accmt.run import Run
from accmt.saving import require_storable


def try_evaluation(run: Run) -> None:
    """Evaluate a few batches, so that a mistake in validation step or metrics surfaces before the first step."""
    settings = run.settings.evaluation
    if not run.val_loaders or settings.num_sanity_val_steps == 0 or settings.eval_when_start:
        return
    limit = None if settings.num_sanity_val_steps == -1 else settings.num_sanity_val_steps
    counters = run.state.state_dict()
    run.saver.check(evaluate(run, "sanity_check", max_batches=limit))
    run.state.load_state_dict(counters)


def try_saving(run: Run) -> None:
    """Save and load the model in memory, so that what no checkpoint or folder can give back is known now.

    Processes: collective.
    """
    if run.saver.selection.names or run.settings.saving.save_last:
        run_on_every_process(lambda: _require_storable(run))
    if run.is_resumed:  # which has just loaded one
        return
    try:
        run_on_every_process(lambda: try_model(run.model))
        run.checkpoints.try_collecting(run)
    except CheckpointError as error:
        if run.checkpoints.are_written:
            raise
        warn(f"{error}\nThe run writes no checkpoints, so it continues.")


def _require_storable(run: Run) -> None:
    if not is_peft_model(run.unwrapped_model):  # of which only the adapters are saved
        safe = run.settings.saving.safe_serialization
        require_storable(run.unwrapped_model.state_dict(), safe_serialization=safe)


def check_room(run: Run) -> None:
    """Warn if the disk will not hold the run's checkpoints or its model, and say what to change.

    It is no error: room may be made while the run trains, and a full disk does not stop it from training.
    """
    settings = run.settings.checkpoints
    if settings.every is not None and settings.checkpointer is None:
        size = estimate_size(run.unwrapped_model, run.stepper.optimizer)
        shortage = find_shortage(size * ((settings.max_checkpoints or 1) + 1), run.checkpoints.folder)
        if shortage is not None:
            warn(shortage)
    _check_model_folder(run)


def _check_model_folder(run: Run) -> None:
    folder = run.settings.model_folder
    weights = run.unwrapped_model.state_dict().values()
    needed = sum(tensor.nbytes for tensor in weights if isinstance(tensor, torch.Tensor)) * len(
        run.saver.selection.names
    )
    room = free_space(folder)
    if needed > room:
        advice = "free space there, or pass another `model_path`"
        warn(f"the model will need {format_bytes(needed)} in {folder}, and there are {format_bytes(room)}: {advice}")
