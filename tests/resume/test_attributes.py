"""Attributes of modules and callbacks that training changes are in the checkpoint."""

from __future__ import annotations

import copy
import logging
import random
import shutil
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, WeightedRandomSampler
from torchmetrics import MeanMetric

from accmt import AcceleratorModule, Callback
from tests.resume.unbroken import Fragile, make
from tests.toys import make_points

STEPS = 12
WRITES = {
    "counted": lambda mean, weight: mean.lerp_(weight, 0.5),
    "through data": lambda mean, weight: mean.data.lerp_(weight.data, 0.5),
    "by new data": lambda mean, weight: setattr(mean, "data", mean.data * 0.5 + weight.data * 0.5),
}


class Stop(Exception):  # noqa: N818 - what interrupts a run
    pass


class Collecting(AcceleratorModule):
    """Keeps in attributes what self-supervised and other programs keep there, and lets the loss depend on all of it."""

    def __init__(self, write: str = "counted", fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.weights, self.means = list(self.model.parameters()), list(self.target.parameters())
        self.queue, self.place = torch.zeros(8, 1), 0
        self.center: Any = None
        self.counts, self.last = {"batches": 0}, deque([0.0], maxlen=3)
        self.mean, self.seen = np.zeros(3), set()
        self.losses: list[Tensor] = []
        self.write, self.fails_at = write, fails_at

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self.model(inputs)
        with torch.no_grad():
            goal = self.target(inputs)
            self.queue[self.place : self.place + len(goal)] = goal
            self.place = (self.place + len(goal)) % len(self.queue)
            self.center = goal.mean(0) if self.center is None else 0.5 * self.center + 0.5 * goal.mean(0)
        self.counts["batches"] += 1
        self.mean += inputs.mean(0).numpy()
        self.seen.add(round(float(targets[0]), 3))
        rest = self.center + self.queue.mean() + sum(self.last) / 9 + (self.counts["batches"] + self.mean.sum()) / 99
        loss = nn.functional.mse_loss(outputs, targets + goal + rest + len(self.seen) / 99)
        self.losses.append(loss.detach())
        self.last.append(float(loss.detach()))
        return loss

    def on_update_end(self) -> None:
        for mean, weight in zip(self.means, self.weights, strict=True):
            WRITES[self.write](mean, weight.detach())

    def on_after_backward(self) -> None:
        if self.state.global_step == self.fails_at:
            raise Stop


class Patient(Callback):
    """Stops after the third step whose loss is not the lowest so far, as an early stopping of one's own."""

    def __init__(self) -> None:
        self.lowest, self.bad = float("inf"), 0

    def on_after_training_step(self, outputs: Any) -> None:
        loss = float(outputs.detach())
        self.bad += loss >= self.lowest
        self.lowest = min(self.lowest, loss)
        self.trainer.should_stop = self.bad == 3


def train(folder: str, module: AcceleratorModule, *, resume: bool = False, **settings: Any) -> AcceleratorModule:
    hps = {"epochs": 2, "batch_size": 4, "scheduler": None}
    settings = {"checkpoint_every": "5 steps", "model_saving": None, "resume": resume, **settings}
    make(folder, hps, **settings).fit(module, make_points(2 * STEPS))
    return module


def attributes_of(module: AcceleratorModule) -> dict[str, Any]:
    found = {"model": module.model.state_dict(), "target": module.target.state_dict()}
    found |= {name: getattr(module, name) for name in ("queue", "place", "center", "counts", "mean", "losses")}
    return {**found, "last": list(module.last), "seen": sorted(module.seen)}  # which assert_close does not know


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("handlers", [None, "any"])
def test_a_run_that_goes_on_has_what_an_unbroken_one_has(write: str, handlers: Any) -> None:
    whole = train("out/a", Collecting(write))
    with pytest.raises(Stop):
        train("out/b", Collecting(write, fails_at=8), handlers=handlers)
    rest = train("out/b", Collecting(write), resume=True)
    assert rest.state.global_step == STEPS
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)
    assert rest.last.maxlen == 3


def test_a_callback_without_a_state_dict_goes_on_counting() -> None:
    whole = train("out/a", Collecting(), callbacks=[Patient()])
    assert whole.state.global_step < STEPS
    with pytest.raises(Stop):
        train("out/b", Collecting(fails_at=whole.state.global_step - 1), callbacks=[Patient()], checkpoint_every="step")
    assert train("out/b", Collecting(), callbacks=[Patient()], resume=True).state.global_step == whole.state.global_step


