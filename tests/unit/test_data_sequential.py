import logging
import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accmt.checkpoint.state_dicts import decode, encode
from accmt.data import Shard, SourceOptions, build_source
from accmt.errors import DataError
from accmt.messages import speaking
from tests.pairs import pairs
from tests.raising import raises_at
from tests.tables import each
from tests.toys import SizedStream, Stream


def rows(length):
    """Numbers as samples of one value."""
    return torch.arange(float(length))[:, None]


def stream(length):
    return Stream(rows(length))


def sized(length):
    return SizedStream(rows(length))


class Shuffled(Stream):
    """A stream that shuffles in a small buffer and augments, with the global generators, while it is read."""

    def __iter__(self):
        waiting = []
        for number in self.values:
            waiting.append(number)
            if len(waiting) == 5:
                yield self.augment(waiting.pop(random.randrange(5)))
        yield from map(self.augment, waiting)

    def augment(self, number):
        return torch.tensor([number, torch.rand(1).item(), float(np.random.rand())])


class Resuming(Stream):
    """A stream that goes on from a state, once; its state is a live object."""

    def __init__(self, length):
        super().__init__(length)
        self.length = length
        self.epoch = 0
        self.begin = 0
        self.state = {"epochs": [], "next": 0}

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for number in range(begin, self.length):
            self.num_read += 1
            self.state["next"] = number + 1
            yield torch.tensor([number + 100.0 * self.epoch, torch.rand(1).item()])

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.begin = state["next"]


class ResumingIterable:
    """The same without torch."""

    def __init__(self, length):
        self.stream = Resuming(length)
        self.set_epoch, self.state_dict = self.stream.set_epoch, self.stream.state_dict
        self.load_state_dict = self.stream.load_state_dict

    def __iter__(self):
        return iter(self.stream)


class ResumingLoader(DataLoader):
    """A loader that counts its batches and goes on after them, in the manner of torchdata's."""

    begin = 0
    num_read = 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        self.at = begin
        indices = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(1)).split(self.batch_size)
        for batch in indices[begin:]:
            self.at += 1
            self.num_read += 1
            yield batch[:, None].float()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def plain_list(length):
    return type("Plain", (), {"__iter__": lambda self: iter(rows(length))})()


def streaming(length, **shuffle):
    data = datasets.Dataset.from_dict({"n": [[float(n)] for n in range(length)]}).to_iterable_dataset(num_shards=3)
    data = data.shuffle(seed=1, **shuffle) if shuffle else data
    return data.map(lambda sample: {"n": sample["n"]})


def loader_of(data, **settings):
    return lambda length: DataLoader(data(length), batch_size=3, **settings)


def stack(samples):
    return torch.stack([torch.tensor(s["n"]) if isinstance(s, dict) else s for s in samples])


def noisy(samples):
    """Collate with a draw, as one that masks words does."""
    return torch.cat([stack(samples), torch.rand(len(samples), 1)], 1)


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 2, "seed": 3, "collate": stack, **settings})


def build_all(make, length, count, **settings):
    return [build_source(make(length), options(shard=Shard(index, count), **settings)) for index in range(count)]


def read(loaders, epoch, first=0, last=None):
    """Read micro-batches of all processes; return (index, samples) of each, and the position after the last."""
    of_all, positions = [[] for _ in loaders], []
    for taken, loader in zip(of_all, loaders, strict=True):
        for micro_batch in loader.micro_batches(epoch, first):
            taken.append(micro_batch)
            torch.manual_seed(len(taken))  # what training does in between
            random.seed(len(taken))
            if micro_batch.index + 1 == last:
                break
        positions.append(decode(encode(loader.position(epoch, first + len(taken)))))
    assert all(position == positions[0] for position in positions)
    micro_batches = [[r for r in micro_batches if r.batch is not None] for micro_batches in zip(*of_all, strict=True)]
    return [(rs[0].index, torch.cat([r.batch for r in rs])) for rs in micro_batches], positions[0]


