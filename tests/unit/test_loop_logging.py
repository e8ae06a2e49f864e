"""What `module.log` gives: exact means with the batch's weight, phases apart, no graphs, no waiting."""

from __future__ import annotations

import gc
import io

import pytest
import torch

from accmt import Callback
from accmt.callbacks.progress import ProgressBar
from accmt.errors import ArgumentError, ModuleContractError
from accmt.loop.logging import Logs
from accmt.metrics.averages import LoggedValues, combine
from accmt.state import Status
from tests.raising import raises_at
from tests.toys import InterruptAt, InterruptionError, Numbers, Scripted, logged, make_trainer


class Logging(Scripted):
    """Calls a function with itself and the batch in each training step, and one in each validation step."""

    def __init__(self, in_training=lambda module, batch: None, in_validation=lambda module, batch: None):
        super().__init__()
        self._in_training, self._in_validation = in_training, in_validation

    def training_step(self, batch):
        self._in_training(self, batch)
        return super().training_step(batch)

    def validation_step(self, batch):
        self._in_validation(self, batch)
        return super().validation_step(batch)


def fit(module, train=6, val=None, **settings):
    trainer = make_trainer(shuffle_train=False, **settings)
    trainer.fit(module, Numbers(train), None if val is None else Numbers(val))
    return trainer


def test_a_value_weighs_what_its_batch_does():
    trainer = fit(Logging(lambda module, batch: module.log("mean", batch.mean())), train=5, log_every=-1)
    assert logged(trainer, "mean") == [(3, 2.0)]  # of 0 1 2 3 4 in batches of 2, 2 and 1
    assert logged(trainer, "mean") == logged(trainer, "train_loss")


def test_the_weight_that_the_step_returns_counts():
    class Weighted(Scripted):
        def training_step(self, batch):
            self.log("first", batch[0])
            return {"loss": super().training_step(batch), "weight": batch.sum() + 1}

    trainer = fit(Weighted(), train=4, log_every=2)
    assert logged(trainer, "first") == [(2, pytest.approx((0 * 2 + 2 * 6) / 8))]


def test_a_value_logged_in_some_batches_only_is_the_mean_over_those():
    def log(module, batch):
        if batch[0] != 2:
            module.log("rare", batch[0])

    assert logged(fit(Logging(log), log_every=3), "rare") == [(3, 2.0)]  # 0 and 4


def test_sums_go_over_all_batches_whatever_they_weigh():
    trainer = fit(Logging(lambda m, batch: m.log("seen", len(batch), reduction="sum")), train=5, log_every=-1)
    assert logged(trainer, "seen") == [(3, 5.0)]


def test_validation_values_come_with_the_results_of_the_evaluation():
    class Watcher(Callback):
        def on_evaluation_end(self, metrics):
            self.metrics = dict(metrics)

    watcher = Watcher()
    module = Logging(
        lambda module, batch: module.log("a", 7), lambda module, batch: module.log_dict({"a": batch.mean(), "b": 1})
    )
    trainer = fit(module, train=4, val=5, callbacks=watcher)
    assert watcher.metrics == {"val_loss": 2.0, "a": 2.0, "b": 1.0}
    assert logged(trainer, "a") == [(1, 7.0), (2, 7.0), (2, 2.0)]


def test_each_validation_set_has_values_of_its_own():
    trainer = make_trainer()
    module = Logging(in_validation=lambda module, batch: module.log("top", batch.max()))
    trainer.fit(module, Numbers(2), {"x": Numbers(2), "y": Numbers([5, 5])})
    assert {name: trainer.state.metrics[name] for name in ("top__x", "top__y")} == {"top__x": 1.0, "top__y": 5.0}


def test_prog_bar_shows_the_newest_row():
    stream = io.StringIO()
    trainer = fit(Logging(lambda module, batch: module.log("acc", batch[0], prog_bar=True)), train=4)
    assert trainer.progress_bar_metrics == {"acc": 2.0}
    bar = ProgressBar(enable=True, stream=stream)
    bar.trainer, bar.module, bar.state = trainer, trainer.run.module, trainer.state
    bar.on_fit_start()
    bar.show(trainer.progress_bar_metrics)
    bar.on_fit_end()
    assert "acc 2" in stream.getvalue()


