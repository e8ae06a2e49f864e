"""Checkpoints of 2 processes, loaded by 1, 2 and 3: replicated (DDP) and sharded (`fully_shard`)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.e2e.markdown import ROOT, read_blocks
from tests.launching import SCRIPTS, launch

CASES = [f"ddp {name}" for name in ("adamw", "adamw_fused", "sgd", "sgd_momentum", "adafactor")]
CASES += [f"sharded {name}" for name in ("adamw", "adamw_fused", "sgd", "sgd_momentum")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save every case on 2 processes."""
    folder = tmp_path_factory.mktemp("saved")
    launch(
        SCRIPTS / "checkpoints.py",
        str(folder / "save.json"),
        "save",
        str(folder),
        processes=2,
        result=folder / "save.json",
    )
    return folder


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda number: f"{number} processes")
def loaded(request, saved):
    """Load every case on so many processes."""
    result = saved / f"load-{request.param}.json"
    launch(SCRIPTS / "checkpoints.py", str(result), "load", str(saved), processes=request.param, result=result)
    return request.param, json.loads(result.read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights_and_optimizer_are_those_that_2_processes_saved(loaded, case):
    processes, outcomes = loaded
    assert len(outcomes) == processes
    assert all(outcome[case]["is_restored"] for outcome in outcomes)


@pytest.mark.parametrize("case", CASES)
def test_every_process_gets_the_other_states_of_the_main_process(loaded, case):
    _, outcomes = loaded
    assert all(outcome[case]["others"] for outcome in outcomes)


@pytest.mark.parametrize("case", CASES)
def test_the_next_update_is_that_of_the_unbroken_run_on_as_many_processes_and_only_there(loaded, case):
    processes, outcomes = loaded  # other processes have other samples here, so a sameness there would prove nothing
    assert [outcome[case]["is_next_the_same"] for outcome in outcomes] == [processes == 2] * processes


@pytest.mark.parametrize("case", CASES)
def test_each_process_writes_a_share_and_the_main_process_the_rest(saved, case):
    first, second = json.loads((saved / "save.json").read_text())
    assert first[case] == ["tensors-00001-of-00002.safetensors", "state.json"]
    assert second[case] == ["tensors-00002-of-00002.safetensors"]


@pytest.mark.parametrize("case", CASES)
def test_what_both_processes_have_is_written_once_and_shared_out(saved, case):
    files = sorted((saved / case.replace(" ", "-")).glob("*.safetensors"))
    sizes, names = [], []
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.append(set(tensors.keys()))
            sizes.append(sum(tensors.get_tensor(name).nbytes for name in tensors.keys()))  # noqa: SIM118 - not a dict
    if case.startswith("ddp"):
        assert not names[0] & names[1]
        assert max(sizes) < 0.75 * sum(sizes)
    assert "model.embedding.weight" in names[0] | names[1]
    assert "model.head.weight" not in names[0] | names[1]  # tied to the embedding


def test_torchs_own_reader_puts_the_pieces_together(saved):
    folder = saved / "sharded-adamw"
    expected = {"model.hidden.weight": torch.empty(5, 5), "optimizers.0.state.hidden.weight.exp_avg": torch.empty(5, 5)}
    got = {name: tensor.clone() for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(got, storage_reader=HuggingFaceStorageReader(str(folder)), planner=DefaultLoadPlanner())
    with safe_open(saved / "saved-sharded-adamw.safetensors", "pt") as whole:
        assert torch.equal(got["model.hidden.weight"], whole.get_tensor("model.hidden.weight"))
        moment = whole.get_tensor("optimizer.state.hidden.weight.exp_avg")
        assert torch.equal(got["optimizers.0.state.hidden.weight.exp_avg"], moment)


def test_the_code_of_the_documentation_reads_pieces_without_accmt(saved):
    namespace = {}
    (block,) = [block for block in read_blocks(ROOT / "docs" / "formats.md") if block.file_name == "read_checkpoint.py"]
    exec(block.text, namespace)
    state = namespace["read_state"](saved / "sharded-adamw")
    with safe_open(saved / "saved-sharded-adamw.safetensors", "pt") as whole:
        for name in ("embedding.weight", "hidden.weight", "single.bias", "calls"):
            assert torch.equal(state["model"][name], whole.get_tensor(f"model.{name}")), name
        moment = whole.get_tensor("optimizer.state.hidden.weight.exp_avg")
    assert torch.equal(state["optimizers"][0]["state"]["hidden.weight"]["exp_avg"], moment)
    assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
    assert state["others"] == {"rank": 0, "window": (torch.tensor(0.25), None, 1.5)}


@pytest.mark.parametrize("case", CASES)
def test_the_folder_holds_only_safetensors_and_json(saved, case):
    files = sorted((saved / case.replace(" ", "-")).iterdir())
    assert [path.suffix for path in files] == [".json", ".safetensors", ".safetensors"]
    json.loads(files[0].read_text())
    for path in files[1:]:
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + header_bytes])
        # The last tensor ends where the file ends: nothing else is in it.
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        assert 8 + header_bytes + max(ends) == path.stat().st_size
