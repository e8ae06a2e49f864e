"""A package outside of accmt decides where accumulation windows end: gradients, resume, agreement, missing plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, Callback, StepsCurriculum, Trainer
from accmt.errors import AccmtError
from tests.launching import launch
from tests.toys import ByHand, Linear, Stream, make_points

HERE = Path(__file__).parent
ENDS = [4, 8, 12, 20, 28, 36, 41, 57, 73, 82]  # 41 samples in each of two epochs
SGD = {"batch_size": 2, "optim": {"type": "SGD", "lr": 0.1, "momentum": 0.5}}


def train(folder: Path, processes: int | str, stop: str = "0") -> dict[str, Any]:
    result = folder / f"result-{stop}.json"
    folder.mkdir(exist_ok=True)
    launch(HERE / "scripts" / "windows.py", str(result), str(folder), stop, processes=processes, result=result)
    return json.loads(result.read_text())


def train_by_hand() -> list[Any]:
    """Make the same steps as single big batches in plain torch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inputs, targets = make_points(41).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    begin = 0
    for end in ENDS:
        chosen = [index % 41 for index in range(begin, end)]
        nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        begin = end
    return [weight.tolist() for weight in model.parameters()]


@pytest.mark.parametrize("processes", [1, 2, "fsdp-2"])
def test_windows_of_a_package_are_steps_of_one_big_batch_and_resume_to_the_same_bits(
    tmp_path: Path, processes: int | str
) -> None:
    whole = train(tmp_path / "whole", processes)
    stopped = train(tmp_path / "broken", processes, stop="5")
    resumed = train(tmp_path / "broken", processes)
    assert (whole["ended"], stopped["ended"], resumed["ended"]) == ("finished", "stopped", "finished")
    assert whole["seen"] == ENDS
    assert sum(whole["ends"]) == len(ENDS)
    assert whole["ends"][:5] == ([False, True] * 2 + [False] if processes == 1 else [True, True, True, False, True])
    assert (resumed["weights"], resumed["state"]) == (whole["weights"], whole["state"])
    for weight, expected in zip(whole["weights"], train_by_hand(), strict=True):
        torch.testing.assert_close(torch.tensor(weight), torch.tensor(expected))


def test_a_window_that_processes_end_differently_is_an_error_on_all_of_them(tmp_path: Path) -> None:
    told = train(tmp_path / "run", 2, stop="apart")["ended"]
    assert "the window maker 'growing'" in told
    assert "a window that ends after 1 micro-batches on process 0, but not on all others" in told
    assert "decide from the arguments alone" in told


# ---- In this process, with makers that a test installs


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a package with a window maker `asked`."""

    def install(body: str) -> None:
        site = tmp_path / "site"
        (site / "asked_windows-1.0.dist-info").mkdir(parents=True)
        (site / "asked_windows-1.0.dist-info" / "METADATA").write_text("Name: asked_windows\nVersion: 1.0\n")
        entry = "[accmt.window_makers]\nasked = asked_windows:asked\n"
        (site / "asked_windows-1.0.dist-info" / "entry_points.txt").write_text(entry)
        (site / "asked_windows.py").write_text(f"seen = []\ndef asked(window, state):\n    {body}\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(__import__("sys").modules, "asked_windows", raising=False)

    return install


def seen_windows() -> list[Any]:
    return __import__("asked_windows").seen


class Tokens(AcceleratorModule):
    """Sees texts of tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(8, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch["input_ids"]).square().mean()


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) != 0).long()}


TEXTS = [{"input_ids": [1] * length} for length in (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)]


