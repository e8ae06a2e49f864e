"""Several data sets in known shares: the order, epochs, resuming with other weights, and the loss of each."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accmt import AcceleratorModule, Trainer
from accmt.addons.flight_recorder.examiner import WatchedMaker
from accmt.addons.mix.section import read_data_section
from accmt.addons.mix.sources import Mixture
from accmt.data import ByCount, Shard, SourceOptions, build_source
from accmt.data.samplers import Order
from accmt.errors import ArgumentError, DataError, HyperParameterError
from accmt.metrics.averages import exact_sum
from accmt.options import Settings
from accmt.tracking import read_history
from tests.raising import raises_at
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.tables import each
from tests.toys import Record

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.01}}
MIX = {"news": 0.5, "code": 0.3, "chat": "rest"}


def draw_weights(seed: int) -> list[Fraction]:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    weights = [Fraction(str(round(rng.random() ** rng.choice([1, 4]), rng.choice([1, 2, 3])))) for _ in range(count)]
    return weights if any(weights) else [Fraction(1)]


def numbers(begin: int, count: int) -> TensorDataset:
    """Return samples that are their own positions in all sources."""
    return TensorDataset(torch.arange(begin, begin + count, dtype=torch.float32)[:, None])


def mix(sizes: dict[str, int], data: dict[str, Any]) -> Mixture:
    section, faults = read_data_section(data)
    assert section is not None, faults
    begins = np.cumsum([0, *sizes.values()]).tolist()
    sources = {name: numbers(begin, size) for (name, size), begin in zip(sizes.items(), begins, strict=False)}
    return Mixture(sources, section)


def order_of(mixture: Mixture, seed: int = 1, *, num_shards: int = 1, **settings: Any) -> Any:
    hps = {**HPS, **settings.pop("hps", {})}
    chosen = Trainer(hps, "unused", verbose=False, **settings).settings if settings or hps != HPS else defaults()
    return mixture.order_run(Points(), chosen, num_shards=num_shards, seed=seed)


@cache
def defaults() -> Settings:
    return Trainer(HPS, "unused", verbose=False).settings


def draw(mixture: Mixture, epoch: int = 0, seed: int = 1, **settings: Any) -> list[int]:
    order = order_of(mixture, seed, **settings)
    return Order(len(mixture), seed, sampler=order).at(epoch).tolist()


class Points(AcceleratorModule):
    """Predicts twice a number; keeps what it was trained on."""

    def __init__(self, *, of_samples: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.of_samples = of_samples
        self.seen: list[tuple[list[int], list[float], float]] = Record()

    def training_step(self, batch: Any) -> Any:
        inputs = batch[0] / 100
        losses = (self.model(inputs) - 2 * inputs).square().squeeze(1)
        if torch.is_grad_enabled():
            self.seen.append((batch[0].flatten().int().tolist(), losses.tolist(), float(len(losses))))
        return {"loss": losses.mean(), **({"losses": losses} if self.of_samples else {})}

    validation_step = training_step


def test_shares_hold_for_the_batches_of_one_two_and_three_processes():
    for seed in range(0, 50, 4):
        weights = draw_weights(seed)
        sizes = {f"s{number}": 15 + 5 * number for number in range(len(weights))}
        data = {"mix": dict(zip(sizes, map(float, weights), strict=True))}
        mixture = mix(sizes, data)
        ends = np.cumsum(list(sizes.values()))
        expected = draw(mixture)
        shares = np.array([float(weight / sum(weights)) for weight in weights])
        for count in (1, 2, 3):
            options = SourceOptions(purpose="train", batch_size=6 // count, seed=1, sampler=order_of(mixture))
            shards = [build_source(mixture, replace(options, shard=Shard(index, count))) for index in range(count)]
            trained: list[int] = []
            for parts in zip(*(shard.micro_batches(0) for shard in shards), strict=True):
                trained += [
                    int(v) for part in parts if part.batch is not None for v in part.batch[0].flatten().tolist()
                ]
                counts = np.bincount(np.searchsorted(ends, trained, side="right"), minlength=len(weights))
                assert (np.abs(counts - len(trained) * shares) < 1).all(), (seed, count)
            assert trained == expected, (seed, count)


def test_each_source_is_read_in_passes_each_in_another_order():
    mixture = mix({"news": 6, "code": 4}, {"mix": {"news": 0.5, "code": 0.5}, "stop": "last"})
    trained = [index for epoch in range(4) for index in draw(mixture, epoch)]
    code = [index for index in trained if index >= 6]
    news = [index for index in trained if index < 6]
    assert len(trained) == 4 * 12, "an epoch ends when the larger source was read: 6 of each"
    for own, size in ((news, 6), (code, 4)):
        passes = [own[begin : begin + size] for begin in range(0, len(own), size)]
        assert all(sorted(one) == sorted(passes[0]) for one in passes)
        assert len({tuple(one) for one in passes}) > 1
    assert trained != [index for epoch in range(4) for index in draw(mixture, epoch, seed=2)]
    in_order = draw(mixture, shuffle_train=False)
    assert [index for index in in_order if index >= 6] == [6, 7, 8, 9, 6, 7]


ONCE, TWICE = {"weight": 1, "epochs": 1}, {"weight": 1, "epochs": 2}


@each(
    ("data", "settings", "lengths"),
    [
        ({"stop": "first"}, {}, [20, 20, 20]),  # 10 of news
        ({"stop": "last"}, {}, [100, 100, 100]),  # 50 of chat, which has 50
        ({"stop": "repeat"}, {"hps": {"max_steps": 7}}, [28, 28]),
        ({"mix": {"news": TWICE, "code": 0, "chat": 1}, "stop": "last"}, {}, [70, 70]),
        ({"mix": {"news": TWICE, "code": ONCE, "chat": 0}}, {}, [20, 20, None]),
        ({"mix": {"news": TWICE, "code": 0, "chat": ONCE}, "stop": "repeat"}, {}, [70]),
    ],
)
def test_an_epoch_ends_where_the_rule_says(data: dict[str, Any], settings: dict[str, Any], lengths: list[int | None]):
    mixture = mix({"news": 10, "code": 20, "chat": 50}, {"mix": {"news": 0.5, "code": 0, "chat": 0.5}, **data})
    order = order_of(mixture, **settings)
    for epoch, length in enumerate(lengths):
        order.set_epoch(epoch)
        if length is None:
            with raises_at(DataError, "are all limited", "40 samples"):
                len(order)
        else:
            assert len(order) == length == len(order.draw()), epoch


def test_a_source_that_is_exhausted_leaves_its_share_to_the_others():
    data = {"mix": {"news": {"weight": 0.5, "epochs": 1}, "code": 0.3, "chat": "rest"}, "stop": "last"}
    drawn = draw(mix({"news": 10, "code": 30, "chat": 40}, data))
    sources = np.searchsorted([10, 40, 80], drawn, side="right")
    assert np.bincount(sources[:20]).tolist() == [10, 6, 4]
    assert np.bincount(sources[20:70], minlength=3).tolist() == [0, 30, 20]


def test_weights_change_at_their_steps():
    data = {"mix": {"easy": {0: 1, 3: 0}, "hard": {0: 0, 3: 0.5, 5: 1}, "both": {"weight": {0: 0, 3: 0.5, 5: 0}}}}
    drawn = draw(mix({"easy": 5, "hard": 7, "both": 9}, data), hps={"max_steps": 8})
    sources = np.searchsorted([5, 12, 21], drawn, side="right")
    assert len(drawn) == 8 * 4
    assert set(sources[:12]) == {0}
    assert np.bincount(sources[12:20], minlength=3).tolist() == [0, 4, 4]
    assert set(sources[20:]) == {1}


def test_shares_of_target_tokens_follow_from_the_mean_of_each_source():
    class Texts(Dataset[Any]):
        def __init__(self, length: int) -> None:
            self.length = length

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": [1] * (self.length + 1), "labels": [-100] + [1] * self.length}

        def __len__(self) -> int:
            return 90

    section, _ = read_data_section({"mix": {"short": 1, "long": 1}, "unit": "tokens"})
    assert section is not None
    mixture = Mixture({"short": Texts(10), "long": Texts(50)}, section)
    sources = np.array(draw(mixture)) // 90
    counts = np.bincount(sources[:60]).tolist()
    assert counts == [50, 10], "500 tokens of each"


# ---- Runs


def fit(
    folder: Path, module: Any, sizes: dict[str, int], data: Any = None, hps: Any = None, **settings: Any
) -> Trainer:
    begins = np.cumsum([0, *sizes.values()]).tolist()
    sources = {name: numbers(begin, size) for (name, size), begin in zip(sizes.items(), begins, strict=False)}
    given = {"seed": 1, "log_every": 2, "verbose": False, "logging_dir": folder / "logs", "checkpoint": folder / "ckpt"}
    trainer = Trainer(
        {**HPS, "data": data or {"mix": MIX}, **(hps or {})},
        folder / "model",
        **{**given, "model_saving": None, **settings},
    )
    trainer.fit(module, sources, {name: source for name, source in sources.items() if settings.get("model_saving")})
    return trainer


SIZES = {"news": 10, "code": 14, "chat": 30}


def rows_of(trainer: Trainer) -> list[dict[str, float]]:
    return [
        row["values"] for row in read_history(trainer.run.tracking.run_folder) if "train_loss" in row.get("values", {})
    ]


def test_each_row_has_the_loss_and_the_samples_of_each_source(tmp_path: Path):
    module = Points()
    trainer = fit(tmp_path, module, SIZES, hps={"epochs": 3}, grad_accumulation_steps=2, log_every=3)
    ends = np.cumsum(list(SIZES.values()))
    rows, seen, taken, counted = rows_of(trainer), iter(module.seen), 0, {name: 0 for name in SIZES}
    every = [(np.searchsorted(ends, samples, side="right").tolist(), losses) for samples, losses, _ in seen]
    assert len(rows) == 3
    for row in rows:
        losses: dict[str, list[float]] = {name: [] for name in SIZES}
        missing = sum(row[f"samples_seen__{name}"] for name in SIZES) - sum(counted.values())
        while sum(map(len, losses.values())) < missing:
            for source, loss in zip(*every[taken], strict=True):
                losses[list(SIZES)[source]].append(loss)
            taken += 1
        for name, own in losses.items():
            counted[name] += len(own)
            assert row[f"samples_seen__{name}"] == counted[name]
            assert (f"train_loss__{name}" in row) == bool(own)
            if own:
                assert row[f"train_loss__{name}"] == pytest.approx(exact_sum(own) / len(own), rel=1e-6)
        total = [loss for own in losses.values() for loss in own]
        assert row["train_loss"] == pytest.approx(exact_sum(total) / len(total), rel=1e-6)
    assert taken == len(every)
    assert sum(counted.values()) == trainer.state.samples_seen


def test_rows_do_not_depend_on_how_often_checkpoints_are_written(tmp_path: Path):
    rows = [
        rows_of(fit(tmp_path / str(every), Points(), SIZES, hps={"epochs": 3}, log_every=5, **settings))
        for every, settings in enumerate(({}, {"checkpoint_every": "1 steps"}, {"checkpoint_every": "3 steps"}))
    ]
    assert rows[0] == rows[1] == rows[2]


def test_reloaded_sources_of_other_sizes_get_their_own_samples(tmp_path: Path):
    class Reloading(Points):
        times = 0

        def get_train_dataloader(self) -> Any:
            self.times += 1
            return {"a": numbers(0, 4 * self.times), "b": numbers(100, 8)}

    trainer = Trainer(
        {**HPS, "epochs": 3, "data": {"mix": {"a": 1, "b": 1}, "stop": "last"}},
        tmp_path / "model",
        reload_dataloaders_every_n_epochs=1,
        **{"model_saving": None, "verbose": False, "logging_dir": tmp_path / "logs", "log_every": 2, "seed": 1},
    )
    module = Reloading()
    trainer.fit(module)
    assert module.times >= 3
    trained = trained_by(module)
    last = rows_of(trainer)[-1]
    assert last["samples_seen__a"] == sum(sample < 100 for sample in trained)
    assert last["samples_seen__b"] == sum(sample >= 100 for sample in trained)


class Reading(Dataset[Any]):
    """The samples of a `TensorDataset`, read by a class of the user."""

    def __init__(self, held: TensorDataset) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        return self.held[index]

    def __len__(self) -> int:
        return len(self.held)


@pytest.mark.parametrize("workers", [0, 1])
def test_sources_that_only_hold_samples_train_like_those_that_read_them(tmp_path: Path, workers: int):
    def draw(samples: list[Any]) -> Any:
        (inputs,) = zip(*samples, strict=True)
        return [torch.stack(inputs) + torch.rand(1) + random.random()]

    seen = []
    for name, wrap in (("held", lambda data: data), ("listed", list), ("read", Reading)):
        module = Points()
        trainer = Trainer(
            {**HPS, "epochs": 2, "data": {"mix": MIX}},
            tmp_path / name,
            collate_fn=draw,
            dataloader_num_workers=workers,
            **{"model_saving": None, "verbose": False, "logging_dir": tmp_path / "logs", "seed": 1},
        )
        sources = {source: wrap(numbers(10 * size, size)) for source, size in SIZES.items()}
        trainer.fit(module, sources)
        assert trainer.run.loaders.train_data.only_holds_samples == (name != "read")
        seen.append(module.seen)
    assert seen[0] == seen[1] == seen[2]


def test_the_steps_are_those_of_plain_torch_on_the_same_samples(tmp_path: Path):
    module = Points()
    fit(tmp_path, module, SIZES, grad_accumulation_steps=2)
    plain = Points()
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.01)
    for begin in range(0, len(module.seen), 2):
        samples = [sample for batch in module.seen[begin : begin + 2] for sample in batch[0]]
        plain.training_step((torch.tensor(samples, dtype=torch.float32)[:, None],))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for own, expected in zip(module.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


class InterruptWithin(InterruptAt):
    """Ends a run in the second batch of a window, after the first was counted."""

    number = 0

    def on_after_backward(self) -> None:
        self.number += self.state.global_step == self.update
        if self.number == 2:
            raise KeyboardInterrupt  # the state after the last step is saved


@pytest.mark.parametrize("stop", [1, 4])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, stop: int):
    settings: dict[str, Any] = {"hps": {"epochs": 3}, "checkpoint_every": "2 steps", "log_every": 3}
    settings["grad_accumulation_steps"] = 2
    whole = Points()
    unbroken = fit(tmp_path / "whole", whole, SIZES, **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", Points(), SIZES, callbacks=InterruptWithin(stop), **settings)
    rest = Points()
    resumed = fit(tmp_path / "parts", rest, SIZES, resume=True, **settings)
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    assert [samples for samples, _, _ in rest.seen] == [samples for samples, _, _ in whole.seen][-len(rest.seen) :]
    assert rows_of(resumed) == rows_of(unbroken)


def test_a_run_resumes_with_other_weights_where_each_source_was(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings: dict[str, Any] = {"checkpoint_every": "2 steps", "ledger": True}
    sizes = {"news": 40, "code": 40, "chat": 80}
    changed = {"mix": {"news": 0, "code": 0.25, "chat": 0.75}}
    before = Points()
    with pytest.raises(InterruptionError):
        fit(tmp_path, before, sizes, callbacks=InterruptAt(4), **settings)
    after = Points()
    with caplog.at_level("INFO", logger="accmt"):
        trainer = fit(
            tmp_path,
            after,
            sizes,
            changed,
            resume=True,
            verbose=True,
            **settings,
        )
    assert "data.mix.news: 0.5 -> 0" in caplog.text
    assert "after 16 samples of the mixture" in caplog.text
    trained = [sample for samples, _, _ in before.seen[:4] for sample in samples]
    then = [sample for samples, _, _ in after.seen for sample in samples]
    sources = np.searchsorted([40, 80, 160], then, side="right")
    assert len(set(trained + then)) == len(trained + then), "no sample twice: each source goes on in its pass"
    counts = [np.cumsum(sources == number) for number in range(3)]
    for own, share in zip(counts, (0, 0.25, 0.75), strict=True):
        assert (np.abs(own - share * np.arange(1, len(then) + 1)) < 1).all()
    assert '"chat": 0.75' in (Path(trainer.run.tracking.run_folder) / "ledger.jsonl").read_text()
    # A second resumption continues the changed mixture.
    again = Points()
    trainer = fit(
        tmp_path,
        again,
        sizes,
        changed,
        hps={"epochs": 2},
        resume=True,
        **settings,
    )
    assert np.bincount(np.array([s for samples, _, _ in again.seen for s in samples]) // 40)[0] == 0


def test_a_run_resumes_with_other_limits_after_what_each_source_gave(tmp_path: Path):
    def mix(**limits: int) -> dict[str, Any]:
        weights = {"news": 0.5, "code": 0.25, "chat": 0.25}
        return {
            "mix": {name: {"weight": weight, **({"epochs": limits[name]} if name in limits else {})}
                    for name, weight in weights.items()},
            "stop": "repeat",
        }  # fmt: skip

    settings: dict[str, Any] = {"checkpoint_every": "2 steps", "shuffle_train": False}
    sizes, before, after = {"news": 8, "code": 80, "chat": 80}, Points(), Points()
    hps = {"epochs": -1, "max_steps": 12}
    with pytest.raises(InterruptionError):
        fit(tmp_path, before, sizes, mix(news=1), hps=hps, callbacks=InterruptAt(8), **settings)
    fit(tmp_path, after, sizes, mix(news=3), hps=hps, resume=True, **settings)
    trained = [sample for samples, _, _ in before.seen[:8] for sample in samples]
    then = [sample for samples, _, _ in after.seen for sample in samples]
    assert [*range(8)] == [sample for sample in trained if sample < 8]
    assert [*range(8)] == [sample for sample in then if sample < 8], "the second pass, from its start"
    others = sorted(sample for sample in trained + then if sample >= 8)
    assert len(set(others)) == len(others) == 32, "no sample twice"
    of_code = sum(sample < 88 for sample in others)
    assert others == [*range(8, 8 + of_code), *range(88, 88 + 32 - of_code)], "none left out"


def test_a_run_that_the_sources_do_not_suffice_for_is_rejected_and_higher_limits_continue_one(tmp_path: Path):
    def mix(epochs: int) -> dict[str, Any]:
        return {"mix": {name: {"weight": 1, "epochs": epochs} for name in SIZES}, "stop": "last"}

    for data, hps in ((mix(1), {"epochs": 2}), ({**mix(1), "stop": "repeat"}, {"epochs": -1, "max_steps": 100})):
        with raises_at(DataError, "are all limited", "54 samples", do="increase `epochs` of a source"):
            fit(tmp_path / "none", Points(), SIZES, data, hps=hps)
    first, second = Points(), Points()
    fit(tmp_path / "run", first, SIZES, mix(1))
    fit(tmp_path / "run", second, SIZES, mix(2), hps={"epochs": 2}, resume=True)
    for module in (first, second):
        assert sorted(sample for samples, _, _ in module.seen for sample in samples) == [*range(sum(SIZES.values()))]


def trained_by(module: Points) -> list[int]:
    return [sample for samples, _, _ in module.seen for sample in samples]


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_batches": 3},
        {"limit_batches": {"train": 0.5}},
        {"data_options": {"drop_last": True}},
        {"limit_batches": 3, "hps": {"max_tokens": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize("data", [{}, {"stop": "repeat", "hps": {"epochs": -1, "max_steps": 11}}], ids=str)
def test_the_next_epoch_begins_with_what_a_limit_or_drop_last_left_out(
    tmp_path: Path, settings: dict[str, Any], data: dict[str, Any]
):
    hps = {"epochs": 4, **data.get("hps", {}), **settings.get("hps", {})}
    section = {"mix": MIX, **({"stop": data["stop"]} if data else {})}
    options = {**settings, "shuffle_train": False, "checkpoint_every": "1 steps", "hps": hps}
    whole, rest = Points(), Points()
    if "max_tokens" in hps:
        whole.length_of = rest.length_of = lambda sample: 1
    unbroken = fit(tmp_path / "whole", whole, SIZES, section, **options)
    trained = np.array(trained_by(whole))
    begin = 0
    for name, size in SIZES.items():
        own = trained[(trained >= begin) & (trained < begin + size)] - begin
        assert own.tolist() == (np.arange(len(own)) % size).tolist(), "none left out, none twice"
        values = [row["values"] for row in read_history(unbroken.run.tracking.run_folder) if "values" in row]
        assert max(one.get(f"samples_seen__{name}", 0) for one in values) == len(own)
        begin += size
    assert unbroken.state.samples_seen == len(trained)
    stop = unbroken.state.global_step - 2
    with pytest.raises(InterruptionError):
        fit(tmp_path / "parts", Points() if "max_tokens" not in hps else rest, SIZES, section,
            callbacks=InterruptAt(stop), **options)  # fmt: skip
    rest.seen.clear()
    rest.model.load_state_dict(Points().model.state_dict())
    fit(tmp_path / "parts", rest, SIZES, section, resume=True, **options)
    assert trained_by(rest) == trained.tolist()[-len(trained_by(rest)) :]
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))


def test_another_limit_at_a_resume_leaves_nothing_out(tmp_path: Path):
    options: dict[str, Any] = {"shuffle_train": False, "checkpoint_every": "1 steps", "hps": {"epochs": 3}}
    first, second = Points(), Points()
    with pytest.raises(InterruptionError):
        fit(tmp_path, first, SIZES, limit_batches=4, callbacks=InterruptAt(6), **options)
    fit(tmp_path, second, SIZES, limit_batches=3, resume=True, **options)
    trained = np.array(trained_by(first)[: 6 * 4] + trained_by(second))
    assert len(trained) == 4 * (4 + 3 + 3)
    of_news = trained[trained < SIZES["news"]]
    assert of_news.tolist() == (np.arange(len(of_news)) % SIZES["news"]).tolist()


def test_overfitting_repeats_the_same_batches(tmp_path: Path):
    module = Points()
    fit(tmp_path, module, SIZES, hps={"epochs": 3}, overfit_batches=2)
    trained = trained_by(module)
    assert len(trained) == 3 * 2 * 4
    assert trained == trained[:8] * 3


@pytest.mark.parametrize(
    ("before", "after", "place", "got"),
    [
        ({"limit": 5}, {"limit": 1}, "in a resumed run", "(news: 12 of 10, code: 12 of 10)"),
        ({"limit": 5, "max_steps": 12, "batch_size": 8}, {"limit": 2, "max_steps": 10}, "in a resumed run", "48"),
        ({"limit": 5, "max_steps": 12, "batch_size": 8}, {"limit": 3, "max_steps": 13}, "all limited", "step 9"),
        ({"limit": 5, "stop": "last", "epochs": 4}, {"limit": 1, "stop": "last", "epochs": 2}, "limited", "epoch 2"),
    ],
)
def test_lower_limits_than_what_was_read_before_a_resume_are_an_error(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], place: str, got: str
):
    def settings(limit: int, stop: str = "repeat", **hps: Any) -> dict[str, Any]:
        mix = {name: {"weight": 1, "epochs": limit} for name in ("news", "code")}
        return {"data": {"mix": mix, "stop": stop}, "hps": hps}

    sizes = {"news": 10, "code": 10}
    with pytest.raises(InterruptionError):
        fit(tmp_path, Points(), sizes, callbacks=InterruptAt(6), checkpoint_every="1 steps", **settings(**before))
    with raises_at(DataError, place, got):
        fit(tmp_path, Points(), sizes, resume=True, **settings(**after))


def test_a_run_that_ended_with_its_sources_is_complete_with_higher_limits_too(tmp_path: Path):
    def settings(limit: int) -> dict[str, Any]:
        return {"mix": {name: {"weight": 1, "epochs": limit} for name in SIZES}, "stop": "repeat"}

    first, second = Points(), Points()
    ended = fit(tmp_path, first, SIZES, settings(1))
    again = fit(tmp_path, second, SIZES, settings(2), resume=True)
    assert sorted(trained_by(first)) == [*range(sum(SIZES.values()))]
    assert (trained_by(second), again.state.global_step) == ([], ended.state.global_step)


def test_more_steps_continue_a_run_that_repeats_its_sources(tmp_path: Path):
    data = {"mix": {"news": {0: 1, 3: 0.5, 8: 0}, "code": {0: 0, 3: 0.5, 8: 1}, "chat": 0}}
    settings: dict[str, Any] = {"checkpoint_every": "2 steps"}
    whole = Points()
    fit(tmp_path / "whole", whole, SIZES, data, hps={"epochs": -1, "max_steps": 12}, **settings)
    fit(tmp_path / "parts", Points(), SIZES, data, hps={"epochs": -1, "max_steps": 6}, **settings)
    rest = Points()
    fit(tmp_path / "parts", rest, SIZES, data, hps={"epochs": -1, "max_steps": 12}, resume=True, **settings)
    assert len(rest.seen) == 6
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))


def test_the_best_model_of_one_source_is_saved(tmp_path: Path):
    trainer = fit(tmp_path, Points(), SIZES, model_saving="best_valid_loss@code")
    assert set(trainer.state.best_metrics) >= {"val_loss__news", "val_loss__code", "val_loss__chat"}
    assert trainer.state.best["best_valid_loss@code"] == trainer.state.metrics["val_loss__code"]


def test_without_losses_of_samples_the_reason_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trainer = fit(tmp_path, Points(of_samples=False), SIZES)
    assert "the training loss of each source is not logged" in caplog.text
    for row in rows_of(trainer):
        assert not any(name.startswith("train_loss__") for name in row)
        assert row["samples_seen__news"] > 0


class Drawing(Dataset[Any]):
    """Points with noise of a generator of their own, whose seed the system draws."""

    def __init__(self, begin: int) -> None:
        self.begin, self.rng = begin, np.random.default_rng()

    def __getitem__(self, index: int) -> Any:
        return (torch.tensor([self.begin + index + float(self.rng.random())]),)

    def __len__(self) -> int:
        return 12


def test_the_generators_of_sources_are_seeded(tmp_path: Path):
    def run(name: str) -> list[list[float]]:
        module = Points()
        settings = {"seed": 1, "verbose": False, "model_saving": None, "logging_dir": tmp_path / "logs"}
        trainer = Trainer({**HPS, "data": {"mix": {"a": 1, "b": 1}}}, tmp_path / name, **settings)
        trainer.fit(module, {"a": Drawing(0), "b": Drawing(20)})
        return [losses for _, losses, _ in module.seen]

    assert run("one") == run("other")


def test_losses_of_samples_that_lack_a_penalty_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Penalized(Points):
        def training_step(self, batch: Any) -> Any:
            result = super().training_step(batch)
            return {**result, "loss": result["loss"] + (self.model.weight - 1).square().sum()}

    fit(tmp_path / "own", Points(), SIZES)
    assert "the losses of samples average to" not in caplog.text
    fit(tmp_path / "penalized", Penalized(), SIZES)
    assert "the losses of samples average to" in caplog.text


def test_a_batch_size_is_searched_on_a_mixture(tmp_path: Path):
    trainer = Trainer({**HPS, "data": {"mix": MIX}}, tmp_path / "m", verbose=False, model_saving=None)
    begins = [0, 10, 24]
    sources = {name: numbers(begin, size) for (name, size), begin in zip(SIZES.items(), begins, strict=True)}
    assert trainer.tune(Points(), sources, batch_size="power", lr=None).batch_size > 4


def test_a_step_that_is_replayed_without_samples_knows_those_that_are_left():
    mixture = mix(SIZES, {"mix": MIX})
    source = build_source(
        mixture, SourceOptions(purpose="train", batch_size=4, seed=1, sampler=order_of(mixture), shard=Shard(0, 1))
    )
    whole = [[int(sample) for sample in batch.samples] for batch in source.micro_batches(0)]
    maker = WatchedMaker(ByCount(), {whole[2][1]}, [(0, 2, 3)])
    left = [batch for window in maker.windows(source, 0, 0) for batch in window.units]
    whole[2].pop(1)
    for batch, samples in zip(left, whole, strict=True):
        assert [int(sample) for sample in batch.samples] == batch.batch[0].flatten().tolist() == samples


# ---- Streams


class Counting(IterableDataset[Any]):
    """A stream of samples like those of `numbers`, from a place that depends on the epoch."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size, self.epoch = begin, size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for number in range(self.size):
            yield (torch.tensor([float(self.begin + (number + self.epoch) % self.size)]),)


