"""Loaders of data whose samples can be fetched by index, so that what is passed over is never read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from accmt.data.batches import Round
from accmt.data.options import LoaderOptions, length_of, require_rounds
from accmt.data.samplers import BatchShare, GlobalBatchSampler, Order, tell_epoch
from accmt.data.seeding import SeededDataset, WorkerStart
from accmt.data.sharding import Plan


class SizedLoader:
    """Rounds of a dataset with a length, ordered and shared by (seed, epoch, position).

    Args:
        dataset: Anything with `__len__` and `__getitem__`.
        options: Sizes, order and sharing.

    Raises:
        DataError: The dataset, or what sampler and `drop_last` leave of it, is empty.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        require_rounds(len(dataset), options, "a dataset of length 0")
        sampler = options.sampler
        if callable(sampler) and not isinstance(sampler, Sampler):
            sampler = sampler(dataset)
        options = options.without_second_sharing(sampler)
        self.micro_batches = options.micro_batches
        self._dataset = dataset
        self._options = options
        self._order = Order(len(dataset), options.seed, shuffle=options.shuffle, sampler=sampler)
        self._sampler = GlobalBatchSampler(self._order, seed=options.seed, purpose=options.purpose)
        self.num_rounds: int | None = self._start_at(0, 0)
        self.dataloader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset), batch_sampler=self._sampler, **options.torch_options(dataset)
        )

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of rounds `first` up to without `last` over all processes."""
        return self._plan.samples_in(first, last)

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on; what is passed over is never read."""
        tell_epoch(self._dataset, epoch)
        self.num_rounds = num_rounds = self._start_at(epoch, first)
        plan = self._plan
        batches = iter(self.dataloader)
        for index in range(first, num_rounds):
            size, own = plan.samples_in(index, index + 1), len(plan.part(index))
            batch = next(batches) if own else None
            yield Round(index, batch, size, own, index == num_rounds - 1, size < plan.share.count)

    def _start_at(self, epoch: int, first: int) -> int:
        options = self._options
        self._plan = plan = Plan(self._order.size(epoch), options.batch_size, options.share)
        whole_batches = plan.num_samples // (plan.global_batch_size * options.micro_batches)
        num_full = whole_batches * options.micro_batches if options.drop_last else plan.num_rounds
        require_rounds(num_full, options, f"{plan.num_samples} samples for batches of {plan.global_batch_size}")
        num_rounds = options.limit_rounds(num_full)
        self._sampler.start_at(epoch, plan, range(first, num_rounds))
        return num_rounds


class BatchLoader:
    """Rounds of batches that a user's DataLoader cuts: batch i of its order goes to process i mod processes.

    Args:
        given: The user's DataLoader; its dataset, batches, collate function and workers are used.
        options: Sharing, seed and limit.

    Raises:
        DataError: There are no batches.
    """

    def __init__(self, given: DataLoader[Any], options: LoaderOptions) -> None:
        self.micro_batches = 1
        self._dataset = given.dataset
        self._options = options
        self._sampler = BatchShare(given.batch_sampler, options.share, seed=options.seed, purpose=options.purpose)  # type: ignore[arg-type]
        self._sizes: list[int] | None = None
        self.num_rounds: int | None = self._count_rounds(length_of(given.batch_sampler) or 0)
        self.dataloader: DataLoader[Any] = DataLoader(
            SeededDataset(given.dataset), batch_sampler=self._sampler, **_torch_options_of(given)
        )

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of rounds `first` up to without `last` of the epoch in work, None before the first."""
        count = self._options.share.count
        return None if self._sizes is None else sum(self._sizes[first * count : last * count])

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on; what is passed over is never read."""
        tell_epoch(self._dataset, epoch)
        self._sizes = sizes = self._sampler.sizes(epoch)
        self.num_rounds = num_rounds = self._count_rounds(len(sizes))
        self._sampler.start_at(epoch, range(first, num_rounds))
        count, process = self._options.share.count, self._options.share.index
        batches = iter(self.dataloader)
        for index in range(first, num_rounds):
            of_round = sizes[index * count : (index + 1) * count]
            has_part = process < len(of_round)
            batch, own = (next(batches), of_round[process]) if has_part else (None, 0)
            yield Round(index, batch, sum(of_round), own, index == num_rounds - 1, len(of_round) < count)

    def _count_rounds(self, num_batches: int) -> int:
        require_rounds(num_batches, self._options, "a DataLoader without a batch")
        return self._options.limit_rounds(-(-num_batches // self._options.share.count))


def _torch_options_of(given: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(given, name) for name in names}
    options["worker_init_fn"] = WorkerStart(given.worker_init_fn)
    return options | {
        "multiprocessing_context": given.multiprocessing_context,
        "persistent_workers": given.persistent_workers and not hasattr(given.dataset, "set_epoch"),
    }