@pytest.mark.parametrize("hps", [{}, {"max_tokens": 8}])
def test_tokens_are_counted_without_padding(tmp_path: Path, install: Callable[..., None], hps: dict[str, Any]) -> None:
    install("seen.append(window); return window.num_tokens >= 10")
    trainer = Trainer(
        {"epochs": 1, **SGD, **hps},
        tmp_path / "model",
        grad_accumulation_steps="asked",
        shuffle_train=False,
        collate_fn=pad,
        verbose=False,
    )
    trainer.fit(Tokens(), TEXTS)
    assert [(window.num_batches, window.num_tokens) for window in seen_windows()] == [(1, 4), (2, 9), (3, 16), (1, 11)]
    assert trainer.state.global_step == 3
    assert [window.num_samples for window in seen_windows()] == [2, 4, 6, 2]


@pytest.mark.parametrize("size", [None, 1])
def test_smaller_micro_batches_make_the_same_windows(
    tmp_path: Path, install: Callable[..., None], size: int | None
) -> None:
    install("seen.append(window); return window.num_batches == 2 + state.epoch")
    hps = {"epochs": 2, **SGD} | ({} if size is None else {"max_micro_batch_size": size})
    trainer = Trainer(hps, tmp_path / "model", grad_accumulation_steps="asked", verbose=False)
    trainer.fit(Linear(), make_points(12))
    assert [tuple(window) for window in seen_windows()][:4] == [(1, 2, None), (2, 4, None)] * 2
    assert trainer.state.global_step == 3 + 2


class Noted(Callback):
    """Notes the length of the run as callbacks see it."""

    def on_fit_start(self) -> None:
        self.length = self.trainer.estimated_stepping_batches, self.trainer.estimated_global_steps_per_epoch


def test_max_steps_is_the_length_of_a_run_whose_windows_are_unknown(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install("return window.num_batches == 2")
    noted = Noted()
    hps = {"max_steps": 5, **SGD, "scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.2}}
    trainer = Trainer(
        hps, tmp_path / "model", grad_accumulation_steps="asked", callbacks=noted, enable_progress_bar=True
    )
    module = Linear()
    trainer.fit(module, make_points(12))
    assert noted.length == (5, None)
    assert trainer.state.global_step == 5
    assert module.scheduler.get_last_lr() == [0.0]


POINTS = make_points(12)
WARMUP = {"scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.2}}


@pytest.mark.parametrize(
    ("arguments", "module", "data", "hps", "message"),
    [
        ({"checkpoint_every": 0.5}, Linear, POINTS, {}, "checkpoint_every=100"),
        ({"evaluate_every_n_steps": 0.5}, Linear, POINTS, {}, "evaluate_every_n_steps=100"),
        ({}, Linear, POINTS, WARMUP, r"the number of steps is unknown(.|\n)*max_steps"),
        ({}, Linear, StepsCurriculum([(-1, POINTS)]), {"max_steps": 3}, "grad_accumulation_steps=4"),
        ({}, ByHand, POINTS, {}, "the module decides when to step"),
    ],
)
def test_what_needs_a_plan_is_an_error_that_says_what_to_write(
    tmp_path: Path,
    install: Callable[..., None],
    arguments: dict[str, Any],
    module: Callable[[], Any],
    data: Any,
    hps: dict[str, Any],
    message: str,
) -> None:
    install("return True")
    trainer = Trainer(
        {"epochs": 1, **SGD, **hps}, tmp_path / "model", grad_accumulation_steps="asked", verbose=False, **arguments
    )
    with pytest.raises(AccmtError, match=message):
        trainer.fit(module(), data)


def test_a_fraction_of_a_stream_is_no_checkpoint_interval_but_a_time_is(tmp_path: Path) -> None:
    trainer = Trainer({"epochs": 1, **SGD}, tmp_path / "model", checkpoint_every=0.5, verbose=False)
    with pytest.raises(AccmtError, match="checkpoint_every=100"):
        trainer.fit(Linear(), Stream(POINTS))
    for every in ("10 minutes", "auto", "1 epoch"):
        trainer = Trainer({"epochs": 1, **SGD}, tmp_path / "model", checkpoint_every=every, verbose=False)
        assert trainer.fit(Linear(), Stream(POINTS)).finished