def fit_streams(folder: Path, module: Any, data: Any = None, hps: Any = None, **settings: Any) -> Trainer:
    given = {"seed": 1, "log_every": 2, "verbose": False, "logging_dir": folder / "logs", "checkpoint": folder / "ckpt"}
    values = {**HPS, "data": data or {"mix": MIX}, **(hps or {})}
    trainer = Trainer(values, folder / "model", **{**given, "model_saving": None, **settings})
    trainer.fit(module, {"news": numbers(0, 10), "code": Counting(10, 14), "chat": Counting(24, 30)})
    return trainer


@pytest.mark.parametrize("settings", [{}, {"dataloader_num_workers": 1}], ids=["here", "in a worker"])
def test_streams_are_mixed_in_the_same_shares_with_the_loss_of_each(tmp_path: Path, settings: Any):
    module = Points()
    trainer = fit_streams(tmp_path, module, hps={"epochs": 2}, **settings)
    trained = [sample for samples, _, _ in module.seen for sample in samples]
    sources = np.searchsorted([10, 24, 54], trained, side="right")
    length = len(trained) // 2
    for number, share in enumerate((0.5, 0.3, 0.2)):
        of_epoch = np.cumsum(sources[:length] == number)
        assert (np.abs(of_epoch - share * np.arange(1, length + 1)) < 1).all()
    assert sorted(sample for sample in trained[:length] if sample < 10) == [*range(10)]
    assert [sample for sample in trained[:length] if 10 <= sample < 24] == [*range(10, 16)]
    assert [sample for sample in trained[length:] if 10 <= sample < 24] == [*range(11, 17)], "set_epoch was called"
    row, losses = rows_of(trainer)[0], {name: [] for name in SIZES}
    for samples, of_samples, _ in module.seen[:2]:
        for sample, loss in zip(samples, of_samples, strict=True):
            losses[list(SIZES)[int(np.searchsorted([10, 24, 54], sample, side="right"))]].append(loss)
    for name, own in losses.items():
        assert row[f"train_loss__{name}"] == pytest.approx(sum(own) / len(own), rel=1e-6)
        assert row[f"samples_seen__{name}"] == len(own)


