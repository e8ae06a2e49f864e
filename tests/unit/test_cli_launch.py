"""`accmt launch`, `strats` and `example`: the commands that begin a training."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accmt import HyperParameters
from accmt.cli.main import main

ROOT = Path(__file__).parents[2]
ENGINES = ("DeepSpeed", "Megatron-LM", "XLA")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ.get('ACCELERATE_USE_CPU'))\n")
    return tmp_path / "train.py"


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)


def dry_run(capsys, *arguments):
    """Return the words of the command that would run."""
    assert main(["launch", "--dry-run", *arguments]) == 0
    return shlex.split(capsys.readouterr().out)


def processes_of(words):
    return next((int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node=")), "single")


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize(
    ("typed", "processes", "environment"),
    [
        ("", 4, []),
        ("-N 2", 2, []),
        ("--gpus 0,2", 2, ["CUDA_VISIBLE_DEVICES=0,2"]),
        ("--cpu", "single", ["ACCELERATE_USE_CPU=true"]),
        ("--cpu -N 8", 8, ["ACCELERATE_USE_CPU=true"]),
        ("--strat single", "single", []),
        ("--strat ddp -N 1", 1, []),
    ],
)
def test_a_dry_run_prints_the_command(typed, processes, environment, capsys):
    words = dry_run(capsys, *typed.split(), "train.py", "--lr", "1e-3", "a b", "-N", "5")
    assert processes_of(words) == processes
    assert words[: len(environment)] == environment
    assert words[len(environment)] == sys.executable
    assert words[-6:] == ["train.py", "--lr", "1e-3", "a b", "-N", "5"]
    assert ("torch.distributed.run" in words) == (processes != "single")


@pytest.mark.usefixtures("four_gpus", "script")
def test_numbers_count_the_gpus_that_the_shell_lets_be_seen(capsys, monkeypatch):
    with monkeypatch.context() as shell:
        shell.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert dry_run(capsys, "--gpus", "0,2", "train.py")[0] == "CUDA_VISIBLE_DEVICES=4,6"


@pytest.mark.usefixtures("no_gpu", "script")
def test_without_a_gpu_it_is_one_process_unless_told_otherwise(capsys):
    assert processes_of(dry_run(capsys, "train.py")) == "single"
    assert processes_of(dry_run(capsys, "-N", "2", "train.py")) == 2


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("-N 5 train.py", "5 for 4 GPUs"),
        ("--gpus 0,1 -N 3 train.py", "3 for 2 GPUs"),
        ("--strat single -N 2 train.py", "--strat ddp"),
        ("nowhere.py", "no such file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(typed, message, capsys):
    assert main(["launch", *typed.split()]) == 2
    assert message in capsys.readouterr().err


def test_one_process_is_the_script_itself(script):
    script.write_text(script.read_text() + "sys.exit(3)\n")
    program = "import sys; from accmt.cli.main import main; sys.exit(main())"
    run = [sys.executable, "-c", program, "launch", "--cpu", str(script), "--lr", "1e-3"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (3, "['--lr', '1e-3'] true\n")


@pytest.mark.parametrize(("strat", "sizes"), [("fsdp2", None), ("hsdp", ("2", "4"))])
def test_strategies_that_shard_set_what_accelerate_reads(strat, sizes, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--cpu", "-N", "8", "--strat", strat, "--dry-run", str(script)]) == 0
    said = capsys.readouterr().out
    assert "ACCELERATE_USE_FSDP=true FSDP_VERSION=2" in said
    found = [re.search(rf"DP_{name}_SIZE=(\d+)", said) for name in ("REPLICATE", "SHARD")]
    assert sizes == (None if None in found else tuple(match[1] for match in found if match))


@pytest.mark.parametrize(("number", "replicate"), [(4, 3), (2, 2), (4, 0)])
def test_groups_that_cannot_be_are_an_error(number, replicate, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    arguments = ["-N", str(number), "--replicate", str(replicate), str(script)]
    assert main(["launch", "--cpu", "--strat", "hsdp", *arguments]) == 2
    assert "groups of equal size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "is_sharded", "sizes"),
    [("-N 2", False, {"TP": "2"}), ("-N 8 --tp 4", True, {"TP": "4", "DP_SHARD": "2"})],
)
def test_tensor_parallelism_leaves_the_other_processes_to_fsdp2(arguments, is_sharded, sizes, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--cpu", *arguments.split(), "--strat", "tp", "--dry-run", str(script)]) == 0
    said = capsys.readouterr().out
    assert ("ACCELERATE_USE_FSDP=true" in said) == is_sharded
    assert "ACCELERATE_USE_PARALLELISM_CONFIG=true" in said
    assert dict(re.findall(r"PARALLELISM_CONFIG_(\w+)_SIZE=(\d+)", said)) == sizes


@pytest.mark.parametrize("arguments", ["-N 3", "-N 2 --tp 4", "-N 2 --tp 1", "-N 1"])
def test_processes_that_cannot_be_split_alike_are_an_error(arguments, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--cpu", "--strat", "tp", *arguments.split(), str(script)]) == 2
    assert "an integer >= 2 that divides them" in capsys.readouterr().err


def test_example_writes_the_files_of_the_quickstart_once(tmp_path, capsys):
    assert main(["example", str(tmp_path / "new")]) == 0
    page = (ROOT / "docs" / "quickstart.md").read_text()
    files = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert files.keys() == {"train.py", "hps.yaml"}
    assert all(f"\n{text}```" in page for text in files.values())
    compile(files["train.py"], "train.py", "exec")
    assert HyperParameters.from_config(tmp_path / "new" / "hps.yaml").epochs == 10
    (tmp_path / "new" / "train.py").write_text("mine")
    (tmp_path / "new" / "hps.yaml").unlink()
    capsys.readouterr()
    assert main(["example", str(tmp_path / "new")]) == 2
    assert "a folder with train.py" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ["mine"]


# ---- As in the original accmt: slices, free GPUs, and files of `accelerate config`


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize(
    ("typed", "gpus"),
    [("-N 2:", "2,3"), ("-N :1", "0"), ("-N 1:3", "1,2"), ("--gpus 3,1,0 -N 1:", "1,0"), ("--gpus all -N 4", None)],
)
def test_a_slice_chooses_gpus(typed, gpus, capsys):
    words = dry_run(capsys, *typed.split(), "train.py")
    assert words[0] == (f"CUDA_VISIBLE_DEVICES={gpus}" if gpus else sys.executable)
    assert processes_of(words) == ("single" if gpus == "0" else len(gpus.split(",")) if gpus else 4)


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize("typed", ["-N 4:", "-N 1:2:3:4", "-N two", "--cpu -N 1:", "--strat nothing"])
def test_a_wrong_slice_or_strategy_is_an_error(typed, capsys):
    try:
        code = main(["launch", *typed.split(), "train.py"])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "accmt launch" in capsys.readouterr().err


CONFIG = {
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "gpu_ids": "all",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 3,
}
FSDP = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
}
SIZES = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
CONFIGS = [
    ({}, [], 3, ["ACCELERATE_MIXED_PRECISION=bf16"]),
    ({}, ["-N", "2"], 2, ["ACCELERATE_MIXED_PRECISION=bf16"]),
    ({"gpu_ids": "0, 2", "num_processes": 2}, [], 2, ["CUDA_VISIBLE_DEVICES=0,2"]),
    ({}, ["--gpus", "1"], "single", ["CUDA_VISIBLE_DEVICES=1"]),
    ({"use_cpu": True, "mixed_precision": "no"}, [], 3, ["ACCELERATE_USE_CPU=true", "ACCELERATE_MIXED_PRECISION=no"]),
    (
        {"distributed_type": "FSDP", "fsdp_config": FSDP, "parallelism_config": SIZES, "debug": True},
        [],
        3,
        [
            "ACCELERATE_USE_FSDP=true", "FSDP_VERSION=2", "FSDP_RESHARD_AFTER_FORWARD=true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP=BertLayer", "ACCELERATE_USE_PARALLELISM_CONFIG=true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2", "ACCELERATE_DEBUG_MODE=true",
        ],
    ),
    (
        {
            "num_machines": 2, "num_processes": 4,
            "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 5,
        },
        [],
        2,
        ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=5"],
    ),
]  # fmt: skip


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize(("changes", "typed", "processes", "words"), CONFIGS)
@pytest.mark.parametrize("flag", ["--config_file", "--strat"])
def test_a_file_of_accelerate_config_sets_what_was_not_typed(flag, changes, typed, processes, words, capsys):
    Path("mine.json").write_text(json.dumps({**CONFIG, **changes}))
    printed = dry_run(capsys, flag, "mine.json", *typed, "train.py")
    assert processes_of(printed) == processes
    assert set(words) <= set(printed)


WRONG = [
    ({"distributed_type": "DEEPSPEED"}, "--strat fsdp2"),
    ({"distributed_type": "MEGATRON_LM"}, "--strat fsdp2"),
    ({"mixed_precision": "fp8", "downcast_bf16": True}, "mixed_precision: bf16"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, "accelerate to-fsdp2"),
    ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "Trainer(compile=True)"),
    ({"nonsense": 1}, "accelerate config --config_file"),
]


@pytest.mark.usefixtures("four_gpus", "script")
@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_what_a_file_asks_for_and_is_not_here_is_an_error_with_the_line(changes, line, capsys):
    Path("mine.json").write_text(json.dumps({**CONFIG, **changes}))
    assert main(["launch", "--config_file", "mine.json", "train.py"]) == 2
    assert line in capsys.readouterr().err
    assert main(["launch", "--config_file", "nowhere.yaml", "train.py"]) == 2
    assert "no such file" in capsys.readouterr().err
