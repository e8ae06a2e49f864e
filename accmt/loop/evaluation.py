"""An evaluation: a pass over all validation sets that counts every sample once on any number of processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.callbacks import Callback
from accmt.callbacks.callback import Hook
from accmt.data import Loader, MicroBatch, seed_generators
from accmt.errors import AccmtError, ModuleContractError, fail
from accmt.libraries.private_names import count_writes
from accmt.loop.step_outputs import read_validation_output, read_weight
from accmt.messages import warn, warn_once
from accmt.metrics import Metric, ValidationCollector
from accmt.metrics.results import TooFewSamplesError, describe, find_scalar
from accmt.optimization.schedulers import DEFAULT_MONITOR, monitored_by
from accmt.precisions import autocast
from accmt.processes import broadcast_object, data_index, num_processes, sum_over_data
from accmt.registry import addon
from accmt.run import TEST_LOSS, EvaluationRun, Run
from accmt.saving import name_by_rules
from accmt.state import Stage
from accmt.without_trace import restore_modes


def evaluate_and_count(run: Run, *, counts: bool = True) -> dict[str, float]:
    """Evaluate, call the hooks and log the results.

    Processes: collective.

    Args:
        counts: False for the evaluation before training, which does not select models.

    Returns:
        Losses and metrics by name; with several validation sets `<name>__<key>`. Empty without validation data.
    """
    state = run.state
    run.require_equal_replicas()
    run.snapshot.capture_all(run)
    with run.features.doing("evaluating"), in_evaluation_mode(run.unwrapped_model), run.stepper.evaluating():
        state.now.is_evaluating = True  # marks log rows
        try:
            call_hooks(run.hooks.on_evaluation_start)
            state.begin_evaluation()
            results = evaluate(run, "validate")
            run.train_loader.source.set_epoch_again()  # the same data may be used for training and evaluation
            state.metrics = dict(results)
            if counts:
                state.count_evaluation()
            call_hooks(run.hooks.on_evaluation_end, metrics=state.metrics)
        finally:
            state.now.is_evaluating = False
    return state.metrics


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode (no dropout), and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        restore_modes(modes)


@torch.no_grad()
def call_hooks(hooks: Iterable[Hook], **data: Any) -> None:
    """Call hooks of an evaluation, without gradients."""
    for hook in hooks:
        hook(**data)


class EvaluationResults(Callback):
    """Logs the results of an evaluation after the user's hooks, and steps a scheduler that monitors them.

    Values that hooks add or change are those of the main process: every process uses them to decide whether to save.

    Processes: all.
    """

    order = sys.float_info.max / 2  # after the hooks of users, and before the model is saved by the results

    def __init__(self) -> None:
        self._has_user_hooks: bool | None = None
        self._writes: int | None = None

    def on_validation_end(self) -> None:
        """Record which weights are evaluated."""
        self._writes = self._count_writes()

    def on_evaluation_end(self, metrics: dict[str, Any]) -> None:
        """Agree on the results, and log them."""
        run: Run = self.trainer.run
        # A callback that swaps in its averaged weights: the best metric belonged to weights that were not saved.
        if self._writes not in (None, self._count_writes()) and run.saver.selection.names:
            what = "on_evaluation_end has changed the weights: the model to be saved is not the one that was evaluated"
            do = "if your callback swaps weights for an evaluation, set order = math.inf to swap them back last"
            warn_once(f"{what}; {do}", about="weights changed after an evaluation")
        run.stepper.evaluate_again()
        if self._has_user_hooks is None:
            self._has_user_hooks = bool(run.user_hooks("on_evaluation_end"))
        if self._has_user_hooks:
            scalars = {}
            for name, value in metrics.items():
                scalar = find_scalar(value)
                if scalar is None:
                    got = f"metrics[{name!r}] = {describe(value)}"
                    do = f"metrics[{name!r}] = float(value), or store it on the module"
                    raise fail(ModuleContractError, "on_evaluation_end", got=got, expected="a number", do=do)
                scalars[name] = float(scalar)
            # A hook may compute them with a random generator or a clock, and every process decides by them to save.
            agreed = broadcast_object(scalars)
            metrics.clear()
            metrics.update(agreed)
        row = reported(run, metrics)
        if not run.settings.evaluation.report_loss_after_eval:
            row.pop(run.loss_name, None)
        if row:
            for hook in run.hooks.on_log:
                hook(values=row, step=run.state.global_step)
        _step_on_plateau(run, metrics)

    def _count_writes(self) -> int | None:
        """Return how often weights were modified in place; None if an optimizer or sharding modifies them anyway."""
        run = self.trainer.run
        weights = run.engine.quiet_weights()
        if run.stepper.trains_other_weights or not weights:
            return None
        return sum(map(count_writes, weights))


def _step_on_plateau(run: Run, results: dict[str, float]) -> None:
    """Step a scheduler that monitors a result: its `monitor`, or the validation loss."""
    if not isinstance(run.scheduler, ReduceLROnPlateau):
        return
    name = monitored_by(run.scheduler)
    watched = run.saver.selection.find_quantity(name)
    values = name_by_rules(results, loss_name=run.loss_name, train_loss=None)
    if watched is not None and watched.is_in(values):
        run.scheduler.step(watched.read(values))
    elif name != DEFAULT_MONITOR:  # an evaluation whose weights are all 0 has no loss
        got = f"an evaluation with {sorted(results)}"
        do = "return it from validation_step, or add it in on_evaluation_end"
        raise fail(
            ModuleContractError, f"the scheduler's monitor {name!r}", got=got, expected=f"{name!r} among them", do=do
        )


def evaluate(run: EvaluationRun, stage: Stage, *, max_batches: int | None = None) -> dict[str, float]:
    """Run the validation (or test) steps over all sets.

    Processes: collective between sets, and in a micro-batch that does not reach all of them.

    Args:
        stage: "validate", "test", or "sanity_check", which counts nothing and calls no hooks.
        max_batches: Maximum batches of each set; None means all.

    Returns:
        Losses and metrics by name; with several sets `<name>__<key>`.
    """
    run.engine.share_buffers()
    results: dict[str, float] = {}
    with without_training(run, stage):
        for key, loader in run.val_loaders.items():
            if stage == "sanity_check":
                outputs = _try_set(run, key, loader, max_batches)
            else:
                call_hooks(run.hooks.on_validation_start, key=key)
                evaluation = _SetEvaluation(run, key, stage)
                evaluation.take_all(loader, max_batches)
                outputs = evaluation.finish()
                call_hooks(run.hooks.on_validation_end, key=key, outputs=outputs)
            for name, value in outputs.items():
                results[_name_of_set(name, key)] = value
        for add_results in run.features.add_results:
            results |= add_results(stage)
        settings = run.settings.evaluation.metric_options
        if settings.averages is not None and results:
            averages = addon("averages")(settings.averages, settings.derived)
            metrics = _without_losses(run, results)
            if run.state.fn == "fit":  # a manual evaluation may use other sets
                averages.require_members(list(metrics))
            results |= averages.compute(metrics)
        return results


def _try_set(run: EvaluationRun, key: str, loader: Loader, max_batches: int | None) -> dict[str, float]:
    """Evaluate a set in the trial before training, which calls no hooks."""
    evaluation = _SetEvaluation(run, key, "sanity_check")
    evaluation.take_all(loader, max_batches)
    total = loader.source.num_micro_batches
    is_cut = max_batches is not None and (total is None or total > max_batches)
    return evaluation.finish(partial(_handle_error_in_trial, is_cut=is_cut))


def _without_losses(run: EvaluationRun, results: dict[str, float]) -> dict[str, float]:
    metrics = dict(results)
    for loss in (run.settings.tracking.val_loss_metric_name, TEST_LOSS):
        for key in run.val_loaders:
            metrics.pop(_name_of_set(loss, key), None)
    return metrics


def _name_of_set(name: str, key: str) -> str:
    """Return the name of a value of one of several sets; the key of a single set is empty."""
    return f"{name}__{key}" if key else name


def reported(run: EvaluationRun, results: dict[str, float]) -> dict[str, float]:
    """Return the results to log; those that were averaged only if `report_all` is set."""
    settings = run.settings.evaluation.metric_options
    if settings.averages is None or settings.report_all:
        return dict(results)
    members = addon("averages")(settings.averages).find_members(list(_without_losses(run, results)))
    hidden = set(chain(*members.values())) - members.keys()
    return {name: value for name, value in results.items() if name not in hidden}


@contextmanager
def without_training(run: EvaluationRun, stage: Stage) -> Iterator[None]:
    """Use a model without training it: in evaluation mode, each process separately."""
    before, run.state.now.stage = run.state.now.stage, stage
    try:
        with in_evaluation_mode(run.unwrapped_model), run.engine.unwrapped():
            yield
    finally:
        run.state.now.stage = before


@contextmanager
def taking_batches(run: EvaluationRun) -> Iterator[None]:
    """Mark that the batches of a set are being evaluated, which prevents another evaluation."""
    run.state.now.in_evaluation_batches = True
    try:
        yield
    finally:
        run.state.now.in_evaluation_batches, run.state.now.sample_indices = False, None


_MISTAKES = (AccmtError, AttributeError, ImportError, MemoryError, NameError, NotImplementedError, TypeError)


def _handle_error_in_trial(metric: Metric, error: Exception, *, is_cut: bool) -> None:
    """Raise errors that would also occur with all data; only warn about a metric that may need the whole set."""
    name = metric.name
    # AUROC over two batches may see one class only; a name that does not exist fails with all data, too.
    if not is_cut or (isinstance(error, _MISTAKES) and not isinstance(error, TooFewSamplesError)):
        batches = "all batches"
        if is_cut:
            batches = "the first batches"
        error.add_note(f"This happened in the trial before training, when computing {name!r} over {batches} of a set.")
        raise error
    what = f"metric {name!r} cannot be checked before training: over the first batches it raises"
    do = "this is fine if it needs the whole set; num_sanity_val_steps=-1 checks it with the whole set"
    warn(f"{what} {type(error).__name__}: {error}\n{do}")


class SetPass:
    """A pass over one set without training: the batch loop of evaluations and predictions.

    Args:
        key: The name of the set.
        stage: The stage.
    """

    def __init__(self, run: EvaluationRun, key: str, stage: Stage) -> None:
        self._run = run
        self._key = key
        self._stage = stage
        self._purpose = "predict_step" if stage == "predict" else "validation_step"
        self._has_batch = False

    def take_all(self, loader: Loader, max_batches: int | None = None) -> None:
        """Run the step on this process's batches.

        Processes: collective in a micro-batch that does not reach all of them, and at the end.

        Args:
            loader: The batches.
            max_batches: Maximum number of batches; None means all.
        """
        features = self._run.features
        for before_set in features.before_set:
            before_set()
        num_batches, counts_unread = 0, num_processes() > 1  # then all processes read equally many
        with taking_batches(self._run):
            for micro_batch in loader.micro_batches(0):
                indices = (micro_batch.borrowed or micro_batch).samples
                self._run.state.now.sample_indices = None if indices is None else list(map(int, indices))
                for before_set_batch in features.before_set_batch:
                    before_set_batch(micro_batch)
                taken = self._take(micro_batch)
                self._run.state.count_validation_batch(micro_batch.num_finished)
                self.after_batch(taken)
                # Not those of which no sample could be read.
                if counts_unread or micro_batch.batch is not None or not micro_batch.bad:
                    num_batches += micro_batch.num_finished
                if max_batches is not None and num_batches >= max_batches:
                    break
        for after_set in features.after_set:
            after_set(self._key, has_batch=self._has_batch)

    def _take(self, micro_batch: MicroBatch) -> Any:
        run = self._run
        if micro_batch.batch is None:
            if micro_batch.borrowed is not None:  # the others' step may need all processes; its result is not used
                with self.without_gradients(), autocast(run.accelerator), run.engine.running(micro_batch):
                    self.forward(run.place(micro_batch.borrowed.batch))
                run.module.logs.of_evaluation.begin_batch()  # drops the values logged by the step
            return None
        self._has_batch = True
        batch = run.place(micro_batch.batch)
        seed_generators(micro_batch.seed_of_step(run.seed, self._purpose, data_index=data_index()), run.device)
        with self.without_gradients():
            self.before_step(batch)
            for before_set_forward in run.features.before_set_forward:
                before_set_forward()
            try:
                with autocast(run.accelerator), run.engine.running(micro_batch):
                    is_trial = self._stage == "sanity_check" and run.settings.evaluation.inference_mode
                    forward = self._try_forward if is_trial else self.forward
                    output = forward(batch)
            except Exception as error:
                for on_step_error in run.features.on_step_error:
                    on_step_error(error, micro_batch.batch)
                raise
            return self.take(micro_batch, batch, output)

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return the context in which the step runs: `torch.inference_mode`, unless `inference_mode=False`."""
        # A model may cache tensors in the trial evaluation and use them in training, where inference tensors fail.
        if self._stage == "sanity_check" or not self._run.settings.evaluation.inference_mode:
            return torch.no_grad()
        return self._run.engine.inference_mode()

    def _try_forward(self, batch: Any) -> Any:
        """Run the step under `no_grad`; one that turns gradients on is run again as in evaluations, which may not."""
        saved: list[None] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(None)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self.forward(batch)
        if saved:
            with self._run.engine.inference_mode():
                self.forward(batch)
        return output

    def before_step(self, batch: Any) -> None:
        """Called before the step of a batch."""

    def forward(self, batch: Any) -> Any:
        """Return the output of the step for a batch, this process's or a borrowed one."""
        return self._run.validation_step(self._key, batch)

    def take(self, micro_batch: MicroBatch, batch: Any, output: Any) -> Any:
        """Return what is left of the output of the step for one of this process's batches, without gradients."""

    def after_batch(self, taken: Any) -> None:
        """Called after each micro-batch, once it is counted.

        Processes: all.

        Args:
            taken: The result of `take`; None if this process had no batch.
        """