def test_what_a_hook_of_the_start_sets_anew_is_restored_after_it() -> None:
    class OnStart(Collecting):
        def on_fit_start(self) -> None:
            self.queue = torch.zeros(8, 1)

    whole = train("out/a", OnStart())
    with pytest.raises(Stop):
        train("out/b", OnStart(fails_at=8))
    rest = train("out/b", OnStart(), resume=True)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)


@pytest.mark.parametrize("fails_at", [8, 9, 11])
def test_what_the_start_of_an_epoch_resets_counts_the_whole_epoch(fails_at: int) -> None:
    class Counting(Callback):
        def __init__(self) -> None:
            self.rows: list[int] = []

        def on_epoch_start(self) -> None:
            self.count, self.table = 0, torch.zeros(2)

        def on_update_end(self) -> None:
            self.count += 1
            self.table[1] += 1

        def on_epoch_end(self) -> None:
            self.rows += [self.count, int(self.table[1])]

    class Stateful(Counting):
        count, table = 0, torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "table": self.table, "rows": self.rows}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    with pytest.raises(Stop):
        train("out/b", Collecting(fails_at=fails_at), callbacks=[Counting(), Stateful()], checkpoint_every="2 steps")
    rest = train("out/b", Collecting(), callbacks=[Counting(), Stateful()], resume=True)
    per_epoch = STEPS // 2
    for kind in (Counting, Stateful):
        assert rest.trainer.get_callback(kind).rows == [per_epoch] * 4


def test_what_does_not_change_is_not_in_the_checkpoint_and_follows_the_program() -> None:
    class Frozen(Collecting):
        def __init__(self, factor: float, fails_at: int | None = None) -> None:
            super().__init__(fails_at=fails_at)
            self.reference, self.factor = copy.deepcopy(self.model).requires_grad_(False), factor

    with pytest.raises(Stop):
        train("out/b", Frozen(1.0, fails_at=8))
    text = next(Path("out/checkpoint-b").glob("step-*/state.json")).read_text()
    assert "self.target" in text
    assert "self.reference" not in text.replace('"self.reference": {"kind": "digest"', "")
    assert "self.factor" not in text
    assert train("out/b", Frozen(2.0), resume=True).factor == 2.0


