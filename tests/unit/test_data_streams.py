import gc
import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accmt.addons.streams import StreamSource, UserLoaderSource
from accmt.data import Shard, SourceOptions, build_source
from accmt.errors import DataError
from accmt.messages import speaking
from tests.raising import raises_at
from tests.toys import Linear, SizedStream, Stream, make_trainer


class Shuffled(Stream):
    """A stream that shuffles in a small buffer and augments, with the global generators, while it is read."""

    def __iter__(self):
        waiting = []
        for number in self.values:
            waiting.append(number)
            if len(waiting) == 4:
                yield self.augment(waiting.pop(random.randrange(4)))
        yield from map(self.augment, waiting)

    def augment(self, number):
        return torch.tensor([number, torch.rand(1).item(), float(np.random.rand())], dtype=torch.float64)


class Plain:
    """Anything that can be iterated anew."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 2, "seed": 3, **settings})


def build_all(make, count, **settings):
    return [build_source(make(), options(shard=Shard(index, count), **settings)) for index in range(count)]


def micro_batches_of_all(loaders, epoch=0, first=0):
    """Read all processes' loaders and check that they agree on the micro-batches and on the end."""
    of_all = [list(loader.micro_batches(epoch, first)) for loader in loaders]
    for micro_batches in zip(*of_all, strict=True):
        assert len({(r.index, r.num_samples, r.is_last, r.is_partial) for r in micro_batches}) == 1
        assert micro_batches[0].is_partial == any(r.batch is None for r in micro_batches)
        assert micro_batches[0].is_last == (micro_batches[0].index == of_all[0][-1].index)
    assert [r.index for r in of_all[0]] == list(range(first, first + len(of_all[0])))
    return of_all


def in_global_order(loaders, epoch=0, first=0):
    of_all = micro_batches_of_all(loaders, epoch, first)
    return [
        int(s)
        for micro_batches in zip(*of_all, strict=True)
        for r in micro_batches
        if r.batch is not None
        for s in r.batch
    ]


@pytest.mark.parametrize("kind", [Stream, SizedStream, Plain])
def test_every_sample_of_a_stream_is_seen_once_over_all_processes_in_its_order(kind):
    for length in (1, 2, 3, 5, 8, 12, 13):
        for batch_size in (1, 2, 5):
            for count in (1, 2, 3, 4):
                loaders = build_all(lambda: kind(length), count, batch_size=batch_size)  # noqa: B023
                assert in_global_order(loaders) == list(range(length)), (length, batch_size, count)


def test_the_last_round_of_a_stream_is_split_as_evenly_as_can_be():
    of_all = micro_batches_of_all(build_all(lambda: Stream(13), 3))
    assert [[r.own_samples for r in micro_batches] for micro_batches in of_all] == [[2, 2, 1], [2, 2, 0], [2, 2, 0]]
    assert [r.num_samples for r in of_all[0]] == [6, 6, 1]
    assert [r.is_partial for r in of_all[0]] == [False, False, True]


@pytest.mark.parametrize("data", [[1, 2, 3].__reversed__, lambda: {4: 1, 5: 2}.keys(), lambda: {"a": 7}.values()])
def test_anything_that_can_be_iterated_is_a_stream(data):
    expected = list(data())
    loader = build_source(data(), options())
    assert isinstance(loader, StreamSource)
    assert in_global_order([loader]) == expected