class _SetEvaluation(SetPass):
    """The evaluation of one set."""

    def __init__(self, run: EvaluationRun, key: str, stage: Stage) -> None:
        super().__init__(run, key, stage)
        is_silent = stage == "sanity_check"  # which calls no hooks
        self._hooks_before = () if is_silent else run.hooks.on_before_validation_step
        self._hooks_after = () if is_silent else run.hooks.on_after_validation_step
        self._reports_batches = (
            run.state.fn == "fit" and not is_silent and not run.settings.evaluation.report_loss_after_eval
        )
        added: list[Metric] = []
        for make_metrics in run.features.make_metrics:
            added += make_metrics()
        self._collector = ValidationCollector(
            run.metrics[key],
            run.module.logs.of_evaluation,
            added=added,
            chunk_bytes=run.settings.evaluation.metric_options.chunk_bytes,
        )

    def before_step(self, batch: Any) -> None:
        """Call the hooks."""
        for hook in self._hooks_before:
            hook(batch=batch)

    def forward(self, batch: Any) -> Any:
        """Return the output of the step, with what features add."""
        outputs = super().forward(batch)
        for add_to_outputs in self._run.features.add_to_outputs:
            outputs = add_to_outputs(self._key, batch, outputs)
        return outputs

    def take(self, micro_batch: MicroBatch, batch: Any, output: Any) -> tuple[Any, Any]:
        """Collect the output of the step, and return the loss and its weight."""
        run, loss_name = self._run, self._run.loss_name
        entries, weight = read_validation_output(output, loss_name)
        targets = None
        if run.features.weigh:
            weight_of_feature = run.features.find_weight(entries.get(loss_name), is_given=weight is not None)
            targets = read_weight("validation_step", weight_of_feature)
        loss_weight = weight
        if weight is None:
            loss_weight = targets
            weight = run.count_samples(micro_batch, batch, has_weight=targets is not None)
        position = micro_batch.places or micro_batch.index
        self._collector.add(entries, weight, position, weights={loss_name: loss_weight})
        for hook in self._hooks_after:
            hook(batch=batch, outputs=output)
        if loss_weight is None:
            loss_weight = weight
        return entries.get(loss_name, 0.0), loss_weight

    def after_batch(self, taken: Any) -> None:
        """Report the loss over the batches of all processes, if requested."""
        run, step = self._run, self._run.state.eval_global_step
        if not self._reports_batches or step % max(run.settings.tracking.log_steps, 1):
            return
        loss, weight = taken or (0.0, 0.0)
        total, total_weight = sum_over_data((float(loss) * float(weight), float(weight)))
        name = _name_of_set(run.loss_name, self._key)
        if total_weight:
            for hook in run.hooks.on_log:
                hook(values={name: total / total_weight}, step=step)

    def finish(self, on_error: Callable[[Metric, Exception], None] | None = None) -> dict[str, float]:
        """Return the averages and metrics over all samples of all processes.

        Processes: collective.

        Args:
            on_error: As in `ValidationCollector.compute`.
        """
        return self._collector.compute(on_error)
