import datasets
import pytest
from torch.utils.data import DataLoader

from accmt.addons.streams import StreamState


class Resuming:
    """Something with a state."""

    def __init__(self, **parts):
        self.state = {"next": [1]}
        self.__dict__.update(parts)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def streaming():
    return datasets.Dataset.from_dict({"n": list(range(37))}).to_iterable_dataset(num_shards=3)


def generated():
    def generate(shards):
        for shard in shards:
            yield from ({"n": 12 * shard + i} for i in range(12))

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2]})


EXACT = {
    "plain": streaming,
    "generator": generated,
    "map": lambda: streaming().map(lambda s: {"m": 2 * s["n"]}),
    "batched map": lambda: generated().map(
        lambda s: {"n": [n for n in s["n"] for _ in range(2)]}, batched=True, batch_size=5
    ),
    "filter": lambda: streaming().filter(lambda s: s["n"] % 3),
    "format": lambda: streaming().map(lambda s: {"m": s["n"]}, batched=True).with_format("numpy"),
    "interleaved": lambda: datasets.interleave_datasets([streaming(), generated()], probabilities=[0.3, 0.7], seed=1),
    "concatenated": lambda: datasets.concatenate_datasets([streaming(), streaming().skip(3).take(9)]),
}
SHUFFLED = {
    "shuffled": lambda: streaming().shuffle(seed=1, buffer_size=4),
    "shuffled, then mapped": lambda: generated().shuffle(seed=1, buffer_size=4).map(lambda s: s),
    "shuffled, then interleaved": lambda: datasets.interleave_datasets(
        [streaming().shuffle(seed=1, buffer_size=4), generated()]
    ),
    "shuffled, then formatted": lambda: streaming().shuffle(seed=1, buffer_size=4).with_format("numpy"),
}


def read(data, epoch):
    """Read batches as a loader does; return each, and the state after it."""
    data.set_epoch(epoch)
    state = StreamState(data)
    return [(repr(batch), state.take()) for batch in DataLoader(data, batch_size=3, collate_fn=list)]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_the_states_of_datasets_are_exact_after_every_batch_and_forgotten_in_the_next_epoch(make, epoch):
    read_once = read(make(), epoch)
    following = [batch for batch, _ in read(make(), epoch + 1)]
    for index, (_, position) in list(enumerate(read_once))[::3]:
        data = make()
        state = StreamState(data)
        assert state.is_in(position)
        with state.restored(position):
            assert [batch for batch, _ in read(data, epoch)] == [batch for batch, _ in read_once[index + 1 :]]
            assert [batch for batch, _ in read(data, epoch + 1)] == following
        assert [batch for batch, _ in read(data, epoch)] == [batch for batch, _ in read_once]  # in another run


@pytest.mark.parametrize("make", SHUFFLED.values(), ids=SHUFFLED)
def test_a_shuffle_buffer_is_found_wherever_it_is_for_its_state_is_not_exact(make):
    assert "shuffle buffer" in StreamState(make()).why_not
    assert "shuffle buffer" in StreamState(Resuming(stream=make())).why_not
    assert "shuffle buffer" in StreamState(Resuming(), source=make()).why_not
    read_once = read(make(), 0)
    data = make()
    data.load_state_dict(make_state(make, 4))
    data.set_epoch(0)
    rest = [repr(batch) for batch in DataLoader(data, batch_size=3, collate_fn=list)]
    assert rest != [batch for batch, _ in read_once[4:]]  # once this fails, the search for buffers can go


def make_state(make, num_batches):
    data = make()
    data.set_epoch(0)
    batches = iter(DataLoader(data, batch_size=3, collate_fn=list))
    for _ in range(num_batches):
        next(batches)
    return data.state_dict()


@pytest.mark.parametrize("version", ["3.6.0", "4.8.5", "5.0.1"])
@pytest.mark.parametrize("make", [EXACT["plain"], EXACT["filter"]], ids=["plain", "filter"])
def test_the_state_of_older_datasets_is_never_used(monkeypatch, make, version):
    saved = StreamState(make()).take()  # by a newer one
    monkeypatch.setattr(datasets, "__version__", version)
    for state in (
        StreamState(make()),
        StreamState(Resuming(stream=make())),
        StreamState(Resuming(), source=make()),
    ):
        assert f"datasets {version} lose or repeat samples" in state.why_not
        assert state.take() == {}
        assert not state.is_in(saved)
    assert StreamState(Resuming()).why_not is None  # it is not of `datasets`


def test_a_state_is_a_copy_both_ways():
    owner = Resuming()
    state = StreamState(owner)
    position = state.take()
    owner.state["next"].append(2)
    assert position == {"state": {"next": [1]}}
    with state.restored(position):
        assert owner.state == {"next": [1]}
        owner.state["next"].append(3)
    assert position == {"state": {"next": [1]}}
    assert owner.state == {"next": [1, 3]}  # the data's own business
    with state.restored({"samples": 3}):
        assert owner.state == {"next": [1, 3]}
