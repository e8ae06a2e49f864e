import random
import traceback

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from accmt.data import SourceOptions, build_source
from accmt.data.fetching import BadSample, CollateFetched, Fetched, ReadableBatch, SeededDataset
from accmt.data.seeding import BatchIndices
from accmt.errors import DataError
from tests.raising import raises_at
from tests.toys import Linear, Stream, make_trainer


def draw():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


class Noisy:
    def __getitem__(self, index):
        return (index, *draw())

    def __len__(self):
        return 10


class Batched:
    def __init__(self):
        self.asked = []

    def __getitem__(self, index):
        raise AssertionError("a batch was to be fetched at once")

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [(index, *draw()) for index in indices]

    def __len__(self):
        return 10


class Broken(Noisy):
    """Samples of which some cannot be read; each good one has a draw of every generator."""

    def __init__(self, bad, error=None):
        self.bad = bad
        self.error = error

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index in self.bad:
            raise self.error or KeyError(f"label of {index}")
        return torch.tensor(sample, dtype=torch.float64)


class BrokenBatches(Broken):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def fetch(dataset, indices=(1, 2, 3), *, skips_bad=False):
    return SeededDataset(dataset, skips_bad=skips_bad).__getitems__(BatchIndices(indices, 7))


def text_of(error):
    return "".join(traceback.format_exception(error))


def read(data, **settings):
    loader = build_source(data, SourceOptions(**{"purpose": "train", "batch_size": 2, "seed": 3, **settings}))
    return list(loader.micro_batches(0))


@pytest.mark.parametrize("kind", [Noisy, Batched])
def test_a_batch_is_fetched_under_the_seed_that_it_carries(kind):
    dataset = SeededDataset(kind())
    first = dataset.__getitems__(BatchIndices([1, 2], 7))
    other = dataset.__getitems__(BatchIndices([1, 2], 8))
    assert dataset.__getitems__(BatchIndices([1, 2], 7)) == first
    assert other.samples != first.samples
    assert [sample[0] for sample in first.samples] == [1, 2]
    assert first.samples[0][1:] != first.samples[1][1:]


def test_a_seeded_dataset_is_read_by_index_too():
    dataset = SeededDataset(Noisy())
    assert len(dataset) == 10
    assert dataset[3][0] == 3


@pytest.mark.parametrize("kind", [Broken, BrokenBatches])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_says_of_which_batch_and_epoch_it_was(kind, workers):
    loader = build_source(kind({7}), SourceOptions(purpose="validate", batch_size=2, num_workers=workers))
    with pytest.raises(KeyError) as caught:
        list(loader.micro_batches(4))
    text = text_of(caught.value)
    assert f"reading sample 7 of {kind.__name__}" in text
    assert "raise self.error or KeyError" in text
    assert "loading batch 3 of epoch 5 of the validation data" in text
    loader.end_workers()


def test_a_batch_that_fails_only_as_a_whole_names_all_its_samples():
    class Whole(Noisy):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise OSError("the connection is lost")
            return [self[index] for index in indices]

    with pytest.raises(OSError, match="the connection is lost") as caught:
        fetch(Whole())
    assert caught.value.__notes__[0].startswith("reading the samples [1, 2, 3] of Whole")
    assert [sample[0] for sample in fetch(Whole(), skips_bad=True).samples] == [1, 2, 3]


def test_a_transform_of_a_datasets_dataset_that_fails_is_named():
    def decode(batch):
        return {"x": [1 / x for x in batch["x"]]}

    data = datasets.Dataset.from_dict({"x": [1, 2, 0, 4]}).with_transform(decode)
    with pytest.raises(ZeroDivisionError) as caught:
        read(data)
    assert "reading sample 2 of Dataset" in caught.value.__notes__[0]
    micro_batches = read(data, skips_bad=True)
    assert [micro_batch.batch["x"].tolist() for micro_batch in micro_batches] == [[1.0, 0.5], [0.25]]


def test_an_error_of_the_collate_function_names_the_samples():
    def fail(samples):
        return samples[0]["ids"]

    with pytest.raises(TypeError) as caught:
        CollateFetched(fail)(Fetched([1, 2], [4, 5, 6], (BadSample(5, ""),)))
    where, got, expected, _ = caught.value.__notes__[0].splitlines()
    assert where == "making a batch of the samples [4, 6]"
    assert got == "  got: TypeError: 'int' object is not subscriptable"
    assert expected.endswith(
        "samples that test_an_error_of_the_collate_function_names_the_samples.<locals>.fail can collate"
    )


