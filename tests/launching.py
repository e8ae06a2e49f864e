"""Starts scripts in one or several processes, and judges them by what they wrote.

A gloo run sometimes aborts at interpreter exit, after everything was done ("terminate called without an active
exception"; seen without accmt too). So a script writes its results before it leaves, and an abort after that is told
apart from a failure.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "distributed" / "scripts"
LAST_LINES = 50
FORKS = ROOT / "tests" / "forks.py"
_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
_HSDP = {f"PARALLELISM_CONFIG_DP_{name}_SIZE": "2" for name in ("REPLICATE", "SHARD")}
_MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
_TP = {**_MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"}
ENGINES = {
    "ddp": {},
    "fsdp": _FSDP,
    "hsdp": {**_FSDP, **_HSDP, **_MESH},
    "tp": _TP,
    "tpfsdp": {**_TP, **_FSDP, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
}
NUM_FORKING = 2  # each has sets in another order, so neighbours in a launch differ as new processes do
GRACE_S = 60.0  # for processes to end after one of them failed, also on a busy machine
_turns = count()


def launch(
    script: Path,
    *arguments: str,
    processes: int | str,
    result: Path,
    timeout_s: float = 120,
) -> str:
    """Run a script in several processes, with what torchrun gives them, and return what they printed.

    Args:
        script: The script.
        arguments: Its arguments.
        processes: How many processes run it; "fsdp-2" launches two with FSDP2, as `accelerate launch` does, "hsdp-4"
            four with hybrid sharding, "tp-2" two by tensor parallelism, "tpfsdp-4" four by both.
        result: A file that the script writes last.
        timeout_s: Seconds after which the run counts as hung, and is killed.

    Raises:
        AssertionError: The run failed, hung, or wrote no result; the message holds its last lines.
    """
    forks, printed = run_together(script, *arguments, processes=processes, timeout_s=timeout_s)
    codes = [fork.poll() for fork in forks]
    assert result.exists(), f"{script.name} wrote no result (exit codes {codes}):\n{_tail(printed)}"
    assert set(codes) <= {0, -signal.SIGABRT}, f"{script.name} ended with {codes}:\n{_tail(printed)}"
    return printed


def run_together(script: Path, *arguments: str, processes: int | str, timeout_s: float = 120) -> tuple[list[Fork], str]:
    """Run a script in several processes, however they end; return the processes, and what they printed.

    Nothing ends the others when one of them fails: they have to see it for themselves.

    Raises:
        AssertionError: One had to be killed.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        forks, store = start_together(script, *arguments, processes=processes, output=output)
        is_over = _wait_for_all(forks, timeout_s)
        del store  # by which they found one another
        if len(forks) % NUM_FORKING == 0:
            next(_turns)  # a process differs from the one that continues its run, too
        printed = _read(output)
        assert is_over, f"{script.name} did not come to an end by itself:\n{_tail(printed)}"
        return forks, printed


def start_together(
    script: Path, *arguments: str, processes: int | str, output: IO[Any], folder: Path | None = None
) -> tuple[list[Fork], TCPStore]:
    """Start a script in several processes; return them, and the store that has to live as long as they do."""
    engine, number = processes.split("-") if isinstance(processes, str) else ("ddp", processes)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environments = [_environment_of(index, int(number), store.port) | ENGINES[engine] for index in range(int(number))]
    files = [output, output]
    return [Fork(script, *arguments, env=own, files=files, folder=folder) for own in environments], store


def torchrun(script: Path, *arguments: str, processes: int, timeout_s: float = 120) -> str:
    """Run a script with the real torchrun, and return what it printed.

    Raises:
        AssertionError: The run failed; the message holds its last lines.
    """
    flags = ["--standalone", f"--nproc-per-node={processes}"]
    run = python("-m", "torch.distributed.run", *flags, script, *arguments, timeout_s=timeout_s)
    printed = run.stdout + run.stderr
    is_well = run.returncode == 0 or "SIGABRT" in printed
    assert is_well, f"{script.name} ended with {run.returncode}:\n{_tail(printed)}"
    return printed


def python(*command: Any, timeout_s: float = 120, env: dict[str, str] | None = None) -> CompletedProcess[str]:
    """Run Python with arguments in a new process."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**_environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_script(script: Path, *arguments: Any, timeout_s: float = 120) -> CompletedProcess[str]:
    """Run a script as `python` does, but in a fork; it is killed after so many seconds."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        fork = Fork(script, *arguments, files=[output, errors])
        _wait_for_all([fork], timeout_s)
        return CompletedProcess([script, *arguments], fork.poll(), _read(output), _read(errors))


class Fork:
    """A running script, in a fork of a process that has imported torch and accmt, which takes 3 s less than a new one.

    It has a group of processes of its own.

    Args:
        command: The script and its arguments.
        env: Further environment variables.
        files: Where standard output and standard error go.
        folder: Where it runs; None means the current folder.
    """

    def __init__(
        self, *command: Any, env: dict[str, str] | None = None, files: Sequence[IO[Any]], folder: Path | None = None
    ) -> None:
        self._code: int | None = None
        receiver, sender = os.pipe()
        self._told = os.fdopen(receiver)
        request = {"command": list(map(str, command)), "folder": str(folder or Path.cwd())}
        request["environment"] = {**_environment(), **(env or {})}
        descriptors = [sender, *(file.fileno() for file in files)]
        socket.send_fds(_forking(next(_turns) % NUM_FORKING), [json.dumps(request).encode()], descriptors)
        os.close(sender)

    @cached_property
    def pid(self) -> int:
        """The process; waits until it is there."""
        return self._receive()

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code as subprocess does, or None where the script still runs after so many seconds."""
        if self._code is None and self.pid and select.select([self._told], [], [], timeout_s)[0]:
            self._code = self._receive()
            self._told.close()
        return self._code

    def kill(self) -> None:
        """End the script and what it started, if it still runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.poll(GRACE_S)

    def _receive(self) -> int:
        told = self._told.readline()
        assert told, f"{FORKS.name} ended; its errors are among what this test printed"
        return int(told)


@cache
def _forking(_number: int) -> socket.socket:
    """Start a process that runs scripts in forks of itself, and return the socket on which it is asked for them."""
    channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(FORKS), str(its.fileno())]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**_environment(), "PYTHONWARNINGS": "default"},
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    its.close()
    atexit.register(process.wait)
    atexit.register(channel.close)
    return channel


def _wait_for_all(forks: Sequence[Fork], timeout_s: float) -> bool:
    """Wait until all have ended; kill what is left after so many seconds, or long after one of them failed.

    Returns:
        Whether all ended by themselves.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while None in (codes := [fork.poll(0.05) for fork in forks]) and time.monotonic() < deadline:
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return None not in codes
    finally:
        for fork in forks:
            fork.kill()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _environment_of(process: int, processes: int, port: int) -> dict[str, str]:
    """Return what torchrun gives to a process."""
    index, number = str(process), str(processes)
    places = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**places, **store, "TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": "0"}


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LAST_LINES:])