def test_what_cannot_be_stored_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Holding(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.records: list[object] = []

        def on_update_end(self) -> None:
            self.records.append(object())

    with caplog.at_level(logging.WARNING):
        train("out/a", Holding())
    assert caplog.text.count("self.records has changed since training began, but a checkpoint cannot contain") == 1


def test_a_failure_after_a_target_changed_writes_no_emergency_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Early(Collecting):
        def on_update_end(self) -> None:
            pass

        def on_before_backward(self, loss: Any) -> None:
            super().on_update_end()  # before the step is made

    with caplog.at_level(logging.WARNING), pytest.raises(Stop):
        train("out/a", Early(fails_at=8), handlers="any")
    assert "no emergency checkpoint" in caplog.text
    assert [path.name for path in Path("out/checkpoint-a").glob("step-*")] == ["step-00000005"]


Pair = namedtuple("Pair", "seen mean")  # noqa: PYI024 - as users write it


class Statistics:
    """Running statistics, as reinforcement learning keeps them."""

    def __init__(self) -> None:
        self.mean, self.count, self.parts = np.zeros(3), 0, {"largest": [0.0]}

    def update(self, inputs: Any) -> None:
        self.count += 1
        self.mean += (inputs.mean(0) - self.mean) / self.count
        self.parts["largest"][0] = max(self.parts["largest"][0], float(inputs.max()))


class Stage(Enum):
    EARLY = 1
    LATE = 2


@dataclass(slots=True)
class Progress:
    share: float = 0.0


class Kinds(AcceleratorModule):
    """Keeps values of further kinds, and lets the loss depend on all of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        for layer in self.model[:2]:
            layer.requires_grad_(False)
        self.targets = [copy.deepcopy(self.model).requires_grad_(False) for _ in range(2)]
        self.heads = {"teacher": copy.deepcopy(self.model).requires_grad_(False)}
        self.progress, self.stage = Progress(), Stage.EARLY
        self.statistics, self.pair = Statistics(), Pair(0, torch.zeros(1))
        self.best: Any = np.float64(9.0)
        self.kinds, self.table, self.counts = np.array(["new", "old"]), {(0, 1): 0.0}, defaultdict(int)
        self.small, self.phase = np.zeros(2, dtype=np.uint16), 1 + 0j
        self.nested = {"a": {"n": 0}, "b": [[0, torch.zeros(1)]]}
        self.of_samples = [0.0] * 20_000
        self.hidden = self.cell = torch.zeros(1)
        self.previous = self.model[2].weight.data
        self.window, self.fails_at = deque([Pair(0, torch.zeros(1))], maxlen=4), fails_at

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            goal = sum(target(inputs) for target in (*self.targets, self.heads["teacher"]))
        self.statistics.update(inputs.numpy())
        self.pair = Pair(self.pair.seen + 1, goal.mean().reshape(1))
        self.window.append(self.pair)
        self.progress.share += 0.01
        self.stage = Stage.LATE
        self.best = min(self.best, np.mean(goal.numpy()))
        self.kinds[self.pair.seen % 2] = "old" if self.kinds[self.pair.seen % 2] == "new" else "new"
        self.table[0, self.pair.seen % 3] = float(goal.max())
        self.counts[float(goal.max()) > 0] += 1
        self.small += 1
        self.phase *= 1j
        self.nested["a"]["n"] += 1
        self.nested["b"][0][0] += 1
        self.nested["b"][0][1] += goal.mean()
        self.of_samples[self.pair.seen % 7] += 1.0
        self.hidden, self.cell = self.hidden * 0.5 + goal.mean(), self.cell * 0.5 + goal.std()
        numbers = [self.statistics.count, self.best, len(self.table), self.counts[True], self.small[0], self.phase.real]
        numbers += [self.progress.share, self.nested["a"]["n"], sum(self.of_samples), list(self.kinds).count("new")]
        rest = sum(map(float, numbers)) / 99 + self.hidden - self.cell + self.nested["b"][0][1] + self.pair.mean
        rest = rest + sum(one.mean for one in self.window) + float(self.statistics.mean.sum()) + self.previous.mean()
        return nn.functional.mse_loss(self.model(inputs), targets + 0.1 * goal + 0.01 * rest)

    def on_update_end(self) -> None:
        self.previous = self.model[2].weight.data.clone()
        for target in (*self.targets, self.heads["teacher"]):
            for mean, weight in zip(target.parameters(), self.model.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.5)

    def on_after_backward(self) -> None:
        if self.state.global_step == self.fails_at:
            raise Stop


@pytest.mark.parametrize("handlers", [None, "any"])
def test_values_of_further_kinds_go_on(handlers: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = train("out/a", Kinds())
    with caplog.at_level(logging.WARNING), pytest.raises(Stop):
        train("out/b", Kinds(fails_at=8), handlers=handlers)
    rest = train("out/b", Kinds(), resume=True)
    assert "cannot contain" not in caplog.text
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    for name in ("hidden", "cell", "previous", "pair", "of_samples"):
        torch.testing.assert_close(getattr(rest, name), getattr(whole, name), rtol=0, atol=0)
    for name in ("best", "table", "progress", "stage", "counts", "phase", "nested"):
        assert type(getattr(rest, name)) is type(getattr(whole, name))
        assert getattr(rest, name) == getattr(whole, name)
    assert (rest.kinds.tolist(), rest.small.tolist()) == (whole.kinds.tolist(), whole.small.tolist())
    assert rest.counts.default_factory is int
    assert vars(rest.statistics)["mean"].tobytes() == whole.statistics.mean.tobytes()
    assert (rest.window.maxlen, type(rest.window[0])) == (4, Pair)


def test_what_no_checkpoint_can_contain_is_no_error(tmp_path: Path) -> None:
    class Odd(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.file = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=(4,))
            self.sparse, self.later = torch.eye(2).to_sparse(), nn.Module()
            self.later.weight = nn.UninitializedParameter(requires_grad=False)
            self.wide, self.records = np.zeros(2, dtype=np.longdouble), np.zeros(2, dtype=[("a", "i4")])
            self.other = Statistics()
            self.other.itself = self.other  # type: ignore[attr-defined]

    assert train("out/a", Odd()).state.global_step == STEPS


def test_a_module_in_objects_of_a_later_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Later(Collecting):
        old: Any = None

        def on_update_end(self) -> None:
            super().on_update_end()
            self.old = self.old or copy.deepcopy(self.model).requires_grad_(False)

    with pytest.raises(Stop):
        train("out/b", Later(fails_at=8))
    with caplog.at_level(logging.WARNING):
        train("out/b", Later(), resume=True)
    assert "self.old: the checkpoint contains the weights of a module, which is a NoneType now" in caplog.text


def test_two_names_of_one_module_that_differ_in_the_checkpoint_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Swapping(Collecting):
        def __init__(self, fails_at: int | None = None) -> None:
            super().__init__(fails_at=fails_at)
            self.active = self.target

        def on_update_end(self) -> None:
            super().on_update_end()
            self.active = copy.deepcopy(self.target) if self.active is self.target else self.active

    with pytest.raises(Stop):
        train("out/b", Swapping(fails_at=8))
    with caplog.at_level(logging.WARNING):
        train("out/b", Swapping(), resume=True)
    assert "self.active: the checkpoint contains a Sequential that is another attribute's now" in caplog.text


class AlsoTorch(nn.Module, AcceleratorModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.register_buffer("center", torch.zeros(1))
        self.fails_at = fails_at

    def training_step(self, batch: Any) -> Tensor:
        outputs = self.model(batch[0])
        self.center.lerp_(outputs.detach().mean(), 0.5)
        return nn.functional.mse_loss(outputs, batch[1] - self.center)

    on_after_backward = Kinds.on_after_backward


def test_buffers_of_a_module_that_is_also_an_nn_module_go_on() -> None:
    whole = train("out/a", AlsoTorch())
    with pytest.raises(Stop):
        train("out/b", AlsoTorch(fails_at=8), handlers="any")
    rest = train("out/b", AlsoTorch(), resume=True)
    torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_check_resume_accepts_a_state_that_is_reset() -> None:
    class Reset(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.hidden: Any = None

        def on_after_backward(self) -> None:
            self.hidden = torch.ones(1) if self.state.global_step % 4 == 1 else None

    assert make("out/a", {"batch_size": 4}).check_resume(Reset(), make_points(2 * STEPS)) > 0


def test_what_changed_in_a_step_that_ran_out_of_memory_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Collecting):
        def training_step(self, batch: Any) -> Tensor:
            loss = super().training_step(batch)
            if self.state.global_step == 3 and len(batch[0]) == 4:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return loss

    with caplog.at_level(logging.WARNING):
        make("out/a", {"batch_size": 4, "max_micro_batch_size": "auto", "epochs": 1}).fit(
            Full(), make_points(2 * STEPS)
        )
    assert "changed in the step that ran out of memory" in caplog.text


def test_what_the_constructor_draws_anew_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Projected(Collecting):
        def __init__(self, fails_at: int | None = None, *, seed: int) -> None:
            super().__init__(fails_at=fails_at)
            generator = torch.Generator().manual_seed(seed)
            self.projection = torch.randn(4, 3, generator=generator)
            self.random_net = nn.Linear(3, 1).requires_grad_(False)

    with pytest.raises(Stop):
        train("out/a", Projected(fails_at=8, seed=1))
    shutil.copytree("out", "same")
    train("same/a", Projected(seed=1), resume=True)
    assert "is not what it was" not in caplog.text
    train("out/a", Projected(seed=2), resume=True)
    assert caplog.text.count("self.projection is not what it was in the saved run") == 1
    assert "self.random_net" not in caplog.text


class Labelled(Dataset[Any]):
    """Has what programs change in a dataset, and what reading changes: a cache of a kind that cannot be stored."""

    def __init__(self) -> None:
        self.points = torch.tensor([[index / 24, 1.0, 0.0] for index in range(24)])
        self.labels, self.weights, self.strength = self.points.sum(1, keepdim=True), np.ones(24, np.float32), 1.0
        self.reads, self.cache = 0, [None] * 24

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.cache[index] = self.cache[index] or object()  # type: ignore[call-overload]
        factor = self.strength * float(self.weights[index]) + self.reads / 99
        return self.points[index] * factor, self.labels[index]


class Labelling(AcceleratorModule):
    """Changes its dataset in each step and at the end of each epoch, as self-training does."""

    def __init__(self, data: Labelled, fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model, self.data, self.fails_at = nn.Linear(3, 1), data, fails_at

    def training_step(self, batch: Any) -> Tensor:
        self.data.weights[self.state.global_step] += 0.5
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def on_update_end(self) -> None:
        self.data.strength *= 0.9

    def on_epoch_end(self) -> None:
        with torch.no_grad():
            self.data.labels[12:] = self.model(self.data.points[12:])

    on_after_backward = Collecting.on_after_backward


@pytest.mark.parametrize(("handlers", "fails_at"), [(None, 3), (None, 8), ("any", 8)])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(ConcatDataset([data]), 4)])
def test_what_training_changes_in_the_dataset_goes_on(
    wrap: Any, handlers: Any, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run(folder: str, data: Labelled, **settings: Any) -> Labelling:
        module = Labelling(data, settings.pop("fails_at", None))
        hps = {"epochs": 2, "batch_size": 4, "scheduler": None, "optim": {"type": "SGD", "lr": 0.05}}
        make(folder, hps, model_saving=None, **settings).fit(module, wrap(data))
        return module

    whole = run("out/a", Labelled())
    with pytest.raises(Stop):
        run("out/b", Labelled(), handlers=handlers, fails_at=fails_at)
    text = next(Path("out/checkpoint-b").glob("step-*/state.json")).read_text()
    assert ".strength" in text
    assert ".points" not in text
    rest = run("out/b", Labelled(), resume=True)
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(rest.data.labels, whole.data.labels, rtol=0, atol=0)
    assert rest.data.weights.tolist() == whole.data.weights.tolist()
    assert "cannot contain" not in caplog.text


class Endless(Labelled):
    """Makes another dataset each time, refers to itself, and has a method with the name of what holds several."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["dataset"] = self

    @property
    def dataset(self) -> Any:
        return Endless()

    def datasets(self) -> list[str]:
        return ["points"]


def test_a_dataset_that_makes_up_others_is_trained_on() -> None:
    hps = {"epochs": 1, "batch_size": 4, "scheduler": None}
    data = Endless()
    make("out/a", hps, model_saving=None).fit(Labelling(data), data)
    assert data.weights.sum() == 24 + 6 * 0.5


class Annealed(nn.Module):
    """Keeps state in attributes, in a buffer that is not saved, and the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.is_begun, self.center = 2.0, False, torch.zeros(1)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.last: Any = None

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.tau, self.is_begun = max(0.5, self.tau * 0.9), True
            self.center = 0.9 * self.center + 0.1 * values.detach().mean()
            self.count += 1
        self.last = values.repeat(1, 1 << 17)
        return (values - self.center) / (self.tau + self.count)


class InLayers(AcceleratorModule):
    """Its layers change by themselves and by hooks: rates, and a batch norm that is frozen in the second epoch."""

    def __init__(self, fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1), Annealed())
        self.criterion, self.mean, self.fails_at = Annealed(), MeanMetric(), fails_at
        self.means: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        outputs = self.model(batch[0])
        loss = nn.functional.mse_loss(self.criterion(outputs), batch[1])
        self.mean.update(loss.detach())
        return loss

    def on_epoch_start(self) -> None:
        if self.state.epoch >= 1:
            self.model[1].eval()

    def on_epoch_end(self) -> None:
        self.model[1].momentum *= 0.5
        self.model[2].p += 0.1
        self.means.append(float(self.mean.compute()))
        self.mean.reset()

    on_after_backward = Collecting.on_after_backward


@pytest.mark.parametrize(("handlers", "fails_at"), [(None, 8), (None, 14), ("any", 14)])
def test_what_training_changes_in_layers_goes_on(
    handlers: Any, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    hps = {"epochs": 3, "batch_size": 4, "scheduler": None}
    settings: dict[str, Any] = {"model_saving": None}
    points = make_points(2 * STEPS)
    whole, rest = InLayers(), InLayers()
    make("out/a", hps, **settings).fit(whole, points)
    with pytest.raises(Stop):
        make("out/b", hps, **settings, handlers=handlers).fit(InLayers(fails_at), points)
    make("out/b", hps, **settings, resume=True).fit(rest, points)
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert rest.means == whole.means
    for name in ("tau", "is_begun", "center", "count"):
        assert getattr(rest.model[4], name) == getattr(whole.model[4], name)
        assert getattr(rest.criterion, name) == getattr(whole.criterion, name)
    assert (rest.model[1].training, rest.model[2].p) == (False, whole.model[2].p)
    assert "cannot contain" not in caplog.text
    sizes = [path.stat().st_size for path in Path("out/checkpoint-b").glob("step-*/*.safetensors")]
    assert max(sizes) < 1 << 20  # without the last outputs


def test_an_estimator_that_learns_from_batches_goes_on_or_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Scaling(Collecting):
        def __init__(self, fails_at: int | None = None) -> None:
            super().__init__(fails_at=fails_at)
            self.scaler, self.classifier, self.unused = StandardScaler(), SGDClassifier(), SGDClassifier()

        def training_step(self, batch: Any) -> Tensor:
            inputs = batch[0].numpy()
            scaled = torch.tensor(self.scaler.partial_fit(inputs).transform(inputs))
            self.classifier.partial_fit(inputs, np.arange(len(inputs)) % 2, classes=[0, 1])
            return super().training_step((scaled, batch[1]))

    whole = train("out/a", Scaling())
    with pytest.raises(Stop):
        train("out/b", Scaling(fails_at=8))
    rest = train("out/b", Scaling(), resume=True)
    assert rest.scaler.mean_.tolist() == whole.scaler.mean_.tolist()
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    named = "self.classifier has changed since training began, but a checkpoint cannot contain a SGDClassifier"
    assert named in caplog.text
    assert "self.unused" not in caplog.text


def test_an_optimizer_in_an_attribute_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class InBackward(Collecting):
        """Steps in backward, to save the memory of the gradients."""

        def __init__(self, *, is_own: bool = True) -> None:
            super().__init__()
            self.used = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
            self.unused = torch.optim.Adam(self.model.parameters())
            if is_own:
                self.each = {weight: torch.optim.Adam([weight], 1e-5) for weight in self.model.parameters()}
                for weight in self.model.parameters():
                    weight.register_post_accumulate_grad_hook(lambda weight: self.each[weight].step())

        def get_optimizer(self) -> torch.optim.Optimizer:
            return self.used

    train("out/a", InBackward(is_own=False))
    assert "optimizer" not in caplog.text
    train("out/a", InBackward())
    assert caplog.text.count("self.each has an optimizer that get_optimizer did not return") == 1
    assert "self.used" not in caplog.text
    assert "self.unused" not in caplog.text


def test_values_by_parameter_go_on(caplog: pytest.LogCaptureFixture) -> None:
    class Importance(Collecting):
        """Sums squared gradients, as elastic weight consolidation does."""

        def __init__(self, fails_at: int | None = None) -> None:
            super().__init__(fails_at=fails_at)
            self.sums = {weight: torch.zeros_like(weight) for weight in self.model.parameters()}
            self.later: dict[Any, int] = {}

        def on_before_optimizer_step(self) -> None:
            for weight, total in self.sums.items():
                total += weight.grad.detach() ** 2
            self.later[next(self.model.parameters())] = self.state.global_step

    whole = train("out/a", Importance())
    with pytest.raises(Stop):
        train("out/b", Importance(fails_at=8))
    rest = train("out/b", Importance(), resume=True)
    assert list(rest.sums) == list(rest.model.parameters())
    torch.testing.assert_close(list(rest.sums.values()), list(whole.sums.values()), rtol=0, atol=0)
    assert (
        "self.later: the checkpoint contains values by tensor, which it does not have now: it is ignored" in caplog.text
    )


def test_a_scheduler_in_an_attribute_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Scheduling(Collecting):
        def on_fit_start(self) -> None:
            self.decay = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)
            self.same = self.scheduler

        def on_update_end(self) -> None:
            super().on_update_end()
            self.decay.step()

    make("out/a", {"epochs": 1, "batch_size": 4}, model_saving=None).fit(Scheduling(), make_points(2 * STEPS))
    assert caplog.text.count("self.decay has a scheduler that get_scheduler did not return") == 1
    assert "self.same" not in caplog.text


class InPlace(Sampler[int]):
    """Shuffles what it has, and counts, whenever it draws."""

    def __init__(self) -> None:
        self.order, self.draws = list(range(24)), 0

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        self.draws += 1
        random.shuffle(self.order)
        return iter(self.order)


@pytest.mark.parametrize("in_loader", [False, True])
def test_a_sampler_that_learns_is_named(in_loader: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Learning(Fragile):
        sampler: Any = None

        def on_epoch_end(self) -> None:
            if self.sampler is not None:
                self.sampler.weights = self.sampler.weights * 0.9

    def run(module: Any, sampler: Any) -> None:
        points: Any = make_points(24)
        data, given = (DataLoader(points, 4, sampler=sampler), None) if in_loader else (points, sampler)
        hps = {"epochs": 3, "batch_size": 4, "scheduler": None}
        make("out/a", hps, model_saving=None, sampler=given, checkpoint_every="epoch").fit(module, data)

    run(Learning(), InPlace())
    run(Learning(), WeightedRandomSampler([1.0] * 24, 24))
    assert "of the sampler" not in caplog.text
    module = Learning()
    module.sampler = WeightedRandomSampler([1.0] * 24, 24)
    run(module, module.sampler)
    assert caplog.text.count("weights of the sampler has changed in training, and is not in checkpoints") == 1
