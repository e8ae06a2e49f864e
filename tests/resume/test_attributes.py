"""Attributes of modules and callbacks that training changes are in the checkpoint."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from accmt import AcceleratorModule, Callback
from tests.resume.unbroken import make
from tests.toys import InterruptAt, InterruptionError, make_points

STEPS = 12
WRITES = {
    "counted": lambda mean, weight: mean.lerp_(weight, 0.5),
    "through data": lambda mean, weight: mean.data.lerp_(weight.data, 0.5),
    "by new data": lambda mean, weight: setattr(mean, "data", mean.data * 0.5 + weight.data * 0.5),
}


class Collecting(AcceleratorModule):
    """Keeps in attributes what self-supervised and other programs keep there, and lets the loss depend on all of it."""

    def __init__(self, write: str = "counted") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.weights, self.means = list(self.model.parameters()), list(self.target.parameters())
        self.queue, self.place = torch.zeros(8, 1), 0
        self.center: Any = None
        self.counts, self.last = {"batches": 0}, deque([0.0], maxlen=3)
        self.mean, self.seen = np.zeros(3), set()
        self.losses: list[Tensor] = []
        self.write = write

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


class Patient(Callback):
    """Stops after the third step whose loss is not the lowest so far, as an early stopping of one's own."""

    def __init__(self) -> None:
        self.lowest, self.bad = float("inf"), 0

    def on_after_training_step(self, outputs: Any) -> None:
        loss = float(outputs.detach())
        self.bad += loss >= self.lowest
        self.lowest = min(self.lowest, loss)
        self.trainer.should_stop = self.bad == 3


def train(folder: str, module: AcceleratorModule, *, stop: int | None = None, **settings: Any) -> AcceleratorModule:
    """Train, to the end or to an interruption after some steps."""
    hps = {"epochs": 2, "batch_size": 4, "scheduler": None}
    settings = {"checkpoint_every": "5 steps", "model_saving": None, **settings}
    callbacks = [*settings.pop("callbacks", ()), *([] if stop is None else [InterruptAt(stop)])]
    with contextlib.nullcontext() if stop is None else pytest.raises(InterruptionError):
        make(folder, hps, callbacks=callbacks, **settings).fit(module, make_points(2 * STEPS))
    return module


def interrupted(build: Callable[[], AcceleratorModule], **settings: Any) -> tuple[Any, Any]:
    """Return the module of an unbroken run, and that of one that was interrupted after 8 steps and went on."""
    whole = train("out/a", build())
    train("out/b", build(), stop=8, **settings)
    return whole, train("out/b", build(), resume=True)


def attributes_of(module: AcceleratorModule) -> dict[str, Any]:
    found = {"model": module.model.state_dict(), "target": module.target.state_dict()}
    found |= {name: getattr(module, name) for name in ("queue", "place", "center", "counts", "mean", "losses")}
    return {**found, "last": list(module.last), "seen": sorted(module.seen)}  # which assert_close does not know


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("handlers", [None, "any"])
def test_a_run_that_goes_on_has_what_an_unbroken_one_has(write: str, handlers: Any) -> None:
    whole, rest = interrupted(lambda: Collecting(write), handlers=handlers)
    assert rest.state.global_step == STEPS
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)
    assert rest.last.maxlen == 3


def test_a_callback_without_a_state_dict_goes_on_counting() -> None:
    whole = train("out/a", Collecting(), callbacks=[Patient()])
    assert whole.state.global_step < STEPS
    train("out/b", Collecting(), stop=whole.state.global_step - 1, callbacks=[Patient()], checkpoint_every="step")
    assert train("out/b", Collecting(), callbacks=[Patient()], resume=True).state.global_step == whole.state.global_step


def test_what_a_hook_of_the_start_sets_anew_is_restored_after_it() -> None:
    class OnStart(Collecting):
        def on_fit_start(self) -> None:
            self.queue = torch.zeros(8, 1)

    whole, rest = interrupted(OnStart)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)


