"""What a Trainer finds out before training: a size of batches that fits, a learning rate to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from accmt.errors import ArgumentError, explain
from accmt.messages import say, warn
from accmt.trainer.evaluation import TrainerEvaluation

if TYPE_CHECKING:
    from accmt.module import AcceleratorModule
    from accmt.trainer import Trainer
    from accmt.trainer.trial_fits import Search, Tuning


class TrainerTuning(TrainerEvaluation):
    """Tunes hyper-parameters in short runs before `fit`."""

    def tune(
        self,
        module: AcceleratorModule,
        train_dataset: Any = None,
        *,
        batch_size: Search | None = None,
        lr: bool = False,
        lowest_lr: float = 1e-7,
        highest_lr: float = 1.0,
        lr_updates: int = 100,
    ) -> Tuning:
        """Find a batch size and a learning rate, and put them into the hyper-parameters of this Trainer.

        Each trial trains the module for a few updates, without validation, callbacks, files and trackers; its weights
        are given back. Hooks of the module are called. A new batch size changes the effective batch: where that is to
        stay, `auto_micro_batch=True` is the way.

        Processes: collective.

        Args:
            module: The module.
            train_dataset: As for `fit`.
            batch_size: "power" doubles the batch until memory runs out, "binsearch" then looks for the largest that
                fits; None leaves it as it is.
            lr: Whether to look for the learning rate at which the loss falls fastest while the rate rises.
            lowest_lr: Where the rate begins.
            highest_lr: Where it ends, if the loss does not diverge before.
            lr_updates: Updates in between.

        Returns:
            What was found; the hyper-parameters have it too. With `fast_dev_run` nothing is looked for.

        Raises:
            ArgumentError: A single sample does not fit in memory, or `batch_size` is something else.
            DataError: There are no training data.
        """
        from accmt.setup.datasets import find_train_data
        from accmt.setup.torch_flags import working
        from accmt.trainer.trial_fits import Tuning, suggest_rate, sweep_rates

        if self.settings.running.fast_dev_run:
            return Tuning()
        trainer, hps = cast("Trainer", self), self.settings.hps
        module.trainer, module.state = trainer, self.state  # which its own loaders may go by
        data = find_train_data(module, train_dataset)
        size, rate, curve = None, None, []
        with working(self.settings.running):
            if batch_size is not None:
                size = _find_batch_size(trainer, module, data, batch_size)
                hps.set_train_batch_size(size)
                say(f"tune: batches of {size} samples fit")
            if lr:
                curve = sweep_rates(trainer, module, data, lowest_lr, highest_lr, lr_updates)
                rate = suggest_rate(curve)
                _take_rate(hps, rate)
        return Tuning(size, rate, tuple(curve))


def _find_batch_size(trainer: Trainer, module: AcceleratorModule, data: Any, search: Search) -> int:
    from accmt.trainer.trial_fits import find_batch_size, fits_in_memory, largest_batch

    if search not in ("power", "binsearch"):
        expected, do = '"power", "binsearch" or None', 'batch_size="power"'
        raise ArgumentError(explain("Trainer.tune(batch_size=...)", repr(search), expected, do))
    start, limit = trainer.settings.hps.train_batch_size, largest_batch(data)
    return find_batch_size(lambda size: fits_in_memory(trainer, module, data, size), start, limit, search)


def _take_rate(hps: Any, rate: float | None) -> None:
    if rate is None:
        warn(f"tune: the loss falls at no learning rate, so lr stays {hps.optim_kwargs.get('lr')}")
        return
    hps.optim_kwargs = {**hps.optim_kwargs, "lr": rate}
    say(f"tune: the loss falls fastest at lr {rate:.3g}")
