"""Batches of samples of like length: their order, and what a resumed run has of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from accmt.addons.curricula import RatioCurriculum
from accmt.addons.token_batches.lengths import LengthGroupedSampler, group_dataset, group_stream
from accmt.data import Shard, SourceOptions, build_source
from accmt.errors import ArgumentError, DataError
from tests.pairs import pairs
from tests.raising import raises_at
from tests.toys import Stream
from tests.toys import pad_texts as pad
from tests.unit.test_loop_token_budget import LENGTHS, NUMBER, Break, BrokenError, Shaky, Texts, run

BATCH = 8


def draw(lengths: Any, batch_size: int = 4, seed: int = 0, *, shuffle: bool = True) -> list[int]:
    torch.manual_seed(seed)
    return LengthGroupedSampler(np.asarray(lengths), batch_size, shuffle=shuffle).draw().tolist()


def lengths_of_texts(number: int) -> list[int]:
    draws = random.Random(1)
    return [min(512, max(5, int(draws.lognormvariate(4.2, 0.75)))) for _ in range(number)]


def test_each_sample_comes_once_in_groups_of_50_batches_sorted_by_length() -> None:
    lengths = lengths_of_texts(1000)
    order = draw(lengths)
    assert sorted(order) == list(range(1000))
    assert lengths[order[0]] == max(lengths)
    groups = [[lengths[index] for index in order[start : start + 200]] for start in range(0, 1000, 200)]
    unsorted = sum(sorted(group, reverse=True) != group for group in groups)
    assert unsorted <= 1  # the one from whose place the longest came
    assert order != draw(lengths, seed=1)
    assert order == draw(lengths)


def test_without_shuffling_groups_are_those_of_the_data() -> None:
    lengths = lengths_of_texts(400)
    order = draw(lengths, 2, shuffle=False)
    groups = [{index // 100 for index in order[start : start + 100]} for start in range(0, 400, 100)]
    longest = lengths.index(max(lengths)) // 100  # which comes first, and the one that was there in its place
    assert groups == [{number} | ({0, longest} if number in (0, longest) else set()) for number in range(4)]


class Repeated(Texts):
    """The texts again and again."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index % NUMBER)


class DrawingStream(Stream):
    """The texts without a length, drawing while they are read."""

    def __init__(self) -> None:
        super().__init__(Texts(draws=True))
        self.number = NUMBER


class Stateful(DrawingStream):
    """Keeps its position."""

    start = position = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for index in range(start, self.number):
            self.position = index + 1
            yield self.values[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]


def hub_stream() -> Any:
    texts = Texts()
    return datasets.Dataset.from_list([texts[index] for index in range(NUMBER)]).to_iterable_dataset(num_shards=3)


def loader_of(data: Any, shard: Shard, batch_size: int) -> Any:
    options = SourceOptions(
        purpose="train", batch_size=batch_size, shard=shard, seed=3, collate=lambda samples: samples
    )
    if isinstance(data, IterableDataset):
        return build_source(
            data, SourceOptions(**vars(options) | {"group_stream": partial(group_stream, batch_size=2)})
        )
    return build_source(data, SourceOptions(**vars(options) | {"sampler": group_dataset(data, None, 2, shuffle=True)}))


