"""`HyperParameterSearch` of the original accmt, as a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accmt.addons.hints.original import group_by_set
from accmt.addons.sweep.worker import Sweep
from accmt.callbacks.callback import StatelessCallback
from accmt.errors import ArgumentError, fail
from accmt.module import AcceleratorModule

if TYPE_CHECKING:
    from accmt.addons.sweep.results import SweepResult
    from accmt.module import Data

_SCORE = "score"


class HyperParameterSearch:
    """Searches hyper-parameters of Adam or AdamW, as in the original accmt; `Sweep` can do more.

    A value that is a list [low, high] is a range, and a tuple has choices; a list of train_batch_size is of choices.

    Args:
        get_module_fn: Returns a new module.
        train_dataset: The training data.
        val_dataset: The validation data.
        metrics: Metrics, as of the Trainer.
        folder: The folder of the trials. The same search continues there: delete it to start again.
        **trainer_kwargs: Further arguments of the Trainer.

    Examples:
        >>> search = HyperParameterSearch(lambda: MyModule(), train_dataset=[1, 2], val_dataset=[3])
        >>> search.set_parameters(train_batch_size=[8, 16], learning_rate=[1e-5, 1e-3])
        >>> search.optimize(lambda metrics: metrics["0"]["accuracy"], "maximize", n_trials=20)  # doctest: +SKIP
    """

    def __init__(
        self,
        get_module_fn: Callable[[], AcceleratorModule],
        train_dataset: Data,
        val_dataset: Data,
        metrics: Sequence[Any] | None = None,
        *,
        folder: str = "out/hp_search",
        **trainer_kwargs: Any,
    ) -> None:
        self._get_module = get_module_fn
        self._data = (train_dataset, val_dataset)
        self._folder = folder
        self._arguments = {"metrics": metrics, "model_saving": None, **trainer_kwargs}
        self._hps: dict[str, Any] = {}
        self._space: dict[str, Any] = {}

    def set_parameters(
        self,
        *,
        train_batch_size: int | Sequence[int] = 1,
        epochs: int | Sequence[int] = 1,
        max_steps: int | Sequence[int] | None = None,
        learning_rate: float | Sequence[float] | None = None,
        beta1: float | Sequence[float] = 0.9,
        beta2: float | Sequence[float] = 0.999,
        eps: float | Sequence[float] = 1e-8,
        weight_decay: float | Sequence[float] = 0.01,
        scheduler: str | Mapping[str, str] | None = None,
        warmup_ratio: float | Sequence[float] = 0.1,
        step_scheduler_per_epoch: bool = False,
        optimizer: Literal["AdamW", "Adam"] = "AdamW",
        eval_batch_size: int | None = None,
    ) -> None:
        """Set values and ranges; the names are those of the original."""
        sizes = train_batch_size if isinstance(train_batch_size, Sequence) else [train_batch_size]
        pairs = [[size, eval_batch_size or size] for size in sizes]
        optim = {"type": optimizer, "lr": 1e-3, "betas": [0.9, 0.999]}
        self._hps = {"batch_size": pairs[0], "optim": optim, "step_scheduler_per_epoch": step_scheduler_per_epoch}
        self._space = {"batch_size": pairs} if len(pairs) > 1 else {}
        values: dict[str, Any] = {"optim.lr": [1e-7, 1e-3] if learning_rate is None else learning_rate}
        values |= {"optim.eps": eps, "optim.weight_decay": weight_decay}
        values |= {"optim.betas.0": beta1, "optim.betas.1": beta2}
        values |= {"epochs": epochs} if max_steps is None else {"max_steps": max_steps}
        if scheduler is not None:
            self._hps["scheduler"] = {"type": "LinearWithWarmup"}
            values["scheduler.type"] = tuple(scheduler.values()) if isinstance(scheduler, Mapping) else scheduler
            values["scheduler.warmup_ratio"] = warmup_ratio
        for key, value in values.items():
            if isinstance(value, list):
                self._space[key] = {"int" if key in ("epochs", "max_steps") else "uniform": sorted(value)}
            else:
                self._space[key] = list(value) if isinstance(value, tuple) else value

    def optimize(
        self,
        best_metric_fn: Callable[[dict[str, dict[str, float]]], float] | None = None,
        direction: Literal["maximize", "minimize"] = "minimize",
        n_trials: int = 10,
    ) -> SweepResult:
        """Run the trials, and return them; `result.best.values` are the best hyper-parameters.

        Args:
            best_metric_fn: Returns the objective for the metrics of an evaluation, by the key of the validation set
                ("0" for a single one). None: the validation loss.
            direction: Whether the objective is maximized or minimized.
            n_trials: How many trials to run.

        Raises:
            ArgumentError: `set_parameters` was not called, or a value is invalid.
        """
        if not self._hps:
            got, do = "no parameters", "search.set_parameters(learning_rate=[1e-5, 1e-3])"
            raise fail(ArgumentError, "HyperParameterSearch.optimize", got=got, expected="a search space", do=do)
        import accmt  # here: an add-on may not import the Trainer's package

        objective = "valid_loss" if best_metric_fn is None else _SCORE
        callbacks = [_Score(best_metric_fn)] if best_metric_fn else []
        passed = self._arguments.get("callbacks") or []
        callbacks += passed if isinstance(passed, list | tuple) else [passed]

        def train() -> None:
            trainer = accmt.Trainer(self._hps, "out/model", **{**self._arguments, "callbacks": callbacks})
            trainer.fit(self._get_module(), *self._data)

        limits = {"trials": n_trials, "take": "last", "folder": self._folder, "name": "hp_search"}
        return Sweep(self._space, {objective: direction[:3].lower()}, **limits).run(train)


class _Score(StatelessCallback):
    """Logs the objective of each evaluation, before the sweep reads it."""

    def __init__(self, function: Callable[[dict[str, dict[str, float]]], float]) -> None:
        self._function = function

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        by_set = group_by_set(metrics, self.trainer.settings.tracking.val_loss_metric_name)
        self.module.log(_SCORE, self._function(by_set), instant=True)
