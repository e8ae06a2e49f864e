"""The processes on the GPUs of this machine, as `nvidia-smi` lists them."""

from __future__ import annotations

import subprocess
from pathlib import Path

_TIMEOUT_S = 30


def list_gpus() -> dict[str, str]:
    """Return the index of each GPU by its UUID; empty without `nvidia-smi`."""
    return {uuid: index for uuid, index in _query("--query-gpu=uuid,index")}


def list_processes() -> dict[str, list[str]]:
    """Return the processes on each GPU that has some, by its UUID; empty without `nvidia-smi`."""
    processes: dict[str, list[str]] = {}
    for uuid, pid, memory, program in _query("--query-compute-apps=gpu_uuid,pid,used_memory,process_name"):
        try:
            owner = f" of {Path('/proc', pid).owner()}"
        except (OSError, KeyError):  # it has ended, or runs in another container
            owner = ""
        processes.setdefault(uuid, []).append(f"process {pid}{owner}, {program}: {memory} MiB")
    return processes


def describe_processes() -> str:
    """Return a line for each process on a GPU; empty without any."""
    gpus = list_gpus()
    lines = []
    for uuid, processes in list_processes().items():
        lines += [f"GPU {gpus.get(uuid, uuid)}: {process}" for process in processes]
    return "\n".join(lines)


def _query(question: str) -> list[list[str]]:
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    width = question.count(",")
    return [line.split(", ", width) for line in done.stdout.splitlines() if line.count(", ") >= width]
