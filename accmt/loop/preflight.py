"""Checks before training, to find errors that would otherwise appear after hours."""

from __future__ import annotations

from typing import Any

import torch

from accmt.checkpoint.retention import estimate_size, estimate_state, find_shortage
from accmt.data import LargestBatch
from accmt.errors import AccmtError, is_out_of_memory
from accmt.files import format_bytes, free_space
from accmt.huggingface import is_peft_model, try_model_files
from accmt.loop.evaluation import evaluate
from accmt.loop.logging import SilentLogs
from accmt.loop.step_outputs import read_training_output
from accmt.messages import say_once, warn
from accmt.options.optimizer_and_scheduler_arguments import state_of
from accmt.precisions import autocast
from accmt.processes import is_on_any_process, run_on_every_process, run_on_main_process
from accmt.run import Run
from accmt.saving import require_storable
from accmt.without_trace import without_trace


def try_evaluation(run: Run) -> None:
    """Evaluate a few batches, to find errors in the validation step or metrics before the first step."""
    settings = run.settings.evaluation
    # An evaluation before training finds the same errors.
    if not run.val_loaders or settings.num_sanity_val_steps == 0 or settings.eval_when_start:
        return
    limit = None if settings.num_sanity_val_steps == -1 else settings.num_sanity_val_steps
    counters = run.state.state_dict()
    # Observers of quantization count in evaluation mode, too, and a validation step may change attributes.
    with without_trace(run.unwrapped_model), run.attributes.keeping(unchanged=True):
        run.saver.check(run, evaluate(run, "sanity_check", max_batches=limit))
    run.state.load_state_dict(counters)


def try_largest(run: Run) -> None:
    """Run forward and backward on the largest micro-batch of the data, so that memory errors occur now.

    Nothing is counted or logged, no hook is called, and model and random generators are restored. Other changes by the
    module's step are not undone. Other errors only skip the trial: the step may need something that a hook of the first
    epoch creates.

    Processes: all; collective if the model is sharded, otherwise independent.

    Raises:
        AccmtError: The batch cannot be trained on.
        Exception: Memory ran out; or any error if the model is sharded, because processes are then out of step.
    """
    asked = run.settings.failures.try_longest
    if asked is False or (asked is None and run.device.type == "cpu"):
        return
    what = "the largest micro-batch"
    try:
        with without_trace(run.unwrapped_model):
            why_not_tried = run.features.why_not_tried
            largest = why_not_tried[0]() if why_not_tried else run.loaders.make_largest_batch()
            # The forward of a sharded model would wait for the processes that have no such batch.
            if run.engine.needs_all and is_on_any_process(isinstance(largest, str)):
                largest = largest if isinstance(largest, str) else "another process cannot build one"
            if isinstance(largest, LargestBatch):
                what = f"{what}, {largest.num_samples} samples of up to {largest.longest} tokens"
                _put_through(run, largest.batch)
    except Exception as error:
        # The step may need what a hook of the first epoch creates, so other errors may be of the trial alone.
        if not (run.engine.needs_all or isinstance(error, AccmtError) or is_out_of_memory(error)):
            warn(f"trying {what} before training failed: {type(error).__name__}: {error}")
            return
        do = ": lower max_tokens or batch_size" if is_out_of_memory(error) else ""
        off = 'Trainer(failures={"try_longest": False}) skips this trial'
        error.add_note(f"This happened before training, while trying {what}{do}; {off}.")
        raise
    if isinstance(largest, LargestBatch):
        say_once(f"tried {what}, with forward and backward before training")
    elif asked or run.settings.hps.max_tokens is not None:
        say_once(f"{what} is not tried before training: {largest}")


def _put_through(run: Run, batch: Any) -> None:
    module, model, logs, stage = run.module, run.unwrapped_model, run.module.logs, run.state.now.stage
    module.logs, run.state.now.stage = SilentLogs(module.trainer), "train"
    model.train()
    try:
        with run.engine.unwrapped(trains=True):
            optimizer, reserved = run.stepper.optimizer, None  # its first step will create its state: reserve memory
            if not (run.engine.needs_all or state_of(optimizer) or run.device.type == "cpu"):
                reserved = torch.empty(estimate_state(optimizer), dtype=torch.uint8, device=run.device)
            with run.engine.running(None):
                with autocast(run.accelerator):
                    outputs = run.features.call_training_step(run.training_step, run.place(batch), read=batch)
                    output = read_training_output(outputs)
                output.loss.backward()  # type: ignore[no-untyped-call]
            del reserved
    finally:
        module.logs, run.state.now.stage = logs, stage
        logs.of_training.drop_batch()


def try_saving(run: Run) -> None:
    """Find what a checkpoint or the model folder cannot hold: names, shapes and dtypes of what would be saved.

    The small files beside the weights are written once, to a temporary folder.

    Whether what is loaded equals what was saved is for `Trainer.check_resume`.

    Processes: collective.
    """
    if run.saver.selection.names or run.settings.saving.saves_last:
        run_on_every_process(lambda: _require_storable(run))
        run_on_main_process(lambda: try_model_files(run.unwrapped_model, run.module.processor))
    if run.checkpoints.are_written and not run.is_resumed:  # it has just loaded one
        run.checkpoints.try_collecting(run)


def _require_storable(run: Run) -> None:
    if not is_peft_model(run.unwrapped_model):  # only adapters are saved
        safe = run.settings.saving.safe_serialization
        require_storable(run.unwrapped_model.state_dict(), safe_serialization=safe)


def check_room(run: Run) -> None:
    """Warn if there is not enough disk space for the run's checkpoints or its model.

    This is not an error: space may become free during training, and a full disk does not stop training.
    """
    settings = run.settings.checkpoints
    if settings.writes_to_folder:
        size = estimate_size(run.unwrapped_model, run.stepper.optimizer)
        shortage = find_shortage(
            size * ((settings.checkpoint_options.max_checkpoints or 1) + 1), run.checkpoints.folder
        )
        # Without this line, a full disk shows at the first checkpoint, perhaps after hours.
        if shortage is not None:
            warn(shortage)
    folder = run.settings.model_folder
    weights = run.unwrapped_model.state_dict().values()
    size = sum(tensor.nbytes for tensor in weights if isinstance(tensor, torch.Tensor))
    needed, room = size * len(run.saver.selection.names), free_space(folder)
    if needed > room:
        advice = "free space there, or pass a different `model_path`"
        warn(f"the model needs {format_bytes(needed)} in {folder}, but only {format_bytes(room)} are free: {advice}")