@pytest.mark.parametrize("stop", ["first", "last", "repeat"])
def test_streams_resume_with_the_same_bits(tmp_path: Path, stop: str):
    data = {"mix": MIX, "stop": stop}
    hps = {"epochs": -1, "max_steps": 30} if stop == "repeat" else {"epochs": 2}
    settings: dict[str, Any] = {"data": data, "hps": hps, "checkpoint_every": "2 steps", "log_every": 3}
    whole, rest = Points(), Points()
    unbroken = fit_streams(tmp_path / "whole", whole, **settings)
    with pytest.raises(InterruptionError):
        fit_streams(tmp_path / "parts", Points(), callbacks=InterruptAt(4), **settings)
    resumed = fit_streams(tmp_path / "parts", rest, resume=True, **settings)
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    assert rows_of(resumed) == rows_of(unbroken)
    if stop != "first":
        news = [sample for samples, _, _ in whole.seen for sample in samples if sample < 10]
        assert sorted(news[:10]) == sorted(news[10:20]) == [*range(10)]
        assert news[:10] != news[10:20]
    if stop == "repeat":
        code = [sample for samples, _, _ in whole.seen for sample in samples if 10 <= sample < 24]
        assert sorted(code[:14]) == sorted(code[14:28]) == [*range(10, 24)]
        assert code[:14] != code[14:28], "the stream was told that it begins again"


