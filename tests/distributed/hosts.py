"""Two hosts on one machine: network namespaces that a cable joins. Root makes them; elsewhere tests are skipped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.launching import ROOT

PORT = 29561
PROGRAM = "import sys; from accmt.cli.main import main; sys.exit(main())"


class CannotMakeHostsError(Exception):
    """Hosts cannot be made here; the message says why."""


class Hosts:
    """Two hosts, and what runs on them."""

    def __init__(self) -> None:
        self._names = [f"accmt-{os.getpid()}-{index}" for index in (0, 1)]
        self._interfaces = [f"acc{os.getpid()}{end}" for end in "ab"]  # 15 characters at most
        self._running: list[Running] = []

    @property
    def address(self) -> str:
        """Where the first host is reached."""
        return "10.77.0.10"

    def make(self) -> None:
        """Make the hosts.

        Raises:
            CannotMakeHostsError: The machine does not let this user, or has no `ip`.
        """
        first, second = self._names
        ends = self._interfaces
        try:
            for name in self._names:
                _ip("netns", "add", name)
            _ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
            for index, (name, end) in enumerate(zip(self._names, ends, strict=True)):
                _ip("-n", name, "addr", "add", f"10.77.0.1{index}/24", "dev", end)
                for interface in ("lo", end):
                    _ip("-n", name, "link", "set", interface, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            raise CannotMakeHostsError(getattr(error, "stderr", "") or str(error)) from error

    def remove(self) -> None:
        """End what runs there, and remove the hosts."""
        for running in self._running:
            running.kill()
        for name in self._names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def cut(self) -> None:
        """Cut the cable: nobody gets an answer any more, and nobody is told."""
        _ip("-n", self._names[1], "link", "set", self._interfaces[1], "down")

    def mend(self) -> None:
        """Join the hosts again."""
        _ip("-n", self._names[1], "link", "set", self._interfaces[1], "up")

    def start(self, host: int, command: Sequence[Any], folder: Path, *, own_disk: Path | None = None) -> Running:
        """Run Python with arguments on a host; with a disk of its own where a folder is given for that."""
        arguments = [sys.executable, *map(str, command)]
        if own_disk is not None:  # in the namespace of mounts that `ip netns exec` makes
            arguments = ["sh", "-c", f'mount -t tmpfs none "{own_disk}" && exec "$@"', "sh", *arguments]
        # By default gloo takes the address of the machine's name, which is that of the loopback here.
        own = {"GLOO_SOCKET_IFNAME": self._interfaces[host], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        running = Running(["ip", "netns", "exec", self._names[host], *arguments], {**os.environ, **own}, folder, host)
        self._running.append(running)
        return running


class Running:
    """A launcher on a host, with all its processes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, host: int) -> None:
        self._log = folder / f"host-{host}-{time.monotonic_ns()}.log"
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What all its processes have printed."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return the exit code.

        Raises:
            AssertionError: It still runs after so many seconds.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.said}") from None

    def kill(self) -> None:
        """End all its processes at once, as a host that loses its power."""
        for group in groups_below(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait(60)


def groups_below(process: int) -> set[int]:
    """Return the groups of a process and of those that it has started: torchrun gives each a group of its own."""
    import psutil

    groups = {process}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(child.pid))
    return groups


def torchrun(host: int, hosts: Hosts) -> list[str]:
    """Return the arguments of Python for torchrun."""
    where = [f"--master-addr={hosts.address}", f"--master-port={PORT}"]
    return ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1", *where]


def accelerate_launch(host: int, hosts: Hosts) -> list[str]:
    """Return the arguments of Python for `accelerate launch`; without GPUs, `--multi_gpu` is what starts processes."""
    where = [f"--main_process_ip={hosts.address}", f"--main_process_port={PORT}", f"--machine_rank={host}"]
    plain = ["--mixed_precision=no", "--dynamo_backend=no"]
    sizes = ["--multi_gpu", "--num_machines=2", "--num_processes=2"]
    return ["-m", "accelerate.commands.launch", *sizes, *where, *plain]


def accmt_launch(host: int, hosts: Hosts) -> list[str]:
    """Return the arguments of Python for `accmt launch`."""
    where = [f"--node-rank={host}", f"--address={hosts.address}:{PORT}"]
    return ["-c", PROGRAM, "launch", "--cpu", "-N", "1", "--nodes=2", *where]


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, and remove them.

    Raises:
        CannotMakeHostsError: They cannot be made here.
    """
    hosts = Hosts()
    hosts.make()
    try:
        yield hosts
    finally:
        hosts.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
