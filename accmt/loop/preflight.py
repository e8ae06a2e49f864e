"""What is tried before training, because it would otherwise show after hours."""

from __future__ import annotations

import torch

from accmt.checkpoint.space import estimate_size, find_shortage
from accmt.files import format_bytes, free_space
from accmt.loop.run import Run
from accmt.messages import warn


def check_room(run: Run) -> None:
    """Warn if the disk will not hold the run's checkpoints or its model, and say what to change.

    It is no error: room may be made while the run trains, and a full disk does not stop it from training.
    """
    told = run.settings.checkpoints
    if told.every is not None and told.checkpointer is None:
        size = estimate_size(run.unwrapped_model, run.stepper.optimizer)
        shortage = find_shortage(size * ((told.max_checkpoints or 1) + 1), run.checkpoints.folder)
        if shortage is not None:
            warn(shortage)
    _check_model_folder(run)


def _check_model_folder(run: Run) -> None:
    folder = run.settings.saving.folder
    weights = run.unwrapped_model.state_dict().values()
    needed = sum(tensor.nbytes for tensor in weights if isinstance(tensor, torch.Tensor)) * len(
        run.saver.selection.names
    )
    room = free_space(folder)
    if needed > room:
        advice = "free space there, or pass another `model_path`"
        warn(f"the model will need {format_bytes(needed)} in {folder}, and there are {format_bytes(room)}: {advice}")
