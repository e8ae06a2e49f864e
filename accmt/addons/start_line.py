"""One line at the start of a run: where it runs, what it trains, on how many samples, and for how many steps."""

from __future__ import annotations

from accmt.data import Loader
from accmt.processes import num_processes
from accmt.run import Run


def describe_start(run: Run) -> str:
    """Return the line: data of the wrong size or a frozen model would otherwise show only later."""
    parts = [_describe_processes(run), _describe_parameters(run), f"training: {_describe_data(run.train_loader)}"]
    parts += [f"{key or 'validation'}: {_describe_data(loader)}" for key, loader in run.val_loaders.items()]
    return "; ".join([*parts, _describe_steps(run)])


def _describe_processes(run: Run) -> str:
    number = num_processes()
    processes = f"{number} processes" if number > 1 else "1 process"
    precision = run.accelerator.mixed_precision
    return f"{processes} on {run.device.type}, mixed precision {precision}, seed {run.seed}"


def _describe_parameters(run: Run) -> str:
    parameters = list(run.unwrapped_model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{trained:,} of {sum(parameter.numel() for parameter in parameters):,} parameters trained"


def _describe_data(loader: Loader) -> str:
    number = loader.source.num_micro_batches
    samples = None if number is None else loader.source.samples_in(0, number)
    if number is None:
        return "unknown number of samples"
    batches = _count(-(-number // loader.source.micro_batches_per_batch), "batch", "batches")
    return batches if samples is None else f"{_count(samples, 'sample')} in {batches}"


def _describe_steps(run: Run) -> str:
    total, samples = run.length.total, run.samples_per_step(run.state.epoch)
    steps = "steps without a limit" if total is None else _count(total, "step")
    of_samples = "" if samples is None else f" of {_count(samples, 'sample')}"
    resumed = f", resumed after step {run.state.global_step:,}" if run.is_resumed else ""
    return f"{steps}{of_samples}{resumed}"


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
