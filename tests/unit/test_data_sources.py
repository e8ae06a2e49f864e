import datasets
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accmt.addons.streams import StreamSource, UserLoaderSource
from accmt.data import SourceOptions, build_source
from accmt.data.planned import BatchesSource, DatasetSource
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each
from tests.toys import SizedStream, Stream

TENSORS = TensorDataset(torch.arange(4))
TABLE = datasets.Dataset.from_dict({"number": [1, 2, 3]})


class WithoutLength(Dataset):
    def __getitem__(self, index):
        return index


def options(**settings):
    return SourceOptions(**{"purpose": "validate", "batch_size": 2, **settings})


@each(
    ("make", "kind"),
    [
        (lambda: TENSORS, DatasetSource),
        (lambda: [1, 2], DatasetSource),
        (lambda: TABLE, DatasetSource),
        (lambda: TABLE.to_iterable_dataset(), StreamSource),
        (lambda: Stream(3), StreamSource),
        (lambda: SizedStream(3), StreamSource),
        (lambda: {1, 2}, StreamSource),
        (lambda: DataLoader(TENSORS), BatchesSource),
        (lambda: DataLoader(TABLE), BatchesSource),
        (lambda: DataLoader(Stream(3)), UserLoaderSource),
        (lambda: DataLoader(TENSORS, batch_size=None), UserLoaderSource),
    ],
)
def test_each_kind_of_data_gets_its_loader(make, kind):
    loader = build_source(make(), options())
    assert type(loader) is kind
    assert isinstance(loader.dataloader, DataLoader)
    assert sum(1 for _ in loader.micro_batches(0)) > 0


def test_a_batch_sampler_makes_a_loader_of_batches():
    loader = build_source(TENSORS, options(batch_sampler=[[0], [1, 2, 3]], collate=len))
    assert type(loader) is BatchesSource
    assert [r.batch for r in loader.micro_batches(0)] == [1, 3]


@each("data", [3, None, object(), b"bytes", print])
def test_what_is_no_data_is_rejected_by_its_kind(data):
    with raises_at(DataError, "the validation data", type(data).__name__):
        build_source(data, options())


def test_a_dict_of_datasets_is_rejected_with_its_keys():
    splits = datasets.DatasetDict({"train": TABLE, "test": TABLE})
    with raises_at(DataError, "the validation data", "DatasetDict", "['train', 'test']", do='data["train"]'):
        build_source(splits, options())


def test_a_dataloader_that_accelerate_has_prepared_is_rejected():
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(DataLoader(TENSORS))
    with raises_at(DataError, "the validation data", "accelerator.prepare"):
        build_source(prepared, options())