def test_the_newest_values_that_trackers_got_can_be_read_off_the_trainer():
    trainer = fit(Logging(lambda module, batch: module.log("acc", batch[0])), train=4, val=2)
    assert trainer.logged_metrics == {"acc": 2.0, "train_loss": 2.5, "val_loss": 0.5}


def test_logger_false_shows_a_value_and_logs_nothing():
    trainer = fit(Logging(lambda module, batch: module.log("hidden", 3, prog_bar=True, logger=False)), train=2)
    assert logged(trainer, "hidden") == []
    assert trainer.progress_bar_metrics == {"hidden": 3.0}


def test_a_tensor_is_neither_changed_nor_kept_nor_watched():
    given = torch.tensor([1.5], dtype=torch.float64)

    def log(module, batch):
        module.log("given", given)
        changing = batch[0].clone()
        module.log("before", changing)
        changing.fill_(99)

    trainer = fit(Logging(log), train=2)
    assert given.dtype == torch.float64
    assert given.tolist() == [1.5]
    assert logged(trainer, "given") == [(1, 1.5)]
    assert logged(trainer, "before") == [(1, 0.0)]


def test_ten_thousand_logged_tensors_leave_the_number_of_live_tensors_constant():
    values, weight = LoggedValues(), torch.nn.Parameter(torch.ones(3))

    def live():
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    def log(times):
        for _ in range(times):
            values.begin_batch()
            values.add("x", (weight * 2).sum())  # attached to a graph
            values.end_batch(1.0)

    log(5)
    before = live()
    log(2 * 1_024)
    assert live() == before
    assert combine([values.take()]) == {"x": 6.0}


def test_steps_that_make_no_row_read_no_tensor(monkeypatch):
    class Unreadable(torch.Tensor):
        pass

    def refuse(*_):
        raise AssertionError("the value was read, which waits for the device")

    for name in ("item", "tolist", "__float__", "__bool__"):
        monkeypatch.setattr(Unreadable, name, refuse, raising=False)
    values = LoggedValues()
    for _ in range(1_000):
        values.begin_batch()
        values.add("x", torch.ones(()).as_subclass(Unreadable))
        values.end_batch(torch.ones(()).as_subclass(Unreadable))
    monkeypatch.undo()  # a row reads them
    assert {name: (sum(total), sum(weight)) for name, (total, weight) in values.take().items()} == {"x": (1_000, 1_000)}


@pytest.mark.parametrize("value", [None, "high", torch.ones(2), [1.0]], ids=str)
def test_what_is_not_one_number_is_refused(value):
    with raises_at(ModuleContractError, "the logged value 'x'"):
        fit(Logging(lambda module, batch: module.log("x", value)))


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_text(name):
    with raises_at(ModuleContractError, "log", repr(name), expected="a string"):
        fit(Logging(lambda module, batch: module.log(name, 1)))


@pytest.mark.parametrize("name", ["train_loss", "val_loss"])
def test_the_losses_keep_their_names(name):
    with raises_at(ModuleContractError, f"log('{name}', ...)"):
        fit(Logging(lambda module, batch: module.log(name, 1)))


def test_a_value_that_is_also_returned_is_refused():
    class Both(Scripted):
        def training_step(self, batch):
            self.log("acc", 1)
            return {"loss": super().training_step(batch), "acc": torch.tensor(1.0)}

        def validation_step(self, batch):
            self.log("score", 1)
            return {"loss": super().validation_step(batch), "score": torch.tensor(1.0)}

    with raises_at(ModuleContractError, "the logged value 'acc'"):
        fit(Both())
    with raises_at(ModuleContractError, "the logged value 'score'"):
        fit(Both(), val=2)


def test_means_and_sums_do_not_mix():
    def log(module, batch):
        module.log("x", 1)
        module.log("x", 1, reduction="sum")

    with raises_at(ModuleContractError, "the logged value 'x'"):
        fit(Logging(log))


def test_a_value_beside_values_by_name_is_refused():
    with raises_at(ArgumentError, "log", "a single value"):
        fit(Logging(lambda module, batch: module.log({"x": 1}, 2)))


def test_a_step_needs_an_instant_row():
    with raises_at(ArgumentError, "log('x', ...)"):
        fit(Logging(lambda module, batch: module.log("x", 1, step=5)))