def continue_on(loaders, epoch, first, position):
    for loader in loaders:
        loader.resume_from(epoch, first, decode(encode(position)))
    return loaders


def samples_of(micro_batches):
    return [int(sample) for _, batch in micro_batches for sample in batch[:, 0]]


def same(micro_batches, others):
    return [i for i, _ in micro_batches] == [i for i, _ in others] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(micro_batches, others, strict=True)
    )


STREAMS = {
    "stream": stream,
    "with a length": sized,
    "plain": plain_list,
    "drawing": Shuffled,
    "with a state": Resuming,
    "plain with a state": ResumingIterable,
    "datasets": streaming,
    "datasets shuffled": lambda length: streaming(length, buffer_size=4),
}
LOADERS = {
    "loader of a stream": loader_of(stream),
    "loader of a drawing stream": loader_of(Shuffled),
    "loader of a stream with a length": loader_of(sized),
    "loader of a stream with a state": loader_of(Resuming),
    "loader of datasets": lambda length: DataLoader(streaming(length), batch_size=3, collate_fn=stack),
    "loader without automatic batches": lambda length: DataLoader(
        list(torch.arange(float(length)).split(3)), batch_size=None, collate_fn=lambda batch: batch[:, None]
    ),
    "loader with a state": lambda length: ResumingLoader(range(length), batch_size=3),
}
ALL = {**STREAMS, **LOADERS}


@pytest.mark.parametrize(("name", "settings", "count"), pairs(ALL, [{}, {"limit": 4}, {"drop_last": True}], [1, 2]))
def test_the_same_launch_resumes_as_if_it_had_never_stopped(name, settings, count):
    make = ALL[name]
    unbroken = build_all(make, 22, count, **settings)
    epochs = [read(unbroken, epoch)[0] for epoch in (0, 1, 2)]
    for first in (1, 3, len(epochs[1])):
        stopped = build_all(make, 22, count, **settings)
        read(stopped, 0)
        done, position = read(stopped, 1, last=first)
        assert same(done, epochs[1][:first])
        others = continue_on(build_all(make, 22, count, **settings), 1, first, position)
        rest, end = read(others, 1, first)
        assert same(rest, epochs[1][first:])
        assert same(read(others, 2)[0], epochs[2])
        others = continue_on(build_all(make, 22, count, **settings), 1, len(epochs[1]), end)
        assert list(others[0].micro_batches(1, first=len(epochs[1]))) == []


@pytest.mark.parametrize(
    ("make", "num_workers"), [*((make, 0) for make in STREAMS.values()), (stream, 1), (Shuffled, 1)]
)
def test_an_epoch_of_a_stream_interrupted_on_4_then_2_then_3_then_1_processes_has_each_sample_once(make, num_workers):
    settings = {"num_workers": num_workers}
    whole, _ = read(build_all(make, 41, 1, **settings), 1)
    samples, first, position = [], 0, {}
    for count, num_micro_batches in [(4, 2), (2, 3), (3, 1), (1, None)]:
        loaders = continue_on(build_all(make, 41, count, **settings), 1, first, position)
        micro_batches, position = read(
            loaders, 1, first, None if num_micro_batches is None else first + num_micro_batches
        )
        samples += samples_of(micro_batches)
        assert [index for index, _ in micro_batches] == list(range(first, first + len(micro_batches)))
        first += len(micro_batches)
    assert sorted(samples) == sorted(samples_of(whole))
    if make is not Shuffled or num_workers == 1:  # a stream that draws is seeded anew for each batch, whatever its size
        assert samples == samples_of(whole)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_an_epoch_of_a_loader_interrupted_on_4_then_2_then_3_then_1_processes_has_each_batch_once(make):
    whole, _ = read(build_all(make, 61, 1), 1)
    samples, first, position = [], 0, {}
    for count, num_micro_batches in [(4, 2), (2, 2), (3, 1), (1, None)]:
        loaders = continue_on(build_all(make, 61, count), 1, first, position)
        micro_batches, position = read(
            loaders, 1, first, None if num_micro_batches is None else first + num_micro_batches
        )
        samples += samples_of(micro_batches)
        first += len(micro_batches)
    assert samples == samples_of(whole)


