"""Checks on a user's module and data that a resumed run is bit-for-bit identical, or names the first difference."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.addons.digests import changed_attributes, digest, digest_attributes
from accmt.callbacks import StatelessCallback, build_callbacks
from accmt.checkpoint.contents import StateCollector
from accmt.checkpoint.manifest import step_name
from accmt.errors import CheckpointError, fail
from accmt.messages import say, speaking
from accmt.options import Settings
from accmt.processes import broadcast_object, gather_objects
from accmt.run.run_state import collect_others, list_parts

if TYPE_CHECKING:
    from accmt import Trainer
    from accmt.module import AcceleratorModule

_LEFT_OUT = ("checkpointer", "fork", "run_name", "log_with", "tracker_options")


@dataclass
class _Trace:
    """Digests by name of everything in a run, in the order in which differences would appear."""

    entries: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digests of the module's attributes before each batch."""
    module: AcceleratorModule | None = None

    def first_difference(self, other: _Trace) -> str | None:
        """Return the first name whose digest differs from `other`'s."""
        names = (name for name, one in other.entries.items() if self.entries.get(name) != one)
        return next(names, None)


class _Witness(StatelessCallback):
    """Records digests of every batch and loss of a run, and of its final state."""

    def __init__(self) -> None:
        self.trace = _Trace()

    def on_before_training_step(self, batch: Any) -> None:
        self.trace.entries[f"the batch {self._place()}"] = digest(batch)
        self.trace.attributes[self._place()] = digest_attributes(self.module)

    def on_after_training_step(self, outputs: Any) -> None:
        self.trace.entries[f"the result of training_step for batch {self._place()}"] = digest(outputs)

    def on_fit_end(self) -> None:
        run = self.trainer.run
        collected = StateCollector(run.model, [run.stepper.optimizer]).collect(collect_others(run))
        for name, tensor in collected.pieces.tensors.items():
            self.trace.entries[f"the final {name}"] = digest(tensor)
        for part in list_parts(run):
            if part.name not in ("tracking", "clock", "attributes", "process_attributes", "features", "trainer"):
                self.trace.entries[f"the final state of {part.name}"] = digest(part.owner.state_dict())
        for name, value in run.attributes.collect_all().items():
            self.trace.entries[f"the final {name}"] = digest(value)
        self.trace.module = self.module

    def _place(self) -> str:
        return f"{self.state.train_step + 1} of epoch {self.state.epoch + 1}"


def check_resume(
    trainer: Trainer,
    module: AcceleratorModule,
    train_dataset: Any,
    val_dataset: Any = None,
    *,
    steps: int = 2,
) -> int:
    """Train copies of a module with and without an interruption, and compare every batch, loss and tensor, bit by bit.

    Args:
        trainer: The Trainer; its settings are used, except trackers and folders.
        module: The module; copies are trained, the module itself is not changed.
        train_dataset: As for `fit`.
        val_dataset: As for `fit`.
        steps: Optimizer steps before the interruption, and again after it.

    Returns:
        The number of batches, losses and tensors compared.

    Raises:
        CheckpointError: Something differs; the message names the first difference.

    Processes:
        Collective.
    """
    with (
        tempfile.TemporaryDirectory(prefix="accmt-") as own,
        speaking(verbose=trainer.settings.running.verbose),
    ):
        folder = Path(broadcast_object(own))  # all processes use the main process's
        data = (train_dataset, val_dataset)
        whole = _run(trainer, folder, _copy(module, "the module"), data, steps)
        resumed = _run(trainer, folder, _copy(module, "the module"), data, steps, resume=folder / "checkpoints")
        every = gather_objects(whole.first_difference(resumed))  # of any process
        difference = next((found for found in every if found is not None), None)
        if difference is not None:
            again = _run(trainer, folder, _copy(module, "the module"), data, steps)
            raise _report(difference, again.first_difference(whole), whole, resumed)
        say(f"resuming is exact: {len(resumed.entries)} batches, losses and tensors are bit-for-bit identical")
        return len(resumed.entries)


def _run(
    trainer: Trainer,
    folder: Path,
    module: Any,
    data: tuple[Any, Any],
    steps: int,
    resume: Path | None = None,
) -> _Trace:
    """Train for `2 * steps` steps with a checkpoint halfway, from scratch or from the checkpoint in `resume`."""
    witness = _Witness()
    arguments = trainer.settings.to_arguments()
    for name in (*_LEFT_OUT, *trainer.settings.tracking.tracker_kwargs):
        arguments.pop(name, None)
    arguments |= {
        "hps_config": {"hps": {**arguments["hps_config"]["hps"], "epochs": None, "max_steps": 2 * steps}},
        "model_path": folder / "model",
        "logging_dir": folder / "logs",
        "checkpoint": folder / ("resumed" if resume else "checkpoints"),
        "checkpoint_every": f"{steps} steps",
        "checkpoint_options": {"max_checkpoints": 2},
        "model_saving": None,
        "resume": False,
        "seed": trainer.settings.running.seed or 0,
        "callbacks": [*build_callbacks(_copy(trainer.settings.running.callbacks, "the callbacks")), witness],
        "verbose": False,
    }
    copied: Any = copy.copy(trainer)  # a subclass may have another constructor
    copied.settings = Settings.from_arguments(_with_defaults(arguments))
    copied.registered_savings = []
    if resume is not None:
        copied.load_checkpoint(resume / step_name(steps))
    copied.fit(module, *data)
    return witness.trace


def _with_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**Settings.defaults(), "tracker_kwargs": {}, **arguments}


def _copy(original: Any, what: str) -> Any:
    try:
        return copy.deepcopy(original)
    except Exception as error:
        held = []  # what causes it
        for name, value in getattr(original, "__dict__", {}).items():
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - whatever copying does
                held.append(f"self.{name}")
        got = f"{what} cannot be copied: {error}" + (f" ({', '.join(held)})" if held else "")
        do = "remove open files, locks and the like from it, or define __deepcopy__"
        raise fail(
            CheckpointError, "check_resume", got=got, expected="a module and callbacks that can be copied", do=do
        ) from error


def _report(difference: str, without_interruption: str | None, whole: _Trace, resumed: _Trace) -> CheckpointError:
    where, expected = "check_resume", "bit-for-bit identical runs with and without an interruption"
    if without_interruption is not None:
        got = f"{without_interruption} differs between two runs that were not interrupted"
        do = "look for randomness from custom generators or clocks, and for nondeterministic operations"
        return fail(CheckpointError, where, got=got, expected=expected, do=do)
    start = next(iter(resumed.attributes), "")
    changed = changed_attributes(whole.attributes.get(start, {}), resumed.attributes.get(start, {}))  # was not restored
    changed = changed or changed_attributes(digest_attributes(whole.module), digest_attributes(resumed.module))
    hidden = [f"self.{name}" for name in changed]
    do = "return what the next step depends on from state_dict (of module or callback), restore it in load_state_dict"
    if hidden:
        do = f"return {', '.join(hidden)} from {type(whole.module).__name__}.state_dict, restore it in load_state_dict"
        if any(name.startswith("model.") for name in changed):
            do += "; a number or tensor of a layer can be a buffer instead (self.register_buffer)"
    return fail(CheckpointError, where, got=f"the first difference is {difference}", expected=expected, do=do)
