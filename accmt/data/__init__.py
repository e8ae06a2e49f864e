"""From the user's data to micro-batches: order, sharding over processes, seeds, collating."""

from accmt.data.batches import MicroBatch, find_batch_size
from accmt.data.collate import DataCollatorForLongestSequence, build_collate
from accmt.data.fetching import BadSample
from accmt.data.loaders import build_loader
from accmt.data.options import Loader, LoaderOptions
from accmt.data.seeding import derive_seed, draw_seed, preserve_generators, seed_generators, set_seed
from accmt.data.sharding import Shard
from accmt.data.temperature import TemperatureSampler
from accmt.data.unsharded import UnshardedLoader
from accmt.data.workers import note_dead_worker

__all__ = [
    "BadSample",
    "DataCollatorForLongestSequence",
    "Loader",
    "LoaderOptions",
    "MicroBatch",
    "Shard",
    "TemperatureSampler",
    "UnshardedLoader",
    "build_collate",
    "build_loader",
    "derive_seed",
    "draw_seed",
    "find_batch_size",
    "preserve_generators",
    "note_dead_worker",
    "seed_generators",
    "set_seed",
]
