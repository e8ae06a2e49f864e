"""What has to be the same on all processes: each plans its part from it, without asking the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accmt.data.options import length_of
from accmt.errors import ArgumentError, DataError, explain
from accmt.options import DataSettings, Settings
from accmt.processes import gather_objects, num_processes, run_on_every_process

T = TypeVar("T")


def find_same_data(find: Callable[[], Mapping[str, Any]], settings: DataSettings) -> Mapping[str, Any]:
    """Return the data that `find` returns by name, which have to be of one kind and length on all processes.

    Processes: collective.
    """
    if num_processes() == 1:
        return find()
    found: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        found.update(find())
        return {name: _describe(data) for name, data in found.items()} if settings.shard_dataloaders else {}

    every = run_on_every_process(describe)
    for name in every[0] if set(every[0]) == set.union(*map(set, every)) else ():
        _require_equal(name, [facts.get(name, "none") for facts in every])
    names = [", ".join(filter(None, facts)) or "one" for facts in every]
    _require_equal("the names of the data sets", names)
    return found


def _require_equal(what: str, every: list[str]) -> None:
    if len(set(every)) > 1:
        got = "; ".join(f"process {index}: {facts}" for index, facts in enumerate(every))
        expected = "the same data on every process, of which each takes its part"
        do = "give every process all of it; or shard_dataloaders=False, where each is to have data of its own"
        raise DataError(explain(what.strip(), got, expected, do))


def _describe(data: Any) -> str:
    if isinstance(data, DataLoader):
        sampler = getattr(data.batch_sampler, "sampler", data.sampler)
        if hasattr(sampler, "num_replicas"):  # it shares by itself
            return f"a {type(data).__name__} of {_length(data.dataset)}"
        return f"a {type(data).__name__} of {_length(data, 'batches')} from {_length(data.dataset)}"
    return _length(data)


def _length(data: Any, unit: str = "samples") -> str:
    length = length_of(data)
    return f"{type(data).__name__} without a length" if length is None else f"{length} {unit}"


def require_same_settings(settings: Settings) -> None:
    """Check that processes have the same hyper-parameters, and the settings by which they plan their steps.

    Processes: collective.
    """
    if num_processes() == 1:
        return
    optimization, evaluation, checkpoints = settings.optimization, settings.evaluation, settings.checkpoints
    own: dict[str, str] = {name: repr(value) for name, value in settings.hps.to_dict()["hps"].items()}
    own |= {name: repr(value) for name, value in vars(optimization).items()}
    own |= {
        "evaluate_every_n_steps": repr(evaluation.every),
        "checkpoint_every": repr(checkpoints.every),
        "log_every": repr(settings.tracking.log_steps),
    }
    every = gather_objects(own)
    for name in own:
        values = [facts.get(name, "none") for facts in every]
        if len(set(values)) > 1:
            got = "; ".join(f"process {index}: {value}" for index, value in enumerate(values))
            do = "do not let it depend on the process; seeds of processes differ by themselves"
            raise ArgumentError(explain(name, got, "one value on all processes", do))
