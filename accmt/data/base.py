"""The interface of data sources, their options, and how an interrupted epoch resumes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler

from accmt.data.batches import MicroBatch
from accmt.data.collate import collate_or_explain
from accmt.data.fetching import Fetched, WorkerStart
from accmt.data.fingerprints import Rows, compare
from accmt.data.samplers import Plan, Shard
from accmt.data.seeding import derive_seed
from accmt.errors import DataError, fail
from accmt.libraries.private_names import split_of_stream
from accmt.messages import say, say_once
from accmt.processes import gather_objects, is_on_any_process, num_data_processes, num_processes

_NAMED = 5

# ---- Sources and their options


class Source(Protocol):
    """Reads data as micro-batches, epoch by epoch.

    Attributes:
        dataloader: The torch DataLoader underneath.
        micro_batches_per_batch: Micro-batches that make one batch of the requested size.
        shard: This process among those that share the data; the only one if its data is not shared.
    """

    dataloader: DataLoader[Any]
    micro_batches_per_batch: int
    shard: Shard

    @property
    def num_micro_batches(self) -> int | None:
        """Maximum micro-batches of the current epoch after limits; None for data without a length."""

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of micro-batches [first, last) over all processes; None if unknown beforehand."""

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on."""

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return this process's sample indices in a micro-batch of the current epoch; None for data without indices."""

    def read_again(self, epoch: int, index: int) -> Fetched | None:
        """Read this process's samples of a micro-batch of the current epoch again, under the same seed.

        Returns:
            The samples; None for a stream, or for another epoch.
        """

    def digest_of_samples(self, first: int, last: int) -> str | None:
        """Return a digest of the sample indices in micro-batches [first, last) of the current epoch, in their order.

        They are those of all processes, or of this one if each has its own data; None for data without indices.
        """

    def set_epoch_again(self) -> None:
        """Call the data's `set_epoch` with the current epoch: an evaluation of the same data may have changed it."""

    def end_workers(self) -> None:
        """Stop the loader workers; the next epoch starts new ones."""

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        """Return the position after `num_micro_batches` of an epoch: JSON values, and a stream's own state.

        Stream sources keep positions for the last few micro-batches only.

        Processes: collective if each has its own data; otherwise the same on all.
        """

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        """Resume `epoch` after `first_micro_batch` micro-batches; later epochs begin as usual.

        The next `micro_batches(epoch, first=first_micro_batch)` begins exactly there, on any number of processes and
        with any batch size. `num_micro_batches` and `samples_in` also continue counting from there.

        Processes: all; collective if each has its own data.
        """


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options shared by all sources of one kind of data.

    Attributes:
        purpose: "train", "validate", "test" or "predict"; each has separate randomness.
        batch_size: Samples of a batch of one process.
        shard: This process among those that share the data.
        seed: The run's seed.
        micro_batches_per_batch: Batches of `batch_size` that make one of the requested size.
        limit: Maximum batches of the requested size: a number, or a fraction as a float.
        shuffle: Whether the order is random.
        sampler: The user's sampler, a function that builds one from the dataset, or a list of indices.
        batch_sampler: The user's batch sampler.
        drop_last: Whether an incomplete last batch is dropped.
        collate: The collate function; None uses torch's.
        num_workers: Loader workers.
        persistent_workers: Whether they outlive an epoch. Then their copy of the dataset does not see what changes in
            it between epochs, so a dataset with `set_epoch` or `state_dict` always gets new workers.
        pin_memory: Whether batches are pinned.
        skips_bad: Whether samples that cannot be read are skipped.
        also_read: Other data that is read meanwhile; it may be the same.
        group_stream: Returns a stream with its samples in groups, given the stream and the run's seed.
        plan: Plans the micro-batches of an epoch.
    """

    purpose: str
    batch_size: int
    shard: Shard = field(default_factory=Shard)
    seed: int = 0
    micro_batches_per_batch: int = 1
    limit: int | float = 1.0
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    collate: Callable[[Any], Any] | None = None
    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    skips_bad: bool = False
    also_read: Sequence[Any] = ()
    group_stream: Callable[[Any, int], Any] | None = None
    plan: Callable[[int, int, Shard], Plan] = Plan

    @property
    def kind(self) -> str:
        """The name of this data in messages."""
        return {"train": "training", "validate": "validation"}.get(self.purpose, self.purpose)

    @property
    def is_limited(self) -> bool:
        """Whether an epoch may have fewer batches than the data."""
        return isinstance(self.limit, int) or self.limit < 1.0

    @property
    def has_own_data(self) -> bool:
        """Whether each process has its own data, or is the only process."""
        return self.shard.count == 1 and num_data_processes() == num_processes()

    def error(self, got: str, expected: str, do: str) -> DataError:
        """Return an error about this data."""
        return fail(DataError, f"the {self.kind} data", got=got, expected=expected, do=do)

    def limit_micro_batches(self, num_micro_batches: int) -> int:
        """Return the number of an epoch's micro-batches that are used; a fraction above 0 keeps at least one batch."""
        limit = self.limit
        if isinstance(limit, float):
            num_batches = -(-num_micro_batches // self.micro_batches_per_batch)
            # At least one: a quick test with 0.01 of 50 batches would otherwise train on none.
            # Rounded first: 100 * 0.29 is 28.999999999999996.
            limit = max(int(limit > 0), int(round(num_batches * limit, 6)))
        return min(limit * self.micro_batches_per_batch, num_micro_batches)

    def torch_options(self) -> dict[str, Any]:
        """Return the DataLoader's arguments, except those for the order and size of batches."""
        return {
            "collate_fn": self.collate or collate_or_explain,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "worker_init_fn": WorkerStart(),
            "persistent_workers": self.num_workers > 0 and self.persistent_workers,
        }

    def without_second_sharding(self, *samplers: Any) -> SourceOptions:
        """Return the options for these samplers; data that one of them already shards is not sharded again.

        Each process then has its own data, as with `shard` off, and its own seed.
        """
        for sampler in samplers:
            # A DataLoader and a batch sampler keep the sampler that shards as an attribute.
            for part in (sampler, getattr(sampler, "sampler", None)):
                if isinstance(part, DistributedSampler):
                    return self._of_process(part.rank)
        return self

    def without_split_stream(self, stream: Any) -> SourceOptions:
        """Return the options for a stream; one already split by `split_dataset_by_node` is not split again.

        Processes: collective if they share data.
        """
        if self.shard.count == 1:
            return self
        # Only if each process has its own part: a stream split by machine is an error of `require_same_rows`.
        if is_on_any_process(split_of_stream(stream) != (self.shard.index, self.shard.count)):
            return self
        return self._of_process(self.shard.index)

    def _of_process(self, rank: int) -> SourceOptions:
        # With one seed, processes would augment different samples with the same random numbers.
        seed = derive_seed(self.seed, "process", rank)
        return replace(self, shard=Shard(), seed=seed)


def require_batch(batch: Any, options: SourceOptions) -> None:
    """Check that the collate function made a batch: the weights of all batches count its samples.

    Raises:
        DataError: It returned None.
    """
    if batch is not None or options.skips_bad:  # with `skips_bad`, none of its samples could be read
        return
    got = "None from the collate function, which may have no `return batch`"
    do = (
        "return the batch; to skip samples that cannot be read, raise an error in __getitem__ and pass "
        'failures={"on_bad_sample": "skip"}'
    )
    raise fail(DataError, f"a batch of the {options.kind} data", got=got, expected="a batch of all its samples", do=do)


def require_same_rows(options: SourceOptions, rows: Rows | None) -> None:
    """Check that processes that shard data have the same samples.

    If the script has already split the data, each process would use only a part of its part.

    Args:
        options: The source's options.
        rows: Samples at equal indices; None if there are none.

    Processes: collective.
    """

    def are_different(rows: Rows | None, first_rows: Rows | None) -> bool:
        if rows is None or first_rows is None:  # a stream that is empty on some processes
            return rows is not first_rows
        # Not "partly": a dataset may augment with generators that accmt cannot seed.
        return compare(rows, first_rows) == "different"

    difference = _find_difference(options, rows, are_different)
    if difference is None:
        return
    first, rank, _, _ = difference
    got = f"different samples on process {rank} and process {first} at the same indices"
    expected = "the complete data on every process: accmt shards it"
    do = (
        'pass the complete data on every process, or Trainer(data_options={"shard": False}) if your script splits it. '
        "If only the augmentation differs, draw its random numbers from torch, numpy or random, which are seeded, not "
        "from the operating system"
    )
    raise options.error(got, expected, do)


def _find_difference(
    options: SourceOptions, value: Any, differ: Callable[[Any, Any], bool] = operator.ne
) -> tuple[int, int, Any, Any] | None:
    """Return the first process whose value differs from that of the first process sharing its data.

    All processes share data; if data is not sharded, only those that share its batches.

    Processes: collective if any share data.

    Returns:
        The two processes and the value of each; None if there is no difference.
    """
    if options.has_own_data:
        return None
    values = gather_objects(value)
    group_size = len(values)
    if options.shard.count == 1:  # data that is not sharded: only a tensor-parallel group shares its batches
        group_size //= num_data_processes()
    for rank, value_of_rank in enumerate(values):
        first = rank - rank % group_size
        if differ(value_of_rank, values[first]):
            return first, rank, values[first], value_of_rank
    return None


def require_same_everywhere(options: SourceOptions, has: str, order: str) -> None:
    """Check that processes that shard data have the same data in an epoch, in the same order.

    This was true when the run began, but a dataset may have grown, and a sampler may draw a different order.

    Processes: collective.
    """
    difference = _find_difference(options, (has, order))
    if difference is None:
        return
    first, rank, (has_first, _), (has_rank, _) = difference
    got = f"{has_first} on process {first}, {has_rank} on process {rank}"
    if has_first == has_rank:
        got = f"{has_first}, in different orders on process {rank} and process {first}"
    expected = "the same data in the same order on every process: accmt shards it"
    do = 'build the data the same way on every process (one seed), or pass Trainer(data_options={"shard": False})'
    raise options.error(got, expected, do)


def require_same_end(options: SourceOptions, read: str) -> None:
    """Check that processes that shard a stream reach its end together; otherwise one would wait for the others forever.

    Processes: collective.
    """
    difference = _find_difference(options, read)
    if difference is not None:
        first, rank, read_first, read_rank = difference
        got = f"{read_first} on process {first}, {read_rank} on process {rank}"
        expected = "the same stream on every process: accmt shards it"
        do = 'read the same files in the same order on every process, or pass Trainer(data_options={"shard": False})'
        raise fail(
            DataError,
            f"the {options.kind} data, which can only be read from the start",
            got=got,
            expected=expected,
            do=do,
        )


def require_not_empty(count: int, options: SourceOptions, got: str) -> None:
    """Check that an epoch is not empty."""
    if count == 0:  # a wrong path or filter; the run would end at once, and report success
        do = "check the data's path and filters, the sampler, and drop_last"
        raise options.error(got, "at least one sample and one batch", do)


def length_of(data: Any) -> int | None:
    """Return a length, or None: some classes define `__len__` and then raise in it."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class EpochStart:
    """The point where reading an epoch begins: its first sample, or where it was interrupted.

    Attributes:
        epoch: The resumed epoch; None for a new one.
        micro_batch: Its first micro-batch.
        consumed: Samples, or the user's batches, already trained on over all processes.
        position: The value of a loader's `position`; empty for a new epoch.
    """

    epoch: int | None = None
    micro_batch: int = 0
    consumed: int = 0
    position: Mapping[str, Any] = field(default_factory=dict)

    def of(self, epoch: int, first_micro_batch: int) -> EpochStart:
        """Return this start for the rest of its epoch; otherwise, the start at the first sample."""
        if epoch == self.epoch and first_micro_batch >= self.micro_batch:
            return self
        return EPOCH_START


EPOCH_START = EpochStart()


def read_start(
    epoch: int, first_micro_batch: int, position: Mapping[str, Any], *, kind: str, unit: str, options: SourceOptions
) -> EpochStart:
    """Read where an epoch resumes; after 0 micro-batches the position is not used."""
    if first_micro_batch == 0:
        return EPOCH_START
    if position.get("kind") != kind:  # a dataset was replaced with a stream: their positions count different things
        got = f"a position saved for a {position.get('kind')}"
        raise cannot_resume(options, got, f"a position for a {kind}, like this data")
    return EpochStart(epoch, first_micro_batch, position[unit], position)


def require_same_number(start: EpochStart, number: int, unit: str, options: SourceOptions) -> None:
    """Check that an epoch has the same size as when it began; otherwise its order would differ."""
    if start.position and start.position["of"] != number:
        expected = f"{start.position['of']} {unit}, as when the epoch began ({start.consumed} already trained on)"
        raise cannot_resume(options, f"{number} {unit}", expected)


def require_same_order(start: EpochStart, order: str, options: SourceOptions) -> None:
    """Check that an epoch has the same order as when it began; otherwise samples would be repeated or missed."""
    if start.position["order"] != order:
        got = "a different order: shuffling, the sampler, its seed, or the batches have changed; or "
        got += "training changes what the sampler's order depends on, and the sampler has no state_dict for it"
        expected = f"the epoch's original order ({start.consumed} of {start.position['of']} already trained on)"
        raise cannot_resume(options, got, expected)


def compare_rows(position: Mapping[str, Any], rows: Rows, options: SourceOptions, *, is_in_epoch: bool) -> None:
    """Check that a resumed epoch has the same samples as when it began; log it if a later epoch's samples changed."""
    result = compare(rows, position.get("rows", {}))
    # In the middle of an epoch, a new order of files (os.listdir) would repeat samples and miss others.
    if result == "different" and is_in_epoch:
        got = "different samples at the same indices: their order or their content has changed"
        do = (
            "read the samples in the same order as before (os.listdir and set have no fixed order: sort them), or "
            "start a new run with resume=False; data may only change between epochs"
        )
        raise cannot_resume(options, got, "the samples that the epoch began with", do)
    if result != "same":
        say(f"the {options.kind} data changed since the interruption: samples at the same indices differ")


def compare_files(
    before: Mapping[str, str] | None, files: Mapping[str, str] | None, options: SourceOptions, *, is_in_epoch: bool
) -> None:
    """Check that a resumed epoch has the files that it began with; log it if a later epoch has others.

    Args:
        before: The dataset's descriptions of its files when the checkpoint was written; None if it had none.
        files: Those of now.
        options: The source's options.
        is_in_epoch: Whether the epoch had begun.
    """
    if before is None or files is None or before == files:
        return
    kinds = {
        "missing": [name for name in before if name not in files],
        "changed": [name for name in files if files[name] != before.get(name, files[name])],
        "new": [name for name in files if name not in before],
    }
    changes = [f"{kind}: {_list(names)}" for kind, names in kinds.items() if names]
    got = "; ".join(changes) or "another order of the files"
    if is_in_epoch:  # row numbers would mean other rows
        do = "restore the files, or start a new run with resume=False; data may only change between epochs"
        raise cannot_resume(options, got, f"the {len(before)} files that the epoch began with", do)
    say(f"the files of the {options.kind} data changed since the interruption: {got}")


def _list(names: Sequence[str]) -> str:
    text = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:  # a dataset may have thousands of files
        text += f" and {len(names) - _NAMED} others"
    return text


def say_not_compared(options: SourceOptions) -> None:
    """Log that data that resumes from its own state is not compared, because nothing is read again."""
    say_once(
        f"the {options.kind} data resume from their own state_dict; accmt does not check whether they have changed "
        "since the interruption"
    )


def cannot_resume(options: SourceOptions, got: str, expected: str, do: str | None = None) -> DataError:
    """Return the error for data with which an interrupted epoch cannot resume."""
    do = do or "resume with the same data, sampler and batches, or start a new run with resume=False"
    return fail(DataError, f"the {options.kind} data of a resumed epoch", got=got, expected=expected, do=do)


def plan_epoch(num_samples: int, options: SourceOptions, *, multiple: int = 1, start: EpochStart = EPOCH_START) -> Plan:
    """Plan an epoch's micro-batches after `drop_last` and limits, which always count from the epoch's beginning.

    Args:
        num_samples: Samples of the whole epoch.
        options: Sizes, limit and shard.
        multiple: Samples at the end beyond a multiple of this are dropped; 1 drops none.
        start: Where reading begins.
    """
    epoch = options.plan(num_samples - num_samples % multiple, options.batch_size, options.shard)
    require_not_empty(
        epoch.num_micro_batches, options, f"{num_samples} samples for batches of {epoch.global_batch_size}"
    )
    # The limit of this run may be below what the interrupted one has consumed.
    limit = options.limit_micro_batches(epoch.num_micro_batches)
    num_left = max(0, epoch.samples_before(limit) - start.consumed)
    if start.consumed != epoch.samples_before(start.micro_batch):  # it began with another batch size
        num_left -= num_left % multiple
    return replace(
        epoch, num_samples=start.consumed + num_left, first_micro_batch=start.micro_batch, first_sample=start.consumed
    )
