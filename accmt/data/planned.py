"""Sources for data with access by index, so that skipped samples are never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch.utils.data import DataLoader, Sampler

from accmt.data.base import (
    EPOCH_START,
    SourceOptions,
    compare_files,
    compare_rows,
    length_of,
    plan_epoch,
    read_start,
    require_batch,
    require_not_empty,
    require_same_everywhere,
    require_same_number,
    require_same_order,
    require_same_rows,
)
from accmt.data.batches import MicroBatch
from accmt.data.fetching import (
    CollateFetched,
    Fetched,
    SeededDataset,
    WorkerStart,
    note_dead_worker,
    start_reading,
)
from accmt.data.fingerprints import Rows, read_rows
from accmt.data.samplers import (
    GlobalBatchSampler,
    Order,
    Plan,
    UserBatches,
    call_set_epoch,
    check_length,
    is_user_class,
)
from accmt.data.seeding import preserve_generators
from accmt.libraries.private_names import shut_down_workers
from accmt.messages import say
from accmt.registry import addon


class PlannedSource:
    """Base of sources that know all micro-batches of an epoch when it begins.

    Args:
        dataset: The dataset to fetch from.
        options: Sizes, shard and limit.
        order: The order of the samples, or batches, of each epoch.
        torch_options: Additional arguments of the DataLoader.
        size: Samples, or batches, of the first epoch.
        multiple: Those at the end beyond a multiple of this are dropped; 1 drops none.
    """

    _kind: str
    _unit: str

    def __init__(
        self,
        dataset: Any,
        options: SourceOptions,
        order: Order | UserBatches,
        torch_options: Mapping[str, Any],
        *,
        size: int,
        multiple: int = 1,
    ) -> None:
        self.micro_batches_per_batch = options.micro_batches_per_batch
        self.shard = options.shard
        self._dataset = dataset
        self._options = options
        self._order = order
        self._resumable = order.resumable
        self._sampler = GlobalBatchSampler(order, seed=options.seed, purpose=options.purpose)
        self._multiple = multiple
        self._start = EPOCH_START
        self._epoch: int | None = None
        self._rows_before: Rows | None = None
        self._reading: Iterator[Any] = iter(())
        self._arrange(0, 0, size)
        self._seeded = SeededDataset(dataset, skips_bad=options.skips_bad)
        collate = CollateFetched(torch_options["collate_fn"], options.skips_bad)
        torch_options = {**torch_options, "batch_sampler": self._sampler, "collate_fn": collate}
        if hasattr(dataset, "set_epoch") or hasattr(dataset, "state_dict"):  # workers would keep an old copy
            torch_options["persistent_workers"] = False
        self.dataloader: DataLoader[Any] = DataLoader(self._seeded, **torch_options)
        if not options.has_own_data:
            require_same_rows(options, self.rows)

    @cached_property
    def rows(self) -> Rows:
        """Fingerprints of a few samples as in the first epoch; read when first compared or saved."""
        length = length_of(self._dataset)
        # A run that resumes in a later epoch compares them with those of the first.
        call_set_epoch(self._dataset, 0)
        loader = self.dataloader
        with preserve_generators():
            rows = read_rows(
                self._dataset, length or 0, num_workers=loader.num_workers, context=loader.multiprocessing_context
            )
        self.set_epoch_again()
        return rows

    @cached_property
    def files(self) -> dict[str, Any]:
        """The dataset's descriptions of its files, for positions; empty if it has none."""
        describe = getattr(self._dataset, "describe_files", None)
        return {} if describe is None else {"files": describe()}

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on; skipped ones are never read.

        Processes: collective when the first is read, if they share the data.
        """
        read = self._read_micro_batches(epoch, first)
        if not self._options.skips_bad:
            return read
        readable: Iterator[MicroBatch] = addon("without_bad_samples")(read, self._options, is_whole_epoch=first == 0)
        return readable

    def _read_micro_batches(self, epoch: int, first: int) -> Iterator[MicroBatch]:
        plan = self._begin(epoch, first)
        if self._rows_before is not None:  # only now: a completed run reads nothing
            compare_rows({"rows": self._rows_before}, self.rows, self._options, is_in_epoch=False)
            self._rows_before = None
        require_same_everywhere(self._options, self._describe(), self._order.digest(epoch))
        batches = self._reading = self._read()
        end = plan.num_micro_batches
        counts_batches = isinstance(self._order, UserBatches)
        order = self._sampler.order
        size: int | None
        own_size: int | None
        for index, positions, own, is_partial, num_finished, ends_batch, unit in plan.cut(first):
            batch = None
            if own:
                try:
                    batch = next(batches)
                except Exception as error:
                    note_dead_worker(error, batches)
                    where = f"batch {index} of epoch {epoch + 1} of the {self._options.kind} data"
                    error.add_note(f"This happened while loading {where}.")
                    raise
                if batch is None:
                    require_batch(batch, self._options)
            size, own_size = len(positions), len(own)
            if counts_batches:  # which may differ in size
                size = self._order.num_samples(epoch, positions)
                own_size = self._order.num_samples(epoch, own)
            is_last, indices = index + num_finished == end, order[own.start : own.stop]
            yield MicroBatch(index, batch, size, own_size, is_last, is_partial, indices, num_finished, ends_batch, unit)

    def _read(self) -> Iterator[Any]:
        """Yield what the DataLoader would; without workers, its iterator costs as much as a small batch."""
        loader = self.dataloader
        if loader.num_workers or loader.pin_memory:
            return start_reading(loader)
        collate: Callable[[Any], Any] = loader.collate_fn
        return map(collate, map(self._seeded.__getitems__, self._sampler))

    def samples_in(self, first: int, last: int) -> int | None:
        if self._options.skips_bad:  # how many can be read shows only then
            return None
        positions = range(self._plan.samples_before(first), self._plan.samples_before(last))
        return self._order.num_samples(self._epoch, positions)

    def set_epoch_again(self) -> None:
        if self._epoch is not None:
            call_set_epoch(self._dataset, self._epoch)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        if epoch != self._epoch:  # the order of another epoch is not drawn again
            return None
        return self._sampler.indices(self._plan.local_indices(index))

    def read_again(self, epoch: int, index: int) -> Fetched | None:
        if epoch != self._epoch:
            return None
        return self._seeded.__getitems__(self._sampler.samples(self._plan.local_indices(index)))

    def digest_of_samples(self, first: int, last: int) -> str | None:
        return self._sampler.digest(first, last)

    def end_workers(self) -> None:
        # torch stops them once nothing refers to the iterator; until then they would wait for another epoch, or live as
        # long as the traceback of an error that ended the run.
        shut_down_workers(self.dataloader, self._reading)

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        if num_micro_batches == 0:  # the epoch's order may not have been drawn yet
            at_start = {self._unit: 0, "of": None, "rows": self.rows}
            return {"kind": self._kind, **at_start, **self.files, **self._state_at(epoch)}
        if epoch != self._epoch:
            self._begin(epoch, num_micro_batches)
        consumed = self._plan.samples_before(num_micro_batches)
        order = {"of": self._size, "order": self._order.digest(epoch), **self._state_at(epoch)}
        return {"kind": self._kind, self._unit: consumed, **order, "rows": self.rows, **self.files}

    def _state_at(self, epoch: int) -> dict[str, Any]:
        if self._resumable is None:
            return {}
        return {"sampler": self._resumable.state_at(epoch)}

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        self._start = read_start(
            epoch, first_micro_batch, position, kind=self._kind, unit=self._unit, options=self._options
        )
        is_in_epoch = first_micro_batch > 0
        compare_files(position.get("files"), self.files.get("files"), self._options, is_in_epoch=is_in_epoch)
        is_saved = self._resumable is not None and "sampler" in position
        if self._resumable is not None and is_saved:
            self._resumable.load_state(position["sampler"])
            self._order.forget()
        self._begin(epoch, first_micro_batch)
        require_same_number(self._start, self._size, self._unit, self._options)
        if self._start.position:
            require_same_order(self._start, self._order.digest(epoch), self._options)
            compare_rows(position, self.rows, self._options, is_in_epoch=True)
        else:
            self._rows_before = position.get("rows")
        if self._resumable is not None and is_saved:  # only now: what was trained on is in the order of then
            self._resumable.continue_after(self._start.consumed)
            self._order.forget()
            self._begin(epoch, first_micro_batch)

    def _begin(self, epoch: int, first: int) -> Plan:
        call_set_epoch(self._dataset, epoch)
        self._epoch = epoch
        return self._arrange(epoch, first, self._draw(epoch))

    def _arrange(self, epoch: int, first: int, size: int) -> Plan:
        self._size = size
        start = self._start.of(epoch, first)
        self._plan = plan = plan_epoch(size, self._options, multiple=self._multiple, start=start)
        self.num_micro_batches: int | None = plan.num_micro_batches
        self._sampler.start_at(epoch, plan, first)
        return plan

    def _describe(self) -> str:
        return f"{self._size} {self._unit}"

    def _draw(self, epoch: int) -> int:
        """Draw the samples, or batches, of an epoch, and return their number."""
        raise NotImplementedError


class DatasetSource(PlannedSource):
    """Micro-batches of a dataset with a length, ordered and sharded by (seed, epoch, position)."""

    _kind = "dataset with a length"
    _unit = "samples"
    _order: Order

    def __init__(self, dataset: Any, options: SourceOptions) -> None:
        require_not_empty(len(dataset), options, "a dataset of length 0")
        sampler = options.sampler
        if callable(sampler) and not isinstance(sampler, Sampler):
            sampler = sampler(dataset)
        check_length(sampler, dataset)
        options = options.without_second_sharding(sampler)
        permute = getattr(dataset, "shuffle_rows", None)
        order = Order(len(dataset), options.seed, shuffle=options.shuffle, sampler=sampler, permute=permute)
        multiple = 1
        if options.drop_last:
            plan = options.plan(0, options.batch_size, options.shard)
            multiple = plan.global_batch_size * options.micro_batches_per_batch
        super().__init__(
            dataset,
            options,
            order,
            options.torch_options(),
            size=order.size(0),
            multiple=multiple,
        )

    def _draw(self, epoch: int) -> int:
        length = len(self._dataset)
        if length != self._order.length:
            say(f"the {self._options.kind} data now have {length} samples instead of {self._order.length}")
            self._order.length = length
        return self._order.size(epoch)

    def _describe(self) -> str:
        return f"{self._size} samples in batches of {self._options.batch_size}"


class BatchesSource(PlannedSource):
    """Micro-batches of a user's DataLoader with access by index: batch i goes to process i mod processes."""

    _kind = "DataLoader with a length"
    _unit = "batches"

    def __init__(self, user_loader: DataLoader[Any], options: SourceOptions) -> None:
        check_length(user_loader.sampler, user_loader.dataset)
        batch_sampler: Any = user_loader.batch_sampler
        order = UserBatches(batch_sampler, options.seed)
        options = replace(options, batch_size=1, micro_batches_per_batch=1)  # the plan counts the user's batches
        num_batches = length_of(batch_sampler) or 0
        if is_user_class(batch_sampler):  # its length may be an estimate; the first epoch uses the batches drawn here
            num_batches = order.size(0)
        require_not_empty(num_batches, options, "a DataLoader without batches")
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "prefetch_factor", "multiprocessing_context")
        torch_options = {name: getattr(user_loader, name) for name in (*names, "persistent_workers")}
        torch_options["worker_init_fn"] = WorkerStart(user_loader.worker_init_fn)
        super().__init__(user_loader.dataset, options, order, torch_options, size=num_batches)

    def _draw(self, epoch: int) -> int:
        num_batches = self._order.size(epoch)
        require_not_empty(num_batches, self._options, "a DataLoader without batches")
        return num_batches
