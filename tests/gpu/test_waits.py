"""The host never waits for the device on a step that logs nothing, and batches reach it while it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accmt import EMA, Callback, read_history
from tests.gpu.toys import Classifier, make_data, train

FIRST, LAST = 2, 300  # more steps than the values that are kept one by one


class WithoutWaits(Callback):
    """Makes waiting for the device an error from one optimizer step to another."""

    def __init__(self, make_context: Callable[[], Any]) -> None:
        self._make_context = make_context
        self.num_steps = 0
        self._context: Any = None

    def on_update_end(self) -> None:
        if self.state.global_step == FIRST:
            self._context = self._make_context()
            self._context.__enter__()
        self.num_steps += self._context is not None
        if self.state.global_step == LAST:
            self.leave()

    def on_fit_end(self) -> None:
        self.leave()

    def on_exception(self) -> None:
        self.leave()

    def leave(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped by norm": {"clip_grad": 1.0},
    "bf16": {"mixed_precision": "bf16"},
    "accumulation": {"grad_accumulation_steps": 2},
    "progress bar": {"enable_progress_bar": True},
    "step snapshots": {"checkpoint_every": "10000 steps"},
    "monitored": {"monitor": ["grad_norm", "learning_rate", "throughput"]},
    "averaged weights": {"callbacks": EMA(0.9)},
    "spike guard": {"failures": {"spike_guard": 6.0}},
}


@pytest.mark.parametrize("weighs", [None, "host", "device"])
@pytest.mark.parametrize("case", CASES)
def test_no_step_that_logs_nothing_waits(
    case: str, weighs: str | None, settings: dict[str, Any], device: torch.device, without_waits: Any
) -> None:
    if device.type == "pretend" and case == "bf16":
        pytest.skip("shows nothing on a pretended device: it has one precision")
    if device.type == "cpu" and weighs == "device":
        weighs = "host"  # what is on the host already is read there
    others = dict(CASES[case])
    callbacks = [others.pop("callbacks", None), watch := WithoutWaits(without_waits)]
    others["callbacks"] = [callback for callback in callbacks if callback is not None]
    hps = {"epochs": 1, "batch_size": 2, "max_steps": LAST + 20, "scheduler": {"type": "ConstantLR"}}
    samples = 2 * (LAST + 20) * others.get("grad_accumulation_steps", 1)
    train(Classifier(weighs), make_data(samples), settings, hps=hps, log_every=10**6, **others)
    assert watch.num_steps == LAST - FIRST + 1


class OfSources(Classifier):
    """Also returns the loss of each sample, and its weight on the device."""

    def training_step(self, batch: Any) -> Any:
        inputs, labels = batch
        losses = torch.nn.functional.cross_entropy(self.model(inputs), labels, reduction="none")
        return {"loss": losses.mean(), "losses": losses, "weights": torch.ones_like(losses)}


@pytest.mark.parametrize("case", ["plain", "step snapshots"])
def test_the_losses_of_sources_are_read_in_no_step(case: str, settings: dict[str, Any], without_waits: Any) -> None:
    hps = {"epochs": -1, "batch_size": 2, "max_steps": LAST + 20, "scheduler": None}
    hps["data"] = {"mix": {"one": 2, "other": 1}, "stop": "repeat"}
    watch = WithoutWaits(without_waits)
    others: dict[str, Any] = {"log_every": 10**6, "callbacks": watch, **CASES[case]}
    trainer = train(OfSources(), {"one": make_data(), "other": make_data()}, settings, hps=hps, **others)
    assert watch.num_steps == LAST - FIRST + 1
    [row] = [
        row["values"] for row in read_history(trainer.run.tracking.run_folder) if "train_loss" in row.get("values", {})
    ]
    assert row["samples_seen__one"] + row["samples_seen__other"] == 2 * (LAST + 20)


def test_a_step_that_reads_its_loss_is_found(settings: dict[str, Any], without_waits: Any) -> None:
    class Reading(Classifier):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            loss.item()
            return loss

    with pytest.raises(RuntimeError, match="called a synchronizing"):
        train(Reading(), make_data(), settings, callbacks=WithoutWaits(without_waits))


@pytest.mark.cuda_only("what is compared is where the host is and where the device is")
def test_a_weight_on_the_device_is_read_while_the_backward_pass_still_runs(device: torch.device) -> None:
    from accmt.run.weighting import AccumulationWindow

    window = AccumulationWindow(known_samples=None)
    window.add(torch.tensor(3.0, device=device), 3)
    torch.cuda._sleep(2 * 10**9)  # a second of work, as a backward pass that is queued next
    is_done = torch.cuda.Event()
    is_done.record()
    window.read_weights()
    assert sum(window.own_weights) == 3.0
    assert not is_done.query()
    torch.cuda.synchronize()


class Batches(Callback):
    """Looks at the batches as loaders give them."""

    def __init__(self) -> None:
        self.are_pinned: list[bool] = []

    def on_fit_start(self) -> None:
        place = type(self.trainer.run).place

        def look(run: Any, batch: Any) -> Any:
            self.are_pinned.append(all(part.is_pinned() for part in batch))
            return place(run, batch)

        object.__setattr__(self.trainer.run, "place", look.__get__(self.trainer.run))


@pytest.mark.cuda_only("host memory is pinned for a device")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("on_bad_sample", ["raise", "skip"])
def test_batches_come_in_pinned_memory(num_workers: int, on_bad_sample: str, settings: dict[str, Any]) -> None:
    batches = Batches()
    train(
        Classifier(),
        make_data(),
        settings,
        callbacks=batches,
        dataloader_num_workers=num_workers,
        failures={"on_bad_sample": on_bad_sample},
    )
    assert batches.are_pinned == [True] * 32


@pytest.mark.cuda_only("there is nothing to copy")
def test_a_batch_is_queued_while_the_device_still_works(settings: dict[str, Any], device: torch.device) -> None:
    run = train(Classifier(), make_data(), settings).run
    batch = [torch.arange(1000.0).pin_memory(), {"labels": torch.arange(7).pin_memory()}]
    torch.cuda._sleep(2 * 10**9)
    is_done = torch.cuda.Event()
    is_done.record()
    placed = run.place(batch)
    assert not is_done.query(), "the host went on while the device was busy"
    assert torch.equal(placed[0].cpu(), batch[0])
    assert placed[1]["labels"].device.type == "cuda"
