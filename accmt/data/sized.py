"""Loaders of data whose samples can be fetched by index, so that what is skipped is never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Sampler

from accmt.data.bad_samples import without_bad_samples
from accmt.data.batches import MicroBatch
from accmt.data.collate import keeps_number
from accmt.data.fetching import CollateFetched, SeededDataset
from accmt.data.options import (
    LoaderOptions,
    length_of,
    require_batch,
    require_not_empty,
    require_same_everywhere,
)
from accmt.data.position import EPOCH_START, plan_epoch, read_start, require_same_number, require_same_order
from accmt.data.samplers import GlobalBatchSampler, Order, UserBatchShard, call_set_epoch, is_user_class
from accmt.data.sharding import Plan
from accmt.data.temperature import check_labels
from accmt.data.workers import WorkerStart, end_workers, note_dead_worker, start_reading
from accmt.messages import say, warn


class _PlannedLoader:
    """What the loaders below have in common: all micro-batches of an epoch are known when it begins.

    Args:
        dataset: What is fetched from.
        options: Sizes, sharing and limit.
        sampler: Yields the indices of the planned batches.
        torch_options: Further arguments of the DataLoader.
        size: Samples, or batches, of the first epoch.
        whole: Those that are all there or all left out at the end; 1 leaves none out.
    """

    _kind: str
    _unit: str
    _is_of_user: bool  # whether a sampler of the user's own class draws the order

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        sampler: GlobalBatchSampler,
        torch_options: Mapping[str, Any],
        *,
        size: int,
        whole: int = 1,
    ) -> None:
        self.micro_batches_per_batch = options.micro_batches_per_batch
        self.shard = options.shard
        self._dataset = dataset
        self._options = options
        self._sampler = sampler
        self._whole = whole
        self._start = EPOCH_START
        self._epoch: int | None = None
        self._reading: Iterator[Any] = iter(())
        self._arrange(0, 0, size)
        self._seeded = SeededDataset(dataset, skips_bad=options.skips_bad)
        self._knows_samples = keeps_number(torch_options["collate_fn"])
        collate = CollateFetched(torch_options["collate_fn"], options.skips_bad)
        torch_options = {**torch_options, "batch_sampler": sampler, "collate_fn": collate}
        self.dataloader: DataLoader[Any] = DataLoader(self._seeded, **torch_options)

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on; what is skipped is never read.

        Processes: collective when the first is read, where they share the data.

        Raises:
            Exception: What the dataset or the collate function raised, with notes that name sample and batch.
            DataError: Processes have other data or another order; or nothing at all could be read, where bad samples
                are left out.
        """
        micro_batches = self._read_micro_batches(epoch, first)
        if not self._options.skips_bad:
            return micro_batches
        return without_bad_samples(
            micro_batches, self._options, is_whole_epoch=first == 0, knows_samples=self._knows_samples
        )

    def _read_micro_batches(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        plan = self._begin(epoch, first)
        require_same_everywhere(self._options, self._describe(), self._digest(epoch))
        batches = self._reading = self._read()
        last, num_processes = plan.num_micro_batches - 1, plan.shard.count
        for index in range(first, last + 1):
            whole = plan.global_indices(index)
            part = plan.local_part(whole)
            batch = self._next(batches, epoch, index) if part else None
            if part:
                require_batch(batch, self._options)
            is_partial = len(whole) < num_processes
            num_samples = self._count(whole) if self._knows_samples else None
            yield MicroBatch(index, batch, num_samples, self._count(part), index == last, is_partial)

    def _next(self, batches: Iterator[Any], epoch: int, index: int) -> Any:
        try:
            return next(batches)
        except Exception as error:
            note_dead_worker(error, batches)
            error.add_note(f"This was read for batch {index} of epoch {epoch + 1} of the {self._options.kind} data.")
            raise

    def _read(self) -> Iterator[Any]:
        """Yield what the DataLoader would; without workers its iterator costs as much as a small batch itself."""
        loader = self.dataloader
        if loader.num_workers or loader.pin_memory:
            return start_reading(loader)
        collate: Callable[[Any], Any] = loader.collate_fn
        return (collate(self._seeded.__getitems__(indices)) for indices in self._sampler)

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of micro-batches [first, last) over all processes; None if unknown beforehand."""
        if self._options.skips_bad or not self._knows_samples:
            return None
        return self._count(range(self._plan.samples_before(first), self._plan.samples_before(last)))

    def set_epoch_again(self) -> None:
        """Call the dataset's `set_epoch` with the epoch in work: something else that reads it may have called it."""
        if self._epoch is not None:
            call_set_epoch(self._dataset, self._epoch)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return the samples that this process has in a micro-batch of the epoch in work."""
        return self._sampler.samples(self._plan.local_indices(index)) if epoch == self._epoch else None

    def end_workers(self) -> None:
        """End the processes that load data; the next epoch starts others."""
        end_workers(self.dataloader, self._reading)

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        """Return where the data are after `num_micro_batches` micro-batches of an epoch."""
        if num_micro_batches == 0:  # what the epoch will have may not have been drawn yet
            position = {"kind": self._kind, self._unit: 0, "of": None}
            if self._is_of_user and self._epoch == epoch - 1:
                position["before"] = {"of": self._size, "order": self._digest(epoch - 1)}
            return position
        if epoch != self._epoch:
            self._begin(epoch, num_micro_batches)
        passed = self._plan.samples_before(num_micro_batches)
        return {"kind": self._kind, self._unit: passed, "of": self._size, "order": self._digest(epoch)}

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        """Let `epoch` go on from a position.

        Raises:
            DataError: The position is one in other data.
        """
        self._start = read_start(
            epoch, first_micro_batch, position, kind=self._kind, unit=self._unit, options=self._options
        )
        if first_micro_batch == 0:
            self._compare_before(epoch, position)
        self._begin(epoch, first_micro_batch)
        require_same_number(self._start, self._size, self._unit, self._options)
        if self._start.position:
            require_same_order(self._start, self._digest(epoch), self._options)

    def _compare_before(self, epoch: int, position: Mapping[str, Any]) -> None:
        """Warn where the user's sampler does not draw the epoch before as it did: then no later one either."""
        before = position.get("before")
        if before is None or not self._is_of_user or position["kind"] != self._kind:
            return
        if self._draw(epoch - 1) == before["of"] and self._digest(epoch - 1) != before["order"]:
            warn(
                f"the sampler of the {self._options.kind} data draws epoch {epoch} in another order than before the "
                "interruption, so later epochs are not those of an unbroken run either: it is another sampler, or its "
                "order depends on more than set_epoch(epoch), a seed, and torch's, numpy's or Python's generators"
            )

    def _begin(self, epoch: int, first: int) -> Plan:
        call_set_epoch(self._dataset, epoch)
        self._epoch = epoch
        return self._arrange(epoch, first, self._draw(epoch))

    def _arrange(self, epoch: int, first: int, size: int) -> Plan:
        self._size = size
        self._plan = plan = plan_epoch(size, self._options, whole=self._whole, start=self._start.of(epoch, first))
        self.num_micro_batches: int | None = plan.num_micro_batches
        self._sampler.start_at(epoch, plan, range(first, plan.num_micro_batches))
        return plan

    def _draw(self, epoch: int) -> int:
        """Decide what an epoch has, and return how many samples, or batches."""
        raise NotImplementedError

    def _describe(self) -> str:
        """Return what an epoch has, in words."""
        raise NotImplementedError

    def _digest(self, epoch: int) -> str:
        """Return a digest of what an epoch has, and in which order."""
        raise NotImplementedError

    def _count(self, part: range) -> int | None:
        """Return the samples of a part of the plan."""
        raise NotImplementedError


class SizedLoader(_PlannedLoader):
    """Micro-batches of a dataset with a length, ordered and shared by (seed, epoch, position).

    Args:
        dataset: Anything with `__len__` and `__getitem__`.
        options: Sizes, order and sharing.

    Raises:
        DataError: The dataset, or what sampler and `drop_last` leave of it, is empty; or labels of a sampler are those
            of other data.
    """

    _kind = "dataset with a length"
    _unit = "samples"

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        require_not_empty(len(dataset), options, "a dataset of length 0")
        sampler = options.sampler
        if callable(sampler) and not isinstance(sampler, Sampler):
            sampler = sampler(dataset)
        check_labels(sampler, dataset)
        options = options.without_second_sharding(sampler)
        self._is_of_user = sampler is not None and is_user_class(sampler)
        self._order = Order(len(dataset), options.seed, shuffle=options.shuffle, sampler=sampler)
        whole_batch = options.batch_size * options.shard.count * options.micro_batches_per_batch
        super().__init__(
            dataset,
            options,
            GlobalBatchSampler(self._order, seed=options.seed, purpose=options.purpose),
            options.torch_options(dataset),
            size=self._order.size(0),
            whole=whole_batch if options.drop_last else 1,
        )

    def _draw(self, epoch: int) -> int:
        length = len(self._dataset)
        if length != self._order.length:
            say(f"the {self._options.kind} data have {length} samples now; they had {self._order.length} before")
            self._order.length = length
        return self._order.size(epoch)

    def _describe(self) -> str:
        return f"{self._size} samples in batches of {self._options.batch_size}"

    def _digest(self, epoch: int) -> str:
        return self._order.digest(epoch)

    def _count(self, part: range) -> int:
        return len(part)


class BatchLoader(_PlannedLoader):
    """Micro-batches of batches that a user's DataLoader cuts: batch i of its order goes to process i mod processes.

    Args:
        given: The user's DataLoader; its dataset, batches, collate function and workers are used.
        options: Sharing, seed and limit.

    Raises:
        DataError: There are no batches, or labels of a sampler are those of other data.
    """

    _kind = "DataLoader with a length"
    _unit = "batches"

    def __init__(self, given: DataLoader[Any], options: LoaderOptions) -> None:
        check_labels(given.sampler, given.dataset)
        self._sizes: list[int] | None = None
        self._batches = UserBatchShard(given.batch_sampler, seed=options.seed, purpose=options.purpose)  # type: ignore[arg-type]
        options = replace(options, batch_size=1, micro_batches_per_batch=1)  # the plan counts batches as they are
        self._is_of_user = is_user_class(given.batch_sampler)
        # The length of a user's own may be an estimate; what it draws for the first epoch is kept for it.
        num_batches = len(self._batches.sizes(0)) if self._is_of_user else length_of(given.batch_sampler) or 0
        require_not_empty(num_batches, options, "a DataLoader without a batch")
        super().__init__(given.dataset, options, self._batches, _torch_options_of(given), size=num_batches)

    def _draw(self, epoch: int) -> int:
        self._sizes = sizes = self._batches.sizes(epoch)
        require_not_empty(len(sizes), self._options, "a DataLoader without a batch")
        return len(sizes)

    def _describe(self) -> str:
        return f"{self._size} batches"

    def _digest(self, epoch: int) -> str:
        return self._batches.digest(epoch)

    def _count(self, part: range) -> int | None:
        """Return the samples of some batches; None before an epoch has begun, which draws them."""
        return None if self._sizes is None else sum(self._sizes[part.start : part.stop])


def _torch_options_of(given: DataLoader[Any]) -> dict[str, Any]:
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(given, name) for name in names}
    options["worker_init_fn"] = WorkerStart(given.worker_init_fn)
    return options | {
        "multiprocessing_context": given.multiprocessing_context,
        "persistent_workers": given.persistent_workers and not hasattr(given.dataset, "set_epoch"),
    }