def test_a_mixture_of_streams_does_not_resume_with_other_weights_within_an_epoch(tmp_path: Path):
    with pytest.raises(InterruptionError):
        fit_streams(tmp_path, Points(), callbacks=InterruptAt(3), checkpoint_every="2 steps")
    with raises_at(DataError, "the training data of a resumed epoch", "mixture"):
        fit_streams(tmp_path, Points(), {"mix": {**MIX, "news": 0.4}}, resume=True)


def test_an_iterator_cannot_be_repeated(tmp_path: Path):
    trainer = Trainer({**HPS, "data": {"mix": {"a": 1, "b": 1}, "stop": "last"}}, tmp_path / "m", model_saving=None)
    with raises_at(DataError, "several sources", "pass 2", "'a'"):
        trainer.fit(Points(), {"a": iter(list(numbers(0, 3))), "b": numbers(3, 9)})


# ---- Bad input


@each(
    ("data", "place", "got"),
    [
        ({"mix": {}}, "", "{}"),
        ({"mix": {"a": -0.5, "b": 1}}, ".mix.a", "-0.5"),
        ({"mix": {"a": 0, "b": 0}}, ".mix", "sum to 0"),
        ({"mix": {"a": "half", "b": 1}}, ".mix.a", "'half'"),
        ({"mix": {"a": "rest", "b": "rest"}}, ".mix", "`rest` for a and b"),
        ({"mix": {"a__b": 1}}, ".mix.a__b", "'a__b'"),
        ({"mix": {"a": {"weight": 1, "epochs": 0}}}, ".mix.a.epochs", "0"),
        ({"mix": {"a": {"epochs": 1}}}, ".mix.a", "`weight`"),
        ({"mix": {"a": {0: 1, 5: 0}, "b": {0: 1, 5: 0}}}, ".mix", "sum to 0 from step 5"),
        ({"mix": {"a": {0: 1, 5: 2}}, "stop": "first"}, ".stop", "'first'"),
        ({"mix": {"a": 1}, "unit": "token"}, ".unit", "'token'"),
    ],
)
def test_invalid_weights_are_reported_with_their_place(data: Any, place: str, got: str):
    with raises_at(HyperParameterError, f"hps_config data{place}", got):
        Trainer({**HPS, "data": data}, "unused")


