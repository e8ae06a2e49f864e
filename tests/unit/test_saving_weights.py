import json
import resource

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from accmt.errors import SavingError, WeightsError
from accmt.saving.load_weights import load_weights
from accmt.saving.weights import save_adapter, save_weights
from tests.raising import raises_at

FORMATS = {"safetensors": True, "bin": False}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 6)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 6)
        self.head.weight = self.second.weight

    def forward(self, x):
        return super().forward(x) + self.head(self.norm(self.first(x)))


class SharedView(Plain):
    """Two modules read the same rows of one larger memory, a third one rows that overlap with them."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(12, 8)
        self.second.weight = nn.Parameter(memory[2:8])
        self.same = nn.Linear(8, 6)
        self.same.weight = self.second.weight
        self.overlapping = nn.Linear(8, 6)
        self.overlapping.weight = nn.Parameter(memory[4:10])

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.second(hidden) + self.same(hidden) + self.overlapping(hidden)


class Transposed(Plain):
    """A weight that is the transpose of another, in the same memory."""

    def __init__(self):
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.detach().t())


def half_precision():
    return Plain().to(torch.bfloat16)


def compiled():
    return torch.compile(Plain(), backend="eager")


def compiled_inside():
    model = Tied()
    model.second = torch.compile(model.second, backend="eager")
    return model


def parallel():
    model = nn.Module()
    model.module = Plain()
    model.forward = model.module.forward
    return model


MODELS = [Plain, Tied, SharedView, Transposed, half_precision, compiled, compiled_inside, parallel]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def total_bytes(model):
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values())


def outputs(model):
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 24).reshape(4, 6).to(dtype))


@pytest.mark.parametrize("shards", ["one file", "three shards"])
@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_saved_model_loads_into_a_fresh_one_bit_for_bit(tmp_path, build, safe, shards):
    torch.manual_seed(0)
    model, fresh = build(), build()
    expected = outputs(model)
    size = "10GB" if shards == "one file" else int(total_bytes(model) * 0.4)
    saved = save_weights(model.state_dict(), tmp_path, max_shard_size=size, safe_serialization=safe)
    assert (len(saved.files) == 1) == (shards == "one file")
    assert shards == "one file" or len(saved.files) >= 4
    assert names_in(tmp_path) == sorted(saved.files)
    assert not torch.equal(outputs(fresh), expected)
    load_weights(fresh, tmp_path)
    assert torch.equal(outputs(fresh), expected)


@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_compiled_and_eager_models_load_each_others_weights(tmp_path, safe):
    for source, target in [(compiled(), Plain()), (Plain(), compiled())]:
        save_weights(source.state_dict(), tmp_path, safe_serialization=safe)
        load_weights(target, tmp_path)
        assert torch.equal(outputs(source), outputs(target))


def test_tied_tensors_are_written_once_and_recorded(tmp_path):
    model = Tied()
    save_weights(model.state_dict(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118  the file is no mapping
        assert json.loads(file.metadata()["accmt.shared"]) == {"head.weight": "second.weight"}


@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_tied_weights_fill_both_names_of_a_model_that_does_not_tie_them(tmp_path, safe):
    model, untied = Tied(), Tied()
    untied.head.weight = nn.Parameter(torch.zeros(6, 8))
    save_weights(model.state_dict(), tmp_path, safe_serialization=safe, max_shard_size=100)
    load_weights(untied, tmp_path)
    assert torch.equal(untied.head.weight, model.second.weight)
    assert torch.equal(untied.second.weight, model.second.weight)


@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_small_part_of_a_large_memory_is_saved_without_the_rest(tmp_path, safe):
    large = torch.randn(1_000_000)
    save_weights({"part": large[:10]}, tmp_path, safe_serialization=safe)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5_000


@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_dtypes_and_shapes_come_back_as_they_were(tmp_path, safe):
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
    tensors = {str(dtype).removeprefix("torch."): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.empty(0, 4), "also_empty": torch.empty(0, 4), "scalar": torch.tensor(7)}
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name + "_buffer", torch.zeros_like(tensor))
    save_weights({name + "_buffer": tensor for name, tensor in tensors.items()}, tmp_path, safe_serialization=safe)
    load_weights(model, tmp_path)
    for name, tensor in tensors.items():
        loaded = model.get_buffer(name + "_buffer")
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)


@pytest.mark.parametrize(("size", "num_shards"), [("1KB", 3), (1_000, 3), (2_000, 2)])
def test_shards_keep_to_the_largest_size_and_the_index_names_them(tmp_path, size, num_shards):
    tensors = {f"weight{number}": torch.randn(100) for number in range(6)}
    saved = save_weights(tensors, tmp_path, max_shard_size=size)
    shards = [f"model-{saved.digest}-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)]
    assert saved.files == (*shards, "model.safetensors.index.json")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2400
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == set(shards)


def test_digest_tells_saves_apart_by_value_dtype_name_and_split(tmp_path):
    weights = {"a": torch.ones(300), "b": torch.ones(100), "c": torch.ones(100), "d": torch.ones(300)}
    saves = [
        (weights, "10GB"),
        (weights | {"d": torch.zeros(300)}, "10GB"),
        (weights | {"a": torch.ones(300, dtype=torch.int32)}, "10GB"),
        ({name.upper(): tensor for name, tensor in weights.items()}, "10GB"),
        (weights, 1_600),
        (weights, 1_200),
    ]
    digests = [save_weights(tensors, tmp_path, max_shard_size=size).digest for tensors, size in saves]
    assert len(set(digests)) == len(saves)
    assert save_weights(weights, tmp_path).digest == digests[0]


def test_files_that_go_with_the_weights_are_listed_and_lie_beside_them(tmp_path):
    def write_others(folder):
        assert (folder / "model.safetensors").exists()
        (folder / "config.json").write_text("{}")
        (folder / "inside").mkdir()
        (folder / "inside" / "tokens.txt").write_text("a b")

    saved = save_weights(Plain().state_dict(), tmp_path, write_others=write_others)
    assert saved.files == ("model.safetensors", "config.json", "inside/tokens.txt")
    assert names_in(tmp_path) == ["config.json", "inside", "model.safetensors"]
    assert (tmp_path / "inside" / "tokens.txt").read_text() == "a b"


def test_files_that_cannot_be_written_leave_weights_and_others_as_they_were(tmp_path):
    def write_others(folder):
        (folder / "config.json").write_text("new")
        raise OSError("disk full")

    (tmp_path / "config.json").write_text("old")
    old = save_weights(Plain().state_dict(), tmp_path)
    with pytest.raises(OSError, match="disk full"):
        save_weights(Tied().state_dict(), tmp_path, write_others=write_others)
    assert names_in(tmp_path) == sorted(["config.json", *old.files])
    assert (tmp_path / "config.json").read_text() == "old"
    load_weights(Plain(), tmp_path)


def write_adapter_config(folder):
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_an_adapter_is_one_file_with_every_name(tmp_path, safe):
    model, fresh = Tied(), Tied()
    saved = save_adapter(model.state_dict(), tmp_path, safe_serialization=safe, write_others=write_adapter_config)
    name = "adapter_model.safetensors" if safe else "adapter_model.bin"
    assert saved.files == (name, "adapter_config.json")
    assert names_in(tmp_path) == sorted(saved.files)
    weights = safetensors.torch.load_file(tmp_path / name) if safe else torch.load(tmp_path / name)
    assert weights.keys() == model.state_dict().keys()
    load_weights(fresh, tmp_path)
    assert torch.equal(outputs(fresh), outputs(model))


@pytest.mark.parametrize(
    ("state_dict", "named"),
    [
        ({}, "no tensors"),
        ({"fine": torch.ones(1), "extra": {"a": 1}}, "extra: dict"),
        ({"rows": torch.eye(3).to_sparse()}, "rows: torch.sparse_coo on cpu"),
        ({"later": torch.empty(3, device="meta")}, "later: torch.strided on meta"),
    ],
)
def test_values_that_a_weight_file_cannot_hold_are_refused_by_name(tmp_path, state_dict, named):
    with raises_at(WeightsError, "weights to save", named):
        save_weights(state_dict, tmp_path / "model")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("is_adapter", [False, True], ids=["model", "adapter"])
@pytest.mark.parametrize("safe", FORMATS.values(), ids=FORMATS)
def test_full_disk_leaves_what_was_saved_before_and_no_other_file(tmp_path, safe, is_adapter):
    def save(tensors, **arguments):
        if is_adapter:
            return save_adapter(tensors, tmp_path, safe_serialization=safe, write_others=write_adapter_config)
        return save_weights(tensors, tmp_path, safe_serialization=safe, **arguments)

    old = Plain()
    saved = save(old.state_dict(), max_shard_size=300)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
        with pytest.raises((SavingError, OSError), match="could not be written|too large"):
            save({"large": torch.ones(5_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == sorted(saved.files)
    loaded = Plain()
    load_weights(loaded, tmp_path)
    assert torch.equal(outputs(loaded), outputs(old))