@pytest.mark.parametrize("make_data", [lambda: [Texts()[index] for index in range(NUMBER)], DrawingStream])
def test_the_order_is_that_of_one_process(make_data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accmt.data.planned.require_same_everywhere", lambda *_: None)  # one process plays both
    alone = [s["index"] for m in loader_of(make_data(), Shard(), 4).micro_batches(1) for s in m.batch]
    halves = [list(loader_of(make_data(), Shard(rank, 2), 2).micro_batches(1)) for rank in (0, 1)]
    together = [s["index"] for both in zip(*halves, strict=True) for half in both for s in half.batch or []]
    assert together == alone
    assert sorted(alone) == list(range(NUMBER))


def noisy_pad(samples: list[Any]) -> Any:
    batch = pad([{name: value for name, value in sample.items() if name != "noise"} for sample in samples])
    batch["label"] = (batch["label"] + torch.randint(3, (1,))) % 3
    return batch


KINDS: dict[str, Any] = {
    "list": lambda: [Texts()[index] for index in range(NUMBER)],
    "stream": DrawingStream,
    "stateful": Stateful,
    "hub": hub_stream,
}


@pytest.mark.parametrize(("kind", "after", "workers"), pairs(KINDS, [1, 3, 8], [0, 1]))
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    tmp_path: Path, kind: str, after: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accmt.addons.token_batches.lengths._BATCHES", 2)  # buffers of 4 samples
    settings = {
        "dataloader_num_workers": workers,
        "checkpoint_every": "1 step",
        "data_options": {"group_by_length": True},
    }
    settings |= {"hps": {"max_tokens": None, "batch_size": 2}, "collate_fn": noisy_pad}
    limits = {"limit_batches": {"train": 7}}
    whole, _ = run(tmp_path / "whole", module=Shaky(), data=KINDS[kind](), **settings, **limits)
    with pytest.raises(BrokenError):
        run(
            tmp_path / "broken",
            module=Shaky(),
            data=KINDS[kind](),
            **settings,
            **limits | {"callbacks": [Break(after)]},
        )
    resumed, _ = run(tmp_path / "broken", module=Shaky(), data=KINDS[kind](), resume="auto", **settings, **limits)
    for expected, got in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_a_stateful_stream_reads_only_its_buffer_again(tmp_path: Path) -> None:
    settings = {"checkpoint_every": "1 step", "data_options": {"group_by_length": True}}
    settings |= {"hps": {"max_tokens": None, "batch_size": 1, "epochs": 1}, "limit_batches": {"train": 12}}
    long = Stateful()
    long.number, long.values = 240, Repeated()
    with pytest.raises(BrokenError):
        run(tmp_path, data=long, **settings, callbacks=[Break(5)])
    assert sum(long.values.reads.values()) == 50
    again = Stateful()
    again.number, again.values = 240, Repeated()
    settings["limit_batches"] = {"train": 55}
    _, recorder = run(tmp_path, data=again, resume="auto", **settings)
    assert recorder.state_after.samples_seen == 55
    assert sum(again.values.reads.values()) == 100


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_training_uses_like_lengths(tmp_path: Path, max_tokens: int | None) -> None:
    data = [Texts()[index] for index in range(NUMBER)]
    hps = {"max_tokens": max_tokens, "batch_size": 4}
    plain, _ = run(tmp_path / "plain", data=data, hps=hps)
    module, recorder = run(tmp_path / "grouped", data=data, hps=hps, data_options={"group_by_length": True})
    assert sorted(index for batch in module.batches for index in batch) == sorted(2 * list(range(NUMBER)))
    if max_tokens is None:
        assert sum(r * w for r, w in module.shapes) < 0.9 * sum(r * w for r, w in plain.shapes)
        assert LENGTHS[module.batches[0][0]] == max(LENGTHS)
    assert recorder.state_after.samples_seen == 2 * NUMBER


def test_data_whose_lengths_are_not_known_say_what_to_do(tmp_path: Path) -> None:
    with raises_at(DataError, 'Trainer(data_options={"group_by_length": True})', "a Texts"):
        run(tmp_path, data=Texts(), data_options={"group_by_length": True})

    class Wrong(Texts):
        lengths = (1, 2)

    with raises_at(DataError, 'Trainer(data_options={"group_by_length": True})', "2 lengths", expected="45 lengths"):
        run(tmp_path, data=Wrong(), data_options={"group_by_length": True})


class Known(Texts):
    """Says its lengths."""

    lengths = LENGTHS


def test_another_order_beside_it_is_rejected(tmp_path: Path) -> None:
    with raises_at(ArgumentError, 'Trainer(sampler=..., data_options={"group_by_length": ...})'):
        run(tmp_path, data=Known(), data_options={"group_by_length": True}, sampler=list(range(NUMBER)))


def test_a_curriculum_decides_the_order_itself(tmp_path: Path) -> None:
    curriculum = RatioCurriculum([(0.5, Known()), (0.5, Known())])
    with raises_at(ArgumentError, "training on a curriculum"):
        run(tmp_path, data=curriculum, data_options={"group_by_length": True}, hps={"epochs": -1, "max_steps": 4})
