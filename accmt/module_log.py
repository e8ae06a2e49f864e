"""What a module logs besides its losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accmt.errors import ModuleContractError, explain

if TYPE_CHECKING:
    from accmt.loop.logging import Logs


class LogsValues:
    """The part of `AcceleratorModule` that logs.

    Attributes:
        logs: During a run: what was logged, and the newest rows.
    """

    logs: Logs

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Any = None,
        step: int | None = None,
        reduction: str = "mean",
        *,
        instant: bool = False,
        prog_bar: bool = False,
        logger: bool = True,
    ) -> None:
        """Log a value: in training it comes with the next row, in evaluation with its results.

        It is averaged over the batches that logged it, on all processes, each with the weight of its batch. It may be
        logged in some batches or on some processes only. Nothing waits for the device, and no graph is kept.

        Args:
            name: Its name; or values by name, and no `value`.
            value: A number, or a tensor of one element; it stays as it is.
            step: The step of the row, where `instant`; None is the number of updates.
            reduction: "mean", or "sum" for the sum over batches and processes, whatever they weigh.
            instant: Whether this process makes a row of its own of the value, now. That waits for the device.
            prog_bar: Whether the progress bar shows it.
            logger: Whether trackers and `history.jsonl` get it.

        Raises:
            ModuleContractError: The value is not one number, the name is taken, or nothing is running.
            ArgumentError: There is no such reduction, or a `step` without `instant`.
        """
        if "logs" not in self.__dict__:
            raise ModuleContractError(explain(f"log({name!r}, ...)", "no run", "a call during a run", "log in a step"))
        self.logs.log(name, value, step, reduction, instant=instant, prog_bar=prog_bar, logger=logger)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values.

        Args:
            values: Values by name.
            **options: As for `log`.
        """
        self.log(values, **options)
