"""What every second of a run is counted as, and checkpoints by time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accmt import Callback, Trainer
from accmt.addons.goodput import pace, recorder
from accmt.addons.goodput.pace import Costs, Pacer
from accmt.addons.goodput.recorder import Meter
from accmt.addons.goodput.records import GOODPUT_FILE, SECONDS_BETWEEN_LINES, Totals, read_goodput
from accmt.cli.main import main
from accmt.data import Window
from tests.launching import run_script
from tests.toys import Linear, logged, make_points, make_trainer

HPS = {"epochs": 3, "optim": {"type": "AdamW", "lr": 0.1}}


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_update_end(self) -> None:
        if self.state.global_step == self.step:
            raise RuntimeError("stop")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer_of(**settings: Any) -> Trainer:
    defaults = {"checkpoint_every": "3 steps", "monitor": {"record_goodput": True}}
    return make_trainer(HPS, run_name="run", **{**defaults, **settings})


def totals_of(trainer: Trainer) -> Totals:
    return read_goodput(Path(trainer.log_dir))


def require_whole(totals: Totals) -> None:
    """Require that all bins add up to the time from the first start to the last line, to 1 %."""
    assert totals.began is not None
    assert totals.total_s == pytest.approx(totals.last - totals.began, rel=0.01)
    assert min(totals.seconds.values()) >= 0


# ---- The clock


def windows(clock: Clock, count: int, parts: int = 1) -> Iterator[Window]:
    def micro_batches() -> Iterator[Any]:
        for _ in range(parts):
            clock.pass_time(1)
            yield object()

    for _ in range(count):
        if parts == 1:
            clock.pass_time(1)
        yield Window((object(),) if parts == 1 else micro_batches(), parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [1, 3])
def test_every_second_is_in_one_bin(parts: int) -> None:
    clock = Clock()
    meter = Meter("starting", clock=clock, began=90.0)
    clock.pass_time(5)
    for number, window in enumerate(meter.waits_for_windows(windows(clock, 4, parts))):
        for _ in window.units:
            clock.pass_time(10)
        if number == 2:
            with meter.during("evaluating"):
                clock.pass_time(100)
                with meter.during("saving"):
                    clock.pass_time(1000)
                clock.pass_time(100)
            clock.pass_time(0.5)
    meter.switch("saving")
    clock.pass_time(7)
    assert meter.read() == {
        "starting": 15,
        "data": 4 * parts,
        "training": 40 * parts + 0.5,
        "evaluating": 200,
        "saving": 1007,
        **({"remaking": 0}),
    }
    assert meter.waited_s == 4 * parts
    assert sum(meter.read().values()) == clock.now - 90


def test_steps_that_were_lost_count_as_repeated_until_the_run_is_where_it_was() -> None:
    clock, done = Clock(), 0
    meter = Meter("resuming", clock=clock)
    meter.are_lost = lambda: done < 2
    clock.pass_time(5)
    for _ in meter.waits_for_windows(windows(clock, 3)):
        clock.pass_time(10)
        with meter.during("evaluating"):
            clock.pass_time(3)
        done += 1
    seconds = meter.read()
    assert seconds.pop("resuming") == 5
    assert seconds == {"remaking": 2 * 14, "data": 1, "training": 10, "evaluating": 3}


# ---- The records


def line(time: float, step: int, **seconds: Any) -> dict[str, Any]:
    return {"time": time, "step": step, "seconds": seconds}


def start(time: float, *, is_resumed: bool = False) -> dict[str, Any]:
    return {"start": {"time": time, "step": 0, "is_resumed": is_resumed}}


def test_time_between_two_starts_is_stopped_and_what_a_kill_left_unwritten_is_bounded() -> None:
    totals = Totals()
    for one in (
        start(0),
        line(100, 7, starting=20, training=80),
        start(150, is_resumed=True),  # the one before was killed
        {**line(170, 8, resuming=15, remaking=5), "end": "preempted"},
        start(172, is_resumed=True),
        line(180, 9, resuming=8),
        start(183, is_resumed=True),  # killed at most 3 s after its last line
        {**line(193, 10, resuming=10), "end": "failed"},
    ):
        totals.add(one)
    require_whole(totals)
    assert totals.seconds["unrecorded"] == SECONDS_BETWEEN_LINES + 3
    assert totals.seconds["stopped"] == 50 - SECONDS_BETWEEN_LINES + 2
    assert (totals.starts, totals.resumes, totals.failures, totals.step) == (4, 3, 3, 10)
    assert Totals.from_dict(json.loads(json.dumps(totals.to_dict()))) == totals


SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from accmt import Callback
from tests.toys import Linear, make_points, make_trainer

class Kill(Callback):
    def on_update_end(self):
        if self.state.global_step == 5:
            self.trainer.run.checkpoints.wait()
            [one.write() for one in self.trainer.run.features.all if one.name == "goodput"]
            os.kill(os.getpid(), 9)

hps = {{"epochs": 3, "optim": {{"type": "AdamW", "lr": 0.1}}}}
settings = {{"resume": True}} if {is_second} else {{"callbacks": Kill()}}
monitor = {{"record_goodput": True}}
trainer = make_trainer(hps, run_name="run", checkpoint_every="3 steps", monitor=monitor, **settings)
trainer.fit(Linear(), make_points(8), make_points(4))
"""


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_accounts_for_all_of_its_time(tmp_path: Path) -> None:
    root, script = str(Path(__file__).parents[2]), tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=root, is_second=False))
    assert run_script(script).returncode == -9
    with Path("logs/model/run", GOODPUT_FILE).open("a") as file:
        file.write('{"start": 5}\n{"seconds": {"training": "much"}}\n{"time": 17')  # edited, and torn by the kill
    script.write_text(SCRIPT.format(root=root, is_second=True))
    assert run_script(script).returncode == 0
    totals = read_goodput(Path("logs/model/run"))
    require_whole(totals)
    assert (totals.starts, totals.resumes, totals.failures, totals.step) == (2, 1, 1, 12)
    assert not totals.is_open
    assert all(totals.seconds[name] > 0 for name in totals.seconds if name not in ("stopped", "unrecorded"))
    assert totals.pauses[0] == totals.saves[0] == 5  # after steps 3, 6, 9 and 12, and at the end


