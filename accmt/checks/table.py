"""The table of checks, and the checks of arguments, module, data, metrics and saving rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from accmt.callbacks import find_hooks
from accmt.data import require_readable
from accmt.data.base import length_of
from accmt.engine.choice import choose_engine
from accmt.errors import AccmtError, ArgumentError, DataError, ModuleContractError, fail
from accmt.features.listed import all_features
from accmt.files import require_writable_folder
from accmt.huggingface import advise_wrapping
from accmt.loaders import find_data, find_train_data, find_validation_data
from accmt.messages import say_once
from accmt.metrics import Metric, build_metrics
from accmt.metrics.metric import IsBetter
from accmt.module import AcceleratorModule, defines
from accmt.options import Settings
from accmt.options.optimizer_and_scheduler_arguments import watches_a_result, weights_of
from accmt.options.saving import RegisteredSaving
from accmt.options.yaml_reader import SECTIONS
from accmt.processes import num_processes
from accmt.registry import addon
from accmt.saving import Patience, Selection, without_validation
from accmt.setup.user_methods import STEPS, adapt_training_step, reject_module
from accmt.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.engine.base import Engine
    from accmt.loaders import Evaluation, UserData

Stage: TypeAlias = Literal["arguments", "start", "module", "inputs", "reload", "evaluation", "evaluation_sets"]
Subject: TypeAlias = Literal["settings", "module", "data", "saving", "features"]


class EqualValue(NamedTuple):
    """A value that must be equal on all processes: as text, and the error if it is not."""

    text: str
    kind: type[AccmtError]
    expected: str
    do: str


@dataclass(kw_only=True)
class Facts:
    """What is known about a run before it is built.

    Args:
        settings: The settings of the Trainer.
        function: The method of the Trainer that was called.
        module: The user's module.
        user_data: The data passed to the method.
        accelerator: The Accelerator of the run.
        registered: Further saving rules.

    Attributes:
        engine: The engine; known after the checks of the module's model.
        train_data: The training data; known after the checks of the data, as are the following attributes.
        sets: The sets to evaluate, by name.
        metrics: The metrics of each validation set.
        selection: The rules by which models are saved.
        patience: Early stopping, or None.
        equal: What must be equal on all processes, by its place in messages.
    """

    settings: Settings
    function: Evaluation | Literal["fit"] = "fit"
    module: Any = None
    user_data: UserData = None  # type: ignore[assignment]  # None only where data are not needed
    accelerator: Accelerator = None  # likewise
    registered: Sequence[RegisteredSaving] = ()
    engine: Engine = field(init=False)
    train_data: Any = field(init=False)
    sets: dict[str, Any] = field(init=False)
    metrics: Mapping[str, tuple[Metric, ...]] = field(init=False)
    selection: Selection = field(init=False)
    patience: Patience | None = field(init=False)
    equal: dict[str, EqualValue] = field(init=False, default_factory=dict)


class Row(NamedTuple):
    """A check in the table: its subject, and the subjects whose facts it uses."""

    subject: Subject
    check: Callable[[Facts], None]
    uses: tuple[Subject, ...] = ()


# ---- Settings.


def _has_same_settings(facts: Facts) -> None:
    settings = facts.settings
    values: dict[str, Any] = dict(settings.hps.to_dict()["hps"])
    values |= vars(settings.optimization)
    values["evaluate_every_n_steps"] = settings.evaluation.every
    values["checkpoint_every"] = settings.checkpoints.every
    values["log_every"] = settings.tracking.log_steps
    do = "set the same value on every process; accmt derives a different seed for each process"
    for name, value in values.items():
        facts.equal[name] = EqualValue(repr(value), ArgumentError, "one value on all processes", do)


# ---- The module.


def require_module(module: Any, function: str) -> None:
    """Check that the argument of a Trainer method is a module.

    Raises:
        ModuleContractError: It is something else; the message explains how to make a module from it.
    """
    where = f"{function}(module)"
    if isinstance(module, type):
        got, do = f"the class {module.__name__}", f"trainer.{function}({module.__name__}(...), ...)"
        raise fail(ModuleContractError, where, got=got, expected="an instance of it", do=do)
    if isinstance(module, AcceleratorModule):
        return
    do = advise_wrapping(module) or "class MyModule(AcceleratorModule): with self.model and training_step"
    match module:
        case nn.Module() | Mapping():  # some have a length
            pass
        case str() | PathLike() | tuple():
            make = 'from_hf(path, "AutoModelForCausalLM"), or from_hps(path) for hyper-parameters'
            do = f"module = AcceleratorModule.{make}; trainer.{function}(module, data)"
        case Dataset() | Sized():  # a dataset of `datasets` is none of torch's
            do = f"trainer.{function}(module, data): the module comes first"
    raise fail(ModuleContractError, where, got=type(module).__name__, expected="an AcceleratorModule", do=do)


def _is_module(facts: Facts) -> None:
    require_module(facts.module, facts.function)


def _has_no_foreign_methods(facts: Facts) -> None:
    addon("reject_foreign_methods")(facts.module, facts.settings.running.callbacks)


def _has_no_misspelt_methods(facts: Facts) -> None:
    addon("reject_misspelt_methods")(facts.module)


def _has_model(facts: Facts) -> None:
    module = facts.module
    model = getattr(module, "model", None)
    if model is None:
        reject_module(module, "no attribute `model`", _advise_model(module))
    if not isinstance(model, nn.Module):
        reject_module(module, f"self.model is {type(model).__name__}", "self.model = an nn.Module")


def _advise_model(module: Any) -> str:
    # nn.Module keeps its children in a dict of its own, not among its attributes.
    attributes = dict(module.named_children()) if isinstance(module, nn.Module) else vars(module)
    names = [name for name, value in attributes.items() if isinstance(value, nn.Module)]
    if not names:
        return "self.model = MyNetwork() in __init__"
    if len(names) == 1:
        return f"self.model = self.{names[0]} in __init__, and self.model(...) in the steps"
    entries = ", ".join(f'"{name}": self.{name}' for name in names)
    return f"self.model = nn.ModuleDict({{{entries}}}) in __init__, without those that are not trained"


def _has_known_hooks(facts: Facts) -> None:
    find_hooks(facts.module)


def _has_weights(facts: Facts) -> None:
    model = facts.module.model
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        got = f"lazy layers without weights ({', '.join(lazy[:3])}): nothing can train or save them"
        do = "run one batch through the model before `fit`, in __init__: self.model(torch.zeros(...))"
        reject_module(facts.module, got, do)


def _trains_parameters(facts: Facts) -> None:
    if not any(parameter.requires_grad for parameter in facts.module.model.parameters()):
        reject_module(facts.module, "no parameter of self.model requires a gradient", "leave at least one unfrozen")


def _has_all_parameters_in_model(facts: Facts) -> None:
    module = facts.module
    in_model: set[Any] = set(module.model.parameters())
    attributes = dict(vars(module))
    # What an optimizer in an attribute trains, such as the temperature of a soft actor-critic, checkpoints contain.
    for value in attributes.values():
        if isinstance(value, torch.optim.Optimizer):
            in_model.update(weights_of(value))
    if isinstance(module, nn.Module):  # which does not keep its children in its attributes
        for registry in ("_parameters", "_buffers", "_modules"):
            attributes |= attributes.pop(registry, {})
    for name, attribute in attributes.items():
        # A teacher is not trained; `_has_separate_teacher` checks it.
        if name in ("model", "teacher"):
            continue
        for path, value in _list_values(f"self.{name}", attribute):
            if isinstance(value, nn.Module):
                parameters = list(value.parameters())
                got = f"{path} has parameters that are not in self.model: they would be neither trained nor saved"
                do = f"self.model = nn.ModuleDict({{..., {name!r}: ...}}), or {path}.requires_grad_(False)"
            else:
                parameters = [value]
                got = f"{path} requires a gradient and is not in self.model: it would be neither trained nor saved"
                do = f"self.model.{name} = nn.Parameter(...), and use it from there; or {path}.requires_grad_(False)"
            # Only trainable ones are looked up: what else is in a list need not be hashable.
            if not in_model.issuperset(filter(_is_trainable, parameters)):
                reject_module(module, got, do)


_MOST_ENTRIES = 1000  # of a container that is searched for parameters: a longer one holds data


def _list_values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with its path, or the values in a list, tuple or dict."""
    items: Iterable[tuple[Any, Any]]
    match value:
        case dict():
            items = value.items()
        case list() | tuple():
            items = enumerate(value)
        case _:
            yield path, value
            return
    for key, item in islice(items, _MOST_ENTRIES):
        yield f"{path}[{key!r}]", item


