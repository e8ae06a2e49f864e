"""`accmt launch`, `strats` and `example`: the commands that begin a training."""

from __future__ import annotations

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