@pytest.mark.parametrize(("kind", "num_workers"), [(stream, 1), (stream, 2), (Shuffled, 1)])
def test_workers_read_again_just_what_they_read(kind, num_workers):
    settings = {"num_workers": num_workers, "collate": noisy}
    whole, _ = read(build_all(kind, 17, 1, **settings), 1)
    done, position = read(build_all(kind, 17, 1, **settings), 1, last=3)
    others = continue_on(build_all(kind, 17, 1, **settings), 1, 3, position)
    rest, _ = read(others, 1, 3)
    assert same(done + rest, whole)
    assert same(read(others, 0)[0], read(build_all(kind, 17, 1, **settings), 0)[0])


@pytest.mark.parametrize("make", [Resuming, streaming, loader_of(Resuming), LOADERS["loader with a state"]])
def test_data_with_a_state_go_on_at_once(make, caplog):
    _, position = read(build_all(make, 60, 1), 0, last=8)
    (loader,) = continue_on(build_all(make, 60, 1), 0, 8, position)
    with caplog.at_level(logging.INFO, "accmt"):
        next(loader.micro_batches(0, first=8))
    assert not caplog.messages  # what is not compared was said at the resume
    for part in (loader.dataloader, loader.dataloader.dataset, getattr(loader.dataloader.dataset, "data", None)):
        assert getattr(part, "num_read", 0) <= 6  # this micro-batch and the one read ahead


def test_the_state_is_that_after_the_round_and_stays_so_while_reading_goes_on():
    (loader,) = build_all(Resuming, 20, 1)
    micro_batches = loader.micro_batches(0)
    next(micro_batches)
    first = loader.position(0, 1)
    assert first["state"] == {"epochs": [], "next": 2}  # though the micro-batch after it has been read
    next(micro_batches)
    assert first["state"]["next"] == 2
    assert loader.position(0, 2)["state"]["next"] == 4
    assert loader.position(0, 1) is first


def test_a_checkpoint_right_after_going_on_holds_the_same_position():
    _, position = read(build_all(Resuming, 20, 1), 0, last=3)
    (loader,) = continue_on(build_all(Resuming, 20, 1), 0, 3, position)
    assert loader.position(0, 3) == position
    micro_batches = loader.micro_batches(0, first=3)
    next(micro_batches)
    assert loader.position(0, 3) == position
    assert loader.position(0, 4)["state"]["next"] == 8


def test_a_position_that_is_asked_for_too_late_is_an_error():
    (loader,) = build_all(stream, 20, 1)
    for _ in loader.micro_batches(0):
        pass
    assert loader.position(0, 10)["samples"] == 20
    assert loader.position(0, 99)["samples"] == 20  # a process at its end, while others go on
    assert loader.position(1, 0) == {"kind": "stream", "samples": 0}
    with pytest.raises(LookupError, match="after micro-batch 2 of epoch 0 is no longer kept"):
        loader.position(0, 2)


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (stream, {}, "with state_dict and load_state_dict, and without workers"),
        (Resuming, {"num_workers": 1}, "only be used without workers"),
        (lambda length: streaming(length, buffer_size=4), {}, "the contents of the shuffle buffer"),
        (loader_of(stream), {}, "with state_dict and load_state_dict, and without workers"),
        (loader_of(Resuming, num_workers=1), {}, "only be used without workers"),
    ],
)
def test_reading_again_is_said_once_with_the_reason(make, settings, why, caplog):
    with speaking(verbose=True), caplog.at_level(logging.INFO, "accmt"):
        loaders = build_all(make, 40, 2, **settings)
        position = read(loaders, 0, last=3)[1]
        continue_on(build_all(make, 40, 2, **settings), 0, 3, position)
    (message,) = [m for m in caplog.messages if "read again" in m]
    assert "the training data are read again from the beginning of the epoch" in message
    assert why in message
    assert ("12 samples" in message) or ("6 batches" in message)