@pytest.mark.parametrize("stop", [8, 9, 11])
def test_what_the_start_of_an_epoch_resets_counts_the_whole_epoch(stop: int) -> None:
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

    train("out/b", Collecting(), stop=stop, callbacks=[Counting(), Stateful()], checkpoint_every="2 steps")
    rest = train("out/b", Collecting(), callbacks=[Counting(), Stateful()], resume=True)
    per_epoch = STEPS // 2
    for kind in (Counting, Stateful):
        assert rest.trainer.get_callback(kind).rows == [per_epoch] * 4


def test_what_does_not_change_is_not_in_the_checkpoint_and_follows_the_program() -> None:
    class Frozen(Collecting):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.reference, self.factor = copy.deepcopy(self.model).requires_grad_(False), factor

    train("out/b", Frozen(1.0), stop=8)
    text = next(Path("out/checkpoint-b").glob("step-*/state.json")).read_text()
    values = json.loads(text)["others"]["parts"]["attributes"]["values"]
    assert "self.target" in values
    assert not {"self.reference", "self.factor"} & values.keys()
    assert train("out/b", Frozen(2.0), resume=True).factor == 2.0


class Early(Collecting):
    """Changes its target and its weights before the step is made, and fails then."""

    def __init__(self, *, size: int = 1, changes_weights: bool = False) -> None:
        super().__init__()
        self.table, self.changes_weights = torch.zeros(size), changes_weights
        self.rows = [[0.0] for _ in range(200)]

    def on_before_backward(self, loss: Any) -> None:
        self.table += 1
        self.rows[0][0] += 1
        if self.changes_weights:
            with torch.no_grad():
                self.weights[0].mul_(1.05)

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) * (1 + 0.1 * self.rows[0][0] + 0.1 * float(self.table[0]))


@pytest.mark.parametrize("changes_weights", [False, True])
def test_an_emergency_checkpoint_has_the_values_after_the_last_step(changes_weights: bool) -> None:
    whole = train("out/a", Early(changes_weights=changes_weights))
    train("out/b", Early(changes_weights=changes_weights), stop=8, handlers="any")
    assert Path("out/checkpoint-b/step-00000008").is_dir()
    rest = train("out/b", Early(changes_weights=changes_weights), resume=True)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)
    assert (rest.rows[0], float(rest.table[0])) == (whole.rows[0], float(whole.table[0]))


def test_no_emergency_checkpoint_is_written_in_the_middle_of_what_is_too_large_to_copy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = train("out/a", Early(size=1 << 19))
    with caplog.at_level(logging.WARNING):
        train("out/b", Early(size=1 << 19), stop=8, handlers="any")
    assert "no emergency checkpoint" in caplog.text
    assert [path.name for path in Path("out/checkpoint-b").glob("step-*")] == ["step-00000005"]
    rest = train("out/b", Early(size=1 << 19), resume=True)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)


Pair = namedtuple("Pair", "seen mean")  # noqa: PYI024 - as users write it


class Statistics:
    """Running statistics, as reinforcement learning keeps them."""

    def __init__(self) -> None:
        self.mean, self.count, self.parts = np.zeros(3), 0, {"largest": [0.0]}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count, "parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def update(self, inputs: Any) -> None:
        self.count += 1
        self.mean += (inputs.mean(0) - self.mean) / self.count
        self.parts["largest"][0] = max(self.parts["largest"][0], float(inputs.max()))


