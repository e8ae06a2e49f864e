import io
import re
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from accmt.callbacks.progress import ProgressBar, draw_batches
from accmt.state import TrainingState
from tests.slow import Ticks
from tests.toys import Numbers, Scripted, make_trainer


class Terminal(io.StringIO):
    def isatty(self):
        return True


SAVED_AT = {"best_accuracy": 1200}


def make_loader(num_micro_batches):
    return SimpleNamespace(source=SimpleNamespace(num_micro_batches=num_micro_batches))


def make(stream, *, total=100, validates=True, **options):
    bar = ProgressBar(stream=stream, **options)
    validation = {"": make_loader(2)} if validates else {}
    run = SimpleNamespace(cadence=SimpleNamespace(epochs=4), val_loaders=validation)
    run.saver = SimpleNamespace(selection=SimpleNamespace(saved_at=SAVED_AT.get))
    bar.trainer = SimpleNamespace(estimated_stepping_batches=total, run=run)
    bar.state = TrainingState()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.0025)
    bar.module = SimpleNamespace(optimizer=optimizer)
    return bar


@pytest.fixture(autouse=True)
def _wide_terminal():
    with pytest.MonkeyPatch.context() as patch:  # undone before the guard against changed environments looks
        patch.setenv("COLUMNS", "200")
        yield


def train(bar, updates, *, seconds=0.0, samples=8):
    for _ in range(updates):
        sleep(seconds)
        bar.state.global_step += 1
        bar.state.samples_seen += samples
        bar.on_update_end()


def test_a_terminal_shows_loss_lr_speed_and_time_left():
    stream = Terminal()
    bar = make(stream)
    bar.on_fit_start()
    train(bar, 10, seconds=0.002)
    bar.on_log(values={"train_loss": 1.25, "other": 3.0})
    bar.on_fit_end()
    last = stream.getvalue().split("\r")[-1]
    assert "epoch 1/4" in last
    assert "10/100" in last
    assert "loss 1.25" in last
    assert "lr 0.0025" in last
    assert re.search(r"samples/s \d", last)
    assert re.search(r" \d\d:\d\d<\d\d:\d\d ", last)
    assert "other" not in last


@pytest.mark.parametrize("columns", [70, 80, 140])
def test_the_bar_keeps_its_width_and_values_are_whole_or_left_out(columns, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda stream: (columns, 24))
    stream = Terminal()
    bar = make(stream, total=1000)
    bar.on_fit_start()
    bar.on_log(values={"train_loss": 1.25})
    bar.show({"a_long_name_of_a_metric": 0.123, "accuracy": 0.5, "f1": 0.75})
    bar.state.best = {"best_accuracy": 0.625}
    train(bar, 500)
    bar.on_fit_end()
    last = stream.getvalue().split("\r")[-1].rstrip()
    assert len(re.sub(r"\x1b\[\S*?m", "", last)) <= columns
    assert "loss 1.25" in last
    assert ("best accuracy 0.625 saved at 1,200" in last) is (columns == 140)
    plain = re.sub(r"\x1b\[\S*?m", "", last)
    assert plain.startswith("epoch 1/4 " + "#" * 10 + " " * 11 + "500/1000 ")
    whole = {"loss 1.25", "best accuracy 0.625 saved at 1,200", "lr 0.0025", "accuracy 0.5", "f1 0.75"}
    values = [value for value in plain.split("  ")[6:] if "samples/s" not in value]
    assert set(values) <= whole | {"a_long_name_of_a_metric 0.123"}


def test_without_a_terminal_a_line_is_logged_every_so_often(monkeypatch, caplog):
    """After 10 seconds, after 30, and then once a minute; never more often, however quick the steps are."""
    caplog.set_level("INFO", "accmt")
    clock = Ticks()
    monkeypatch.setattr("accmt.callbacks.progress.perf_counter", clock)
    bar = make(io.StringIO(), total=10**6)
    bar.on_fit_start()
    bar.on_log(values={"train_loss": 1.25})
    lines = {}
    for second in range(1, 200):
        clock.now += 1
        before = len(caplog.messages)
        train(bar, 1)
        if len(caplog.messages) > before:
            lines[second] = caplog.messages[-1]
    bar.on_fit_end()
    assert list(lines) == [10, 30, 90, 150]
    assert lines[10] == "step 10 of 1,000,000, epoch 1/4: loss 1.25, lr 0.0025, samples/s 8"
    assert len(caplog.messages) == 4


