"""From the user's data to micro-batches: order, sharding over processes, seeds, collating."""

from accmt.data.base import Source as Source
from accmt.data.base import SourceOptions as SourceOptions
from accmt.data.batches import LargestBatch as LargestBatch
from accmt.data.batches import MicroBatch as MicroBatch
from accmt.data.batches import count_samples as count_samples
from accmt.data.batches import first_dimension as first_dimension
from accmt.data.collate import DataCollatorForLongestSequence as DataCollatorForLongestSequence
from accmt.data.collate import build_collate as build_collate
from accmt.data.collate import in_buckets as in_buckets
from accmt.data.fetching import BadSample as BadSample
from accmt.data.fetching import note_dead_worker as note_dead_worker
from accmt.data.samplers import Shard as Shard
from accmt.data.seeding import derive_seed as derive_seed
from accmt.data.seeding import draw_seed as draw_seed
from accmt.data.seeding import preserve_generators as preserve_generators
from accmt.data.seeding import seed_generators as seed_generators
from accmt.data.seeding import set_seed as set_seed
from accmt.data.sources import UnshardedSource as UnshardedSource
from accmt.data.sources import build_source as build_source
from accmt.data.sources import is_stream as is_stream
from accmt.data.sources import require_readable as require_readable
from accmt.data.windows import ByCount as ByCount
from accmt.data.windows import Grouping as Grouping
from accmt.data.windows import Loader as Loader
from accmt.data.windows import Window as Window
