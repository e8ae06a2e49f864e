from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from accmt.data import Shard, SourceOptions
from accmt.data.planned import BatchesSource, DatasetSource
from tests.tables import each


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 2, **settings})


@each(
    ("limit", "micro_batches", "used"),
    [
        (1.0, 8, 8),
        (0.25, 8, 2),
        (0.5, 5, 2),
        (0.01, 8, 1),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1, 30, 3),
        (0.0, 8, 0),
        (1, 8, 1),
        (10, 8, 8),
        (10, 40, 10),
        (0, 8, 0),
    ],
)
def test_a_whole_number_limits_rounds_and_a_float_is_a_fraction(limit, micro_batches, used):
    assert options(limit=limit).limit_micro_batches(micro_batches) == used


class Scheduled(list):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Mined(list):
    """Samples that training changes: a run that resumes starts new workers, which have the changes."""

    def state_dict(self):
        return {"negatives": list(self)}


@each(("data", "persist"), [([1, 2], True), (Scheduled([1, 2]), False), (Mined([1, 2]), False)])
def test_workers_do_not_outlive_an_epoch_if_the_dataset_changes_between_epochs(data, persist):
    source = DatasetSource(data, options(num_workers=1, persistent_workers=True))
    assert source.dataloader.persistent_workers == persist
    source = BatchesSource(DataLoader(data, num_workers=1, persistent_workers=True), options())
    assert source.dataloader.persistent_workers == persist


def test_data_that_a_distributed_sampler_shares_are_not_shared_twice():
    settings = options(shard=Shard(1, 2), seed=3)
    samplers = [DistributedSampler(range(8), num_replicas=2, rank=rank) for rank in (0, 1)]
    by_rank = [settings.without_second_sharding(sampler) for sampler in samplers]
    assert [o.shard for o in by_rank] == [Shard(), Shard()]
    assert by_rank[0].seed != by_rank[1].seed
    assert settings.without_second_sharding(None, BatchSampler(samplers[0], 2, drop_last=False)) == by_rank[0]
    assert settings.without_second_sharding(SequentialSampler(range(8)), None) is settings