ONE = numbers(0, 3)


@each(
    ("mix", "sources", "got", "do"),
    [
        (None, {"a": ONE, "b": ONE}, "a, b", "data: {mix: {"),
        (None, {"train": ONE, "test": ONE}, "train, test", 'data["train"]'),
        ({"news": 1, "cod": 1}, {"news": ONE, "code": ONE}, "news, code", "rename `cod` in `data.mix` to `code`"),
        ({"a": 1, "b": 1}, {"a": ONE, "c": ONE}, "a, c", "remove `b`"),
    ],
)
def test_weights_of_other_sources_are_reported(mix: Any, sources: Any, got: str, do: str):
    trainer = Trainer({**HPS, **({} if mix is None else {"data": {"mix": mix}})}, "unused", verbose=False)
    with raises_at(ArgumentError, "the training data of several sources", got, do=do):
        trainer.fit(Points(), sources)


@each(
    ("sources", "where", "got"),
    [
        (ONE, "several sources", "TensorDataset"),
        ({"a": ONE, "b": []}, "the source 'b'", "no samples"),
        ({"a": ONE, "b": DataLoader(ONE)}, "the source 'b'", "DataLoader"),
        ({"a": ONE, "b": Counting(9, 3)}, "streams", "`epochs`"),
        ({"a": [{"x": 1}], "b": [{"y": 1}]}, "several sources", "y in 'b', but x in 'a'"),
        ({"a": [{"x": 1}], "b": [(1, 2)]}, "several sources", "tuples of 2 in 'b', but x in 'a'"),
    ],
)
def test_invalid_sources_are_reported(sources: Any, where: str, got: str):
    weight = {"weight": 1, "epochs": 2} if where == "streams" else 1
    trainer = Trainer({**HPS, "data": {"mix": {"a": weight, "b": 1}}}, "unused", verbose=False)
    with raises_at(DataError, where, got):
        trainer.fit(Points(), sources)


