"""Names attributes of the training data that training changes: checkpoints contain no attributes of data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from accmt.data import Window
from accmt.glances import attributes_of, digest_glance
from accmt.messages import warn_once
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.state import Stateful


class ChangedData(Feature):
    """Compares the attributes of a dataset without `state_dict` whenever a checkpoint is written.

    Pseudo-labels or difficulties of samples that training changes would start again after a resume, without an error.
    """

    name = "changed_data"

    def __init__(self, data: Any) -> None:
        self._data = data
        self._before: dict[str, str] | None = None
        self._set_by_reading: set[str] = set()

    @classmethod
    def for_run(cls, run: EvaluationRun) -> ChangedData | None:
        data = run.loaders.inputs_with_state().get("train_data") if isinstance(run, Run) else None
        return None if data is None or isinstance(data, Stateful) else cls(data)

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Leave out what reading the first window of the run changes, such as a cache."""
        if self._before is not None:
            return windows
        self._before = self._look()
        first = list(islice(windows, 1))
        after = self._look()
        self._set_by_reading = {name for name in after if after[name] != self._before.get(name)}
        return chain(first, windows)

    def state_dict(self) -> dict[str, Any]:
        before = self._before or {}
        for name, digest in self._look().items():
            if name in before and digest != before[name] and name not in self._set_by_reading:
                what = (
                    f"train_data.{name} has changed since training began, and checkpoints contain no attributes of data"
                )
                do = "if samples depend on it, define state_dict and load_state_dict in the dataset; if their order "
                do += "does, in the sampler, without set_epoch: else no run can resume inside an epoch"
                warn_once(f"{what}: {do}", about=f"attribute train_data.{name}")
        return {}

    def _look(self) -> dict[str, str]:
        public = ((name, value) for name, value in attributes_of(self._data).items() if name[0] != "_")
        return {name: digest_glance(value) for name, value in public}
