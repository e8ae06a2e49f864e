"""Each field of the monitor adds exactly its values, and they are right."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, Callback
from accmt.addons.monitor import PURPOSES, GpuUse
from accmt.tracking import read_history
from tests.slow import SlowData, SlowLinear
from tests.tables import each
from tests.toys import Linear, logged, make_points, make_trainer


def fit(monitor, hps=None, module=None, points=8, val=None, **settings):
    trainer = make_trainer(hps, monitor=monitor, shuffle_train=False, **settings)
    trainer.fit(module or Linear(), make_points(points), None if val is None else make_points(val))
    return trainer


def rows(trainer):
    return [row["values"] for row in read_history(trainer.log_dir) if "values" in row]


FIELDS = {
    "learning_rate": {"learning_rate"},
    "grad_norm": {"grad_norm"},
    "epoch": {"epoch"},
    "throughput": {"samples_per_s", "batches_per_s"},
    "time_split": {f"seconds_{purpose}" for purpose in PURPOSES},
    "cpu_utilization": {"CPU_PROCESS_0", "CPU", "RAM"},
}


@each(("field", "names"), FIELDS.items())
def test_each_field_adds_exactly_its_values_to_rows_of_training(field, names):
    trainer = fit([field], val=4)
    assert [set(row) for row in rows(trainer)] == [{"train_loss", *names}] * 4 + [{"val_loss"}]


@pytest.mark.parametrize("sets", [[""], ["__en", "__de"]], ids=["one set", "two sets"])
@pytest.mark.parametrize(
    ("off", "left"),
    [
        ("train_loss", {"val_loss", "bias"}),
        ("validation_loss", {"train_loss", "bias"}),
        ("additional_metrics", {"train_loss", "val_loss"}),
    ],
)
def test_losses_and_metrics_can_be_left_out_of_the_trackers(off, left, sets):
    class WithBias(Linear):
        def validation_step(self, batch):
            return {"loss": self.step(batch), "bias": self.model.bias}

    trainer = make_trainer(monitor={off: False})
    points = make_points(4)
    trainer.fit(WithBias(), points, points if sets == [""] else {name.removeprefix("__"): points for name in sets})
    of_sets = {name + key for name in left - {"train_loss"} for key in sets}
    assert {name for row in rows(trainer) for name in row} == of_sets | (left & {"train_loss"})
    assert set(trainer.state.metrics) == {name + key for name in ("val_loss", "bias") for key in sets}


def test_the_learning_rate_is_that_of_the_schedule_after_the_update():
    hps = {"scheduler": {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, "total_iters": 4}}
    assert logged(fit(["learning_rate"], hps), "learning_rate") == [
        (step, pytest.approx(0.1 * (1 - step / 4))) for step in (1, 2, 3, 4)
    ]


def test_several_groups_have_a_learning_rate_each():
    class TwoGroups(Linear):
        def get_optimizer(self):
            return torch.optim.SGD(
                [{"params": [self.model.weight], "lr": 0.2}, {"params": [self.model.bias], "lr": 0.1}]
            )

    row = rows(fit(["learning_rate"], module=TwoGroups()))[0]
    assert row == {"train_loss": row["train_loss"], "learning_rate_0": 0.2, "learning_rate_1": 0.1}


def expected_norm(order, samples, points=8):
    module = Linear()
    inputs, targets = make_points(points)[:samples]
    nn.functional.mse_loss(module.model(inputs), targets).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.model.parameters()]).norm(order).item()


@each("order", [1, 2.0, 3.5, "inf"])
@each("clip", [None, 0.01])
def test_the_gradient_norm_of_any_order_is_that_before_clipping(order, clip):
    trainer = fit({"grad_norm": order}, clip_grad=clip)
    assert logged(trainer, "grad_norm")[0] == (1, pytest.approx(expected_norm(float(order), 2), rel=1e-5))


def test_the_gradient_norm_under_accumulation_is_that_of_the_whole_window():
    trainer = fit(["grad_norm"], grad_accumulation_steps=3, points=5)  # batches of 2, 2 and 1
    assert logged(trainer, "grad_norm") == [(1, pytest.approx(expected_norm(2, 5, points=5), rel=1e-5))]


def test_a_row_has_the_norm_of_the_update_that_ends_it():
    every = dict(logged(fit(["grad_norm"], {"epochs": 2}, log_every=1), "grad_norm"))
    assert len(set(every.values())) == 8
    for log_every in (2, 3, 5):
        shown = logged(fit(["grad_norm"], {"epochs": 2}, log_every=log_every), "grad_norm")
        assert {step for step, _ in shown} >= set(range(log_every, 9, log_every))
        assert shown == [(step, every[step]) for step, _ in shown]


def test_epochs_have_a_fraction():
    assert logged(fit(["epoch"], {"epochs": 2}, log_every=2), "epoch") == [(2, 0.5), (4, 1.0), (6, 1.5), (8, 2.0)]


class SlowCallback(Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_update_end(self):
        self.clock.now += 0.5


def test_time_is_split_by_what_it_was_spent_on(clock):
    trainer = make_trainer({"epochs": 2}, monitor=["time_split", "throughput"], callbacks=SlowCallback(clock))
    trainer.fit(SlowLinear(clock), SlowData(clock, 4), make_points(4))
    last = rows(trainer)[3]  # of the second epoch: after the evaluation of the first
    split = {name: value for name, value in last.items() if name.startswith("seconds_")}
    assert split == {
        "seconds_data": 0.5,
        "seconds_compute": 2.0,
        "seconds_evaluation": 6.0,
        "seconds_saving": 0.0,
        "seconds_other": 0.5,
    }
    assert last["samples_per_s"] == pytest.approx(2 / 3)
    assert last["batches_per_s"] == pytest.approx(1 / 3)


class Tokens(AcceleratorModule):
    def __init__(self):
        self.model = nn.Embedding(10, 1)

    def step(self, batch):
        return self.model(batch["input_ids"]).mean()


def test_tokens_are_counted_where_batches_have_them(clock):
    class Slow(Callback):
        def on_before_backward(self):
            clock.now += 4

    trainer = make_trainer(monitor=["throughput"], callbacks=Slow())
    trainer.fit(Tokens(), [{"input_ids": torch.arange(5)} for _ in range(4)])
    assert logged(trainer, "tokens_per_s") == [(1, 2.5), (2, 2.5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_use_is_warned_about_and_left_out(caplog):
    trainer = fit(["gpu_utilization"])
    assert "there is no GPU" in caplog.text
    assert set(rows(trainer)[0]) == {"train_loss"}


class _Driver:
    """A driver that answers some questions only, or none."""

    class NVMLError(Exception):
        pass

    def __init__(self, *answers):
        self.answers = answers

    def _ask(self, question, answer=None):
        if question not in self.answers:
            raise self.NVMLError("Not Supported")
        return answer

    def nvmlInit(self):  # noqa: N802
        self._ask("init")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802
        return number

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        return self._ask("memory", SimpleNamespace(used=3e9))

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        return self._ask("use", SimpleNamespace(gpu=70))


@pytest.mark.parametrize(
    ("answers", "measured"),
    [
        ((), set()),
        (("init", "memory"), {"GPU_0_used"}),
        (("init", "memory", "use"), {"GPU_0_used", "GPU_0_utilization"}),
    ],
)
def test_a_driver_that_does_not_answer_ends_no_run(monkeypatch, caplog, answers, measured):
    monkeypatch.setitem(sys.modules, "pynvml", _Driver(*answers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_device", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    use = GpuUse()
    use.on_fit_start()
    assert set(use.measure()) == {"GPU_0", "GPU_0_allocated"} | measured
    assert ("the driver returned: Not Supported" in caplog.text) == ("use" not in answers)


def test_operations_are_counted_from_the_model(clock):
    class OneSecond(Callback):
        def on_before_backward(self):
            clock.now += 1

    trainer = fit({"mfu": 1e3}, callbacks=OneSecond())
    # Forward 2 x 3 x 1, backward 2 x 3 x 1 for the weights, a sample: the inputs need no gradient.
    assert logged(trainer, "mfu") == [(step, pytest.approx(2 * 12 / 1e3)) for step in (1, 2, 3, 4)]


def test_the_utilization_of_several_processes_that_do_alike_is_that_of_one(clock):
    class Together(Callback):
        def __init__(self, processes):
            self.processes = processes

        def on_fit_start(self):
            self.state.num_processes = self.processes

        def on_before_backward(self):
            clock.now += 1

        def on_after_training_step(self):
            self.state.count_samples(2 * (self.processes - 1))  # those of the others

    of_one, of_three = (logged(fit({"mfu": 1e3}, callbacks=Together(processes)), "mfu") for processes in (1, 3))
    assert of_one == of_three


def test_an_unknown_peak_is_warned_about(caplog):
    trainer = fit(["mfu"])
    assert "the peak FLOPS of cpu are unknown" in caplog.text
    assert set(rows(trainer)[0]) == {"train_loss"}


def test_a_checkpoint_makes_a_row():
    trainer = fit(["checkpoint"], checkpoint_every="2step")
    assert set(logged(trainer, "checkpoint")) == {(2, 2.0), (4, 4.0)}


def test_measuring_everything_changes_no_bit():
    def train(monitor):
        module = Linear()
        trainer = fit(monitor, {"epochs": 2}, module, log_every=2, clip_grad=0.5, val=4)
        return copy.deepcopy(module.model.state_dict()), logged(trainer, "train_loss")

    plain, losses = train(None)
    measured, same = train({**dict.fromkeys(FIELDS, True), "mfu": 1e9, "checkpoint": True})
    assert losses == same
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
