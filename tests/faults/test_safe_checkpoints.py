"""Errors anywhere in a run: with a handler, what is continued afterwards is the run without the error, bit for bit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accmt import Callback, Handler, read_history
from accmt.addons.averaging import EMA
from accmt.errors import ArgumentError, Preempted
from tests.checkpoints import names_in
from tests.launching import run_script
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, Fragile, assert_same, make, state_of, train
from tests.slow import Ticks
from tests.toys import Recorder

SETTINGS = {"checkpoint_every": None, "evaluate_every_n_steps": 3}
SETTINGS |= {"grad_accumulation_steps": 2, "eval_when_start": True}
TORN = ("on_after_optimizer_step", "on_before_scheduler_step", "on_after_scheduler_step", "on_before_zero_grad")
TORN += ("on_after_zero_grad",)
WHOLE = (
    "on_fit_start",
    "on_epoch_start",
    "on_before_training_step",
    "on_after_training_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_update_end",
    "on_log",
    "on_evaluation_start",
    "on_validation_start",
    "on_before_validation_step",
    "on_after_validation_step",
    "on_validation_end",
    "on_evaluation_end",
    "on_save_model",
    "on_epoch_end",
)
RARE = ("on_fit_start", "on_save_model")
FIRST = (*RARE, "on_epoch_start", "on_evaluation_start", "on_before_training_step", "on_after_backward")
"""Those of which the first call is in another place of the run than the third."""


class BrokenError(Exception):
    pass


class BreakIn(Callback):
    """Raises in one hook, the `number`-th time that it is called."""

    order = 1

    def __init__(self, hook, number, error):
        self.left = number
        self.error = error
        setattr(self, hook, self.act)

    def act(self):
        self.left -= 1
        if self.left == 0:
            raise self.error


class CountsBatches(Callback):
    """Has a state that moves within windows, and at each hook of an update."""

    def __init__(self):
        self.seen = {"batches": 0, "updates": [], "epochs": 0}

    def on_after_training_step(self):
        self.seen["batches"] += 1

    def on_update_end(self):
        self.seen["updates"].append(self.state.global_step)

    def on_epoch_end(self):
        self.seen["epochs"] += 1

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    torch.set_num_threads(1)  # as each test has it
    with contextlib.chdir(tmp_path_factory.mktemp("unbroken")):
        counting = CountsBatches()
        trainer, module = train("out/m", **SETTINGS, callbacks=[counting])
        return {**state_of(trainer, module), "seen": counting.seen}


def break_and_continue(hook, number, *, handlers=Handler.ANY, error=None):
    error = error or BrokenError(hook)
    breaking = BreakIn(hook, number, error)
    trainer = make("out/m", **SETTINGS, handlers=handlers, callbacks=[CountsBatches(), breaking])
    with pytest.raises(type(error)) as caught:
        trainer.fit(Fragile(), Augmented(), Augmented(9))
    assert caught.value is error
    counting = CountsBatches()
    trainer, module = train("out/m", **SETTINGS, resume=True, callbacks=[counting])
    return {**state_of(trainer, module), "seen": counting.seen}


@pytest.mark.parametrize(
    ("hook", "number"), [*((hook, 1) for hook in FIRST), *((hook, 3) for hook in WHOLE if hook not in RARE)]
)
def test_an_error_in_any_hook_leaves_a_checkpoint_of_the_last_update(hook, number, unbroken):
    assert_same(unbroken, break_and_continue(hook, number))


def test_an_error_in_the_middle_of_a_window_is_continued_from_its_beginning(unbroken):
    assert_same(unbroken, break_and_continue("on_after_backward", 8))
    assert names_in(Path("out/checkpoint-m")) == ["step-00000003"]


@pytest.mark.parametrize("hook", TORN)
def test_no_checkpoint_is_taken_of_an_update_that_is_half_done(hook, caplog):
    with pytest.raises(BrokenError), caplog.at_level(logging.WARNING):
        train("out/m", **SETTINGS, handlers="any", callbacks=[BreakIn(hook, 5, BrokenError(hook))])
    assert "in the middle of a step" in caplog.text
    assert not Path("out/checkpoint-m").exists()


@pytest.mark.parametrize(
    ("error", "matching"),
    [
        (KeyboardInterrupt(), Handler.KEYBOARD),
        (RuntimeError("CUDA out of memory. Tried"), Handler.CUDA_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), Handler.CUDA_OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), Handler.CUDA_OUT_OF_MEMORY),
        (RuntimeError("boom"), Handler.ANY),
    ],
    ids=["keyboard", "memory", "torch memory", "library memory", "other"],
)
def test_each_handler_matches_its_errors_only(error, matching):
    kinds = [Handler.KEYBOARD, Handler.CUDA_OUT_OF_MEMORY, Handler.ANY]
    given = {"all": "all", "matching": matching, "name": [matching.name.lower()]}
    given["others"] = [kind for kind in kinds if kind is not matching]
    for name, handlers in given.items():
        trainer = make(f"out/{name}", checkpoint_every=None, handlers=handlers, callbacks=[breaking(error)])
        with pytest.raises(type(error)) as caught:
            trainer.fit(Fragile(), Augmented(), Augmented(9))
        assert caught.value is error
        expected = [] if name == "others" else ["step-00000003"]
        assert [path.name for path in trainer.checkpoint_path.glob("step-*")] == expected


def breaking(error):
    return BreakIn("on_before_backward", 4, error)


def test_a_safe_checkpoint_never_replaces_those_of_an_earlier_run():
    train("out/m", stop=9)
    with pytest.raises(BrokenError):
        train("out/m", checkpoint_every=None, handlers="any", callbacks=[breaking(BrokenError())])
    assert names_in(Path("out/checkpoint-m")) == ["step-00000003"]
    assert names_in(Path("out/checkpoint-m.previous")) == ["step-00000008"]


def test_a_safe_checkpoint_that_cannot_be_written_does_not_hide_the_error(caplog):
    Path("blocked").write_text("a file")
    with pytest.raises(BrokenError):
        train("out/m", checkpoint_every=None, checkpoint="blocked", handlers="any", callbacks=[breaking(BrokenError())])
    assert "could not write the emergency checkpoint" in caplog.text


class SignalAt(Callback):
    """Sends signals to the own process in one hook, the `number`-th time that it is called."""

    def __init__(self, hook, number, *signals):
        self.left = number
        self.signals = signals
        setattr(self, hook, self.act)

    def act(self):
        self.left -= 1
        for number in self.signals if self.left == 0 else ():
            os.kill(os.getpid(), number)


def status_of(trainer):
    return [row["status"] for row in read_history(trainer.log_dir) if "status" in row][-1]


@pytest.mark.parametrize(
    ("hook", "sent", "error", "status"),
    [
        ("on_before_training_step", signal.SIGINT, KeyboardInterrupt, "KILLED"),
        ("on_before_validation_step", signal.SIGINT, KeyboardInterrupt, "KILLED"),
        ("on_before_training_step", signal.SIGTERM, Preempted, "PREEMPTED"),
        ("on_log", signal.SIGTERM, Preempted, "PREEMPTED"),
        ("on_epoch_end", signal.SIGUSR1, Preempted, "PREEMPTED"),
    ],
)
def test_a_signal_ends_the_run_at_a_checkpoint_that_continues_it(hook, sent, error, status, unbroken, capfd):
    before = signal.getsignal(sent)
    settings = {**SETTINGS, "checkpoint_every": "100 epochs"}
    trainer = make("out/m", **settings, callbacks=[CountsBatches(), SignalAt(hook, 2, sent)])
    with pytest.raises(error) as caught:
        trainer.fit(Fragile(), Augmented(), Augmented(9))
    assert not isinstance(caught.value, SystemExit) or caught.value.code == 143
    assert trainer.interrupted == (sent == signal.SIGINT)
    assert status_of(trainer) == status
    assert signal.getsignal(sent) == before
    counting = CountsBatches()
    resumed, module = train("out/m", **settings, resume=True, callbacks=[counting])
    assert_same(unbroken, {**state_of(resumed, module), "seen": counting.seen})


@pytest.mark.parametrize("report_loss_after_eval", [True, False])
def test_a_signal_in_an_evaluation_is_not_kept_waiting_by_the_rest_of_it(report_loss_after_eval):
    class Validated(Callback):
        batches = 0

        def on_before_validation_step(self):
            self.batches += 1

    validated = Validated()
    trainer = make(
        "out/m",
        {"batch_size": [4, 1]},
        checkpoint_every="100 epochs",
        evaluate_every_n_steps=2,
        report_loss_after_eval=report_loss_after_eval,
        callbacks=[validated, SignalAt("on_before_validation_step", 3, signal.SIGTERM)],
    )
    with pytest.raises(Preempted):
        trainer.fit(Fragile(), Augmented(), Augmented(40))
    assert validated.batches == 3
    assert trainer.state.global_step == 2


def test_a_signal_without_checkpoints_ends_the_run_at_once():
    for sent, error in ((signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)):
        trainer = make("out/m", checkpoint_every=None, callbacks=[SignalAt("on_before_training_step", 2, sent)])
        with pytest.raises(error):
            trainer.fit(Fragile(), Augmented(), Augmented(9))
        assert trainer.state.global_step == 1
        assert not trainer.checkpoint_path.exists()


def test_a_second_ctrl_c_leaves_at_once(monkeypatch, capfd):
    monkeypatch.setattr("accmt.failures.interruption._SAME_CTRL_C_S", -1.0)
    twice = SignalAt("on_before_training_step", 2, signal.SIGINT, signal.SIGINT)
    trainer = make("out/m", checkpoint_every="100 epochs", callbacks=[twice])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Fragile(), Augmented(), Augmented(9))
    assert trainer.state.global_step == 1
    assert not list(trainer.checkpoint_path.glob("step-*"))
    assert "press it again to stop at once" in capfd.readouterr().err


@pytest.mark.parametrize(("again_after_s", "is_same"), [(0.0, True), (0.1, True), (0.5, True), (0.6, False)])
def test_a_ctrl_c_that_a_launcher_sends_on_is_the_same_one(monkeypatch, again_after_s, is_same):
    """The terminal sends it to every process of its group; a launcher sends it on to its own: each gets it twice."""
    times = iter([100.0, 100.0 + again_after_s])
    clocks = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr("accmt.failures.interruption.time", clocks)
    twice = SignalAt("on_before_training_step", 2, signal.SIGINT, signal.SIGINT)
    trainer = make("out/m", checkpoint_every="100 epochs", callbacks=[twice])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Fragile(), Augmented(), Augmented(9))
    assert trainer.state.global_step == (2 if is_same else 1)
    assert len(list(trainer.checkpoint_path.glob("step-*"))) == is_same


def test_the_handler_of_the_program_is_called_when_the_run_is_left():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        trainer = make("out/m", checkpoint_every="100 epochs", callbacks=[SignalAt("on_log", 1, signal.SIGUSR1)])
        with pytest.raises(Preempted):
            trainer.fit(Fragile(), Augmented(), Augmented(9))
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = {"checkpoint_every": "100 epochs", "callbacks": [SignalAt("on_log", 1, signal.SIGINT)]}
        assert train("out/m", **settings)[0].state.finished
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_outside_the_main_thread_leaves_signals_alone():
    states = []
    thread = threading.Thread(target=lambda: states.append(train("out/m")[0].state))
    thread.start()
    thread.join()
    assert states[0].finished


def test_the_exit_code_of_pre_emption_can_be_chosen():
    settings = {"checkpoint_every": "100 epochs", "callbacks": [SignalAt("on_log", 1, signal.SIGTERM)]}
    with pytest.raises(SystemExit) as caught:
        train("out/m", failures={"preempt_exit_code": 99}, **settings)
    assert caught.value.code == 99


@pytest.mark.parametrize("handlers", ["keybord", 5])
def test_handlers_that_do_not_exist_are_refused(handlers):
    with raises_at(ArgumentError, "Trainer(handlers=...)", repr(handlers)):
        make("out/m", handlers=handlers)


def test_should_stop_ends_training_at_the_update_with_evaluation_and_checkpoint():
    class Stop(Callback):
        def on_update_end(self):
            self.trainer.should_stop |= self.state.global_step == 3

    trainer, _ = train("out/m", callbacks=[Stop()])
    assert (trainer.state.global_step, trainer.state.evaluations_done, trainer.state.finished) == (3, 1, True)
    assert trainer.should_stop
    assert names_in(trainer.checkpoint_path) == ["step-00000003"]
    resumed, _ = train("out/m", resume=True)
    assert (resumed.state.epoch, resumed.state.global_step) == (3, 18)


def test_neither_should_stop_nor_max_time_ends_training_before_min_steps():
    class Stop(Callback):
        def on_fit_start(self):
            self.trainer.should_stop = True

    assert train("out/a", callbacks=[Stop()], min_length="8 steps")[0].state.global_step == 8
    assert train("out/b", max_time={"microseconds": 1}, min_length="8 steps")[0].state.global_step == 8


def test_the_time_of_a_run_goes_on_counting_when_it_continues(caplog):
    with caplog.at_level(logging.INFO, logger="accmt"):
        trainer, _ = train("out/m", max_time={"microseconds": 1}, verbose=True)
    assert (trainer.state.global_step, trainer.state.status) == (1, "finished")
    assert "at step 1: stopped by max_time" in caplog.text
    first = trainer.run.clock.elapsed_s
    assert first > 0.001
    again, _ = train("out/m", resume=True, max_time={"seconds": 3600})
    assert again.run.clock.elapsed_s > first
    assert again.state.global_step == 18


def test_the_time_before_an_interruption_counts_towards_the_longest_time(monkeypatch):
    """Each update takes a second: after four, three more are left of seven."""
    clock = Ticks()
    monkeypatch.setattr(
        "accmt.failures.interruption.time", SimpleNamespace(perf_counter=clock, monotonic=time.monotonic)
    )

    class Second(Callback):
        def on_before_optimizer_step(self):
            clock.now += 1

    train("out/m", stop=4, callbacks=[Second()])
    clock.now += 1000  # between the two nothing runs
    trainer, _ = train("out/m", resume=True, max_time={"seconds": 7}, callbacks=[Second()])
    assert (trainer.state.global_step, trainer.state.status) == (7, "finished")


def test_max_time_is_read_as_people_write_it():
    from datetime import timedelta

    from accmt.options.units import read_max_time

    assert read_max_time("01:02:03:04") == 93784
    assert read_max_time(timedelta(minutes=2)) == read_max_time({"minutes": 2}) == 120
    assert read_max_time(None) is None
    for wrong in ("1:2", "soon", 5, {"weekends": 1}, "00:00:00:00"):
        with raises_at(ArgumentError, "Trainer(max_time=...)", repr(wrong)):
            make("out/m", max_time=wrong)


@pytest.mark.parametrize("hook", ["on_before_validation_step", "on_save_model", "on_before_backward"])
def test_averaged_weights_in_the_model_are_never_saved_as_those_of_training(hook):
    settings = {**SETTINGS, "checkpoint_every": "100 epochs"}
    unbroken = state_of(*train("out/a", **settings, callbacks=[EMA(0.5)]))
    with pytest.raises(Preempted):
        train("out/b", **settings, callbacks=[EMA(0.5), SignalAt(hook, 2, signal.SIGTERM)])
    assert_same(unbroken, state_of(*train("out/b", **settings, callbacks=[EMA(0.5)], resume=True)))


def test_a_hang_ends_the_process_and_says_where_it_was(tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(
        "import time\n"
        "from tests.toys import Linear, make_points, make_trainer\n"
        "class Hanging(Linear):\n"
        "    def training_step(self, batch):\n"
        "        if self.state.global_step == 2:\n"
        "            time.sleep(1000)\n"
        "        return self.step(batch)\n"
        "make_trainer(failures={'hang_timeout_s': 1}).fit(Hanging(), make_points())\n"
    )
    ended = run_script(script, timeout_s=90)
    assert ended.returncode == -signal.SIGKILL
    assert "no progress for 1 s" in ended.stderr
    assert "time.sleep(1000)" in ended.stderr


def test_loader_workers_go_on_when_the_whole_job_is_asked_to_end(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal\n"
        "from accmt import Callback\n"
        "from accmt.errors import Preempted\n"
        "from tests.resume.unbroken import assert_same, state_of, train\n"
        "class EndJob(Callback):\n"
        "    def on_update_end(self):\n"
        "        if self.state.global_step == 4:\n"
        "            os.killpg(os.getpgrp(), signal.SIGTERM)\n"
        "unbroken = state_of(*train('out/a', dataloader_num_workers=2))\n"
        "try:\n"
        "    train('out/b', dataloader_num_workers=2, callbacks=[EndJob()])\n"
        "except Preempted:\n"
        "    assert_same(unbroken, state_of(*train('out/b', dataloader_num_workers=2, resume=True)))\n"
        "    print('the same')\n"
    )
    ended = run_script(script)
    assert ended.stdout.strip() == "the same", ended.stderr


def test_an_epoch_whose_evaluation_failed_ends_once_where_the_run_goes_on():
    class Failing(Fragile):
        def validation_step(self, batch):
            if self.state.global_step == 6:  # at the end of the first epoch
                raise ValueError("broken")
            return self.step(batch)

    hooks = "on_epoch_start", "on_epoch_end", "on_evaluation_end"
    unbroken, broken, resumed = Recorder(), Recorder(), Recorder()
    whole = state_of(*train("out/a", callbacks=[unbroken]))
    with pytest.raises(ValueError, match="broken"):
        train("out/b", callbacks=[broken], module=Failing(), handlers="all", checkpoint_every="100 epochs")
    continued = train("out/b", callbacks=[resumed], resume=True)
    assert_same(whole, state_of(*continued))
    assert broken.names(*hooks) + resumed.names(*hooks) == unbroken.names(*hooks)
