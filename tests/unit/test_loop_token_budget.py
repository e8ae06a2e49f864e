"""Runs whose optimizer steps are cut by a budget of tokens: the same steps, samples and counters as without one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, Callback, Trainer, read_history
from accmt.addons.token_batches.budget import TokenBudget
from accmt.addons.token_batches.windows import ByTokens, keep_samples
from accmt.data import ByCount, Loader, SourceOptions, build_source
from accmt.errors import ArgumentError, DataError
from tests import toys
from tests.raising import raises_at
from tests.toys import ByHand, Record
from tests.toys import pad_texts as pad

NUMBER = 45
BATCH = 8
LENGTHS = [1 + (37 * index) % 23 for index in range(NUMBER)]
TOKENS = 64


class Texts(toys.Texts):
    """Texts of unequal lengths."""

    def __init__(self, *, draws: bool = False) -> None:
        super().__init__(LENGTHS, draws=draws)


def make_stream() -> toys.Stream:
    """Return the same texts without a length."""
    return toys.Stream(Texts())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(40, 6, padding_idx=0), "head": nn.Linear(6, 3)})


def compute_loss(model: Any, batch: dict[str, torch.Tensor], *, weighted: bool) -> tuple[torch.Tensor, int]:
    """Return the mean loss over tokens and their number, or over samples and theirs."""
    mask = batch["input_ids"] != 0
    embedded = model["embed"](batch["input_ids"])
    if weighted:
        targets = batch["label"][:, None].expand_as(mask)[mask]
        return nn.functional.cross_entropy(model["head"](embedded[mask]), targets), int(mask.sum())
    means = (embedded * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return nn.functional.cross_entropy(model["head"](means), batch["label"]), len(mask)


class Classifier(AcceleratorModule):
    """Writes down what each of its steps gets."""

    def __init__(self, *, weighted: bool = False) -> None:
        self.model = build_model()
        self.weighted = weighted
        self.shapes: list[tuple[int, int]] = []
        self.batches: list[list[int]] = Record()
        self.noise: dict[int, float] = {}
        self.draws: list[float] = []
        self.places: list[tuple[int, bool]] = []

    def training_step(self, batch: Any) -> Any:
        self.shapes.append(tuple(batch["input_ids"].shape))
        self.batches.append(batch["index"].tolist())
        self.noise |= dict(zip(batch["index"].tolist(), batch.get("noise", torch.zeros(99)).tolist(), strict=False))
        self.draws.append(float(torch.rand(())))
        self.places.append((self.state.batch_idx, self.state.is_grad_accum_boundary()))
        loss, weight = compute_loss(self.model, batch, weighted=self.weighted)
        return {"loss": loss, "weight": weight} if self.weighted else loss


class Recorder(Callback):
    """Writes down gradients, and the number of micro-batches of each step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.steps: list[set[int]] = Record()
        self.counts: list[tuple[int, int, int]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.module.model.parameters()]).clone())
        done = sum(len(step) for step in self.steps)
        seen = [index for batch in self.module.batches for index in batch]
        self.steps.append(set(seen[done:]))

    def on_update_end(self) -> None:
        self.counts.append((self.state.global_step, self.state.train_step, self.state.samples_seen))


