import json
import textwrap

import pytest
import torch

from accmt.data import SourceOptions, UnshardedSource, build_source
from accmt.errors import DataError
from tests.launching import launch
from tests.raising import raises_at
from tests.toys import Stream

CPU = torch.device("cpu")
SCRIPT = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from accmt.data import SourceOptions, build_source

class Stream(IterableDataset):
    def __init__(self, numbers):
        self.numbers = numbers
    def __iter__(self):
        return iter(self.numbers)

def make(kind, rank):
    numbers = list(range(100 * rank, 100 * rank + (5, 12)[rank]))
    data = Stream(numbers) if kind == "stream" else numbers
    options = SourceOptions(purpose="train", batch_size=2, shuffle=True)
    return build_source(data, options)

def take(loader, first, last=None):
    batches = []
    for micro_batch in loader.micro_batches(0, first):
        batches.append([micro_batch.index, [] if micro_batch.batch is None else micro_batch.batch.tolist()])
        if micro_batch.index + 1 == last:
            break
    return batches

dist.init_process_group("gloo")
rank, results = dist.get_rank(), {}
for kind in ("sized", "stream"):
    whole, cuts = take(make(kind, rank), 0), []
    for first in (1, 3, 4, 6):
        stopped, other = make(kind, rank), make(kind, rank)
        done = take(stopped, 0, first)
        position = json.loads(json.dumps(stopped.position(0, first)))
        other.resume_from(0, first, position)
        cuts.append([position, other.num_micro_batches, done + take(other, first) == whole, len(take(other, 0)) > 0])
    results[kind] = [whole, cuts]
gathered = [None, None]
dist.all_gather_object(gathered, results)
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(gathered))
dist.destroy_process_group()
"""


def make(data, **settings):
    return UnshardedSource(build_source(data, SourceOptions(purpose="train", batch_size=2, **settings)))


def numbers(micro_batches):
    return [int(n) for micro_batch in micro_batches for n in micro_batch.batch]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unshared")
    script, result = folder / "script.py", folder / "result.json"
    script.write_text(textwrap.dedent(SCRIPT))
    launch(script, str(result), processes=2, result=result)
    return json.loads(result.read_text())


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_each_process_goes_on_in_its_own_data_also_one_that_is_at_its_end(results, kind):
    for rank, length in enumerate((5, 12)):
        whole, cuts = results[rank][kind]
        assert sorted(n for _, batch in whole for n in batch) == list(range(100 * rank, 100 * rank + length))
        assert [index for index, _ in whole] == list(range(6))
        for first, (position, num_micro_batches, is_same, _) in zip((1, 3, 4, 6), cuts, strict=True):
            assert is_same, (rank, first)
            assert [own["samples"] for own in position["positions"]] == [min(2 * first, 5), 2 * first]
            assert num_micro_batches == (6 if kind == "sized" else None)
    assert results[0][kind][1][0][0] == results[1][kind][1][0][0]  # every process holds the positions of all


@pytest.mark.parametrize("make_data", [lambda: list(range(9)), lambda: Stream(9)])
def test_one_process_with_data_of_its_own_goes_on_too(make_data):
    stopped, other = make(make_data()), make(make_data())
    micro_batches = stopped.micro_batches(0)
    done = numbers([next(micro_batches), next(micro_batches)])
    position = stopped.position(0, 2)
    assert position["positions"][0]["samples"] == 4
    other.resume_from(0, 2, position)
    assert done + numbers(other.micro_batches(0, first=2)) == list(range(9))
    assert numbers(other.micro_batches(1)) == list(range(9))


def test_the_rounds_of_a_resumed_epoch_are_those_of_that_epoch_alone():
    position = make(list(range(40))).position(0, 3)
    loader = UnshardedSource(build_source(list(range(40)), SourceOptions(purpose="train", batch_size=5)))
    assert loader.num_micro_batches == 8
    loader.resume_from(0, 3, position)
    assert loader.num_micro_batches == 3 + 7
    assert numbers(loader.micro_batches(0, first=3)) == list(range(6, 40))
    next(loader.micro_batches(1))
    assert loader.num_micro_batches == 8


def test_another_number_of_processes_can_go_on_between_epochs_only():
    loader = make([1, 2, 3])
    position = {"kind": "part of each process", "positions": [{"samples": 2}, {"samples": 2}]}
    with raises_at(DataError, "the data of each process", "1 processes", "is of 2"):
        loader.resume_from(0, 1, position)
    with raises_at(DataError, "the data of each process", "1 processes", "is of 0"):
        loader.resume_from(0, 1, {"kind": "stream", "samples": 2})
    loader.resume_from(1, 0, position)
    assert numbers(loader.micro_batches(1)) == [1, 2, 3]
