"""From the user's data to micro-batches: order, sharding over processes, seeds, collating."""

from accmt.data.batches import MicroBatch as MicroBatch
from accmt.data.batches import find_batch_size as find_batch_size
from accmt.data.collate import DataCollatorForLongestSequence as DataCollatorForLongestSequence
from accmt.data.collate import build_collate as build_collate
from accmt.data.fetching import BadSample as BadSample
from accmt.data.loaders import build_loader as build_loader
from accmt.data.options import Loader as Loader
from accmt.data.options import LoaderOptions as LoaderOptions
from accmt.data.options import WrappedLoader as WrappedLoader
from accmt.data.seeding import derive_seed as derive_seed
from accmt.data.seeding import draw_seed as draw_seed
from accmt.data.seeding import preserve_generators as preserve_generators
from accmt.data.seeding import seed_generators as seed_generators
from accmt.data.seeding import set_seed as set_seed
from accmt.data.sharding import Shard as Shard
from accmt.data.temperature import TemperatureSampler as TemperatureSampler
from accmt.data.token_budget import EvaluationBudgetLoader as EvaluationBudgetLoader
from accmt.data.token_budget import TokenBudgetLoader as TokenBudgetLoader
from accmt.data.token_budget import keep_samples as keep_samples
from accmt.data.token_budget import reader_of as reader_of
from accmt.data.token_cut import TokenBudget as TokenBudget
from accmt.data.unsharded import UnshardedLoader as UnshardedLoader
from accmt.data.workers import note_dead_worker as note_dead_worker
