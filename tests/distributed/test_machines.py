"""Several machines: two hosts on this one, joined by a cable that can be cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.hosts import (
    PORT,
    CannotMakeHostsError,
    Hosts,
    Running,
    accelerate_launch,
    accmt_launch,
    torchrun,
    two_hosts,
)
from tests.launching import SCRIPTS, launch

pytestmark = [pytest.mark.slow]

SCRIPT = SCRIPTS / "machines.py"
LIMIT_S = 120.0
HELD = 6  # two steps after a checkpoint
Launcher = Callable[[int, Hosts], list[str]]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with two_hosts() as made:
            yield made
    except CannotMakeHostsError as error:
        pytest.skip(f"two hosts are network namespaces, which cannot be made here: {error}")


def start(hosts: Hosts, launcher: Launcher, folder: Path, *arguments: Any, **options: Any) -> list[Running]:
    """Start the script on both hosts."""
    return [
        hosts.start(host, [*launcher(host, hosts), SCRIPT, folder, *arguments], folder, **options) for host in (0, 1)
    ]


def finish(running: list[Running]) -> None:
    """Wait until both have ended well."""
    codes = [each.wait(LIMIT_S) for each in running]
    assert codes == [0, 0], "\n".join(each.said for each in running)


def wait_until_held(folder: Path, running: list[Running]) -> None:
    """Wait until both hosts hold after a step, and the checkpoint before it is published."""
    deadline = time.monotonic() + LIMIT_S
    awaited = [folder / "held-0", folder / "held-1", folder / "checkpoint-model" / "step-00000004"]
    while not all(path.exists() for path in awaited):
        assert time.monotonic() < deadline, "\n".join(each.said for each in running)
        time.sleep(0.05)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def require_same_bits(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = weights(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run without an interruption, of two processes on one host."""
    folder = tmp_path_factory.mktemp("unbroken")
    model = folder / "model" / "model.safetensors"
    launch(SCRIPT, str(folder), "0", "no", processes=2, result=model)
    return load_file(model)


def test_a_cut_link_ends_both_hosts_and_the_run_goes_on_to_the_same_bits(
    hosts: Hosts, unbroken: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    running = start(hosts, accmt_launch, tmp_path, HELD, "no")
    wait_until_held(tmp_path, running)
    hosts.cut()
    try:
        (tmp_path / "go").touch()
        codes = [each.wait(LIMIT_S) for each in running]
    finally:
        hosts.mend()
    assert 0 not in codes
    for host, each in enumerate(running):
        assert f"process {host} of a run on several machines\n  got: no heartbeat from" in each.said
        assert "do: start the run again on all machines" in each.said
    finish(start(hosts, accmt_launch, tmp_path, HELD, "auto"))
    require_same_bits(tmp_path, unbroken)


@pytest.mark.repeats
def test_a_killed_host_ends_the_other_and_the_run_goes_on_to_the_same_bits(
    hosts: Hosts, unbroken: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    running = start(hosts, torchrun, tmp_path, HELD, "no")
    wait_until_held(tmp_path, running)
    running[0].kill()  # with the store through which they found one another
    (tmp_path / "go").touch()
    assert running[1].wait(LIMIT_S) != 0
    finish(start(hosts, accelerate_launch, tmp_path, HELD, "auto"))
    require_same_bits(tmp_path, unbroken)


def test_torchrun_starts_again_with_fewer_hosts_and_the_run_goes_on_by_itself(hosts: Hosts, tmp_path: Path) -> None:
    def elastic(host: int, hosts: Hosts) -> list[str]:
        meeting = ["--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint={hosts.address}:{PORT}"]
        options = f"--rdzv-conf=is_host={host == 0},last_call_timeout=2".lower()
        sizes = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1", f"--local-addr=10.77.0.1{host}"]
        return ["-m", "torch.distributed.run", *sizes, *meeting, options]

    running = start(hosts, elastic, tmp_path, HELD, "no")
    wait_until_held(tmp_path, running)
    running[1].kill()
    (tmp_path / "go").touch()
    assert running[0].wait(LIMIT_S) == 0, running[0].said
    assert "continuing from" in running[0].said
    assert "step 4," in running[0].said
    assert "process(es) 2 -> 1" in running[0].said
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.repeats
def test_machines_without_a_common_disk_are_an_error_on_each(hosts: Hosts, tmp_path: Path) -> None:
    running = [
        hosts.start(host, [*accmt_launch(host, hosts), SCRIPT, tmp_path, 0, "no"], tmp_path, own_disk=disk)
        for host, disk in enumerate((None, tmp_path))
    ]
    assert 0 not in [each.wait(LIMIT_S) for each in running]
    for host, each in enumerate(running):
        said = each.said.replace(f"[rank{host}]: ", "")  # as torch begins the lines of a traceback
        assert f"SavingError: folder {tmp_path / 'model'}\n  got: " in said
        assert "(process 1) does not see what" in said
        assert "expected: a folder on storage that all machines share" in said