@each(
    ("settings", "got"),
    [
        ({"sampler": [0, 1]}, "sampler"),
        ({"data_options": {"group_by_length": True}}, "group_by_length"),
        ({"hps": {"data": {"mix": {"news": 1, "code": 1, "chat": 1}, "stop": "repeat"}}}, "`stop: repeat`"),
        ({"hps": {"data": {"mix": {"news": {0: 1, 5: 0}, "code": 1, "chat": 1}}}}, "without max_steps"),
    ],
)
def test_other_orders_are_rejected(settings: dict[str, Any], got: str, tmp_path: Path):
    with raises_at(ArgumentError, "training on a mixture", got):
        fit(tmp_path, Points(), SIZES, **settings)


def test_a_run_does_not_resume_with_other_sources(tmp_path: Path):
    with pytest.raises(InterruptionError):
        fit(tmp_path, Points(), SIZES, callbacks=InterruptAt(3), checkpoint_every="2 steps")
    with raises_at(DataError, "the sources of a mixture", "chat: 31 samples", expected="chat: 30 samples"):
        fit(tmp_path, Points(), {**SIZES, "chat": 31}, resume=True)
    renamed = {{"code": "source"}.get(name, name): size for name, size in SIZES.items()}
    with raises_at(DataError, "the sources of a mixture", do="rename `source` to `code`"):
        fit(tmp_path, Points(), renamed, {"mix": {"news": 0.5, "source": 0.3, "chat": 0.2}}, resume=True)
    with raises_at(DataError, "the sources of a mixture", "stop: repeat", expected="stop: first"):
        fit(tmp_path, Points(), SIZES, {"mix": MIX, "stop": "repeat"}, hps={"max_steps": 9}, resume=True)


def test_a_step_that_returns_other_losses_is_reported(tmp_path: Path):
    class Wrong(Points):
        def training_step(self, batch: Any) -> Any:
            result = super().training_step(batch)
            return {**result, "losses": result["losses"][1:]}

    with raises_at(TypeError, "training_step"):
        fit(tmp_path, Wrong(), SIZES, num_sanity_val_steps=0)


def test_an_unreadable_sample_names_its_source(tmp_path: Path):
    class Broken(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            raise OSError("torn")

        def __len__(self) -> int:
            return 3

    trainer = Trainer({**HPS, "data": {"mix": {"good": 1, "bad": 1}}}, tmp_path / "m", verbose=False, model_saving=None)
    with pytest.raises(OSError, match="torn") as caught:
        trainer.fit(Points(), {"good": ONE, "bad": Broken()})
    assert "the source 'bad'" in "".join(caught.value.__notes__)
