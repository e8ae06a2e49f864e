"""One evaluation: a pass over all validation sets, in which every sample counts once, whatever the processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.data import Loader, Round, derive_seed, seed_generators
from accmt.errors import ModuleContractError, explain
from accmt.loop.outputs import read_validation_output
from accmt.loop.reduction import broadcast_buffers
from accmt.loop.run import Run
from accmt.metrics import ValidationCollector
from accmt.processes import gather_objects, process_index, sum_over_processes
from accmt.state import Stage


def evaluate_and_count(run: Run, *, counts: bool = True) -> dict[str, float]:
    """Evaluate, tell the hooks and log the results.

    Processes: collective.

    Args:
        run: The run.
        counts: False for the evaluation before training, which nothing is selected by.

    Returns:
        Losses and metrics by name; with several validation sets `<name>__<key>`. Empty without validation data.
    """
    state = run.state
    for hook in run.hooks.on_evaluation_start:
        hook()
    state.begin_evaluation()
    results = evaluate(run, "validate")
    state.metrics = dict(results)
    if counts:
        state.count_evaluation()
    _log_results(run, results)
    _step_on_plateau(run, results)
    for hook in run.hooks.on_evaluation_end:
        hook(metrics=state.metrics)
    return state.metrics


def _log_results(run: Run, results: dict[str, float]) -> None:
    loss_name = run.settings.tracking.val_loss_metric_name
    reported = run.settings.evaluation.report_loss_after_eval
    row = {name: value for name, value in results.items() if reported or name != loss_name}
    if row:
        for hook in run.hooks.on_log:
            hook(values=row, step=run.state.global_step)


def _step_on_plateau(run: Run, results: dict[str, float]) -> None:
    if not isinstance(run.scheduler, ReduceLROnPlateau):
        return
    name = run.settings.tracking.val_loss_metric_name
    losses = [
        results[key] for key in (f"{name}__{set_}" if set_ else name for set_ in run.val_loaders) if key in results
    ]
    if losses:
        run.scheduler.step(sum(losses) / len(losses))


def evaluate(run: Run, stage: Stage, *, max_rounds: int | None = None) -> dict[str, float]:
    """Run the validation steps over all sets.

    Processes: collective only between sets; within a set processes need not keep in step.

    Args:
        run: The run.
        stage: "validate", or "sanity_check", which counts nothing and calls no hooks.
        max_rounds: Batches of each set at most; None is all.

    Returns:
        Losses and metrics by name; with several sets `<name>__<key>`.
    """
    broadcast_buffers(run.unwrapped_model)
    results: dict[str, float] = {}
    with _evaluating(run, stage):
        for key, loader in run.val_loaders.items():
            outputs = _evaluate_set(run, stage, key, loader, max_rounds)
            suffix = f"__{key}" if key else ""
            results |= {f"{name}{suffix}": value for name, value in outputs.items()}
    return results


@contextmanager
def _evaluating(run: Run, stage: Stage) -> Iterator[None]:
    before, run.state.now.stage = run.state.now.stage, stage
    training = [module for module in run.unwrapped_model.modules() if module.training]
    run.unwrapped_model.eval()
    try:
        with run.using_unwrapped_model():
            yield
    finally:
        for module in training:  # and not those that the user keeps in eval mode
            module.training = True
        run.state.now.stage = before


def _without_gradients(run: Run, stage: Stage) -> AbstractContextManager[None]:
    # What a model caches in the trial evaluation is used in training, where inference tensors are refused.
    if stage == "sanity_check" or not run.settings.evaluation.inference_mode:
        return torch.no_grad()
    return torch.inference_mode()


def _evaluate_set(run: Run, stage: Stage, key: str, loader: Loader, max_rounds: int | None) -> dict[str, float]:
    is_silent = stage == "sanity_check"
    hooks = run.hooks
    for hook in () if is_silent else hooks.on_validation_start:
        hook(key=key)
    collector = ValidationCollector(run.metrics[key])
    gave_weight: set[bool] = set()
    for round_ in islice(loader.rounds(0), max_rounds):
        with _without_gradients(run, stage):
            loss, weight = _validate_batch(run, collector, key, round_, gave_weight, is_silent=is_silent)
        run.state.count_validation_batch()
        if not is_silent and not run.settings.evaluation.report_loss_after_eval:
            _report_batch(run, key, loss, weight)
    _require_one_kind(gave_weight.union(*gather_objects(gave_weight)))
    outputs = collector.compute()
    for hook in () if is_silent else hooks.on_validation_end:
        hook(key=key, outputs=outputs)
    return outputs


def _validate_batch(
    run: Run, collector: ValidationCollector, key: str, round_: Round, gave_weight: set[bool], *, is_silent: bool
) -> tuple[Any, Any]:
    if round_.batch is None:
        return 0.0, 0.0
    batch = run.place(round_.batch)
    seed_generators(derive_seed(run.seed, "validation_step", round_.index, process_index()), run.device)
    for hook in () if is_silent else run.hooks.on_before_validation_step:
        hook(batch=batch)
    with run.autocast():
        output = run.validation_step(key, batch)
    loss_name = run.settings.tracking.val_loss_metric_name
    entries, weight = read_validation_output(output, loss_name)
    gave_weight.add(weight is not None)
    if weight is None:
        weight = run.count_samples(round_, batch)
    collector.add(entries, weight, round_.index)
    for hook in () if is_silent else run.hooks.on_after_validation_step:
        hook(batch=batch, outputs=output)
    return entries.get(loss_name, 0.0), weight


def _require_one_kind(gave_weight: set[bool]) -> None:
    if len(gave_weight) > 1:
        got = '"weight" beside the loss of some batches and not of others: tokens and samples cannot be added up'
        do = 'return {"loss": loss, "weight": weight} for every batch, or for none'
        raise ModuleContractError(explain("validation_step", got, "weights for all batches or for none", do))


def _report_batch(run: Run, key: str, loss: Any, weight: Any) -> None:
    step = run.state.eval_global_step
    if step % max(run.settings.tracking.log_every, 1):
        return
    total, total_weight = sum_over_processes((float(loss) * float(weight), float(weight)), run.device)
    name = run.settings.tracking.val_loss_metric_name + (f"__{key}" if key else "")
    for hook in run.hooks.on_log if total_weight else ():
        hook(values={name: total / total_weight}, step=step)
