"""Sharded models: whatever differs for them in the code gives what one process gives."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from tests.distributed.scripts.sharded import CASES
from tests.launching import SCRIPTS, launch

TIMEOUT_S = 400  # for up to 27 runs
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S + 60)  # a launch, and the one that it is compared with

HAS_PLANS = Version(transformers.__version__) >= Version("5.23")

SOME = ("plain", "averaged", "saved", "guarded")
# Those of which no other test shows that DDP gives what one process gives.
OF_DDP = (
    "grouped",
    "clipped_by_value",
    "clipped_and_monitored",
    "averaged",
    "half",
    "with_adapter",
    "generated",
    "compiled",
    "checked",
)
NO_PLAN = ("encoder", "with_adapter", "built_gpt2", "from_meta_tied")
SPLIT = tuple(name for name in CASES if name not in NO_PLAN)
LEFT_OUT = () if HAS_PLANS else ("built_in_fit", "built_gpt2", "built_in_bf16")  # before 5.23 they are whole at first
OF_FSDP = tuple(name for name in CASES if name not in LEFT_OUT)
LAUNCHES = {1: CASES, "ddp-2": OF_DDP, "fsdp-2": OF_FSDP, "hsdp-4": SOME}
LAUNCHES |= {"hsdp-4": (*SOME, "built_gpt2")} if HAS_PLANS else {}
LAUNCHES |= {"tp-2": SPLIT, "tpfsdp-4": (*SOME, "accumulated", "grouped", "built_in_fit")} if HAS_PLANS else {}


def marks_of(way: str, name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that others stand for: hybrid sharding repeats what FSDP2 shows."""
    if way == "hsdp-4":
        return [pytest.mark.slow, pytest.mark.repeats]
    return [pytest.mark.slow] if name == "compiled" or way != "fsdp-2" else []


SHARDED = [
    pytest.param(way, name, marks=marks_of(way, name))
    for way, names in LAUNCHES.items()
    if way != 1
    for name in names
    if name != "refused"
]


class Outcomes(dict[Any, Any]):
    """What came of each launch, which is made when it is asked for, of the cases that will be looked at."""

    def __init__(self, folders: pytest.TempPathFactory, chosen: set[tuple[str, str]]) -> None:
        self._folders = folders
        self._chosen = chosen

    def __missing__(self, way: int | str) -> Any:
        folder = self._folders.mktemp("sharded")
        path = folder / "result.json"
        wanted = {name for of_way, name in self._chosen if way in (1, of_way)} | {"plain", "refused"}
        names = [name for name in LAUNCHES[way] if name in wanted]
        launch(SCRIPTS / "sharded.py", str(path), str(folder), *names, processes=way, result=path, timeout_s=TIMEOUT_S)
        self[way] = json.loads(path.read_text())
        return self[way]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    given = [item.callspec.params for item in here]
    return Outcomes(tmp_path_factory, {(params["way"], params["name"]) for params in given if "name" in params})


@pytest.mark.parametrize(("way", "name"), SHARDED)
def test_a_sharded_model_gives_what_one_process_gives(outcomes: dict[Any, Any], way: str, name: str) -> None:
    got, expected = flatten(outcomes[way][name]), flatten(outcomes[1][name])
    assert got.keys() == expected.keys()
    different = {
        key: (got[key], value)
        for key, value in expected.items()
        if not is_close(got[key], value, abs_tol=1e-4 if ".weights." in key else 2e-5)  # sums, some of them near 0
    }
    assert not different


@pytest.mark.parametrize(("way", "name"), SHARDED)
def test_what_was_saved_or_resumed_has_the_same_bits(outcomes: dict[Any, Any], way: str, name: str) -> None:
    flags = {key: value for key, value in flatten(outcomes[way][name]).items() if isinstance(value, bool)}
    assert all(flags.values())
    built = ("built_in_fit", "built_gpt2", "built_in_bf16", "from_meta", "from_meta_tied")
    assert bool(flags) == (name in ("averaged", "saved", "with_adapter", "checked", *built))


def test_what_cannot_work_on_shards_is_refused_with_the_line_to_write(outcomes: dict[Any, Any]) -> None:
    said = outcomes["fsdp-2"]["refused"]
    assert "call self.model(...)" in said["part"]
    assert "a model that each process has in full" in said["auto_micro_batch"]
    assert "'model.layers.1.self_attn.q_proj.weight' is missing on process 0" in said["other_model"]
    assert "for example from model.to() in a hook" in said["other_type"]
    assert "class NoSuchLayer in the model" in said["layer"]
    assert "such as LlamaDecoderLayer" in said["layer"]
    assert "down_proj.weight is (16, 32) torch.float32 in the model" in said["other_checkpoint"]
    assert "build it on the CPU" in said["tied_meta"]
    assert "1, a MultiheadAttention with tensors but without" in said["no_reset"]
    assert "cls.predictions.bias and cls.predictions.decoder.bias, which are tied" in said["tied"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PLANS, reason="transformers before 5.23 applies no plans to a model that is there")
def test_what_cannot_work_on_split_models_is_refused_with_the_line_to_write(outcomes: dict[Any, Any]) -> None:
    said = outcomes["tp-2"]["refused"]
    assert "which shards any model" in said["adapter"]
    assert "whole heads on each" in said["heads"]
    assert "leave `shard` out" in said["own_data"]
    assert "'model.layers.1.self_attn.q_proj.weight' is missing on process 0" in said["other_model"]


@pytest.mark.slow
@pytest.mark.repeats
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
@pytest.mark.parametrize("way", [1, "fsdp-2"])
def test_what_inductor_compiles_trains_and_resumes_as_what_it_does_not(tmp_path: Path, way: int | str) -> None:
    path, script = tmp_path / "result.json", SCRIPTS / "sharded.py"
    launch(script, str(path), str(tmp_path), "by_inductor", processes=way, result=path, timeout_s=TIMEOUT_S)
    found = json.loads(path.read_text())["by_inductor"]
    assert found.pop("is_steady")
    assert found.pop("is_same")
    compiled, plain = flatten(found["compiled"]), flatten(found["plain"])
    assert compiled.keys() == plain.keys()
    assert all(is_close(value, plain[key]) for key, value in compiled.items())


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return every number, text and flag by its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {key: leaf for name, item in items for key, leaf in flatten(item, f"{path}.{name}").items()}


def is_close(got: Any, expected: Any, *, abs_tol: float = 2e-5) -> bool:
    """Compare to rounding, which Adam's first steps magnify."""
    if not isinstance(expected, float):
        return bool(got == expected)
    return math.isclose(got, expected, rel_tol=1e-4, abs_tol=abs_tol)