def test_an_instant_value_is_a_row_of_its_own():
    module = Logging(lambda module, batch: module.log("now", batch[0], step=int(batch[0]) + 100, instant=True))
    trainer = fit(module, train=4, log_every=-1)
    assert logged(trainer, "now") == [(100, 0.0), (102, 2.0)]


def test_hooks_of_callbacks_log_with_the_weight_of_the_batch_before():
    class AtEnds(Callback):
        def on_after_training_step(self, batch):
            self.module.log("size", len(batch))

        def on_epoch_end(self):
            self.module.log("epochs", self.state.epoch)

    trainer = fit(Logging(), train=5, log_every=-1, callbacks=AtEnds())
    assert logged(trainer, "size") == [(3, pytest.approx((2 * 2 + 2 * 2 + 1 * 1) / 5))]
    assert logged(trainer, "epochs") == [(3, 1.0)]  # in a row of its own after the last


def test_before_and_after_a_run_there_is_nothing_to_log_to():
    module = Logging()
    with raises_at(ModuleContractError, "log('x', ...)"):
        module.log("x", 1)
    fit(module)
    with raises_at(ModuleContractError, "the logged value 'x'"):
        module.log("x", 1)


def test_between_the_sets_of_an_evaluation_there_is_nothing_to_log_to():
    class Late(Callback):
        def on_validation_end(self, key):
            self.module.log("late", 1)

    with raises_at(ModuleContractError, "the logged value 'late'"):
        fit(Logging(), val=2, callbacks=Late())


def test_while_predicting_nothing_is_logged():
    trainer = make_trainer()
    trainer.state.now = Status(stage="predict")
    with raises_at(ModuleContractError, "log", "prediction"):
        Logs(trainer).log("x", 1, None, "mean", instant=False, prog_bar=False, logger=True)


def test_values_that_no_row_has_yet_survive_a_checkpoint():
    values, copied = LoggedValues(), LoggedValues()
    values.begin_batch()
    values.add("mean", 1.0)
    values.add("sum", 2.0, is_total=True)
    values.end_batch(3)
    copied.add_state(values.state_dict())
    for side in (values, copied):
        side.add("mean", 9.0)  # weighs what the last batch did
        side.add("sum", 5.0, is_total=True)
    assert combine([copied.take()]) == combine([values.take()]) == {"mean": 5.0, "sum": 7.0}


def test_a_resumed_run_logs_what_an_unbroken_one_does(tmp_path):
    def run(name, **settings):
        module = Logging(lambda module, batch: module.log("half", batch.mean() / 2))
        trainer = make_trainer({"epochs": 2}, str(tmp_path / name), log_every=4, checkpoint_every="step", **settings)
        trainer.fit(module, Numbers(11))
        return trainer

    unbroken = run("a")
    with pytest.raises(InterruptionError):
        run("b", callbacks=InterruptAt(6))
    assert logged(run("b", resume=True), "half") == logged(unbroken, "half")


def test_what_a_failed_batch_logged_is_dropped():
    values = LoggedValues()
    values.begin_batch()
    values.add("x", 100.0)
    values.begin_batch()
    values.add("x", 1.0)
    values.end_batch(1)
    assert combine([values.take()]) == {"x": 1.0}


def test_processes_that_logged_nothing_do_not_count():
    first, second = LoggedValues(), LoggedValues()
    for values, number, weight in ((first, 1.0, 1), (second, 4.0, 3)):
        values.begin_batch()
        values.add("both", number)
        values.end_batch(weight)
    second.add("one", 8.0)
    assert combine([first.take(), second.take()]) == {"both": 3.25, "one": 8.0}


@pytest.mark.parametrize(
    ("keyword", "do"),
    [
        ("on_step", "remove it: Trainer(log_every=10)"),
        ("on_epoch", "remove it: Trainer(log_every=-1)"),
        ("sync_dist", "remove it"),
        ("reduce_fx", 'reduction="sum"'),
        ("progbar", "did you mean prog_bar?"),
    ],
)
@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_keywords_of_another_log_are_told_what_to_write_here(method, keyword, do):
    def log(module, batch):
        values = ("a", 1.0) if method == "log" else ({"a": 1.0},)
        getattr(module, method)(*values, **{keyword: True})

    with raises_at(ArgumentError, f"{keyword}=...)", "keyword", do=do):
        fit(Logging(log), train=2)
