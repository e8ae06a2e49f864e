"""What a Trainer does with a module besides training it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accmt.errors import ArgumentError, explain
from accmt.files import dumps, require_writable_folder, write_text
from accmt.messages import say
from accmt.processes import run_on_main_process
from accmt.trainer.checkpoints import TrainerCheckpoints

if TYPE_CHECKING:
    from accmt.module import AcceleratorModule
    from accmt.setup.datasets import Evaluation
    from accmt.setup.user_data import UserData
    from accmt.trainer import Trainer
    from accmt.trainer.standalone_evaluation import Request


class TrainerEvaluation(TrainerCheckpoints):
    """Validates, tests and predicts: after `fit`, before it, without it, or inside it."""

    def validate(
        self,
        module: AcceleratorModule | None = None,
        val_dataset: Any = None,
        ckpt_path: str | PathLike[str] | None = None,
        verbose: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        results_output: str | PathLike[str] | None = None,
        *,
        datamodule: Any = None,
    ) -> dict[str, float]:
        """Evaluate validation data, each sample once, as `fit` does: after it, the same values bit for bit.

        Weights, counters and modes of the module and of the Trainer stay as they are, and no model is saved. Hooks of
        evaluations are called; a row is logged only while `fit` is in work.

        Processes: collective.

        Args:
            module: The module; None is that of the last `fit`.
            val_dataset: As for `fit`: one set, or several in a list or dict; None is that of the last `fit` or of its
                datamodule, or what the module's `get_validation_dataloader` makes.
            ckpt_path: Whose weights: None for those that the module has; "best" for `model_path`; "last" for the
                newest checkpoint, or `<model_path>/last` where there is none; or the path of a model folder or of a
                checkpoint. The module has its own again afterwards.
            verbose: Whether the results are said, and a bar is drawn on a terminal.
            results_output: A JSON file in which the main process writes the results.
            datamodule: Makes the data instead, as for `fit`.

        Returns:
            Losses and metrics by name; of several sets `<name>__<set>`. The same on every process.

        Raises:
            ArgumentError: There is neither a module nor a last `fit`, or there are both data and a datamodule.
            ModuleContractError: The module has no validation step, or a step does not keep the contract.
            DataError: There are no data, or they are empty.
            MetricError: A metric got nothing, or computed something else than numbers.
            NoCheckpointError: There are no weights at `ckpt_path`.
            WeightsError: They are incomplete, or another model's.
            CheckpointError: The checkpoint is damaged, or another model's.
            SavingError: The folder of `results_output` cannot be written.
        """
        from accmt.setup.user_data import UserData

        given = UserData("validate", {"validate": val_dataset}, datamodule)
        request = self._request("validate", module, given, ckpt_path, verbose=verbose)
        return self._evaluate(request, results_output)

    evaluate = validate

    def test(
        self,
        module: AcceleratorModule | None = None,
        test_dataset: Any = None,
        ckpt_path: str | PathLike[str] | None = None,
        verbose: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        results_output: str | PathLike[str] | None = None,
        *,
        datamodule: Any = None,
    ) -> dict[str, float]:
        """Evaluate test data by the module's `test_step`, or by its validation step where it has none.

        As `validate`, but in batches of the third number of `batch_size`, and with the loss as `test_loss`.

        Processes: collective.

        Args:
            module: The module; None is that of the last `fit`.
            test_dataset: One set, or several in a list or dict; None where the module has `get_test_dataloader`.
            ckpt_path: As in `validate`.
            verbose: As in `validate`.
            results_output: As in `validate`.
            datamodule: As in `validate`; that of the last `fit` serves here too.

        Returns:
            As `validate`.

        Raises:
            AccmtError: As `validate`.
        """
        from accmt.setup.user_data import UserData

        given = UserData("test", {"test": test_dataset}, datamodule)
        request = self._request("test", module, given, ckpt_path, verbose=verbose)
        return self._evaluate(request, results_output)

    def predict(
        self,
        module: AcceleratorModule | None = None,
        dataset: Any = None,
        ckpt_path: str | PathLike[str] | None = None,
        return_predictions: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        *,
        datamodule: Any = None,
    ) -> Any:
        """Predict each sample of a dataset once, by the module's `predict_step`.

        In batches of the third number of `batch_size`; no hooks are called.

        Processes: collective.

        Args:
            module: The module; None is that of the last `fit`.
            dataset: What to predict; several sets in a list or dict; None where the module has
                `get_predict_dataloader`.
            ckpt_path: As in `validate`.
            return_predictions: False keeps nothing, for a `predict_step` that stores its results itself.
            datamodule: As in `test`.

        Returns:
            On the main process the predictions in the order of the data, on the CPU; None on the others, and where
            they are not kept. Batches are joined: tensors to one tensor `[samples, ...]` (a list of the samples where
            their shapes differ), lists to one list, dicts and tuples entry by entry. Of several sets a dict by name.

        Raises:
            AccmtError: As `validate`; ModuleContractError also where a step returns no prediction for each sample.
        """
        from accmt.setup.torch_flags import working
        from accmt.setup.user_data import UserData
        from accmt.trainer.standalone_evaluation import predict_alone

        with working(self.settings.running):
            given = UserData("predict", {"predict": dataset}, datamodule)
            request = self._request("predict", module, given, ckpt_path, verbose=True)
            predictions = predict_alone(request, keeps=return_predictions)
        return predictions[""] if list(predictions) == [""] else predictions

    def _request(
        self,
        function: Evaluation,
        module: AcceleratorModule | None,
        given: UserData,
        ckpt_path: str | PathLike[str] | None,
        *,
        verbose: bool,
    ) -> Request:
        from accmt.trainer.standalone_evaluation import Request

        last = self._run
        if module is None and last is not None:
            module = last.module
        if module is None:
            do = f"trainer.{function}(module, ...), or fit first"
            raise ArgumentError(explain(function, "no module, and no run that had one", "a module", do))
        self._evaluated = module
        if last is not None and self.state.status == "running":
            last.note_call(f"trainer.{function}")
        return Request(
            trainer=cast("Trainer", self),
            function=function,
            module=module,
            given=given if given.has_any or self._given is None else self._given,
            ckpt_path=ckpt_path,
            last_run=last if last is not None and last.module is module else None,
            verbose=verbose,
        )

    def _evaluate(self, request: Request, results_output: str | PathLike[str] | None) -> dict[str, float]:
        from accmt.setup.torch_flags import working
        from accmt.trainer.standalone_evaluation import evaluate_alone

        output = None if results_output is None else Path(results_output).absolute()
        with working(self.settings.running):
            if output is not None:
                require_writable_folder(output.parent, "results_output")
            results = evaluate_alone(request)
            if request.verbose:
                values = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
                say(f"{request.function}: {values or 'nothing, for the data are limited to nothing'}")
            if output is not None:
                run_on_main_process(lambda: _write(output, results))
        return results


def _write(path: Path, results: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, dumps(results, indent=2) + "\n")