class Kinds(AcceleratorModule):
    """Keeps values of further kinds, and lets the loss depend on all of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        for layer in self.model[:2]:
            layer.requires_grad_(False)
        self.targets = [copy.deepcopy(self.model).requires_grad_(False) for _ in range(2)]
        self.heads = {"teacher": copy.deepcopy(self.model).requires_grad_(False)}
        self.statistics, self.pair = Statistics(), Pair(0, torch.zeros(1))
        self.best: Any = np.float64(9.0)
        self.kinds, self.table, self.counts = np.array(["new", "old"]), {(0, 1): 0.0}, defaultdict(int)
        self.small, self.phase = np.zeros(2, dtype=np.uint16), 1 + 0j
        self.fields = np.zeros(2, dtype=[("a", "f4"), ("b", "i4")])
        self.nested = {"a": {"n": 0}, "b": [[0, torch.zeros(1)]]}
        self.of_samples = [0.0] * 20_000
        self.hidden = self.cell = torch.zeros(1)
        self.previous = self.model[2].weight.data
        self.window = deque([Pair(0, torch.zeros(1))], maxlen=4)

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            goal = sum(target(inputs) for target in (*self.targets, self.heads["teacher"]))
        self.statistics.update(inputs.numpy())
        self.pair = Pair(self.pair.seen + 1, goal.mean().reshape(1))
        self.window.append(self.pair)
        self.best = min(self.best, np.mean(goal.numpy()))
        self.kinds[self.pair.seen % 2] = "old" if self.kinds[self.pair.seen % 2] == "new" else "new"
        self.table[0, self.pair.seen % 3] = float(goal.max())
        self.counts[float(goal.max()) > 0] += 1
        self.small += 1
        self.fields["a"] += 0.5
        self.phase *= 1j
        self.nested["a"]["n"] += 1
        self.nested["b"][0][0] += 1
        self.nested["b"][0][1] += goal.mean()
        self.of_samples[self.pair.seen % 7] += 1.0
        self.hidden, self.cell = self.hidden * 0.5 + goal.mean(), self.cell * 0.5 + goal.std()
        numbers = [
            self.fields["a"][0],
            self.statistics.count,
            self.best,
            len(self.table),
            self.counts[True],
            self.small[0],
            self.phase.real,
        ]
        numbers += [self.nested["a"]["n"], sum(self.of_samples), list(self.kinds).count("new")]
        rest = sum(map(float, numbers)) / 99 + self.hidden - self.cell + self.nested["b"][0][1] + self.pair.mean
        rest = rest + sum(one.mean for one in self.window) + float(self.statistics.mean.sum()) + self.previous.mean()
        return nn.functional.mse_loss(self.model(inputs), targets + 0.1 * goal + 0.01 * rest)

    def on_update_end(self) -> None:
        self.previous = self.model[2].weight.data.clone()
        for target in (*self.targets, self.heads["teacher"]):
            for mean, weight in zip(target.parameters(), self.model.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.5)


@pytest.mark.parametrize("handlers", [None, "any"])
def test_values_of_further_kinds_go_on(handlers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        whole, rest = interrupted(Kinds, handlers=handlers)
    assert "cannot contain" not in caplog.text
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    for name in ("hidden", "cell", "previous", "pair", "of_samples"):
        torch.testing.assert_close(getattr(rest, name), getattr(whole, name), rtol=0, atol=0)
    for name in ("best", "table", "counts", "phase", "nested"):
        assert type(getattr(rest, name)) is type(getattr(whole, name))
        assert getattr(rest, name) == getattr(whole, name)
    for name in ("kinds", "small", "fields"):
        assert getattr(rest, name).tolist() == getattr(whole, name).tolist()
    assert rest.counts.default_factory is int
    assert vars(rest.statistics)["mean"].tobytes() == whole.statistics.mean.tobytes()
    assert (rest.window.maxlen, type(rest.window[0])) == (4, Pair)


def test_a_module_in_objects_of_a_later_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Later(Collecting):
        old: Any = None

        def on_update_end(self) -> None:
            super().on_update_end()
            self.old = self.old or copy.deepcopy(self.model).requires_grad_(False)

    train("out/b", Later(), stop=8)
    with caplog.at_level(logging.WARNING):
        train("out/b", Later(), resume=True)
    assert "self.old has changed since training began, and a checkpoint cannot contain" in caplog.text


def test_two_names_of_one_module_that_differ_in_the_checkpoint_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Swapping(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.active = self.target

        def on_update_end(self) -> None:
            super().on_update_end()
            self.active = copy.deepcopy(self.target) if self.active is self.target else self.active

    train("out/b", Swapping(), stop=8)
    with caplog.at_level(logging.WARNING):
        train("out/b", Swapping(), resume=True)
    assert "the checkpoint contains the state of an object, which is Sequential now" in caplog.text


class AlsoTorch(nn.Module, AcceleratorModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.register_buffer("center", torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        outputs = self.model(batch[0])
        self.center.lerp_(outputs.detach().mean(), 0.5)
        return nn.functional.mse_loss(outputs, batch[1] - self.center)


def test_buffers_of_a_module_that_is_also_an_nn_module_go_on() -> None:
    whole, rest = interrupted(AlsoTorch, handlers="any")
    torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_check_resume_accepts_a_state_that_is_reset() -> None:
    class Reset(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.hidden: Any = None

        def on_after_backward(self) -> None:
            self.hidden = torch.ones(1) if self.state.global_step % 4 == 1 else None

    assert make("out/a", {"batch_size": 4}).check_resume(Reset(), make_points(2 * STEPS)) > 0


def test_what_the_constructor_draws_anew_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Projected(Collecting):
        def __init__(self, *, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.projection = torch.randn(4, 3, generator=generator)
            self.random_net = nn.Linear(3, 1).requires_grad_(False)

    train("out/a", Projected(seed=1), stop=8)
    shutil.copytree("out", "same")
    train("same/a", Projected(seed=1), resume=True)
    assert "is not what it was" not in caplog.text
    train("out/a", Projected(seed=2), resume=True)
    assert caplog.text.count("self.projection is not what it was in the saved run") == 1
    assert "self.random_net" not in caplog.text


class Labelled(Dataset[Any]):
    """Has labels that a module changes, in a state."""

    def __init__(self) -> None:
        self.points = torch.tensor([[index / 24, 1.0, 0.0] for index in range(24)])
        self.labels = self.points.sum(1, keepdim=True)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.points[index], self.labels[index]

    def state_dict(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels = state["labels"]


class Learned(Sampler[int]):
    """Draws what it has weights for, and lets a module change them."""

    def __init__(self) -> None:
        self.weights = torch.ones(24)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.weights, 24, replacement=True).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


class Labelling(AcceleratorModule):
    """Changes its dataset at the end of each epoch, as self-training does, and its sampler in each step."""

    def __init__(self, data: Labelled, sampler: Learned) -> None:
        torch.manual_seed(0)
        self.model, self.data, self.sampler = nn.Linear(3, 1), data, sampler
        self.steps = 0

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def on_update_end(self) -> None:
        self.steps += 1
        self.sampler.weights = self.sampler.weights * torch.linspace(0.9, 1.1, 24) ** self.steps

    def on_epoch_end(self) -> None:
        with torch.no_grad():
            self.data.labels = torch.cat([self.data.labels[:12], self.model(self.data.points[12:])])


@pytest.mark.parametrize("stop", [3, 8, 14])
@pytest.mark.parametrize("in_loader", [False, True])
def test_a_dataset_and_a_sampler_with_a_state_go_on(in_loader: bool, stop: int) -> None:
    def run(folder: str, **settings: Any) -> Labelling:
        data, sampler = Labelled(), Learned()
        module = Labelling(data, sampler)
        hps = {"epochs": 3, "batch_size": 4, "scheduler": None, "optim": {"type": "SGD", "lr": 0.05}}
        settings |= {"model_saving": None, "checkpoint_every": "2 steps"}
        if in_loader:
            make(folder, hps, **settings).fit(module, DataLoader(data, 4, sampler=sampler))
        else:
            make(folder, hps, sampler=sampler, **settings).fit(module, data)
        return module

    whole = run("out/a")
    with pytest.raises(InterruptionError):
        run("out/b", callbacks=[InterruptAt(stop)])
    rest = run("out/b", resume=True)
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(rest.data.labels, whole.data.labels, rtol=0, atol=0)
    torch.testing.assert_close(rest.sampler.weights, whole.sampler.weights, rtol=0, atol=0)


class Counted(nn.Module):
    """Keeps a count in a buffer that is not saved with the model, and registers another one in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if not hasattr(self, "center"):
            self.register_buffer("center", torch.zeros(1), persistent=False)
        if self.training:
            self.count += 1
            self.center = 0.9 * self.center + 0.1 * values.detach().mean()
        return (values - self.center) / (1 + 0.1 * self.count)