def run(folder: Path, *, data: Any = None, module: Any = None, hps: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Train, and return the module and what was written down."""
    recorder = Recorder()
    base = {"epochs": 2, "batch_size": BATCH, "optim": {"type": "SGD", "lr": 0.1}, "max_tokens": TOKENS}
    trainer = Trainer(
        base | (hps or {}),
        folder / "model",
        **{
            "model_saving": None,
            "logging_dir": folder,
            "collate_fn": pad,
            "callbacks": [recorder],
            "verbose": False,
            "seed": 3,
        }
        | settings,
    )
    module = module or Classifier()
    recorder.state_after = trainer.fit(module, Texts() if data is None else data)
    recorder.log_dir = trainer.log_dir
    return module, recorder


@pytest.mark.parametrize("weighted", [False, True], ids=["samples", "weights"])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_each_step_has_its_samples_and_the_gradient_of_one_big_batch(
    tmp_path: Path, weighted: bool, accumulation: int
) -> None:
    settings = {"grad_accumulation_steps": accumulation}
    plain, expected = run(
        tmp_path / "plain", module=Classifier(weighted=weighted), hps={"max_tokens": None}, **settings
    )
    module, got = run(tmp_path / "cut", module=Classifier(weighted=weighted), **settings)
    assert got.steps == expected.steps
    assert got.counts == expected.counts
    assert module.batches != plain.batches
    assert all(rows * width <= TOKENS for rows, width in module.shapes)
    assert sum(r * w for r, w in module.shapes) < sum(r * w for r, w in plain.shapes)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples, gradient in zip(got.steps, got.gradients, strict=True):
        loss, _ = compute_loss(model, pad([Texts()[index] for index in sorted(samples)]), weighted=weighted)
        loss.backward()
        reference = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert (gradient - reference).norm() <= 1e-6 * reference.norm()
        optimizer.step()
        optimizer.zero_grad()


def test_counters_count_batches_as_planned_and_steps_know_their_last_micro_batch(tmp_path: Path) -> None:
    module, recorder = run(tmp_path, grad_accumulation_steps=2, hps={"epochs": 1})
    state = recorder.state_after
    assert [count[:2] for count in recorder.counts] == [(1, 2), (2, 4), (3, 6)]
    assert (state.samples_seen, state.batch_iteration, state.global_step) == (NUMBER, 6, 3)
    assert [place[0] for place in module.places] == sorted(place[0] for place in module.places)
    assert {place[0] for place in module.places} == {0, 2, 4}
    assert sum(ends for _, ends in module.places) == 3
    assert len(module.draws) == len(set(module.draws))  # each micro-batch has randomness of its own


@pytest.mark.usefixtures("without_fingerprints")
@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_read_once_an_epoch_with_the_randomness_that_it_has_without_a_budget(
    tmp_path: Path, workers: int
) -> None:
    data = Texts(draws=True)
    settings = {"dataloader_num_workers": workers}
    plain, _ = run(tmp_path / "plain", data=Texts(draws=True), hps={"max_tokens": None}, **settings)
    module, _ = run(tmp_path / "cut", data=data, **settings)
    assert module.noise == plain.noise
    assert len(set(module.noise.values())) == NUMBER
    if workers == 0:
        assert set(data.reads.values()) == {2}
        assert set(data.reads) == set(range(NUMBER))


def test_the_logged_losses_are_those_without_a_budget(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain", hps={"max_tokens": None})
    _, cut = run(tmp_path / "cut")
    losses = [
        [row["values"]["train_loss"] for row in read_history(one.log_dir) if "train_loss" in row.get("values", {})]
        for one in (plain, cut)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0]


class BrokenError(Exception):
    """Ends a run."""


class Break(Callback):
    """Raises after a number of micro-batches of all epochs."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_before_training_step(self, batch: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise BrokenError


class Shaky(Classifier):
    """Draws in its step, as dropout does."""

    def training_step(self, batch: Any) -> Any:
        factor = 1 + 0.1 * torch.rand(len(batch["index"]))
        loss, _ = compute_loss(self.model, batch, weighted=False)
        return loss * factor.mean()


@pytest.mark.parametrize("data", [lambda: Texts(draws=True), make_stream], ids=["sized", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path: Path, after: int, workers: int, data: Any) -> None:
    if workers and data is make_stream:
        workers = 1
    settings = {"grad_accumulation_steps": 2, "dataloader_num_workers": workers, "checkpoint_every": "1 step"}
    whole, _ = run(tmp_path / "whole", module=Shaky(), data=data(), **settings)
    with pytest.raises(BrokenError):
        run(tmp_path / "broken", module=Shaky(), data=data(), **settings | {"callbacks": [Break(after)]})
    resumed, _ = run(tmp_path / "broken", module=Shaky(), data=data(), resume="auto", **settings)
    for expected, got in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_bad_samples_are_skipped_and_the_rest_is_cut(tmp_path: Path) -> None:
    class Faulty(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index in (3, 11):
                raise OSError("gone")
            return super().__getitem__(index)

    module, recorder = run(tmp_path, data=Faulty(), failures={"on_bad_sample": "skip"}, hps={"epochs": 1})
    assert sorted(index for batch in module.batches for index in batch) == [
        index for index in range(NUMBER) if index not in (3, 11)
    ]
    assert recorder.state_after.bad_samples == 2
    assert recorder.state_after.samples_seen == NUMBER - 2


def test_a_budget_below_the_longest_sample_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, _ = run(tmp_path, hps={"max_tokens": 20})
    assert caplog.text.count("longer than max_tokens") == 1
    assert all(rows == 1 or rows * width <= 20 for rows, width in module.shapes)


def test_lengths_that_are_not_true_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lying(Classifier):
        def length_of(self, sample: Any) -> int:
            return 1

    run(tmp_path, module=Lying())
    assert caplog.text.count("correct the lengths") == 1


def test_data_without_lengths_say_what_to_define(tmp_path: Path) -> None:
    with raises_at(DataError, "the length of a sample", "['index']", do="def length_of"):
        run(tmp_path, data=[{"index": 1}] * 4, collate_fn=None)


def test_the_module_may_say_how_long_a_sample_is(tmp_path: Path) -> None:
    class Twice(Classifier):
        def length_of(self, sample: Any) -> int:
            return 2 * len(sample["input_ids"])

    module, _ = run(tmp_path, module=Twice())
    assert all(rows == 1 or 2 * rows * width <= TOKENS for rows, width in module.shapes)


def test_max_micro_batch_size_holds_beside_the_budget(tmp_path: Path) -> None:
    module, _ = run(tmp_path, hps={"max_micro_batch_size": 3})
    assert max(rows for rows, _ in module.shapes) == 3


def test_an_error_of_the_collate_function_names_the_batch(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        run(tmp_path, collate_fn=collate)
    assert "while collating" in "".join(caught.value.__notes__)


def make_loader(make_data: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(make_data(), BATCH, collate_fn=pad, num_workers=workers)


@pytest.mark.parametrize(
    "make",
    [
        make_stream,
        *(partial(make_loader, data, workers) for data in (Texts, make_stream) for workers in (0, 1)),
    ],
    ids=["stream", "loader", "loader with a worker", "loader of a stream", "loader of a stream with a worker"],
)
def test_a_stream_and_the_batches_of_a_loader_of_the_users_are_cut_too(tmp_path: Path, make: Any) -> None:
    settings = {"collate_fn": pad if make is make_stream else None, "grad_accumulation_steps": 2}
    plain, expected = run(tmp_path / "plain", data=make(), hps={"max_tokens": None}, **settings)
    module, got = run(tmp_path / "cut", data=make(), **settings)
    assert got.steps == expected.steps
    assert got.counts == expected.counts
    assert module.batches != plain.batches
    assert all(rows * width <= TOKENS for rows, width in module.shapes)
    for gradient, reference in zip(got.gradients, expected.gradients, strict=True):
        assert (gradient - reference).norm() <= 1e-5 * reference.norm()


class OwnLoader(DataLoader[Any]):
    """Makes its batches in a way of its own."""

    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_loader_with_an_iter_of_its_own_keeps_its_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, _ = run(tmp_path, data=OwnLoader(Texts(), 5, collate_fn=pad), hps={"epochs": 1})
    assert caplog.text.count("max_tokens has no effect on your DataLoader of training data") == 1
    assert {rows for rows, _ in module.shapes} == {5}


class Pinned(dict[str, Any]):
    """A batch that notes whether it was pinned."""

    is_pinned = False

    def pin_memory(self) -> Pinned:
        self.is_pinned = True
        return self


@pytest.mark.parametrize("pins", [True, False])
def test_micro_batches_are_pinned_as_batches_are(pins: bool) -> None:
    samples = [Texts()[index] for index in range(8)]
    source = build_source(samples, SourceOptions(purpose="train", batch_size=8, collate=keep_samples))
    maker = ByTokens(
        TokenBudget(TOKENS, 100),
        collate=lambda samples: Pinned(pad(samples)),
        length_of=None,
        seed=0,
        pins_memory=pins,
        grouping=ByCount(lambda epoch: 1),
    )
    assert {micro_batch.batch.is_pinned for micro_batch in Loader(source, maker).micro_batches(0)} == {pins}


def test_a_sample_longer_than_the_budget_is_an_error_where_asked_for(tmp_path: Path) -> None:
    with raises_at(DataError, "max_tokens: 20", "up to 23 tokens", do="max_length=20"):
        run(tmp_path, hps={"max_tokens": 20}, failures={"on_long_sample": "raise"})


@pytest.mark.parametrize(
    ("hps", "module"), [({"max_micro_batch_size": "auto"}, None), ({}, ByHand())], ids=["auto", "manual"]
)
def test_what_decides_on_micro_batches_too_is_rejected(tmp_path: Path, hps: Any, module: Any) -> None:
    with raises_at(ArgumentError, "max_tokens in the hyper-parameters"):
        run(tmp_path, module=module, hps=hps)


def test_the_monitor_logs_real_tokens_and_the_share_of_padding(tmp_path: Path) -> None:
    module, recorder = run(tmp_path, monitor={"throughput": True}, log_every=3)
    rows = [row["values"] for row in read_history(recorder.log_dir) if "values" in row]
    rows = [row for row in rows if "padding" in row]
    batches_of_row = iter(zip(module.batches, module.shapes, strict=True))
    steps = iter(recorder.steps)
    assert len(rows) == 4
    for row in rows:
        left = sum(len(next(steps)) for _ in range(3))
        real = padded = 0
        while left:
            indices, (height, width) = next(batches_of_row)
            left, real, padded = left - len(indices), real + sum(LENGTHS[i] for i in indices), padded + height * width
        assert row["padding"] == pytest.approx(1 - real / padded)
        assert row["real_tokens_per_s"] > 0


def test_batches_of_a_batch_sampler_are_cut_too(tmp_path: Path) -> None:
    sampler = [list(range(start, min(start + 9, NUMBER))) for start in range(0, NUMBER, 9)]
    module, recorder = run(tmp_path, data_options={"batch_sampler": sampler}, hps={"epochs": 1})
    assert recorder.steps == [set(batch) for batch in sampler]
    assert all(rows * width <= TOKENS for rows, width in module.shapes)


class Large(Texts):
    """A million samples; which are read is written down."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index % NUMBER) | {"index": index}

    def __len__(self) -> int:
        return 1_000_000


@pytest.mark.usefixtures("without_fingerprints")
def test_a_resume_among_a_million_samples_reads_those_of_the_step_only(tmp_path: Path) -> None:
    settings = {"hps": {"epochs": -1, "max_steps": 4}, "checkpoint_every": "1 step", "grad_accumulation_steps": 2}
    whole, expected = run(tmp_path / "whole", data=Large(), **settings)
    with pytest.raises(BrokenError):  # in the middle of the third step
        run(tmp_path / "broken", data=Large(), **settings | {"callbacks": [Break(len(whole.batches) // 2 + 1)]})
    data = Large()
    resumed, got = run(tmp_path / "broken", data=data, resume="auto", **settings)
    assert got.steps == expected.steps[2:]
    assert data.reads.total() == 2 * 2 * BATCH
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_batch_norm_is_warned_of_and_a_norm_of_each_sample_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, norm in {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}.items():
        module = Classifier()
        module.model["norm"] = norm(1).requires_grad_(False)
        run(tmp_path / name, module=module, hps={"max_steps": 1}, callbacks=[])
        said = [record.message for record in caplog.records if "batch norm (norm)" in record.message]
        assert len(said) == (name == "batch")