def other_stream(length):
    """As many other numbers."""
    return Stream(rows(length) + 100)


def in_batches(data):
    return lambda length: DataLoader(data(length), batch_size=None, collate_fn=lambda sample: sample[None])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_that_is_read_again_must_have_the_samples_of_before(count, num_workers):
    kept, other = (loader_of(data, num_workers=num_workers) for data in (stream, other_stream))
    _, position = read(build_all(kept, 24, 2), 0, last=2)
    read(continue_on(build_all(kept, 24, count), 0, 2, position), 0, 2)
    with raises_at(DataError, "of a resumed epoch", "indices"):
        read(continue_on(build_all(other, 24, count), 0, 2, position), 0, 2)


def test_a_loader_that_makes_no_batches_of_samples_says_that_its_batches_are_others(caplog):
    _, position = read(build_all(in_batches(stream), 12, 1), 0, last=2)
    for data, is_said in ((stream, False), (other_stream, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "accmt"):
            read(continue_on(build_all(in_batches(data), 12, 1), 0, 2, position), 0, 2)
        assert ("the training data changed since the interruption" in caplog.text) == is_said


def test_a_position_without_samples_is_compared_with_nothing():
    make = loader_of(stream)
    _, position = read(build_all(make, 24, 1), 0, last=2)
    older = {name: value for name, value in position.items() if name not in ("rows", "num_workers")}
    whole = samples_of(read(build_all(make, 24, 1), 0)[0])
    assert samples_of(read(continue_on(build_all(make, 24, 1), 0, 2, older), 0, 2)[0]) == whole[6:]


@pytest.mark.parametrize("make", [Resuming, LOADERS["loader with a state"], loader_of(Resuming)])
def test_that_a_state_is_not_compared_is_said_at_the_resume(make, caplog):
    _, position = read(build_all(make, 60, 1), 0, last=4)
    with speaking(verbose=True), caplog.at_level(logging.INFO, "accmt"):
        continue_on(build_all(make, 60, 1), 0, 4, position)
    assert caplog.messages == [
        "the training data resume from their own state_dict; accmt does not check whether they have changed since the "
        "interruption"
    ]


def test_a_state_that_was_not_kept_is_replaced_by_reading_again(caplog):
    whole = samples_of(read(build_all(Resuming, 20, 1), 0)[0])
    _, position = read(build_all(Resuming, 20, 1, num_workers=1), 0, last=3)
    assert "state" not in position
    with speaking(verbose=True), caplog.at_level(logging.INFO, "accmt"):
        others = continue_on(build_all(Resuming, 20, 1), 0, 3, position)
    assert "their state was not saved" in caplog.text
    assert samples_of(read(others, 0, 3)[0]) == whole[6:]


@each(("make", "length"), [(stream, None), (sized, 40)])
@each(("limit", "rest"), [(5, [6, 4]), (4, [4]), (3, []), (1, [])])
def test_a_limit_counts_samples_from_the_beginning_of_the_epoch(make, length, limit, rest):
    _, position = read(build_all(make, 40, 1, batch_size=5), 0, last=4)  # 20 samples
    (loader,) = continue_on(build_all(make, 40, 1, batch_size=6, limit=limit), 0, 4, position)
    assert loader.num_micro_batches == 4 + len(rest)
    assert [len(batch) for _, batch in read([loader], 0, 4)[0]] == rest
    assert loader.num_micro_batches == 4 + len(rest)
    list(loader.micro_batches(1))
    assert loader.num_micro_batches == limit
    if length is not None:
        (unlimited,) = continue_on(build_all(make, 40, 1, batch_size=6), 0, 4, position)
        assert unlimited.num_micro_batches == 4 + 4


def test_a_position_tells_how_the_epoch_was_read_so_that_it_can_be_read_again():
    _, position = read(build_all(stream, 60, 1, batch_size=5), 0, last=4)
    rows = position["rows"]
    assert len(rows) == 5
    fixed = {"kind": "stream", "readers": 1, "rows": rows, "in_worker": False}
    assert position == {**fixed, "reads": [[0, 5]], "samples": 20}
    _, position = read(continue_on(build_all(stream, 60, 2, batch_size=3, limit=5), 0, 4, position), 0, 4)
    assert (position["samples"], position["reads"]) == (30, [[0, 5], [20, 6]])  # the limit cut the last batch
    rest, position = read(continue_on(build_all(stream, 60, 1, batch_size=6), 0, 6, position), 0, 6)
    assert (position["samples"], position["reads"]) == (60, [[0, 5], [20, 6], [30, 6]])
    assert samples_of(rest) == list(range(30, 60))


def test_a_limit_of_a_loaders_batches_counts_from_the_beginning_of_the_epoch():
    make = loader_of(stream)
    _, position = read(build_all(make, 61, 4), 0, last=2)  # 8 batches
    others = continue_on(build_all(make, 61, 3, limit=4), 0, 2, position)
    assert others[0].num_micro_batches == 2 + 2  # 12 batches in all
    micro_batches, _ = read(others, 0, 2)
    assert samples_of(micro_batches) == list(range(24, 36))


def test_nothing_left_is_no_error_but_an_empty_epoch_is():
    for make in (stream, Resuming, loader_of(stream), loader_of(Resuming)):
        micro_batches, position = read(build_all(make, 6, 1), 0)
        (loader,) = continue_on(build_all(make, 6, 1), 0, len(micro_batches), position)
        assert list(loader.micro_batches(0, first=len(micro_batches))) == []
        assert samples_of(read([loader], 1)[0])
    with raises_at(DataError, "the training data", "no samples"):
        list(build_source(stream(0), options()).micro_batches(0))


def test_several_workers_cannot_resume_with_other_processes_or_workers():
    _, position = read(build_all(stream, 40, 1, num_workers=2), 0, last=3)
    for settings in ({"num_workers": 1}, {"num_workers": 0}, {"num_workers": 2, "batch_size": 4}):
        (other,) = build_all(stream, 40, 1, **settings)
        with raises_at(DataError, "of a resumed epoch", expected="2 and 2"):
            other.resume_from(0, 3, position)
    _, of_one = read(build_all(stream, 40, 1, num_workers=1), 0, last=3)
    (other,) = build_all(stream, 40, 1, num_workers=2)
    with raises_at(DataError, "of a resumed epoch", "2 workers and 2", expected="1 and 2"):
        other.resume_from(0, 3, of_one)


def test_a_loader_that_cuts_other_batches_cannot_resume():
    _, position = read(build_all(loader_of(stream), 40, 1), 0, last=3)
    for given in (DataLoader(stream(40), batch_size=4), DataLoader(stream(40), batch_size=3, num_workers=2)):
        with raises_at(DataError, "of a resumed epoch", "DataLoader", expected="{'batch_size': 3, 'readers': 1}"):
            build_source(given, options()).resume_from(0, 3, position)
    one_worker = build_source(DataLoader(stream(40), batch_size=3, num_workers=1), options())
    one_worker.resume_from(0, 3, position)
    assert samples_of(read([one_worker], 0, 3)[0]) == list(range(9, 40))


def test_a_position_of_another_kind_is_rejected():
    with raises_at(DataError, "of a resumed epoch", "dataset with a length", expected="a stream"):
        build_source(stream(8), options()).resume_from(0, 1, {"kind": "dataset with a length", "samples": 2, "of": 8})
    loader = build_source(stream(8), options())
    loader.resume_from(1, 0, {"kind": "dataset with a length", "samples": 0, "of": None})  # an epoch that begins
    assert samples_of(read([loader], 1)[0]) == list(range(8))