def _is_trainable(value: Any) -> bool:
    """Return whether a value is a trainable tensor; a computed one is a result, such as the last loss."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _has_separate_teacher(facts: Facts) -> None:
    module = facts.module
    trained = {parameter for parameter in module.model.parameters() if parameter.requires_grad}
    if module.teacher is not None and not trained.isdisjoint(module.teacher.parameters()):
        got = "self.teacher shares trainable weights with self.model, but a teacher is frozen"
        reject_module(module, got, "self.teacher = copy.deepcopy(...), or freeze the shared weights")


def _has_training_step(facts: Facts) -> None:
    module = facts.module
    if not defines(module, "training_step") and not _defines_step(module):
        reject_module(module, "neither training_step nor step", "def training_step(self, batch): return loss")
    adapt_training_step(module, TrainingState())


def _has_validation_step(facts: Facts) -> None:
    if facts.function == "predict" or facts.function == "fit" and not facts.sets:
        return
    module, step = facts.module, "test_step" if facts.function == "test" else "validation_step"
    *names, _ = STEPS[step]
    if not any(defines(module, name) for name in names) and not _defines_step(module):
        got = f"{step.partition('_')[0]} data, but neither {', '.join(names)} nor step"
        reject_module(module, got, 'def validation_step(self, batch): return {"loss": loss}')


def _defines_step(module: AcceleratorModule) -> bool:
    # `step` of an ExtendedAcceleratorModule is not a training step: it steps optimizer and scheduler.
    return defines(module, "step") and not module.uses_manual_optimization


def find_engine(facts: Facts) -> None:
    """Choose the engine; it checks that the settings fit the model."""
    facts.engine = choose_engine(facts.module, facts.accelerator, facts.settings)


# ---- Data.


def _has_data(facts: Facts) -> None:
    module, user_data, settings = facts.module, facts.user_data, facts.settings
    data: dict[str, Any] = {}
    if facts.function == "fit":
        data["the training data"] = facts.train_data = find_train_data(module, user_data.load("train"), settings.hps)
        facts.sets = find_validation_data(module, user_data.load("validate"), settings.data)
    else:
        facts.sets = find_data(module, user_data.load(facts.function), facts.function, settings.data)
    names, do = ", ".join(map(repr, facts.sets)) or "none", "build the dict of sets in the same way"
    # Processes evaluate the sets in this order, together.
    expected = "the same sets in the same order on every process"
    facts.equal["the names of the sets to evaluate"] = EqualValue(names, DataError, expected, do)
    for name, evaluated in facts.sets.items():
        data[_name_set(facts, name)] = evaluated
    expected = "the same data on every process, which accmt shards"
    do = 'pass all data on every process, or data_options={"shard": False} if each process has its own data'
    # One process has nothing to compare, and the length of its loader may be an error that nothing else would meet.
    if settings.data.data_options.shard and num_processes() > 1:
        for where, part in data.items():
            facts.equal[where] = EqualValue(_describe_length(part), DataError, expected, do)
    if settings.data.overfit_batches and facts.function == "fit" and facts.sets:
        facts.sets = {"": facts.train_data}


def _kind_of_sets(facts: Facts) -> str:
    return {"test": "test", "predict": "prediction"}.get(facts.function, "validation")


def _name_set(facts: Facts, name: str) -> str:
    where = f"the {_kind_of_sets(facts)} data"
    return f"{where} {name!r}" if name else where


def _describe_length(data: Any) -> str:
    if not isinstance(data, DataLoader):
        return _count(data)
    sampler = getattr(data.batch_sampler, "sampler", data.sampler)
    if hasattr(sampler, "num_replicas"):  # the sampler shards the data, so the number of batches may differ
        return f"a {type(data).__name__} of {_count(data.dataset)}"
    return f"a {type(data).__name__} of {_count(data, 'batches')} from {_count(data.dataset)}"


def _count(data: Any, unit: str = "samples") -> str:
    length = length_of(data)
    return f"{type(data).__name__} without a length" if length is None else f"{length} {unit}"


_LOADER_OF_SEVERAL = (
    "DataLoader(Both(), batch_size=None), where Both is an IterableDataset whose __iter__ does "
    "`yield from zip(first_loader, second_loader)`; or torch.utils.data.StackDataset(first_dataset, second_dataset)"
)


def _is_one_source(facts: Facts) -> None:
    data = facts.train_data
    if isinstance(data, list | tuple) and data and isinstance(data[0], DataLoader):
        got = f"a {type(data).__name__} of {len(data)} DataLoaders"
        raise fail(DataError, "the training data", got=got, expected="one loader or dataset", do=_LOADER_OF_SEVERAL)


def _has_one_order(facts: Facts) -> None:
    data, options = facts.train_data, facts.settings.data
    if not isinstance(data, DataLoader):
        return
    if options.sampler_of("train") is not None or options.data_options.batch_sampler is not None:
        expected = "a dataset together with sampler=, or a DataLoader with its own sampler"
        got, do = "a DataLoader as training data", "pass the sampler to the DataLoader"
        raise fail(ArgumentError, "Trainer(sampler=...)", got=got, expected=expected, do=do)
    if hasattr(data.dataset, "order_run"):
        name = type(data.dataset).__name__
        got, do = f"a DataLoader around a {name}", f"pass the {name} itself to fit: it decides the order"
        raise fail(ArgumentError, "the training data", got=got, expected=f"the {name} alone", do=do)


def _is_readable(facts: Facts) -> None:
    if facts.function == "fit":
        require_readable(facts.train_data, "training")
    for data in facts.sets.values():
        require_readable(data, _kind_of_sets(facts))


def _is_readable_again(facts: Facts) -> None:
    train_data = facts.train_data
    if isinstance(train_data, Iterator) and facts.settings.hps.epochs != 1:
        got, do = "an iterator, which can be read only once", "an IterableDataset, a list, or epochs: 1"
        if hasattr(train_data, "__len__"):  # as loaders that are combined have, and each iter() may begin again
            got = f"a {type(train_data).__name__} that is an iterator: it has __next__"
            do = _LOADER_OF_SEVERAL
        expected = "data that can be iterated in every epoch"
        raise fail(DataError, "the training data", got=got, expected=expected, do=do)
    for name, data in facts.sets.items():
        if isinstance(data, Iterator):
            got, do = "an iterator, which can be read only once", "pass list(...), or an IterableDataset"
            raise fail(
                DataError, _name_set(facts, name), got=got, expected="data that can be read for each evaluation", do=do
            )


# ---- Metrics, saving rules and early stopping.


def _can_write_model(facts: Facts) -> None:
    if facts.settings.saving.model_saving is not None or facts.registered:
        require_writable_folder(facts.settings.model_folder, "model_path")


def _has_metrics(facts: Facts) -> None:
    user_metrics = facts.settings.evaluation.metrics
    # Predictions have no references.
    if facts.function == "predict":
        user_metrics = None
    facts.metrics = _find_metrics(user_metrics, list(facts.sets) or [""])


def _find_metrics(user_metrics: Any, sets: Sequence[str]) -> dict[str, tuple[Metric, ...]]:
    is_by_set = _is_by_set(user_metrics) or (isinstance(user_metrics, Mapping) and set(user_metrics) <= set(sets))
    if not is_by_set:
        return {name: build_metrics(user_metrics) for name in sets}
    for name in user_metrics:
        if name not in sets:
            got, expected = f"metrics for {name!r}", f"names of the validation sets: {list(sets)}"
            raise fail(ArgumentError, "Trainer(metrics=...)", got=got, expected=expected, do="rename one of the two")
    return {name: build_metrics(user_metrics.get(name)) for name in sets}


def _is_by_set(user_metrics: Any) -> bool:
    """Return whether the keys of a dict must be validation sets: a list of metrics has no name."""
    return isinstance(user_metrics, Mapping) and any(isinstance(value, list | tuple) for value in user_metrics.values())


def _has_saving_rules(facts: Facts) -> None:
    settings, sets = facts.settings, list(facts.sets)
    rule = settings.saving.rule if sets else without_validation(settings.saving.rule)
    if rule != settings.saving.rule:
        say_once("no validation data: models are saved by best_train_loss")
    facts.selection = _build_selection(settings, rule, facts.metrics, facts.registered, sets=sets)
    facts.patience = _build_patience(settings, rule, facts.metrics, sets=sets)
    if sets:
        return
    got, expected = "no validation data", "validation data"
    if facts.selection.needs_validation:
        do = "pass validation data to fit, or model_saving='best_train_loss'"
        raise fail(ArgumentError, f"Trainer(model_saving={rule!r})", got=got, expected=expected, do=do)
    if facts.patience is not None and facts.patience.needs_validation:
        where = f"Trainer(patience={settings.saving.patience!r})"
        do = "pass validation data to fit, or patience={'train_loss': 3}"
        raise fail(ArgumentError, where, got=got, expected=expected, do=do)


def _can_have_saving_rules(facts: Facts) -> None:
    """Check metrics, saving rules and patience as far as possible without data."""
    settings = facts.settings
    if settings.evaluation.is_off:
        addon("reject_without_evaluations")(settings, facts.registered)
    user_metrics = settings.evaluation.metrics
    groups = user_metrics.values() if _is_by_set(user_metrics) else [user_metrics]
    metrics = {str(number): build_metrics(group) for number, group in enumerate(groups)}
    selection = _build_selection(settings, settings.saving.rule, metrics, facts.registered, sets=None)
    if "monitor" in settings.hps.scheduler_kwargs and watches_a_result(settings.hps.scheduler_class):
        from accmt.setup.build import find_monitored

        find_monitored(settings, selection, settings.hps.scheduler_kwargs["monitor"])
    _build_patience(settings, settings.saving.rule, metrics, sets=None)


_Metrics = Mapping[str, tuple[Metric, ...]]


def _find_directions(settings: Settings, metrics: _Metrics, sets: Sequence[str] | None) -> dict[str, IsBetter]:
    """Return for each result of an evaluation which of two values is better; `sets` is None if they are unknown."""
    directions: dict[str, IsBetter] = {}
    for section in map(settings.hps.section, SECTIONS):  # of the hyper-parameters, which may add results
        if hasattr(section, "directions"):
            directions |= section.directions()
    of_sets: dict[str, IsBetter] = {}
    for set_name, group in metrics.items():
        for metric in group:
            for entry, is_better in metric.directions.items():
                directions[entry] = is_better
                of_sets[f"{entry}__{set_name}" if set_name else entry] = is_better
    averages = settings.evaluation.metric_options.averages
    if averages is None:
        return directions
    if sets is None:  # then what an average selects is unknown, but its name is known
        return dict.fromkeys(averages, operator.gt) | directions
    of_averages: dict[str, IsBetter] = addon("averages")(averages).find_directions(of_sets)
    return of_averages | directions


def _build_selection(
    settings: Settings,
    rule: Any,
    metrics: _Metrics,
    registered: Sequence[RegisteredSaving],
    *,
    sets: Sequence[str] | None,
) -> Selection:
    below, above = settings.saving.model_saving_below, settings.saving.model_saving_above
    selection = Selection(rule, _find_directions(settings, metrics, sets), sets=sets, below=below, above=above)
    for saving in registered:
        selection.register(saving.name, below=saving.below, above=saving.above)
    return selection


def _build_patience(settings: Settings, rule: Any, metrics: _Metrics, *, sets: Sequence[str] | None) -> Patience | None:
    patience = settings.saving.patience_evaluations
    if patience is None:
        return None
    return Patience(patience, rule, _find_directions(settings, metrics, sets), sets=sets)


# ---- Features.


def _have_what_they_need(facts: Facts) -> None:
    for kind in all_features(facts.settings):
        kind.check(facts.settings, facts.module, facts.train_data)


# ---- The table. A comment names the failure that a row exists for.


_UNTRAINED_MODULE = (
    # fit(MyModule) set `trainer` on the class, and all later instances had the state of that run
    Row("module", _is_module),
    # `configure_optimizers` of a Lightning module was never called: the YAML's optimizer was used without a word
    Row("module", _has_no_foreign_methods),
    # `validaton_step`: no evaluation ran, and the last model was saved as the best one
    Row("module", _has_no_misspelt_methods),
    # AttributeError inside Accelerator.prepare, thirty frames deep
    Row("module", _has_model),
    # `on_epoch_ends` was never called
    Row("module", _has_known_hooks),
)
_MODULE = (
    *_UNTRAINED_MODULE,
    # LazyLinear: torch's optimizer got parameters without a shape
    Row("module", _has_weights),
    # a frozen model: backward fails with "element 0 of tensors does not require grad"
    Row("module", _trains_parameters),
    # a projection head in self.head stayed at its random values, and no file contained it
    Row("module", _has_all_parameters_in_model),
    # teacher = model: the student's target moved with every step
    Row("module", _has_separate_teacher),
    # a module without a step, or with arguments that nothing fills, failed only at the first batch
    Row("module", _has_training_step),
)
_DATA = (
    # each process iterated over data of another length, and the longer ones waited for collectives forever
    Row("data", _has_data),
    # a list of loaders was taken for a dataset of loaders, and collate failed on a DataLoader
    Row("data", _is_one_source),
    # a sampler was ignored because the DataLoader has its own; a curriculum inside a DataLoader lost its order
    Row("data", _has_one_order),
    # streams of files read by each worker from the start gave every sample once per worker
    Row("data", _is_readable),
    # the second epoch of an iterator was empty; the trial before training consumed the validation data
    Row("data", _is_readable_again),
)
# "skip" with manual optimization could not undo the step that it had to skip
_FEATURES = Row("features", _have_what_they_need, uses=("module", "data"))
STAGES: Mapping[Stage, tuple[Row, ...]] = {
    "arguments": (
        # `model_saving="best_acuracy"` saved no model, and a typo in patience ended no run, after hours
        Row("saving", _can_have_saving_rules),
    ),
    "start": (
        # scripts that read the rank into a learning rate trained replicas that differed
        Row("settings", _has_same_settings),
    ),
    "module": _MODULE,
    "inputs": (
        *_MODULE,
        # separate data for processes that hold one model: their halves computed on different batches
        Row("module", find_engine),
        *_DATA,
        # validation data without a step for them: the error came after the first epoch
        Row("module", _has_validation_step, uses=("data",)),
        # the first save, after an epoch, found a read-only folder
        Row("saving", _can_write_model),
        # metrics for a set that does not exist were never computed
        Row("saving", _has_metrics, uses=("data",)),
        # best_accuracy without validation data saved no model
        Row("saving", _has_saving_rules, uses=("data",)),
        _FEATURES,
    ),
    "reload": (*_DATA, _FEATURES),
    "evaluation": (*_UNTRAINED_MODULE, Row("module", _has_validation_step)),
    "evaluation_sets": (Row("data", _has_data), Row("data", _is_readable), Row("saving", _has_metrics, uses=("data",))),
}
"""The checks of each stage, in the order in which they run.

"arguments" when a Trainer is created, "start" when `fit` begins, "module" before a datamodule prepares its data,
"inputs" before anything is built, "reload" when an epoch begins with new data; "evaluation" and "evaluation_sets" in
`validate`, `test` and `predict`.
"""
