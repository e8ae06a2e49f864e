"""`accmt launch` on several machines: what torchrun is started with, and what cannot be."""

from __future__ import annotations

import shlex
import socket

import pytest

from accmt.cli.launch import describe_lost_machines
from accmt.cli.main import main

ELASTIC = ["--rdzv-backend=c10d", "--rdzv-id=accmt", "--rdzv-endpoint=127.0.0.1:29500"]


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def torchrun(capsys, typed):
    """Return the arguments of torchrun that follow from what is typed, and the environment."""
    assert main(["launch", "--cpu", "--dry-run", *typed.split(), "train.py"]) == 0
    words = shlex.split(capsys.readouterr().out)
    if "torch.distributed.run" not in words:
        return None, words
    begin = words.index("torch.distributed.run") + 1
    end = next(index for index, word in enumerate(words) if word.startswith("--signals-to-handle"))
    return words[begin:end], words[:begin]


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ("", None),
        ("--nodes 1", None),
        ("-N 2 --nodes 1:1", ["--standalone", "--nproc-per-node=2"]),
        ("--max-restarts 3", ["--standalone", "--max-restarts=3", "--nproc-per-node=1"]),
        (
            "--nodes 2 --node-rank 1 --address 10.0.0.1",
            ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--nproc-per-node=1"],
        ),
        (
            "--num_machines 2 --machine_rank 0 --main_process_ip host:1234 -N 4",
            ["--nnodes=2", "--node-rank=0", "--master-addr=host", "--master-port=1234", "--nproc-per-node=4"],
        ),
        (
            "--nodes 1:4 --node-rank 0 --address 127.0.0.1",
            ["--nnodes=1:4", *ELASTIC, "--rdzv-conf=is_host=true", "--local-addr=127.0.0.1", "--nproc-per-node=1"],
        ),
        (
            "--nodes 2 --node-rank 1 --address 127.0.0.1 --max-restarts 5",
            [
                *("--nnodes=2:2", *ELASTIC, "--rdzv-conf=is_host=false", "--local-addr=127.0.0.1"),
                *("--max-restarts=5", "--nproc-per-node=1"),
            ],
        ),
        (
            "--nodes 2 --node-rank 0 --address [::1]:80",
            ["--nnodes=2", "--node-rank=0", "--master-addr=::1", "--master-port=80", "--nproc-per-node=1"],
        ),
        (
            "--nodes 2 --node-rank 0 --address fd00::1",
            ["--nnodes=2", "--node-rank=0", "--master-addr=fd00::1", "--master-port=29500", "--nproc-per-node=1"],
        ),
    ],
)
def test_torchrun_is_told_of_the_machines(typed, arguments, capsys):
    assert torchrun(capsys, typed)[0] == arguments


def test_a_machine_that_cannot_be_found_has_no_address_on_the_way_to_it(capsys, monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    arguments, _ = torchrun(capsys, "--nodes 1:2 --node-rank 0 --address nowhere")
    assert not [argument for argument in arguments if argument.startswith("--local-addr")]


def test_groups_of_hybrid_sharding_count_the_processes_of_all_machines(capsys):
    _, environment = torchrun(capsys, "-N 4 --nodes 2 --node-rank 0 --address a --strat hsdp --replicate 2")
    assert "PARALLELISM_CONFIG_DP_SHARD_SIZE=4" in environment


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--nodes 2", "2 without --node-rank or --address"),
        ("--address a", "expected: the number of machines"),
        ("--nodes 3:2 --node-rank 0 --address a", "got: '3:2'"),
        ("--nodes 2 --node-rank 2 --address a", "an integer from 0 to 1"),
        ("--nodes 2 --node-rank 0 --address a:70000", "a host, or a host and a port"),
        ("--nodes 1:2 --node-rank 0 --address a --strat hsdp -N 4", "groups of a fixed size"),
        ("--nodes 2 --node-rank 0 --address a --strat single", "one process"),
        ("--max-restarts -1", "an integer >= 0"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_starts(typed, message, capsys):
    assert main(["launch", "--cpu", *typed.split(), "train.py"]) == 2
    assert message in capsys.readouterr().err


def test_machines_that_do_not_meet_are_told_without_a_traceback(capsys, monkeypatch):
    from torch.distributed import run as launcher
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    def fail(arguments):
        raise RendezvousTimeoutError("nobody came\nwithin ten minutes")

    monkeypatch.setattr(launcher, "main", fail)
    assert main(["launch", "--cpu", "-N", "2", "train.py"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "the machines of the run\n  got: they could not connect, or lost the connection: nobody came\n"
    )
    assert describe_lost_machines(OSError("gone")) in said.replace("nobody came", "gone")