@pytest.mark.parametrize("handlers", [None, "any"])
def test_all_buffers_of_the_model_go_on(handlers: Any) -> None:
    class Buffered(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(3, 1), Counted())
            self.weights, self.means = [], []

        def training_step(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def on_update_end(self) -> None:
            pass

    whole, rest = interrupted(Buffered, handlers=handlers)
    torch.testing.assert_close(dict(rest.model.named_buffers()), dict(whole.model.named_buffers()), rtol=0, atol=0)
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_an_optimizer_and_a_scheduler_in_attributes_go_on() -> None:
    class Twice(Collecting):
        """Makes a step of another optimizer after each one."""

        def __init__(self) -> None:
            super().__init__()
            self.also = torch.optim.Adam(self.model.parameters(), 1e-3)
            self.decay = torch.optim.lr_scheduler.StepLR(self.also, 4)

        def on_update_end(self) -> None:
            super().on_update_end()
            for weight in self.model.parameters():
                weight.grad = torch.ones_like(weight)
            self.also.step()
            self.also.zero_grad()
            self.decay.step()

    whole, rest = interrupted(Twice)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)
    assert rest.decay.last_epoch == whole.decay.last_epoch


class Game:
    def __init__(self) -> None:
        self.turns = 0


@pytest.mark.parametrize(
    "make_value",
    [
        lambda: Game(),
        lambda: [Game()],
        lambda: {"one": [Game(), logging]},
        lambda: np.array([0, "x"], dtype=object),
        lambda: torch.eye(2).to_sparse(),
        lambda: type("Numbers", (list,), {})([0]),
        lambda: {torch.zeros(1): 0},
    ],
)
def test_what_changes_and_cannot_be_stored_is_named(make_value: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Holding(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.unchanged = make_value(), make_value()

        def on_update_end(self) -> None:
            super().on_update_end()
            value = self.odd
            game = (
                value["one"][0]
                if type(value) is dict and "one" in value
                else value[0]
                if type(value) is list
                else value
            )
            if isinstance(game, Game):
                game.turns += 1
            elif isinstance(value, Tensor):
                self.odd = value * 2
            elif isinstance(value, dict):
                value[next(iter(value))] += 1
            else:
                value[0] += 1

    with caplog.at_level(logging.WARNING):
        train("out/a", Holding())
    assert caplog.text.count("self.odd has changed since training began, and a checkpoint cannot contain") == 1
    assert "self.unchanged" not in caplog.text


def test_a_collection_of_any_length_is_compared_as_a_whole() -> None:
    class Long(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.table = [[0.0] for _ in range(12_000)], {index: [0.0] for index in range(12_000)}

        def on_update_end(self) -> None:
            super().on_update_end()
            self.rows[7_000][0] += 1
            self.table[7_000][0] += 1

    train("out/b", Long(), stop=8)
    rest = train("out/b", Long(), resume=True)
    assert rest.rows[7_000] == rest.table[7_000] == [float(STEPS)]


def test_a_tensor_of_a_module_and_a_buffer_may_be_resized() -> None:
    class Sized(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.empty(0)

        def training_step(self, batch: Any) -> Tensor:
            torch.randn(batch[0].shape, out=self.noise)
            return super().training_step((batch[0] + self.noise, batch[1]))

    assert train("out/a", Sized(), handlers="any").state.global_step == STEPS


class Observed(nn.Module):
    """Observes in evaluation mode, too, as quantization-aware training does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.largest.lerp_(inputs.detach().abs().max(), 0.1)
        return inputs / self.largest


class Loaded(torch.optim.Adam):
    """Counts how often a state is loaded."""

    loads = 0

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1
        super().load_state_dict(state)


def test_the_evaluation_before_training_leaves_no_trace() -> None:
    class Counting(AcceleratorModule):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Sequential(Observed(), nn.Linear(3, 1))
            self.validated, self.seen = 0, []
            self.also = Loaded(self.model.parameters())

        def training_step(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1]) / (1 + self.validated + len(self.seen))

        def validation_step(self, batch: Any) -> Tensor:
            self.validated += 1
            self.new_at = getattr(self, "new_at", self.state.global_step)
            self.seen.append(len(batch[0]))
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    weights = []
    for num_steps in (0, 2):
        module = Counting()
        hps = {"max_steps": 3, "batch_size": 4, "scheduler": None, "optim": {"type": "SGD", "lr": 0.1}}
        trainer = make(f"out/{num_steps}", hps, model_saving=None, num_sanity_val_steps=num_steps)
        trainer.fit(module, make_points(24), make_points(8))
        weights.append(module.model.state_dict())
        assert (module.also.loads, module.new_at) == (0, 3)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "accmt" and record.levelno >= logging.WARNING]


class Stage(Enum):
    EARLY = 1
    LATE = 2


class Further(AcceleratorModule):
    """Changes values in ways that a simple copy would miss, and lets the loss depend on all of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.stage, self.warm, self.is_late = Stage.EARLY, 1.0, False
        self.nested: dict[str, Any] = {}
        self.table = torch.zeros(4, 3)
        self.row = self.table[0]
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha_steps = torch.optim.Adam([self.log_alpha], lr=0.1)
        self.extra = Extra().requires_grad_(False)

    def training_step(self, batch: Any) -> Tensor:
        step = self.state.global_step
        self.stage = Stage.LATE if step > 2 else Stage.EARLY
        self.is_late = self.is_late or step == 3
        if step == 1:
            del self.warm
        self.nested.setdefault("by step", defaultdict(list))[step].append(1)
        self.nested.setdefault("last", OrderedDict())[step] = 1
        self.nested["last"].move_to_end(step, last=False)
        self.row += batch[0][0]
        self.table[1] += 1
        self.log_alpha.grad = torch.ones(1)
        self.alpha_steps.step()
        self.extra.count += 1
        rest = (
            self.is_late
            + self.stage.value
            + getattr(self, "warm", 0.0)
            + len(self.nested["by step"])
            + self.extra.count
        )
        rest = rest + next(iter(self.nested["last"])) + self.table.sum() + self.log_alpha.detach()
        return nn.functional.mse_loss(self.model(batch[0]), batch[1] + rest / 99)


class Extra(nn.Module):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


class Teacher(Callback):
    """Has a model that it creates when training begins."""

    def on_fit_start(self) -> None:
        self.model = copy.deepcopy(self.module.model).requires_grad_(False)

    def on_update_end(self) -> None:
        for mean, weight in zip(self.model.parameters(), self.module.model.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.3)


@pytest.mark.parametrize("handlers", [None, "any"])
def test_what_changes_in_other_ways_goes_on(handlers: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"checkpoint_every": "2 steps"}
    first, last = Teacher(), Teacher()
    whole = train("out/a", Further(), callbacks=[first], **settings)
    for stop in (5, 9):  # what the first start has changed is in the checkpoints of the second, too
        train("out/b", Further(), stop=stop, callbacks=[Teacher()], handlers=handlers, resume="auto", **settings)
    rest = train("out/b", Further(), resume=True, callbacks=[last], **settings)
    torch.testing.assert_close(rest.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(last.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    assert not hasattr(rest, "warm")
    assert warnings_in(caplog) == []


def test_odd_values_that_do_not_change_disturb_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __repr__(self) -> str:
            raise RuntimeError

    class Odd(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.itself: list[Any] = [1]
            self.itself.append(self.itself)
            self.conjugate = torch.ones(2, dtype=torch.complex64).conj()
            self.failing, self.by_failing = [Failing()], np.array([Failing()], dtype=object)
            self.deep: Any = None
            for _ in range(400):
                self.deep = {"next": self.deep}
            self.log_, self.kind, self.function = logging.getLogger("accmt.tests.odd"), torch.optim.SGD, torch.relu
            self.file = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=(4,))
            self.sparse, self.later = torch.eye(2).to_sparse(), nn.Module()
            self.later.weight = nn.UninitializedParameter(requires_grad=False)
            self.wide, self.records = np.zeros(2, dtype=np.longdouble), np.zeros(2, dtype=[("a", "i4")])
            self.other = Statistics()
            self.other.itself = self.other  # type: ignore[attr-defined]

    with caplog.at_level(logging.WARNING):
        assert train("out/a", Odd(), handlers="any").state.global_step == STEPS
    assert warnings_in(caplog) == []


def test_an_object_that_training_creates_is_named_when_a_checkpoint_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Snapshots(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.pool: list[nn.Module] = []
            self.batches = iter(range(1000))

        def on_update_end(self) -> None:
            super().on_update_end()
            self.pool.append(copy.deepcopy(self.model).requires_grad_(False))
            next(self.batches)

    with caplog.at_level(logging.WARNING):
        train("out/a", Snapshots())
    assert caplog.text.count("self.pool has changed since training began, and a checkpoint cannot contain") == 1
    assert caplog.text.count("self.batches has changed since training began, and a checkpoint cannot contain") == 1