class BestOfBar(ProgressBar):
    """Keeps what it shows of the best value, after each evaluation."""

    def __init__(self):
        super().__init__(stream=Terminal())
        self.shown = []

    def on_epoch_end(self):
        self.shown += [value for value in self._values() if value.startswith("best ")]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_best_value_is_saved_only_where_its_own_rule_saved_it_also_after_a_resume(stop):
    """Losses of 0.5, 0.25, 0.125 and 0.75: the second is not between the thresholds, the third and the first are."""

    def fit(epochs, resume):
        bar = BestOfBar()
        trainer = make_trainer(
            {"epochs": epochs, "batch_size": 4}, model_saving=["best_valid_loss", "always"], checkpoint_every="epoch",
            callbacks=bar, model_saving_above={"valid_loss": 0.1},
            model_saving_below={"valid_loss": 0.2 if epochs > 1 else 0.6}, resume=resume,
        )  # fmt: skip
        trainer.fit(Scripted([0.5, 0.25, 0.125, 0.75]), Numbers(4), Numbers(2))
        return bar.shown

    shown = fit(stop, False) + fit(4, True)
    held_back = ["best valid_loss 0.5", "best valid_loss 0.25"]
    first = ["best valid_loss 0.5 saved at 1", "best valid_loss 0.25"] if stop == 1 else held_back
    assert shown == [*first, "best valid_loss 0.125 saved at 3", "best valid_loss 0.125 saved at 3"]


def test_a_long_evaluation_shows_its_batches():
    stream = Terminal()
    bar = make(stream)
    bar.trainer.run.val_loaders = {"a": make_loader(8), "b": make_loader(4)}
    bar.on_fit_start()
    bar.on_evaluation_start()
    bar.state.val_step, bar._next_drawing = 5, 0.0
    bar.on_after_validation_step()
    assert stream.getvalue().split("\r")[-1].startswith("evaluating 5/12 ")
    bar.on_fit_end()


def test_asked_for_it_is_drawn_anywhere_and_refused_nowhere():
    plain, terminal = io.StringIO(), Terminal()
    for stream, enable in ((plain, True), (terminal, False)):
        bar = make(stream, enable=enable)
        bar.on_fit_start()
        train(bar, 1)
        bar.on_fit_end()
    assert "1/100" in plain.getvalue()
    assert terminal.getvalue() == ""


def test_speed_is_measured_over_samples_and_leaves_evaluations_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("accmt.callbacks.progress.perf_counter", lambda: now[0])
    stream = Terminal()
    bar = make(stream)

    def update_of_half_a_second():
        now[0] += 0.5
        train(bar, 1, samples=10)

    bar.on_fit_start()
    for _ in range(3):
        update_of_half_a_second()
    bar.on_evaluation_start()
    now[0] += 60
    bar.on_evaluation_end(metrics={})
    update_of_half_a_second()
    bar.on_fit_end()
    assert set(re.findall(r"samples/s (\S+)", stream.getvalue())) == {"20"}


def test_evaluations_are_announced_and_their_results_stay():
    stream = Terminal()
    bar = make(stream)
    bar.on_fit_start()
    bar.on_evaluation_start()
    assert "evaluating" in stream.getvalue()
    bar.on_evaluation_end(metrics={"accuracy": 0.975})
    train(bar, 1)
    bar.on_fit_end()
    last = stream.getvalue().split("\r")[-1]
    assert "accuracy 0.975" in last
    assert "evaluating" not in last


def test_an_evaluation_by_hand_shows_its_batches_on_a_terminal():
    stream = Terminal()
    micro_batches = draw_batches(iter(range(12)), enable=None, text="validate en", total=12, stream=stream)
    assert list(micro_batches) == list(range(12))
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("validate en: 100%")
    assert "12/12" in last
    assert "batches/s" in last