class NanOnce(Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        is_bad = self.state.global_step == 5 and not hasattr(self, "was_bad")
        loss = super().training_step(batch)
        if is_bad:
            self.was_bad = True
        return loss * float("nan") if is_bad else loss


def test_a_rollback_is_no_failure_and_stops_no_machine() -> None:
    trainer = trainer_of(failures={"on_nonfinite": "rollback"})
    trainer.fit(NanOnce(), make_points(8))
    totals = read_goodput(Path(trainer.log_dir))
    assert (totals.starts, totals.failures) == (2, 0)
    assert totals.seconds["stopped"] == pytest.approx(0, abs=1e-3)
    assert totals.seconds["resuming"] > 0


def test_a_run_that_resumes_on_another_disk_keeps_the_account_up_to_its_checkpoint() -> None:
    with pytest.raises(RuntimeError, match="stop"):
        trainer_of(callbacks=StopAt(5)).fit(Linear(), make_points(8))
    Path("logs/model/run", GOODPUT_FILE).unlink()
    trainer = trainer_of(resume=True)
    trainer.fit(Linear(), make_points(8))
    totals = totals_of(trainer)
    require_whole(totals)
    assert (totals.starts, totals.step) == (2, 12)


def test_a_branch_of_a_run_has_an_account_of_its_own() -> None:
    trainer_of(checkpoint_options={"max_checkpoints": 9}).fit(Linear(), make_points(8))
    settings = {"resume": "out/checkpoint-model/step-00000003", "monitor": {"record_goodput": True}}
    branch = make_trainer(HPS, "out/branch", run_name="branch", **settings)
    branch.fit(Linear(), make_points(8))
    assert totals_of(branch).starts == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    Path("logs/model/run", GOODPUT_FILE).mkdir(parents=True)
    trainer_of().fit(Linear(), make_points(8))
    assert caplog.text.count(f"{GOODPUT_FILE}\n  got: ") == 1


def test_rows_have_fractions_of_the_time_if_the_monitor_selects_them() -> None:
    trainer = trainer_of(monitor=["goodput"])
    trainer.fit(Linear(), make_points(8))
    rows = zip(*(logged(trainer, name) for name in ("goodput", "goodput_overhead", "goodput_lost")), strict=True)
    sums = [sum(value for _, value in row) for row in rows]
    assert sums == pytest.approx([1.0] * 12)


def test_the_command_prints_a_table_whose_parts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(monitor={"price_per_hour": 7200})
    trainer.fit(Linear(), make_points(8))
    assert main(["goodput", str(trainer.log_dir)]) == 0
    printed = capsys.readouterr().out
    assert "starts: 1, none failed or was killed; furthest step: 12" in printed
    shares = [float(row[-1][:-1]) for row in map(str.split, printed.splitlines()) if row and row[-1].endswith("%")]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.5)
    assert f"price: {2 * totals_of(trainer).total_s:,.2f}" in printed
    assert main(["goodput", str(trainer.log_dir), "--json", "--price-per-hour", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["seconds"].values()) == pytest.approx(found["total"])
    with pytest.raises(SystemExit) as ended:
        main(["goodput", str(trainer.log_dir), "--price-per-hour", "cheap"])
    assert ended.value.code == 2
    assert "expected a price" in capsys.readouterr().err
    assert main(["goodput", "out"]) == 2
    assert f"no {GOODPUT_FILE} in it" in capsys.readouterr().err


def test_the_energy_of_the_gpu_is_counted_where_the_driver_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class DriverError(Exception):
        pass

    used = iter(range(0, 10**9, 1_800_000))  # in millijoules
    driver = SimpleNamespace(
        NVMLError=DriverError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda identity: identity,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: next(used),
    )

    def fail(gpu: object) -> None:
        raise DriverError

    gpu = SimpleNamespace(uuid="1234")
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    driver.nvmlDeviceGetTotalEnergyConsumption, count = fail, driver.nvmlDeviceGetTotalEnergyConsumption
    assert recorder._find_energy_counter(torch.device("cuda", 0)) is None
    driver.nvmlDeviceGetTotalEnergyConsumption = count
    read = recorder._find_energy_counter(torch.device("cuda", 0))
    assert read is not None
    assert [read(), read()] == [1800, 3600]
    monkeypatch.setattr(recorder, "_find_energy_counter", lambda device: read)
    trainer = trainer_of()
    trainer.fit(Linear(), make_points(8))
    totals = totals_of(trainer)
    assert totals.joules > 0
    assert totals.joules % 1800 == 0
    assert "energy of the GPUs: " in totals.describe()


# ---- Checkpoints by time


@pytest.mark.parametrize("step_s", [0.01, 1.0, 700.0])
def test_checkpoints_are_as_far_apart_as_requested_with_few_messages(step_s: float) -> None:
    clock = Clock()
    pacer, saved, messages, next_step = Pacer(600.0, 0, clock), [], 0, 1
    for step in range(1, int(20_000 / step_s)):
        clock.pass_time(step_s)
        if step == next_step:
            messages += 1
            is_due, next_step = pacer.decide(step)
            if is_due:
                saved.append(clock.now)
                clock.pass_time(5)
                pacer.begin_again()
    between = [after - before - 5 for before, after in zip(saved, saved[1:], strict=False)]
    assert between
    assert all(abs(one - 600) <= max(step_s, 10) for one in between)
    assert messages <= 14 * (len(saved) + 2)


def test_a_run_that_slows_down_does_not_wait_for_the_planned_step() -> None:
    clock = Clock()
    pacer, next_step = Pacer(600.0, 0, clock), 1
    for step in range(1, 10_000):
        clock.pass_time(0.1 if clock.now < 400 else 1.0)
        if step == next_step:
            is_due, next_step = pacer.decide(step)
            if is_due:
                break
    assert 600 <= clock.now - 100 < 2 * 600


def test_the_interval_follows_what_checkpoints_and_failures_cost() -> None:
    assert Costs.of(Totals()) is None
    costs = Costs(pause_s=2.0, save_s=20.0, restart_s=60.0, mtbf_s=7140.0, failures=3)
    assert costs.best_interval() == pytest.approx((2 * 2 * 7200) ** 0.5)
    grid = [costs.goodput(interval_s) for interval_s in (20, 80, 160, 320, 1200)]
    assert max(grid) == grid[2] <= costs.goodput(costs.best_interval())
    assert 0.9 < max(grid) < 1
    slow = Costs(pause_s=0.1, save_s=500.0, restart_s=60.0, mtbf_s=600.0, failures=30)
    assert slow.best_interval() == slow.save_s  # the next one begins when this one is durable
    rare = Costs(pause_s=60.0, save_s=60.0, restart_s=60.0, mtbf_s=1e7, failures=0)
    assert rare.best_interval() == pace.MOST_S
    assert 0 <= Costs(1.0, 1.0, 1e6, 1.0, 10**6).goodput(1e9) <= 1


def test_before_any_failure_one_in_three_hours_is_assumed_and_then_what_was_seen_counts() -> None:
    totals = Totals(pauses=(2, 1.0))
    few = Costs.of(totals)
    totals.failures = 5
    many = Costs.of(totals)
    assert few is not None
    assert many is not None
    assert (few.pause_s, few.mtbf_s, many.mtbf_s) == (0.5, 3 * 3600, 3 * 3600 / 6)


def test_no_bit_of_training_depends_on_when_checkpoints_are_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()

    class Passing(Callback):
        def on_update_end(self) -> None:
            clock.pass_time(25)

    monkeypatch.setattr(pace, "Pacer", partial(Pacer, clock=clock))
    weights, steps = {}, {}
    for number, every in enumerate(("3 steps", "1 minute", "auto", None)):
        trainer = trainer_of(
            checkpoint_every=every,
            model_path=f"out/{number}",
            callbacks=Passing(),
            checkpoint_options={"max_checkpoints": 99},
            verbose=True,
        )
        module = Linear()
        trainer.fit(module, make_points(8))
        weights[every] = module.model.state_dict()
        steps[every] = sorted(int(path.name[5:]) for path in Path(f"out/checkpoint-{number}").glob("step-*"))
    assert steps == {"3 steps": [3, 6, 9, 12], "1 minute": [2, 4, 6, 8, 10, 12], "auto": steps["auto"], None: []}
    assert len(steps["auto"]) > 4
    assert "the first checkpoint after 60 s of training" in caplog.text
    assert "A checkpoint pauses training for" in caplog.text
    for other in weights.values():
        assert all(torch.equal(one, other[name]) for name, one in weights["3 steps"].items())