def test_an_error_that_is_explained_already_gets_the_samples_only():
    class Uneven(Noisy):
        def __getitem__(self, index):
            return torch.zeros(index)

    with raises_at(DataError, "making a batch") as caught:
        read(Uneven())
    assert caught.value.__notes__[0] == "making a batch of the samples [0, 1]"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.OutOfMemoryError("no"),
        KeyboardInterrupt(),
    ],
)
@pytest.mark.parametrize("skips_bad", [False, True])
@pytest.mark.parametrize("kind", [Broken, BrokenBatches])
def test_what_is_no_fault_of_a_sample_passes_untouched(error, skips_bad, kind):
    error.__dict__.clear()
    with pytest.raises(type(error)) as caught:
        fetch(kind({2}, error), skips_bad=skips_bad)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    with pytest.raises(type(error)) as caught:
        CollateFetched(Broken({2}, error).__getitem__, skips_bad)(Fetched(2, [2]))
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("kind", [Broken, BrokenBatches])
def test_bad_samples_are_left_out_and_described(kind):
    fetched = fetch(kind({1, 3}), [0, 1, 2, 3, 4], skips_bad=True)
    assert [int(sample[0]) for sample in fetched.samples] == [0, 2, 4]
    assert fetched.bad == (BadSample(1, "KeyError: 'label of 1'"), BadSample(3, "KeyError: 'label of 3'"))
    again = fetch(kind({1, 3}), [0, 1, 2, 3, 4], skips_bad=True)
    assert all(map(torch.equal, fetched.samples, again.samples))


def test_an_error_of_the_collate_function_is_no_bad_sample():
    with pytest.raises(ZeroDivisionError):
        read(Noisy(), skips_bad=True, collate=lambda samples: 1 / 0)


def test_a_users_loader_names_its_samples_too():
    with pytest.raises(KeyError) as caught:
        read(DataLoader(Broken({5}), batch_size=3, collate_fn=list))
    assert "reading sample 5 of Broken" in caught.value.__notes__[0]


def test_an_error_of_a_stream_says_after_what_it_came():
    def numbers():
        yield from range(5)
        raise OSError("a torn shard")

    with pytest.raises(OSError, match="a torn shard") as caught:
        read(Stream(numbers()))
    where, got, _, do = caught.value.__notes__[0].splitlines()
    assert where == "the training data, epoch 1, after 4 samples"
    assert got == "  got: OSError: a torn shard"
    assert "catch it where it is raised" in do


@pytest.mark.parametrize("bad", [(), (BadSample(3, "x"),)])
def test_what_is_left_of_a_batch_can_be_pinned(bad):
    batch, found = pin_memory(ReadableBatch({"name": "without a tensor, which would need a device"}, bad))
    assert batch == {"name": "without a tensor, which would need a device"}
    assert tuple(found) == bad


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_collate_draws_for_samples_that_are_only_held_is_seeded(kind):
    def collate(samples):
        return torch.rand(1)

    held = SeededDataset(kind(range(4)))
    drawn = [CollateFetched(collate)(held.__getitems__(BatchIndices([0, 1], seed))) for seed in (3, 4, 3)]
    assert drawn[0] == drawn[2] != drawn[1]


class Rows:
    def __init__(self, **row):
        self.row = row

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.row


def collate_numbers(samples):
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize(
    ("collate", "row", "column", "advice"),
    [
        (None, {"x": 1.0, "picture": object(), "caption": "a"}, "'picture' (object)", "return 'picture' as a number"),
        (None, {"x": 1.0, "note": None}, "'note' (NoneType)", "return 'note' as a number or tensor, leave it out"),
        (collate_numbers, {"x": 1.0, "text": "a"}, "'text' (str)", "dataset.remove_columns(['text'])"),
        (collate_numbers, {"x": 1.0, "words": ["a"]}, "'words' (list)", "dataset.remove_columns(['words'])"),
        (collate_numbers, {"labels": "a", "x": 1}, "'labels' (str)", "dataset.class_encode_column('labels')"),
        (collate_numbers, {"x": 1, "text": "a", "label": "b"}, "'text' (str), 'label' (str)", "map 'label' to numbers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_column_that_cannot_be_collated_is_told_with_what_to_write(collate, row, column, advice):
    with pytest.raises((TypeError, ValueError)) as failure:
        make_trainer({"batch_size": 2}, collate_fn=collate).fit(Linear(), Rows(**row))
    where, *_, do = failure.value.__notes__[0].splitlines()
    assert where.endswith(f", column {column}")
    assert advice in do


def test_a_collate_function_that_fails_for_other_reasons_blames_no_column():
    def collate(samples):
        raise ValueError("closed")

    with pytest.raises(ValueError, match="closed") as failure:
        make_trainer({"batch_size": 2}, collate_fn=collate).fit(Linear(), Rows(text="words", x=1))
    assert ", column" not in failure.value.__notes__[0]