def test_a_stream_begins_anew_and_is_told_each_epoch():
    stream = Stream(3)
    loader = build_source(stream, options())
    assert in_global_order([loader], 0) == in_global_order([loader], 1) == [0, 1, 2]
    assert stream.epochs == [0, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_streaming_dataset_of_datasets_is_shared_and_shuffled_by_epoch(count):
    def make():
        data = datasets.Dataset.from_dict({"number": list(range(13))}).to_iterable_dataset(num_shards=3)
        return data.shuffle(seed=1, buffer_size=4)

    def numbers(epoch):
        of_all = micro_batches_of_all(build_all(make, count), epoch)
        return [
            int(n)
            for micro_batches in zip(*of_all, strict=True)
            for r in micro_batches
            if r.batch
            for n in r.batch["number"]
        ]

    assert sorted(numbers(0)) == list(range(13))
    assert numbers(0) == numbers(0) != numbers(1)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", [Stream, SizedStream, Plain, "datasets"])
def test_workers_read_the_same_samples_of_a_stream(kind, count):
    def make():
        if kind == "datasets":
            return datasets.Dataset.from_dict({"n": list(range(13))}).to_iterable_dataset(num_shards=2)
        return kind(13)

    loaders = build_all(
        make, count, num_workers=2, collate=lambda samples: [s["n"] if isinstance(s, dict) else s for s in samples]
    )
    for epoch in (0, 1):
        assert sorted(in_global_order(loaders, epoch)) == list(range(13))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("given", [False, True])
def test_each_worker_may_end_with_a_short_batch_whatever_the_length_says(given):
    """Two workers have 5 of 10 samples each, in batches of 4 and 1; a length of 10 would be 3 batches."""
    data = DataLoader(SizedStream(10), batch_size=4, num_workers=2) if given else SizedStream(10)
    (loader,) = build_all(lambda: data, 1, batch_size=4, num_workers=2)
    assert sorted(in_global_order([loader])) == list(range(10))


class Repeating(IterableDataset):
    """Knows nothing of workers: each reads all of it."""

    def __iter__(self):
        return iter(range(11))


@pytest.mark.parametrize("given", [False, True])
def test_workers_that_each_read_all_of_a_stream_are_an_error_outside_of_training(given, caplog, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # how long ending workers takes
    make = lambda: DataLoader(Repeating(), batch_size=4, num_workers=2) if given else Repeating()  # noqa: E731
    for purpose in ("validate", "test", "predict"):
        loader = build_source(make(), replace(options(num_workers=2), purpose=purpose))
        with pytest.raises(DataError, match=r"each sample appears 2 times[\s\S]*get_worker_info\(\)\.id"):
            list(loader.micro_batches(0))
        gc.collect()  # iterators that an error holds would end their workers while others are forked: seen to hang
    assert not caplog.records
    with speaking(verbose=False):  # in which it has not been said yet
        list(build_source(make(), options(num_workers=2)).micro_batches(0))
    assert "each sample appears 2 times" in caplog.text


def test_a_plain_iterable_which_knows_nothing_of_workers_gets_one():
    assert build_source(Plain(3), options(num_workers=2)).dataloader.num_workers == 1
    assert build_source(Stream(3), options(num_workers=2)).dataloader.num_workers == 2


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("given", [False, True])
def test_a_stream_that_draws_while_it_is_read_is_the_same_on_every_process(given, num_workers):
    def read(index, count, epoch=0, first=0, seed=3):
        data = DataLoader(Shuffled(12), batch_size=2, num_workers=num_workers) if given else Shuffled(12)
        loader = build_source(data, options(shard=Shard(index, count), num_workers=num_workers, seed=seed))
        batches = []
        for micro_batch in loader.micro_batches(epoch, first):
            batches.append(micro_batch.batch)
            torch.manual_seed(index)  # what the training of a process does in between
            random.seed(index)
            np.random.seed(index)
        return batches

    whole = read(0, 1)
    both = [batch for pair in zip(read(0, 2), read(1, 2), strict=True) for batch in pair]
    samples = torch.cat(whole)
    assert sorted(torch.cat(both)[:, 0].tolist()) == list(range(12))
    assert len(torch.unique(torch.cat(both), dim=0)) == 12
    assert len(torch.unique(samples[:, 1])) == len(torch.unique(samples[:, 2])) == 12
    if given:  # the same batches are read; ours are cut from twice as many samples
        assert torch.equal(torch.cat(both), samples)
    assert torch.equal(torch.cat(read(0, 1)), samples)
    assert torch.equal(torch.cat(read(0, 1, first=4)), samples[8:])
    assert not torch.equal(torch.cat(read(0, 1, epoch=1)), samples)
    assert not torch.equal(torch.cat(read(0, 1, seed=4)), samples)


def test_the_workers_of_a_stream_begin_each_epoch_with_its_seed():
    class Augmenting(IterableDataset):
        def __iter__(self):
            return (torch.rand(1) for _ in range(4))

    def read(epochs):
        loader = build_source(Augmenting(), options(num_workers=1))
        return [torch.cat([r.batch for r in loader.micro_batches(epoch)]) for epoch in epochs]

    assert torch.equal(read((0, 1))[1], read((1,))[0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_whole_number_limits_a_stream_and_the_last_round_knows(count):
    loaders = build_all(lambda: Stream(100), count, limit=3)
    assert loaders[0].num_micro_batches == 3
    assert in_global_order(loaders) == list(range(6 * count))
    assert build_all(lambda: Stream(100), count)[0].num_micro_batches is None


def test_a_limit_above_what_there_is_ends_with_the_stream():
    assert in_global_order(build_all(lambda: Stream(5), 2, limit=50)) == list(range(5))
    assert list(build_source(Stream(5), options(limit=0)).micro_batches(0)) == []


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
def test_a_stream_that_uses_the_model_has_the_weights_after_the_last_step(kind, accumulation):
    class Playing(kind):
        def __iter__(self):
            for _ in range(8):
                yield self.module.model.weight.detach().clone()

    class Learner(Linear):
        def training_step(self, batch):
            fresh.append(torch.equal(batch[0], self.model.weight))
            return self.model.weight.square().sum()

    fresh: list[bool] = []
    stream, module = Playing(8), Learner()
    stream.module = module
    make_trainer({"batch_size": 1}, grad_accumulation_steps=accumulation).fit(module, stream)
    assert fresh == [True] * 8


def test_a_stream_is_read_when_it_is_needed_and_no_further():
    read = []

    class Watched(Stream):
        def __iter__(self):
            for number in range(100):
                read.append(number)
                yield number

    micro_batches = build_source(Watched(100), options(limit=3)).micro_batches(0)
    first = next(micro_batches)
    assert read == [0, 1]
    assert not first.is_last  # which only the next one shows
    assert read == [0, 1, 2, 3]
    assert len(list(micro_batches)) == 2
    assert read == list(range(6))


@pytest.mark.parametrize(
    ("data", "own", "other"),
    [(Stream(9), "9 samples", "10 samples"), (DataLoader(Stream(9), 4), "3 batches", "2 batches")],
)
def test_streams_of_unequal_length_on_processes_are_an_error_with_both(data, own, other, monkeypatch):
    loader = build_source(data, options(batch_size=4, shard=Shard(0, 2)))
    assert len(list(loader.micro_batches(0))) == 2
    monkeypatch.setattr("accmt.data.base.gather_objects", lambda read: [read, other if isinstance(read, str) else read])
    with raises_at(DataError, "the training data", f"{own} on process 0, {other} on process 1"):
        list(loader.micro_batches(1))


@pytest.mark.parametrize("data", [Stream(8), Plain(8), DataLoader(Stream(8))], ids=["stream", "iterable", "loader"])
def test_a_fraction_of_an_unknown_length_is_rejected(data):
    with raises_at(DataError, "the training data", "0.25"):
        build_source(data, options(limit=0.25))


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_with_a_length_has_a_known_number_of_rounds(count):
    loaders = build_all(lambda: SizedStream(16), count)
    assert isinstance(loaders[0], StreamSource)
    assert loaders[0].num_micro_batches == 8 // count
    assert in_global_order(build_all(lambda: SizedStream(16), count, limit=0.25)) == list(range(4))
    given = build_all(lambda: DataLoader(SizedStream(15), batch_size=2), count)
    assert given[0].num_micro_batches == 8 // count
    assert build_all(lambda: SizedStream(16), count, num_workers=2)[0].num_micro_batches is None
    assert build_all(lambda: SizedStream(7), count, drop_last=True)[0].num_micro_batches == 7 // (2 * count)


def test_a_stream_that_is_shorter_than_it_says_ends_where_it_ends():
    loader = build_source(Says(5, 100), options())
    assert loader.num_micro_batches == 50
    assert in_global_order([loader]) == list(range(5))


class Says(Stream):
    """A stream of another length than it says."""

    def __init__(self, length, says):
        super().__init__(length)
        self.says = says

    def __len__(self):
        return self.says


SAYING = {
    "more": (20, {}, "is 20 samples, but iterating yields more: each epoch skips the rest"),
    "fewer": (30, {}, "is 30 samples, but iterating yields 24: the LR scheduler"),
    "as many": (24, {}, None),
    "a limit": (20, {"limit": 3}, None),
    "drop_last": (24, {"drop_last": True, "batch_size": 5}, None),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("saying", SAYING)
@pytest.mark.parametrize("kind", ["stream", "loader"])
def test_a_length_that_is_not_that_of_the_stream_is_a_warning_before_the_epoch_ends(kind, saying, count, caplog):
    says, settings, expected = SAYING[saying]
    if kind == "loader":
        expected = expected and expected.replace("30 samples", "15 batches").replace("20 samples", "10 batches")
        expected = expected and expected.replace("yields 24", "yields 12")
    data = (lambda: Says(24, says)) if kind == "stream" else (lambda: DataLoader(Says(24, says), batch_size=2))
    with speaking(verbose=True):
        for loader in build_all(data, count, **settings):
            for epoch in range(2):
                for micro_batch in loader.micro_batches(epoch):
                    assert not micro_batch.is_last or (expected or "") in caplog.text
    assert caplog.text.count("correct __len__") == (expected is not None)


def test_drop_last_leaves_out_the_last_round_of_a_stream():
    assert in_global_order(build_all(lambda: Stream(7), 2, drop_last=True)) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(11), batch_size=2),
        lambda: DataLoader(Stream(11), batch_size=2, num_workers=2),
        lambda: DataLoader([torch.arange(3), torch.arange(3, 11)], batch_size=None),
        lambda: DataLoader(range(11), batch_sampler=iter([[0, 1, 2], list(range(3, 11))])),
    ],
    ids=["stream", "stream with workers", "batches by the dataset", "batches without a length"],
)
def test_a_user_dataloader_that_cannot_be_cut_is_read_by_all_and_shared_by_batches(make, count):
    loaders = build_all(make, count, batch_size=99)
    assert isinstance(loaders[0], UserLoaderSource)
    assert sorted(in_global_order(loaders)) == list(range(11))


def test_a_dataloader_class_that_iterates_in_its_own_way_keeps_its_way():
    class Doubling(DataLoader):
        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    loaders = build_all(lambda: Doubling(range(5), batch_size=1), 2)
    assert in_global_order(loaders) == [0, 2, 4, 6, 8]
    assert loaders[0].num_micro_batches == 3


def test_persistent_workers_of_such_a_class_begin_anew_with_each_epoch():
    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    (loader,) = build_all(lambda: Own(Stream(4), batch_size=2, num_workers=1, persistent_workers=True), 1)
    for epoch in range(3):
        assert in_global_order([loader], epoch) == [0, 1, 2, 3]
    loader.end_workers()


def test_the_generator_of_such_a_loader_is_a_function_of_the_epoch_and_left_as_it_was():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    sampler = RandomSampler(range(9), generator=generator)

    def read(epoch):
        given = DataLoader(range(9), batch_size=None, sampler=sampler, generator=generator)
        return [r.batch for r in build_source(given, options()).micro_batches(epoch)]

    assert sorted(read(0)) == list(range(9))
    assert read(0) == read(0) != read(1)
    assert torch.equal(generator.get_state(), before)


def test_an_iterator_that_is_read_up_is_an_error_and_no_empty_epoch():
    loader = build_source(iter([1, 2, 3]), options())
    assert in_global_order([loader], 0) == [1, 2, 3]
    with raises_at(DataError, "the training data", "no samples"):
        list(loader.micro_batches(1))


@pytest.mark.parametrize("data", [Stream(0), Plain(0), DataLoader(Stream(0))], ids=["stream", "iterable", "loader"])
def test_a_stream_without_samples_is_an_error_when_it_is_read(data):
    loader = build_source(data, options())
    with raises_at(DataError, "the training data", "no samples"):
        next(loader.micro_batches(0))


def test_a_length_of_zero_is_an_error_at_once():
    with raises_at(DataError, "the training data", "a length of 0"):
        build_source(SizedStream(0), options())
    with raises_at(DataError, "the training data", "a length of 0"):
        build_source(DataLoader(SizedStream(0)), options())
